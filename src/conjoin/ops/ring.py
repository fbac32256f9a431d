"""The kernel over columns that stay on their own devices and pass by, one device's share at a time."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .contrastive import BLOCK_SIZE, FLOAT32_SCALE, Blocks, compute_dtype, row_factors, scale_tensor
from .exclusion import Exclusion
from .gather import rotate, world_size


def ring_logsumexp(
    rows: Tensor,
    columns: Tensor,
    scale: Tensor | float,
    exclusion: Exclusion,
    *,
    block_size: int = BLOCK_SIZE,
) -> tuple[Tensor, Tensor]:
    """`cross_logsumexp` of this rank's rows to the columns of all ranks, without ever gathering these.

    A rank holds its own columns, those of one other rank and, in the backward pass, the gradient of the latter, which
    travels with them; of the similarities it holds one block. Every rank must call this with the same shapes, forward
    and backward. Without a process group it is `cross_logsumexp`.

    Args:
        rows: `(N, D)` unit vectors.
        columns: `(M, D)` unit vectors, this rank's share.
        scale: 1 / temperature, the same on all ranks.
        exclusion: Its ids (and groups) are those of `rows` and of this rank's `columns`, comparable across ranks.
        block_size: Rows and columns computed at once.

    Returns:
        As `cross_logsumexp`.
    """
    return _RingLogSumExp.apply(rows, columns, scale_tensor(scale, rows), exclusion, block_size)


class _RingLogSumExp(torch.autograd.Function):
    """Both passes send the columns once around, and home again."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        rows: Tensor,
        columns: Tensor,
        scale: Tensor,
        exclusion: Exclusion,
        block_size: int,
    ) -> tuple[Tensor, Tensor]:
        # All ranks must agree on the dtype, so it is chosen by the scale alone.
        dtype = torch.float64 if float(scale) > FLOAT32_SCALE else compute_dtype(rows)
        sums = torch.zeros(len(rows), dtype=dtype, device=rows.device)
        masked = torch.zeros(len(rows), dtype=torch.long, device=rows.device)
        share = [columns.detach(), *_labels(exclusion)]
        for _ in range(world_size()):
            blocks = Blocks(rows, share[0], float(scale), _replace(exclusion, share[1:]), block_size, dtype)
            sums += blocks.sums()
            masked += blocks.masked
            share = rotate(share)
        ctx.save_for_backward(rows, columns, sums)
        ctx.arguments = (float(scale), exclusion, block_size, dtype)
        ctx.mark_non_differentiable(masked)
        return (sums.log() + blocks.shift).to(compute_dtype(rows)), masked

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _masked: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        rows, columns, sums = ctx.saved_tensors
        scale, exclusion, block_size, dtype = ctx.arguments
        factors = row_factors(grad, sums)
        row_grad = torch.zeros(rows.shape, dtype=dtype, device=rows.device)
        scale_grad = torch.zeros((), dtype=dtype, device=rows.device)
        column_grad = torch.zeros(columns.shape, dtype=dtype, device=columns.device)
        share = [column_grad, columns.detach(), *_labels(exclusion)]
        for _ in range(world_size()):
            blocks = Blocks(rows, share[1], scale, _replace(exclusion, share[2:]), block_size, dtype)
            found = blocks.gradients(factors)
            row_grad += found[0]
            share[0] += found[1]
            scale_grad += found[2]
            share = rotate(share)
        return (
            row_grad.to(rows.dtype),
            share[0].to(columns.dtype),
            scale_grad.to(compute_dtype(rows)),
            None,
            None,
        )


def _labels(exclusion: Exclusion) -> list[Tensor]:
    return [labels for labels in (exclusion.column_ids, exclusion.column_groups) if labels is not None]


def _replace(exclusion: Exclusion, labels: list[Tensor]) -> Exclusion:
    return exclusion._replace(column_ids=labels[0], column_groups=labels[1] if len(labels) > 1 else None)
