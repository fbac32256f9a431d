"""The rows of all devices as columns for those of this device."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


def is_distributed() -> bool:
    """Whether several ranks train together."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


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
        parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, tensor)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # noqa: ANN401
        if dist.get_backend() == dist.Backend.NCCL:
            local = torch.empty_like(gradient.chunk(dist.get_world_size())[0])
            dist.reduce_scatter_tensor(local, gradient.contiguous())
            return local
        total = gradient.clone(memory_format=torch.contiguous_format)  # gloo reduces whole tensors only
        dist.all_reduce(total)
        return total.chunk(dist.get_world_size())[dist.get_rank()]


def local_positions(count: int, device: torch.device) -> Tensor:
    """The indices of this rank's `count` rows in a gathered tensor, `(count,)`."""
    rank = dist.get_rank() if is_distributed() else 0
    return torch.arange(rank * count, (rank + 1) * count, device=device)


class Gathered(NamedTuple):
    """The rows that the local rows are compared with.

    Attributes:
        vectors: One or several matrices `(M, D)`: the rows of all devices, or the local rows.
        ids: `(M,)` integers naming what each row shows; rows of one id are not each other's negatives.
        present: Which of them count, `(M, ...)` bool as the loss says: its mean over devices is then that over all.
        positions: `(N,)` index of each local row among them; None if they are the local rows.
    """

    vectors: Sequence[Tensor]
    ids: Tensor | None = None
    present: Tensor | None = None
    positions: Tensor | None = None


def gather_rows(*vectors: Tensor, ids: Tensor | None = None, present: Tensor | None = None) -> Gathered:
    """Gather rows `(N, D)`, their ids `(N,)` and which of them count `(N, ...)` from all devices.

    The arguments are the local rows; the result is the argument `gathered` of a loss.
    """
    if not is_distributed():
        return Gathered(vectors, ids, present)
    return Gathered(
        [gather_with_gradient(matrix) for matrix in vectors],
        None if ids is None else gather_with_gradient(ids),
        None if present is None else gather_with_gradient(present),
        local_positions(len(vectors[0]), vectors[0].device),
    )
