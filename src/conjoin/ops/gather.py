"""Gathering of negatives from all devices."""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_nn
from torch import Tensor


def is_distributed() -> bool:
    """Whether several ranks train together."""
    return world_size() > 1


def world_size() -> int:
    """Return the number of ranks, 1 without a process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def gather_with_gradient(tensor: Tensor) -> Tensor:
    """Concatenate `tensor` `(N, ...)` of all ranks along dimension 0, in rank order, with gradient to every rank.

    With a loss of local rows against gathered columns, DDP's average over ranks then has exactly the gradient of
    the full batch on one device. Without a process group this is the identity. Every rank must hold the same shape.
    """
    if not is_distributed():
        return tensor
    tensor = tensor.contiguous()
    if tensor.requires_grad:
        return torch.cat(dist_nn.all_gather(tensor))
    parts = [torch.empty_like(tensor) for _ in range(world_size())]
    dist.all_gather(parts, tensor)
    return torch.cat(parts)


def local_positions(count: int, device: torch.device) -> Tensor:
    """The indices of this rank's `count` rows in a gathered tensor, `(count,)`."""
    rank = dist.get_rank() if is_distributed() else 0
    return torch.arange(rank * count, (rank + 1) * count, device=device)
