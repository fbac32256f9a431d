"""Gradient cache: embed a large batch in chunks without a graph, then re-run each chunk with its gradient.

Gao et al., "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup" (arXiv 2101.06983). The result
equals the plain step: the same loss on the same batch, with the same random numbers in both passes. Computations in
`Objective.once` run in the first pass only.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from conjoin.training.objective import Objective, total_loss
from conjoin.training.replay import RandomState, Replay


def cached_backward(
    objective: Objective,
    batch: dict[str, Any],
    chunk_size: int,
    backward: Callable[[Tensor], None],
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    chunk_backward: Callable[[list[Tensor], list[Tensor], bool], None] = lambda rows, gradients, _: (
        torch.autograd.backward(rows, gradients)
    ),
    most: Callable[[int], int] = lambda count: count,
) -> dict[str, Tensor]:
    """Run one forward and backward over `batch` with the graph of at most `chunk_size` rows in memory.

    Args:
        objective: `embed` is called twice per chunk, `terms` once on all rows.
        batch: Parts with model inputs and optional `ids`; see `Objective` and `split_rows`.
        chunk_size: Rows whose activations are in memory at once.
        backward: Receives the total loss, scales it like the trainer, and runs backward.
        autocast: Creates a fresh mixed-precision context for each pass: a pass must not reuse weights that an earlier
            pass cast without a graph.
        chunk_backward: Runs the backward pass of the rows of a chunk, with their gradients; the flag marks the last.
        most: Returns the number of chunks to embed, given those of this device. With sharded weights, all devices
            embed equally many: after its last chunk a device embeds it again, with a gradient of zero.

    Returns:
        The loss terms, detached.
    """
    ids = batch.pop("ids", None)
    chunks = list(split_rows(batch, chunk_size))
    count = len(chunks)
    chunks += chunks[-1:] * (most(count) - count)
    device = next(objective.parameters()).device
    replays, parts = [], []
    with torch.no_grad(), autocast():
        for chunk in chunks:
            replays.append(Replay(device))
            with objective.replaying(replays[-1]):
                parts.append(objective.embed(**chunk))
    end_state = RandomState(device)
    names = dict.fromkeys(name for part in parts[:count] for name in part)
    leaves = {name: torch.cat([part[name] for part in parts[:count] if name in part]) for name in names}
    for leaf in leaves.values():
        leaf.requires_grad_(leaf.is_floating_point())
    with autocast():
        terms = objective.terms(leaves, ids, batch)
    backward(total_loss(terms))
    replayed = dict.fromkeys(leaves, 0)
    for number, (chunk, replay) in enumerate(zip(chunks, replays, strict=True), start=1):
        replay.start.restore()
        with autocast(), objective.replaying(replay):
            embeddings = objective.embed(**chunk)
        kept: list[Tensor] = []
        gradients: list[Tensor] = []
        for name, rows in embeddings.items():
            start, replayed[name] = replayed[name], replayed[name] + len(rows)
            gradient = leaves[name].grad
            if gradient is not None and rows.requires_grad:
                kept.append(rows)
                own = gradient[start : replayed[name]].to(rows.dtype)
                gradients.append(own if number <= count else torch.zeros_like(rows))
        chunk_backward(kept, gradients, number == len(chunks))
    end_state.restore()
    return {name: term.detach() for name, term in terms.items()}


def split_rows(batch: Mapping[str, Any], chunk_size: int) -> Iterator[dict[str, Any]]:
    """Split each part of a batch in turn into chunks `{part: rows}` of at most `chunk_size` rows.

    Tensors outside the parts are skipped: they are inputs of the loss, which sees the whole batch.

    Raises:
        ValueError: There is no part, the tensors of a part differ in length, or `chunk_size` is not positive.
    """
    parts = {name: part for name, part in batch.items() if isinstance(part, Mapping)}
    if chunk_size < 1 or not parts:
        raise ValueError(f"cannot cut a batch with the parts {sorted(parts)} into chunks of {chunk_size} rows")
    for name, part in parts.items():
        sizes = dict(_row_counts(part))
        if len(set(sizes.values())) != 1:
            raise ValueError(f"cannot cut the part {name!r} with {sizes} rows into chunks of {chunk_size}")
        for start in range(0, next(iter(sizes.values())), chunk_size):
            yield {name: _rows(part, slice(start, start + chunk_size))}


def _row_counts(part: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, int]]:
    for name, value in part.items():
        if isinstance(value, Mapping):
            yield from _row_counts(value, f"{prefix}{name}.")
        elif isinstance(value, Tensor):
            yield prefix + name, len(value)


def _rows(value: Any, chosen: slice) -> Any:  # noqa: ANN401
    """Select rows of every tensor; other values go to every chunk unchanged."""
    if isinstance(value, Mapping):
        return {name: _rows(entry, chosen) for name, entry in value.items()}
    return value[chosen] if isinstance(value, Tensor) else value


def average_gradients(module: nn.Module) -> None:
    """Average the gradients over all ranks, as DDP does, for steps that bypass its forward.

    A parameter that no rank used keeps no gradient, so the optimiser skips it, as on one device.
    """
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    used = torch.tensor([parameter.grad is not None for parameter in parameters], device=parameters[0].device).int()
    dist.all_reduce(used)
    for parameter, ranks in zip(parameters, used.tolist(), strict=True):
        if ranks:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
