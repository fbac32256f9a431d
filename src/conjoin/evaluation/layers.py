"""What each layer of an MLLM retriever contributes and costs (PUMA Fig. 3, 5 and 7)."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from conjoin.evaluation.metrics import best_ranks
from conjoin.evaluation.report import metric_name
from conjoin.evaluation.results import Curve, Metric, Results, Table, score_ranks
from conjoin.models.mllm_retriever import MllmRetrieverModel
from conjoin.models.shortcuts import attention_implementation, evaluation_mode, without_shortcuts
from conjoin.progress import progress

ATTENDED = ("image", "text", "prompt", "readout")
"""Targets of the readout token's attention: image features, the item's text, other prompt tokens, itself."""
CUTOFFS = (1, 5, 10)
DIRECTIONS = {"image → text": ("image", "text"), "text → image": ("text", "image")}

_COUNTED = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v)
}


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
    if model.config.model_type != "mllm_retriever":
        raise ValueError(f"only an MLLM retriever can be read at every layer, got {type(model).__name__}")
    if model.config.readout == "mean":
        raise ValueError("the mean of all tokens has no readout token whose attention could be shown")
    if not 0 < share <= 1:
        raise ValueError(f"share={share}; expected more than 0 and at most 1")
    attention = dict(zip(ATTENDED, readout_attention(model, processor, pairs[:attention_pairs]).T, strict=True))

    def read(key: str) -> Tensor:
        starts = progress(range(0, len(pairs), batch_size), f"{key}s", show=show_progress)
        batches = ([pair[key] for pair in pairs[start : start + batch_size]] for start in starts)
        return torch.cat([readout_states(model, processor, batch) for batch in batches], dim=1)

    states = zip(read("image"), read("text"), strict=True)
    hits = {kept: hit_rates({"image": a, "text": b}) for kept, (a, b) in enumerate(states, 1)}
    shown = "R@5" if len(pairs) >= 5 else "R@1"
    rates = {name: [row[f"{name}, {shown}"].value for row in hits.values()] for name in DIRECTIONS}
    mean = {"untrained": [sum(both) / len(both) for both in zip(*rates.values(), strict=True)]}
    samples = {"text": pairs[0]["text"], "image": pairs[0]["image"], "image + text": pairs[0]}
    operations = {name: depth_operations(model, processor, item) for name, item in samples.items()}
    parameters = depth_parameters(model)
    costs = {"parameters, M": parameters / 1e6} | {f"{name}, GFLOP": each / 1e9 for name, each in operations.items()}
    shares = {name: each / each[-1] for name, each in ({"parameters": parameters} | operations).items()}
    return Results(
        title=f"{len(hits)} layers of a multimodal language model",
        summary=f"Retrieval within {len(pairs)} pairs from the state after each layer, under the final norm, "
        "as if the model had been pruned there without training. What layers cost is counted, not timed, with the "
        f"vision tower and the table of tokens, for one item. "
        f"{depth_advice(_curve(f'{shown}, mean of both directions', mean), share)}",
        seed=0,  # of the bootstrap
        model={"architecture": model.config.backbone_config.model_type, "readout": model.config.readout},
        dataset={"pairs": len(pairs), "pairs for attention": min(attention_pairs, len(pairs))},
        tables=[
            number_table("Retrieval by layers kept", hits),
            number_table("Cost by layers kept", _by_layer(costs)),
            number_table("Attention of the readout token", _by_layer(attention), "layer"),
        ],
        curves=[
            _curve("Attention of the readout token", attention, "layer"),
            _curve(f"{shown} by layers kept", rates),
            _curve("Share of the whole model's parameters and operations", shares),
        ],
    )


def hit_rates(vectors: Mapping[str, Tensor], seed: int = 0) -> dict[str, Metric]:
    """Return the share of items whose partner is among the first k, `{"text → image, R@1": ...}`.

    Args:
        vectors: `(N, D)` of `"image"` and of `"text"`; row i of one is the partner of row i of the other.
        seed: Of the bootstrap.
    """
    labels = torch.arange(len(vectors["text"]))
    ranks = {name: best_ranks(vectors[a], vectors[b], labels, labels) for name, (a, b) in DIRECTIONS.items()}
    ks = [k for k in CUTOFFS if k <= len(labels)]
    return {
        f"{name}, {metric_name(key)}": metric
        for name, each in ranks.items()
        for key, metric in score_ranks(each, 1, len(each), ks, None, seed).items()
    }


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
def count_operations(model: Any, processor: Any, item: Any) -> FlopCounterMode:
    """Count the floating-point operations to embed one item, by module."""
    batch = send_to_device(dict(processor([item])), model.device)
    counter = FlopCounterMode(display=False, custom_mapping=_COUNTED)
    plain = without_shortcuts(model) if isinstance(model, MllmRetrieverModel) else nullcontext()
    with evaluation_mode(model), plain, counter:
        model(**batch)
    return counter


def depth_operations(model: Any, processor: Any, item: Any) -> Tensor:
    """Count the floating-point operations to embed one item for each number of layers `(layers,)`."""
    counter = count_operations(model, processor, item)
    counts = {name: sum(parts.values()) for name, parts in counter.get_flop_counts().items()}
    layers = [
        sum(count for name, count in counts.items() if name.endswith(f".language_model.layers.{number}"))
        for number in range(len(model.text_model.layers))
    ]
    return torch.tensor(layers).cumsum(0) + counter.get_total_flops() - sum(layers)


def number_table(title: str, rows: Mapping[Any, Mapping[str, Any]], first: str = "layers") -> Table:
    """Make a row of each entry; other numbers than integers have four digits."""
    columns = [first, *next(iter(rows.values()))]
    cells = ([float(f"{x:.4g}") if isinstance(x, float) else x for x in row.values()] for row in rows.values())
    return Table(title, columns, [[name, *row] for name, row in zip(rows, cells, strict=True)])


def _by_layer(columns: Mapping[str, Tensor]) -> dict[int, dict[str, float]]:
    """Return the rows `{layer: {column: value}}` of columns `(layers,)`."""
    rows = zip(*(values.tolist() for values in columns.values()), strict=True)
    return {number: dict(zip(columns, map(float, row), strict=True)) for number, row in enumerate(rows, 1)}


def _curve(title: str, series: Mapping[str, Any], x_label: str = "layers kept") -> Curve:
    points = {name: [[float(x), float(y)] for x, y in enumerate(line, 1)] for name, line in series.items()}
    return Curve(title, points, x_label)
