"""Compress an MLLM retriever: its first layers learn to embed as the whole model (stage 1 of PUMA).

`analyse_mllm` shows beforehand what each layer contributes and costs (PUMA Fig. 3, 5 and 7).
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import LoraConfig
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from conjoin.devices import choose_device
from conjoin.evaluation.metrics import best_ranks, chance_hit_rate
from conjoin.evaluation.results import Curve, Metric, Results, Table
from conjoin.hub import load_model
from conjoin.hub.build import prune
from conjoin.models.mllm_retriever import MllmRetrieverModel
from conjoin.models.shortcuts import attention_implementation, evaluation_mode, without_shortcuts
from conjoin.progress import progress
from conjoin.retrieval import ItemEncoder
from conjoin.trainers.compress_options import CompressOptions
from conjoin.trainers.puma import PumaStage1Config, PumaStage1Trainer

ATTENDED = ("image", "text", "prompt", "readout")
"""Targets of the readout token's attention: image features, the item's text, other prompt tokens, itself."""
CUTOFFS = (1, 5, 10)
DIRECTIONS = {"image → text": ("image", "text"), "text → image": ("text", "image")}
KINDS = ("text", "image", "both")
PARTS = ("operations", "bytes", "seconds")
"""What costs are compared with those of the whole model."""
LANGUAGE_LAYERS = r".*language_model\..*_proj"
"""All linear layers of the language model."""

_COUNTED = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v)
}


class Measured(NamedTuple):
    """The embeddings of the held-out pairs, and what they cost.

    Args:
        layers: Of the model.
        vectors: `(N, D)` for each of `KINDS`.
        operations: For a pair as one item.
        bytes: Of the weights.
        seconds: Per item.
    """

    layers: int
    vectors: dict[str, Tensor]
    operations: float
    bytes: int
    seconds: float


class DistillationRows(torch.utils.data.Dataset[dict[str, Any]]):
    """Three rows per pair, so that a model distils on all kinds of items: text, image, and both.

    Args:
        pairs: Items `{"image", "text"}`.
        count: Number of first pairs to use.
        instruction: Of the rows whose query has a text.
    """

    def __init__(self, pairs: Sequence[Mapping[str, Any]], count: int, instruction: str | None = None) -> None:
        self.pairs, self.count, self.instruction = pairs, count, instruction
        self.positives = [[str(index // len(KINDS))] for index in range(len(self))]
        self.sources = [""] * len(self)

    def __len__(self) -> int:
        return self.count * len(KINDS)

    def __getitem__(self, index: int) -> dict[str, Any]:
        number, kind = divmod(index, len(KINDS))
        both = {part: self.pairs[number][part] for part in ("image", "text")}
        text, image = {"text": both["text"]}, {"image": both["image"]}
        query, positive = ((text, both), (image, text), (both, image))[kind]
        instruction = self.instruction if "text" in query else None
        return {"id": f"{number}-{KINDS[kind]}", "query": query, "positive": positive, "positive_id": str(number),
                "instruction": instruction}  # fmt: skip


def compress(
    model: MllmRetrieverModel, processor: Any, pairs: Sequence[Any], out: str | Path, options: CompressOptions
) -> Results:
    """Train pruned copies of a model with the model as their teacher, save each, and compare them with it.

    The copies are saved as `layers-N` in `out`: those of a published embedder as what it was.

    Args:
        model: The model, with all its layers.
        processor: Its processor.
        pairs: Items `{"image", "text"}`; the last `held_out` measure, the others train.
        out: Where to write.
        options: How to compress.

    Returns:
        Scores, agreement and cost of every depth, before and after training, as tables and curves.

    Raises:
        ValueError: There are too few pairs, or a depth is not less than the model's.
    """
    depth, device = model.config.get_text_config().num_hidden_layers, choose_device(options.device)
    split = len(pairs) - options.held_out
    if split < options.batch_size:
        raise ValueError(f"{split} of {len(pairs)} pairs are not held out; expected a batch of {options.batch_size}")
    if max(options.layers) >= depth:
        raise ValueError(f"layers={options.layers}; expected fewer than the model's {depth}")
    held_out = [{part: pairs[number][part] for part in ("image", "text")} for number in range(split, len(pairs))]
    rows = DistillationRows(pairs, split, options.instruction or (processor.prompts or {}).get("query") or None)
    measured: dict[str, Measured] = {}

    def measure(name: str, model: Any, reader: Any) -> None:
        key = f"{model.config.keep_layers}, {name}"
        measured[key] = measure_pairs(model, reader, held_out, options.batch_size, device)

    nn.Module.to(model, device).eval().requires_grad_(False)
    measure("whole", model, processor)
    for kept in sorted(options.layers):
        student: Any = prune(model, kept)
        measure("untrained", student, processor)
        torch.manual_seed(options.seed)
        # the vision tower and the tokens stay those of the teacher
        adapters = LoraConfig(r=options.lora_rank, lora_alpha=2 * options.lora_rank, target_modules=LANGUAGE_LAYERS)
        config = PumaStage1Config(
            str(Path(out) / f"layers-{kept}"),
            max_steps=options.steps,
            per_device_train_batch_size=options.batch_size,
            gradient_cache_chunk_size=options.chunk_size,
            learning_rate=options.learning_rate,
            warmup_steps=0.05,
            distill_weight=options.distill_weight,
            contrastive_weight=1 - options.distill_weight,
            kind="cosine",
            bf16=str(options.bf16),
            use_cpu=device.type == "cpu",
            save_strategy="no",
            seed=options.seed,
        )
        trainer = PumaStage1Trainer(student, config, rows, None, processor, teacher=model, peft_config=adapters)
        trainer.train()
        trainer.save_model()
        trainer.accelerator.wait_for_everyone()  # every process loads what the main one has saved
        measure("trained", *load_model(str(config.output_dir)))
    return _report(measured, options, split)


def measure_pairs(
    model: Any, processor: Any, pairs: Sequence[Mapping[str, Any]], batch_size: int, device: torch.device | str
) -> Measured:
    """Embed the texts, the images, and both of each pair."""
    encoder = ItemEncoder(model.eval(), processor, batch_size, device)
    items = {"text": [{"text": pair["text"]} for pair in pairs], "image": [pair["image"] for pair in pairs]}
    start = time.perf_counter()
    vectors = {name: torch.as_tensor(encoder.encode(some)) for name, some in (items | {"both": list(pairs)}).items()}
    seconds = (time.perf_counter() - start) / (len(KINDS) * len(pairs))
    operations = float(depth_operations(model, processor, pairs[0])[-1])
    stored = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    return Measured(model.config.keep_layers, vectors, operations, stored, seconds)


def agreement(student: Measured, teacher: Measured) -> dict[str, float]:
    """Return the mean cosine of the embeddings of each kind, and the overlap of the first ten of each direction."""
    sides = {kind: student.vectors[kind] * teacher.vectors[kind] for kind in KINDS}
    scores = {f"cosine, {kind}": products.sum(1).mean().item() for kind, products in sides.items()}
    for name, (query, candidate) in DIRECTIONS.items():
        tops = [(each.vectors[query] @ each.vectors[candidate].T) for each in (student, teacher)]
        count = min(10, tops[0].shape[1])
        first, second = (top.topk(count, dim=1).indices for top in tops)
        scores[f"top-{count} overlap, {name}"] = (first[:, :, None] == second[:, None]).any(2).float().mean().item()
    return scores


def _report(measured: dict[str, Measured], options: CompressOptions, trained: int) -> Results:
    """Draw up scores, agreement and cost by depth; the whole model ends every line."""
    whole, count = next(iter(measured.values())), options.held_out
    scores = {name: hit_rates(each.vectors, options.seed) for name, each in measured.items()}
    agreed = {name: agreement(each, whole) for name, each in measured.items()}
    costs = {
        name: {"GFLOP per pair": each.operations / 1e9, "bytes": each.bytes, "ms per item": 1000 * each.seconds}
        for name, each in measured.items()
    }
    last = f"R@{max(k for k in CUTOFFS if k <= count)}"

    rates = {name: [row[f"{each}, {last}"].value for each in DIRECTIONS] for name, row in scores.items()}
    drawn = {name: {"mean": sum(rates[name]) / len(DIRECTIONS)} | row for name, row in agreed.items()}
    for name, each in measured.items():
        drawn[name] |= {part: getattr(each, part) / getattr(whole, part) for part in PARTS}

    def line(kind: str, score: str) -> list[list[float]]:
        ends = (f", {kind}", "whole")
        return sorted([each.layers, drawn[name][score]] for name, each in measured.items() if name.endswith(ends))

    means = {kind: line(kind, "mean") for kind in ("trained", "untrained")}
    mean = Curve(f"{last}, mean of both directions", means, "layers")
    alike = {score: line("trained", score) for score in next(iter(agreed.values()))}
    shares = {part: line("trained", part) for part in PARTS}
    return Results(
        title="Compression of a multimodal embedder",
        summary=f"Each depth was trained on {trained} pairs with the whole model as its teacher and measured on "
        f"{count} others. {depth_advice(mean, options.share)}",
        seed=options.seed,
        config=asdict(options),
        dataset={"pairs for training": trained, "pairs held out": count},
        tables=[_table("Retrieval", scores), _table("Agreement with the whole model", agreed), _table("Cost", costs)],
        curves=[
            mean,
            Curve("Agreement with the whole model", alike, "layers"),
            Curve("Cost, share of the whole model's", shares, "layers"),
        ],
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def hit_rates(vectors: Mapping[str, Tensor], seed: int = 0) -> dict[str, Metric]:
    """Return the share of items whose partner is among the first k, `{"text → image, R@1": ...}`.

    Args:
        vectors: `(N, D)` of `"image"` and of `"text"`; row i of one is the partner of row i of the other.
        seed: Of the bootstrap.
    """
    labels = torch.arange(len(vectors["text"]))
    ranks = {name: best_ranks(vectors[a], vectors[b], labels, labels) for name, (a, b) in DIRECTIONS.items()}
    return {
        f"{name}, R@{k}": Metric.from_values((each <= k).double(), chance_hit_rate(1, len(each), k), seed=seed)
        for name, each in ranks.items()
        for k in CUTOFFS
        if k <= len(each)
    }


def _table(title: str, rows: Mapping[Any, Mapping[str, Any]], first: str = "layers") -> Table:
    """Make a row of each entry; other numbers than integers have four digits."""
    columns = [first, *next(iter(rows.values()))]
    cells = ([float(f"{x:.4g}") if isinstance(x, float) else x for x in row.values()] for row in rows.values())
    return Table(title, columns, [[name, *row] for name, row in zip(rows, cells, strict=True)])


def analyse_mllm(
    model: Any,
    processor: Any,
    pairs: Sequence[Any],
    *,
    batch_size: int = 8,
    attention_pairs: int = 16,
    share: float = 0.95,
    show_progress: bool = False,
) -> Results:
    """Report attention, retrieval, parameters and operations of an MLLM retriever at every depth.

    Args:
        model: The retriever, ideally with all its layers.
        processor: Its processor.
        pairs: N items `{"image", "text"}`; image and text of a pair are each other's only match.
        batch_size: Items per forward pass.
        attention_pairs: Number of first pairs to average attention over.
        share: Of the whole model's R@k, which the depth that the summary names must have.
        show_progress: Show progress bars.

    Raises:
        ValueError: The model is not an MLLM retriever, or `share` is out of range.
    """
    if not 0 < share <= 1:
        raise ValueError(f"share={share}; expected more than 0 and at most 1")
    if model.config.model_type != "mllm_retriever":
        raise ValueError(f"only an MLLM retriever can be read at every layer, got {type(model).__name__}")
    if model.config.readout == "mean":
        raise ValueError("the mean of all tokens has no readout token whose attention could be shown")
    attention = readout_attention(model, processor, pairs[:attention_pairs])

    def read(key: str) -> Tensor:
        starts = progress(range(0, len(pairs), batch_size), f"{key}s", show=show_progress)
        batches = ([pair[key] for pair in pairs[start : start + batch_size]] for start in starts)
        return torch.cat([readout_states(model, processor, batch) for batch in batches], dim=1)

    states = zip(read("image"), read("text"), strict=True)
    hits = {kept: hit_rates({"image": a, "text": b}) for kept, (a, b) in enumerate(states, 1)}
    shown = "R@5" if len(pairs) >= 5 else "R@1"
    rates = {name: [row[f"{name}, {shown}"].value for row in hits.values()] for name in DIRECTIONS}
    means = [sum(values) / len(rates) for values in zip(*rates.values(), strict=True)]
    mean = _curve(f"{shown}, mean of both directions", {"untrained": means})
    samples = {"text": pairs[0]["text"], "image": pairs[0]["image"], "image + text": pairs[0]}
    operations = {name: depth_operations(model, processor, item) for name, item in samples.items()}
    parameters = depth_parameters(model)
    shares = {name: each / each[-1] for name, each in ({"parameters": parameters} | operations).items()}
    columns = {"parameters, M": parameters / 1e6} | {f"{name}, GFLOP": each / 1e9 for name, each in operations.items()}
    columns |= {f"{name}, %": 100 * each for name, each in shares.items()}
    lines = dict(zip(ATTENDED, attention.T, strict=True))
    percent = {name: 100 * line for name, line in lines.items()}
    return Results(
        title=f"{len(hits)} layers of a multimodal language model",
        summary=f"Retrieval within {len(pairs)} pairs from the state after each layer, under the final norm, "
        "as if the model had been pruned there without training. What layers cost is counted, not timed, with the "
        f"vision tower and the table of tokens, for one item. {depth_advice(mean, share)}",
        seed=0,  # of the bootstrap
        model={"architecture": model.config.backbone_config.model_type, "readout": model.config.readout},
        dataset={"pairs": len(pairs), "pairs for attention": min(attention_pairs, len(pairs))},
        tables=[
            _table("Retrieval by layers kept", hits),
            _table("Cost by layers kept", _by_layer(columns)),
            _table("Attention of the readout token, %", _by_layer(percent), "layer"),
        ],
        curves=[
            _curve("Attention of the readout token", lines, "layer"),
            _curve(f"{shown} by layers kept", rates),
            _curve("Share of parameters", {"whole model": shares["parameters"]}),
            _curve("Share of operations", {name: shares[name] for name in operations}),
        ],
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def depth_advice(curve: Curve, share: float) -> str:
    """Name the fewest layers that have a share of the whole model's score.

    Args:
        curve: Scores by layers; the last point of the first line is the whole model.
        share: Of its score.
    """
    depth, best = next(iter(curve.series.values()))[-1]
    good = {
        name: [int(kept) for kept, score in line if kept < depth and score >= share * best]
        for name, line in curve.series.items()
    }
    advice = ", ".join(f"{min(depths)} layers {name}" for name, depths in good.items() if depths)
    return f"At {100 * share:g} % of the whole model's {curve.title}: {advice or 'none of these depths'}."


def readout_attention(model: Any, processor: Any, items: Sequence[Any]) -> Tensor:
    """Return how the readout token distributes its attention over token kinds, for each layer.

    Args:
        model: An MLLM retriever.
        processor: Its processor.
        items: Items `{"image", "text"}`.

    Returns:
        `(layers, 4)` shares by `ATTENDED`, averaged over heads and items; each row sums to 1.
    """
    with attention_implementation(model.text_model, "eager"):
        return torch.stack([_attention(model, processor, item) for item in items]).mean(0)


def _attention(model: Any, processor: Any, item: Mapping[str, Any]) -> Tensor:
    batch = processor([item]).to(model.device)
    mark = next(mark for mark in map(chr, range(ord("!"), 0x110000)) if mark not in item["text"])
    prompts = (batch, processor([{**item, "text": mark}]))  # the text is where they differ
    ids, other = (each["input_ids"][0].cpu()[each["attention_mask"][0].bool().cpu()] for each in prompts)
    length, at = min(len(ids), len(other)), len(ids) - 1 - int(model.config.readout == "before_token")
    first = int((ids[:length] == other[:length]).cumprod(0).sum())
    last = len(ids) - int((ids.flip(0)[:length] == other.flip(0)[:length]).cumprod(0).sum())
    kinds = torch.full((len(ids),), ATTENDED.index("prompt"))
    kinds[first:last] = ATTENDED.index("text")
    kinds[ids == model.config.backbone_config.image_token_id] = ATTENDED.index("image")
    kinds[at:] = ATTENDED.index("readout")
    attentions = [layer.self_attn for layer in model.text_model.layers]
    weights = _record(model, batch, attentions, lambda output: output[1][0, :, at].double().mean(0).cpu())
    return weights @ nn.functional.one_hot(kinds, len(ATTENDED)).double()


def readout_states(model: Any, processor: Any, items: Sequence[Any]) -> Tensor:
    """Return the state at the readout position after every layer, under the final norm.

    Args:
        model: An MLLM retriever.
        processor: Its processor.
        items: Items of one modality.

    Returns:
        `(layers, N, D)` float32, on the CPU; the last layer's states equal the model's `pooler_output`.
    """
    batch = processor(list(items)).to(model.device)
    at = batch["attention_mask"].sum(1) - 1 - int(model.config.readout == "before_token")  # prompts end in [RET]
    rows = torch.arange(len(at), device=at.device)
    return _record(model, batch, model.text_model.layers, lambda states: model.norm(states[rows, at]).float().cpu())


@torch.no_grad()
def _record(model: Any, batch: Any, modules: Sequence[nn.Module], read: Callable[[Any], Tensor]) -> Tensor:
    """Run the model, and stack what `read` makes of the output of each module."""
    found: list[Tensor] = []
    with evaluation_mode(model), without_shortcuts(model), ExitStack() as stack:
        for module in modules:
            stack.enter_context(module.register_forward_hook(lambda *call: found.append(read(call[-1]))))
        model(**batch)
    return torch.stack(found)


def depth_parameters(model: Any) -> Tensor:
    """Return the parameter count for each number of layers `(layers,)`, with vision tower and embeddings."""
    layers = torch.tensor([sum(p.numel() for p in layer.parameters()) for layer in model.text_model.layers])
    return layers.cumsum(0) + sum(p.numel() for p in model.parameters()) - layers.sum()


@torch.no_grad()
def depth_operations(model: Any, processor: Any, item: Any) -> Tensor:
    """Count the floating-point operations to embed one item for each number of layers `(layers,)`."""
    batch = processor([item]).to(model.device)
    counter = FlopCounterMode(display=False, custom_mapping=_COUNTED)
    with evaluation_mode(model), without_shortcuts(model), counter:
        model(**batch)
    counts = {name: sum(parts.values()) for name, parts in counter.get_flop_counts().items()}
    layers = [
        sum(count for name, count in counts.items() if name.endswith(f".language_model.layers.{number}"))
        for number in range(len(model.text_model.layers))
    ]
    return torch.tensor(layers).cumsum(0) + counter.get_total_flops() - sum(layers)


def _by_layer(columns: Mapping[str, Tensor]) -> dict[int, dict[str, float]]:
    """Return the rows `{layer: {column: value}}` of columns `(layers,)`."""
    rows = zip(*(values.tolist() for values in columns.values()), strict=True)
    return {number: dict(zip(columns, map(float, row), strict=True)) for number, row in enumerate(rows, 1)}


def _curve(title: str, series: Mapping[str, Iterable[Any]], x_label: str = "layers kept") -> Curve:
    points = {name: [[float(x), float(y)] for x, y in enumerate(line, 1)] for name, line in series.items()}
    return Curve(title, points, x_label)
