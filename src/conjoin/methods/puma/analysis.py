"""Analyse the contribution and cost of each layer of an MLLM retriever, for pruning (PUMA Fig. 3, 5 and 7)."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from conjoin.evaluation.metrics import best_ranks, chance_hit_rate
from conjoin.evaluation.results import Curve, Metric, Results, Table
from conjoin.models.shortcuts import attention_implementation, evaluation_mode, without_shortcuts
from conjoin.progress import progress

ATTENDED = ("image", "text", "prompt", "readout")
"""Targets of the readout token's attention: image features, the item's text, other prompt tokens, itself."""

CUTOFFS = (1, 5, 10)
DIRECTIONS = {"image → text": ("image", "text"), "text → image": ("text", "image")}

_SDPA_ON_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def analyse_mllm(
    model: Any,  # noqa: ANN401
    processor: Any,  # noqa: ANN401
    pairs: Sequence[Any],
    *,
    batch_size: int = 8,
    attention_pairs: int = 16,
    share: float = 0.95,
    compressed: Results | None = None,
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
        compressed: What `compress` returned for the model: its curve joins the others, and its copies the summary.
        show_progress: Show progress bars.

    Raises:
        ValueError: The model is not an MLLM retriever, there are fewer than two pairs, a pair lacks image or text, or
            `share` is out of range, or `compressed` has no curve.
    """
    _check(model, pairs, share)
    if compressed is not None and not compressed.curves:
        raise ValueError(f"the results {compressed.title!r} have no curve; expected those of `compress`")
    attention = readout_attention(model, processor, pairs[:attention_pairs])
    states = {
        key: torch.cat(
            [
                readout_states(model, processor, [pair[key] for pair in pairs[start : start + batch_size]])
                for start in progress(range(0, len(pairs), batch_size), f"{key}s", show=show_progress)
            ],
            dim=1,
        )
        for key in ("image", "text")
    }
    hits = depth_hits(states["image"], states["text"])
    parameters = depth_parameters(model)
    samples = {"text": pairs[0]["text"], "image": pairs[0]["image"], "image + text": pairs[0]}
    operations = {name: depth_operations(model, processor, item) for name, item in samples.items()}
    chance = {k: chance_hit_rate(1, len(pairs), k) for k in CUTOFFS if k <= len(pairs)}
    shown = max(k for k in (1, 5) if k in chance)
    depth = len(attention)
    rates = {name: (ranks <= shown).double().mean(1) for name, ranks in hits.items()}
    mean = _curve(f"R@{shown}, mean of both directions", {"untrained": torch.stack([*rates.values()]).mean(0)})
    chosen = [mean] if compressed is None else [mean, compressed.curves[0]]
    rows: list[list[Any]] = [
        [kept, *(Metric.from_values(hits[name][kept - 1] <= k, chance[k]) for name in hits for k in chance)]
        for kept in range(1, depth + 1)
    ]
    return Results(
        title=f"{depth} layers of a multimodal language model",
        summary=f"Retrieval within {len(pairs)} pairs from the state after each layer, under the final norm, "
        "as if the model had been pruned there without training. What layers cost is counted, not timed. "
        + " ".join(depth_advice(curve, share) for curve in chosen),
        seed=0,  # of the bootstrap
        model={"architecture": model.config.backbone_config.model_type, "readout": model.config.readout},
        dataset={"pairs": len(pairs), "pairs for attention": min(attention_pairs, len(pairs))},
        tables=[
            Table("Retrieval by layers kept", ["layers", *(f"{n}, R@{k}" for n in hits for k in chance)], rows),
            _cost_table(parameters, operations),
            _attention_table(attention),
        ],
        curves=[
            _curve("Attention of the readout token", {n: attention[:, i] for i, n in enumerate(ATTENDED)}, "layer"),
            _curve(f"R@{shown} by layers kept", rates),
            *chosen[1:],
            _curve("Share of parameters", {"whole model": parameters / parameters[-1]}),
            _curve("Share of operations", {name: counts / counts[-1] for name, counts in operations.items()}),
        ],
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )  # fmt: skip


