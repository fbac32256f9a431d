"""Gathering of negatives from all devices."""

from typing import Any

import torch
import torch.distributed as dist
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
    gathered: Tensor = _Gather.apply(tensor)
    return gathered


class _Gather(torch.autograd.Function):
    """Concatenation over ranks; backward, the sum over ranks of the gradients of this rank's rows."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:  # noqa: ANN401
        tensor = tensor.contiguous()
        parts = [torch.empty_like(tensor) for _ in range(world_size())]
        dist.all_gather(parts, tensor)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # noqa: ANN401
        if dist.get_backend() == dist.Backend.NCCL:
            local = torch.empty_like(gradient.chunk(world_size())[0])
            dist.reduce_scatter_tensor(local, gradient.contiguous())
            return local
        total = gradient.clone(memory_format=torch.contiguous_format)  # gloo reduces whole tensors only
        dist.all_reduce(total)
        return total.chunk(world_size())[dist.get_rank()]


def local_positions(count: int, device: torch.device) -> Tensor:
    """The indices of this rank's `count` rows in a gathered tensor, `(count,)`."""
    rank = dist.get_rank() if is_distributed() else 0
    return torch.arange(rank * count, (rank + 1) * count, device=device)
