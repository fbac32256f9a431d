"""Contrastive batches beyond memory: embed in chunks without a graph, then replay each chunk with its gradient.

Gao et al., "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup" (arXiv 2101.06983). The result is
the plain step's: the same loss on the same batch, the same random draws in both passes. What an objective computes by
`Objective.once` is computed in the first pass alone.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .objective import Objective, total_loss
from .replay import RandomState, Replay


def cached_backward(
    objective: Objective,
    batch: dict[str, Any],
    chunk_size: int,
    backward: Callable[[Tensor], None],
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> dict[str, Tensor]:
    """Run one forward and backward over `batch` holding the graph of `chunk_size` rows at a time.

    Args:
        objective: Its `embed` is called twice per chunk, its `loss` once on all rows.
        batch: Model inputs and optionally `ids`; every tensor has the N rows as dimension 0. Or parts with rows of
            their own, see `split_rows`.
        chunk_size: Rows whose activations are held at once.
        backward: Called with the total loss; scales it as the trainer does and runs backward.
        autocast: Makes the context of mixed precision, a fresh one per pass: the weights that one has cast without a
            graph must not serve the next.

    Returns:
        The loss terms, detached.
    """
    ids = batch.pop("ids", None)
    chunks = list(split_rows(batch, chunk_size))
    device = next(objective.parameters()).device
    replays, parts = [], []
    with torch.no_grad(), autocast():
        for chunk in chunks:
            replays.append(Replay(device))
            with objective.replaying(replays[-1]):
                parts.append(objective.embed(**chunk))
    end_state = RandomState(device)
    names = dict.fromkeys(name for part in parts for name in part)
    leaves = {name: torch.cat([part[name] for part in parts if name in part]) for name in names}
    for leaf in leaves.values():
        leaf.requires_grad_(leaf.is_floating_point())
    with autocast():
        terms = objective.contrast(leaves, ids, batch)
    backward(total_loss(terms))
    replayed = dict.fromkeys(leaves, 0)
    for chunk, replay in zip(chunks, replays, strict=True):
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
                gradients.append(gradient[start : replayed[name]].to(rows.dtype))
        torch.autograd.backward(kept, gradients)
    end_state.restore()
    return {name: term.detach() for name, term in terms.items()}


def split_rows(batch: Mapping[str, Any], chunk_size: int) -> Iterator[dict[str, Any]]:
    """Cut every tensor of `batch` along its rows; what is not a tensor goes to every chunk.

    A batch with parts (mappings), such as queries and candidates, is cut part by part: a chunk is one part's, under
    its name, and what stands beside the parts is left out.

    Raises:
        ValueError: The tensors disagree on the number of rows, or `chunk_size` is not positive.
    """
    parts = {name: part for name, part in batch.items() if isinstance(part, Mapping)}
    if parts:
        for name, part in parts.items():
            yield from ({name: chunk} for chunk in split_rows(part, chunk_size))
        return
    sizes = {name: len(value) for name, value in batch.items() if isinstance(value, Tensor)}
    if chunk_size < 1 or len(set(sizes.values())) != 1:
        raise ValueError(f"cannot cut a batch with rows {sizes} into chunks of {chunk_size}")
    for start in range(0, next(iter(sizes.values())), chunk_size):
        yield {name: value[start : start + chunk_size] if name in sizes else value for name, value in batch.items()}


def average_gradients(module: nn.Module) -> None:
    """Average the gradients over all ranks: what DDP does, for steps that went round its forward.

    A parameter that no rank used keeps no gradient, so that the optimiser passes it by as on one device.
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