def depth_advice(curve: Curve, share: float) -> str:
    """Name the fewest layers that have a share of the whole model's score.

    Args:
        curve: Scores by layers; the last point of the first line is the whole model.
        share: Of its score.
    """
    lines = [*curve.series.items()]
    depth, best = lines[0][1][-1]
    good = {
        name: [int(kept) for kept, score in line if kept < depth and score >= share * best] for name, line in lines
    }
    advice = ", ".join(f"{min(depths)} layers {name}" for name, depths in good.items() if depths)
    return f"At {100 * share:g} % of the whole model's {curve.title}: {advice or 'none of these depths'}."


@torch.no_grad()
def readout_attention(model: Any, processor: Any, items: Sequence[Any]) -> Tensor:  # noqa: ANN401
    """Return how the readout token distributes its attention over token kinds, for each layer.

    Args:
        model: An MLLM retriever.
        processor: Its processor.
        items: Items `{"image", "text"}`.

    Returns:
        `(layers, 4)` shares by `ATTENDED`, averaged over heads and items; each row sums to 1.
    """
    shares: list[Tensor] = []
    eager = attention_implementation(model.text_model, "eager")
    with evaluation_mode(model), without_shortcuts(model), eager:
        for item in items:
            batch = processor([item]).to(model.device)
            kinds, at = _token_kinds(model, processor, item, batch)
            rows: list[Tensor] = []

            def keep(*call: Any, rows: list[Tensor] = rows, at: int = at) -> None:  # noqa: ANN401
                rows.append(call[-1][1][0, :, at].double().mean(0).cpu())  # the attention weights in the output

            with _hooks([layer.self_attn for layer in model.text_model.layers], keep):
                model(**batch)
            shares.append(torch.stack(rows) @ kinds.double())
    return torch.stack(shares).mean(0)


@torch.no_grad()
def readout_states(model: Any, processor: Any, items: Sequence[Any]) -> Tensor:  # noqa: ANN401
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
    states: list[Tensor] = []

    def keep(_module: nn.Module, _args: Any, output: Tensor) -> None:  # noqa: ANN401
        states.append(model.norm(output[torch.arange(len(at), device=at.device), at]).float().cpu())

    with evaluation_mode(model), without_shortcuts(model), _hooks(model.text_model.layers, keep):
        model(**batch)
    return torch.stack(states)


def depth_hits(images: Tensor, texts: Tensor) -> dict[str, Tensor]:
    """Return ranks `(layers, N)` of each item's partner by `DIRECTIONS`, from states `(layers, N, D)` of pairs."""
    states = {"image": images, "text": texts}
    labels = torch.arange(images.shape[1])
    return {
        name: torch.stack(
            [best_ranks(*layers, labels, labels) for layers in zip(states[query], states[candidate], strict=True)]
        )
        for name, (query, candidate) in DIRECTIONS.items()
    }


def depth_parameters(model: Any) -> Tensor:  # noqa: ANN401
    """Return the parameter count for each number of layers `(layers,)`, with vision tower and embeddings."""
    layers = torch.tensor([sum(p.numel() for p in layer.parameters()) for layer in model.text_model.layers])
    return layers.cumsum(0) + sum(p.numel() for p in model.parameters()) - layers.sum()


@torch.no_grad()
def depth_operations(model: Any, processor: Any, item: Any) -> Tensor:  # noqa: ANN401
    """Count the floating-point operations to embed one item for each number of layers `(layers,)`."""

    def attention(query: torch.Size, key: torch.Size, value: torch.Size, *_: object, **__: object) -> int:
        return sdpa_flop_count(query, key, value)

    batch = processor([item]).to(model.device)
    with (
        evaluation_mode(model),
        without_shortcuts(model),
        FlopCounterMode(display=False, custom_mapping={_SDPA_ON_CPU: attention}) as counter,
    ):
        model(**batch)
    counts = {name: sum(parts.values()) for name, parts in counter.get_flop_counts().items()}
    depth = len(model.text_model.layers)
    layers = [
        sum(count for name, count in counts.items() if name.endswith(f".language_model.layers.{number}"))
        for number in range(depth)
    ]
    return torch.tensor(layers).cumsum(0) + counter.get_total_flops() - sum(layers)


