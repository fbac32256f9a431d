"""Compress an embedder around a language model: few layers learn to embed as the whole (stage 1 of PUMA)."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import LoraConfig
from torch import Tensor, nn

from conjoin.devices import choose_device
from conjoin.evaluation.layers import CUTOFFS, DIRECTIONS, count_operations, depth_advice, hit_rates, number_table
from conjoin.evaluation.results import Curve, Results
from conjoin.hub import load_any, load_trainable
from conjoin.hub.build import prune
from conjoin.hub.sentence_model import SentenceModel
from conjoin.retrieval import ItemEncoder
from conjoin.trainers.compress_options import CompressOptions
from conjoin.trainers.puma import PumaStage1Config, PumaStage1Trainer

KINDS = ("text", "image", "both")
LANGUAGE_LAYERS = r".*(language|text)_model\..*_proj"
"""All linear layers of the language model."""


class Measured(NamedTuple):
    """The embeddings of the held-out pairs, and what they cost.

    Args:
        layers: Of the model.
        vectors: `(N, D)` for each of `KINDS`.
        costs: Operations of a pair as one item, bytes of the weights, and time of an item.
    """

    layers: int
    vectors: dict[str, Tensor]
    costs: dict[str, float]


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


def compress(model: Any, processor: Any, pairs: Sequence[Any], out: str | Path, options: CompressOptions) -> Results:
    """Train pruned copies of a model with the model as their teacher, save each, and compare them with it.

    The copies are saved as `layers-N` in `out`: those of a published embedder as what it was.

    Args:
        model: The model, with all its layers: an MLLM retriever, or one of sentence-transformers, of which the copies
            are read from its folder.
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
        key = f"{model.config.get_text_config().num_hidden_layers}, {name}"
        measured[key] = measure_pairs(model, reader, held_out, options.batch_size, device)

    nn.Module.to(model, device).eval().requires_grad_(False)
    measure("whole", model, processor)
    for kept in sorted(options.layers):
        student: Any
        if isinstance(model, SentenceModel):
            source, revision = model.source
            student, reader = load_trainable(source, revision=revision, keep_layers=kept, keep_last=options.keep_last)
        else:
            student, reader = prune(model, kept, options.keep_last), processor
        measure("untrained", student, reader)
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
        trainer = PumaStage1Trainer(student, config, rows, None, reader, teacher=model, peft_config=adapters)
        trainer.train()
        trainer.save_model()
        trainer.accelerator.wait_for_everyone()  # every process loads what the main one has saved
        measure("trained", *load_any(str(config.output_dir)))
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
    costs = {
        "GFLOP per pair": count_operations(model, processor, pairs[0]).get_total_flops() / 1e9,
        "bytes": sum(weight.numel() * weight.element_size() for weight in model.parameters()),
        "ms per item": 1000 * seconds,
    }
    return Measured(model.config.get_text_config().num_hidden_layers, vectors, costs)


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
    costs = {name: each.costs for name, each in measured.items()}
    last = f"R@{max(k for k in CUTOFFS if k <= count)}"
    rates = {name: [row[f"{each}, {last}"].value for each in DIRECTIONS] for name, row in scores.items()}
    means = {name: sum(both) / len(both) for name, both in rates.items()}

    def line(values: Mapping[str, float], kind: str = "trained") -> list[list[float]]:
        ends = (f", {kind}", "whole")
        return sorted([each.layers, values[name]] for name, each in measured.items() if name.endswith(ends))

    lines = {kind: line(means, kind) for kind in ("trained", "untrained")}
    curve = Curve(f"{last}, mean of both directions", lines, "layers")
    alike = {part: line({name: row[part] for name, row in agreed.items()}) for part in next(iter(agreed.values()))}
    shares = {part: line({name: row[part] / whole.costs[part] for name, row in costs.items()}) for part in whole.costs}
    return Results(
        title="Compression of a multimodal embedder",
        summary=f"Each depth was trained on {trained} pairs with the whole model as its teacher and measured on "
        f"{count} others. {depth_advice(curve, options.share)}",
        seed=options.seed,
        config=asdict(options),
        dataset={"pairs for training": trained, "pairs held out": count},
        tables=[
            number_table("Retrieval", scores),
            number_table("Agreement with the whole model", agreed),
            number_table("Cost", costs),
        ],
        curves=[
            curve,
            Curve("Agreement with the whole model", alike, "layers"),
            Curve("Cost, share of the whole model's", shares, "layers"),
        ],
    )