def _token_kinds(model: Any, processor: Any, item: Mapping[str, Any], batch: Any) -> tuple[Tensor, int]:  # noqa: ANN401
    """Return one-hot token kinds `(T, 4)` of one item's prompt, and the readout position."""
    ids = _prompt_ids(batch)
    at = len(ids) - 1 - int(model.config.readout == "before_token")
    kinds = torch.full((len(ids),), ATTENDED.index("prompt"))
    mark = next(mark for mark in map(chr, itertools.count(ord("!"))) if mark not in item["text"])
    other = _prompt_ids(processor([{**item, "text": mark}]))  # the text is where this prompt differs
    length = min(len(ids), len(other))
    first = int((ids[:length] == other[:length]).cumprod(0).sum())
    last = len(ids) - int((ids.flip(0)[:length] == other.flip(0)[:length]).cumprod(0).sum())
    kinds[first:last] = ATTENDED.index("text")
    kinds[ids == model.config.backbone_config.image_token_id] = ATTENDED.index("image")
    kinds[at:] = ATTENDED.index("readout")
    return nn.functional.one_hot(kinds, len(ATTENDED)), at


def _prompt_ids(batch: Any) -> Tensor:  # noqa: ANN401
    """Return the ids `(T,)` of the only prompt of a batch."""
    return batch["input_ids"][0].cpu()[batch["attention_mask"][0].bool().cpu()]


@contextmanager
def _hooks(modules: Sequence[nn.Module], hook: Callable[..., None]) -> Iterator[None]:
    handles = [module.register_forward_hook(hook) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _curve(title: str, series: dict[str, Tensor], x_label: str = "layers kept") -> Curve:
    points = {name: [[float(x), y] for x, y in enumerate(values.tolist(), 1)] for name, values in series.items()}
    return Curve(title, points, x_label)


def _cost_table(parameters: Tensor, operations: dict[str, Tensor]) -> Table:
    columns = ["layers", "parameters, M", "% of all"]
    for name in operations:
        columns += [f"{name}, GFLOP", "% of all"]
    rows: list[list[Any]] = []
    for index in range(len(parameters)):
        row: list[Any] = [index + 1]
        for counts, unit in ((parameters, 1e6), *((counts, 1e9) for counts in operations.values())):
            row += [float(f"{counts[index] / unit:.4g}"), round(100 * float(counts[index] / counts[-1]), 1)]
        rows.append(row)
    return Table(
        "Cost by layers kept", columns, rows, "Vision tower and table of tokens included; one item of the data."
    )


def _attention_table(attention: Tensor) -> Table:
    rows: list[list[Any]] = [
        [number, *(round(100 * share, 1) for share in shares)] for number, shares in enumerate(attention.tolist(), 1)
    ]
    return Table("Attention of the readout token, %", ["layer", *ATTENDED], rows)


def _check(model: Any, pairs: Sequence[Any], share: float) -> None:  # noqa: ANN401
    if not 0 < share <= 1:
        raise ValueError(f"share={share}; expected more than 0 and at most 1")
    if model.config.model_type != "mllm_retriever":
        raise ValueError(f"only an MLLM retriever can be read at every layer, got {type(model).__name__}")
    if model.config.readout == "mean":
        raise ValueError("the mean of all tokens has no readout token whose attention could be shown")
    if len(pairs) < 2:
        raise ValueError(f"{len(pairs)} pairs are too few for retrieval; expected at least 2")
    lacking = [index for index, pair in enumerate(pairs) if pair.get("image") is None or pair.get("text") is None]
    if lacking:
        raise ValueError(f"every item must have an image and a text; item {lacking[0]} lacks one")
