"""The one contrastive kernel: log-sum-exp over blocks of a similarity matrix that never exists as a whole.

InfoNCE, multi-positive, MAC and GCL all need, for every row, the log of the summed exponentials of its scaled
similarities to the columns that are its negatives. The positives are few per row and are added by the loss itself.

Rows and columns are unit vectors, so a score lies in [-scale, scale] and exp never overflows: there is no running
maximum and each block is touched once by the product, once by exp and once by the sums. The backward pass computes the
blocks again. Memory grows with the number of rows and columns, not with their product.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

BLOCK_SIZE = 1024
"""Rows and columns of a block: 4 MiB of float32, which stays in cache."""

FLOAT32_SCALE, FLOAT64_SCALE = 70.0, 650.0
"""Largest scale (1 / temperature) whose exponentials are summed in float32, and in float64."""


class Exclusion(NamedTuple):
    """Which columns are not a row's negatives: those with its id, and what the optional rules add.

    Args:
        row_ids: `(N,)` integer ids; a column with the same id is excluded.
        column_ids: `(M,)`.
        row_groups: `(N,)` integer groups (modalities), for `group_scale` or `same_group`.
        column_groups: `(M,)`.
        same_group: Exclude the columns of the row's own group.
        thresholds: `(N,)`; columns of a higher similarity are taken for false negatives and excluded.
    """

    row_ids: Tensor
    column_ids: Tensor
    row_groups: Tensor | None = None
    column_groups: Tensor | None = None
    same_group: bool = False
    thresholds: Tensor | None = None

    def mask(self, rows: slice, columns: slice, cosines: Tensor, may_share_ids: bool) -> Tensor | None:
        """Which entries of a block are excluded, `(rows, columns)` bool; None when no rule can apply to it."""
        if not may_share_ids and not self.same_group and self.thresholds is None:
            return None
        mask = self.row_ids[rows, None] == self.column_ids[columns]
        if self.same_group:
            mask |= self.in_group(rows, columns)
        if self.thresholds is not None:
            mask |= cosines > self.thresholds[rows, None]
        return mask

    def in_group(self, rows: slice, columns: slice) -> Tensor:
        """Which entries of a block join a row and a column of one group."""
        if self.row_groups is None or self.column_groups is None:
            raise ValueError("row_groups and column_groups are needed for a rule between groups")
        return self.row_groups[rows, None] == self.column_groups[columns]


def cross_logsumexp(
    rows: Tensor,
    columns: Tensor,
    scale: Tensor | float,
    exclusion: Exclusion,
    *,
    group_scale: Tensor | float | None = None,
    block_size: int = BLOCK_SIZE,
) -> Tensor:
    """Log-sum-exp of the scaled similarities of each row to its negatives among the columns.

    Args:
        rows: `(N, D)` unit vectors.
        columns: `(M, D)` unit vectors.
        scale: 1 / temperature, a float or a 0-d tensor (with gradient).
        exclusion: Which columns are not negatives.
        group_scale: Scale in place of `scale` between a row and a column of the same group (MAC).
        block_size: Rows and columns computed at once.

    Returns:
        `(N,)`; minus infinity for a row without negatives.

    Raises:
        ValueError: A scale is not positive, or too large for float64 exponentials (temperature below 1/650).
    """
    scales = _scales(rows, scale, group_scale)
    return _BlockedLogSumExp.apply(rows, columns, *scales, exclusion, block_size)


def self_logsumexp(
    vectors: Tensor, scale: Tensor | float, exclusion: Exclusion, *, block_size: int = BLOCK_SIZE
) -> Tensor:
    """`cross_logsumexp(vectors, vectors, ...)` at half the cost: the matrix is symmetric, so half the blocks do.

    Args:
        vectors: `(N, D)` unit vectors, rows and columns at once.
        scale: 1 / temperature.
        exclusion: Must be symmetric: no thresholds.
        block_size: Rows and columns computed at once.

    Raises:
        ValueError: As `cross_logsumexp`, or the exclusion has thresholds.
    """
    if exclusion.thresholds is not None:
        raise ValueError("thresholds differ by row, so the matrix is not symmetric; use cross_logsumexp")
    scale, _ = _scales(vectors, scale, None)
    return _BlockedLogSumExp.apply(vectors, None, scale, None, exclusion, block_size)


def _scales(rows: Tensor, *scales: Tensor | float | None) -> list[Tensor | None]:
    """Scales as 0-d tensors, checked."""
    checked = [
        None if s is None else torch.as_tensor(s, dtype=_compute_dtype(rows), device=rows.device) for s in scales
    ]
    for value in (float(scale.detach()) for scale in checked if scale is not None):
        if not 0.0 < value <= FLOAT64_SCALE:
            raise ValueError(f"scale (1 / temperature) {value:.4g} is outside (0, {FLOAT64_SCALE:.0f}]")
    return checked


def _compute_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


class _BlockedLogSumExp(torch.autograd.Function):
    """Forward and backward over blocks. `columns=None` means the rows themselves, upper triangle of blocks only."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        rows: Tensor,
        columns: Tensor | None,
        scale: Tensor,
        group_scale: Tensor | None,
        exclusion: Exclusion,
        block_size: int,
    ) -> Tensor:
        work = _Work(rows, columns, scale, group_scale, exclusion, block_size)
        sums = rows.new_zeros(len(rows), dtype=work.sum_dtype)
        for block in work.blocks():
            exponentials, _ = work.exponentials(block)
            sums[block.rows] += exponentials.sum(1)
            if block.mirrored:
                sums[block.columns] += exponentials.sum(0)
        result = sums.log()
        ctx.save_for_backward(rows, columns, scale, group_scale, result)
        ctx.exclusion, ctx.block_size = exclusion, block_size
        return result.to(_compute_dtype(rows))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        rows, columns, scale, group_scale, result = ctx.saved_tensors
        work = _Work(rows, columns, scale, group_scale, ctx.exclusion, ctx.block_size)
        # d lse_i / d s_ij = exp(s_ij) exp(-lse_i); a row without negatives has no gradient.
        factors = torch.where(result.isfinite(), grad.to(work.sum_dtype) * (-result).exp(), 0.0)
        row_grad = torch.zeros_like(work.row_vectors)
        column_grad = row_grad if columns is None else torch.zeros_like(work.column_vectors)
        scale_grads = [torch.zeros_like(scale), torch.zeros_like(scale)]
        need_scale = ctx.needs_input_grad[2] or ctx.needs_input_grad[3]
        for block in work.blocks():
            weights, kept = work.exponentials(block, keep_cosines=need_scale)
            if block.mirrored:
                weights *= factors[block.rows, None] + factors[block.columns]
            else:
                weights *= factors[block.rows, None]
            weights = weights.to(row_grad.dtype)
            if need_scale:
                work.add_scale_grads(scale_grads, weights * kept, block)
            weights = work.times_scale(weights, block)
            row_grad[block.rows].addmm_(weights, work.column_vectors[block.columns])
            if block.mirrored or columns is not None:
                column_grad[block.columns].addmm_(weights.T, work.row_vectors[block.rows])
            else:
                row_grad[block.rows].addmm_(weights.T, work.row_vectors[block.rows])
        return (
            row_grad.to(rows.dtype),
            None if columns is None else column_grad.to(columns.dtype),
            scale_grads[0] if ctx.needs_input_grad[2] else None,
            scale_grads[1] if ctx.needs_input_grad[3] else None,
            None,
            None,
        )


class _Block(NamedTuple):
    rows: slice
    columns: slice
    mirrored: bool  # an off-diagonal block of a symmetric matrix, standing for its transpose too


class _Work:
    """One pass over the blocks: vectors in the dtype computed in, and a buffer used by every block."""

    def __init__(
        self,
        rows: Tensor,
        columns: Tensor | None,
        scale: Tensor,
        group_scale: Tensor | None,
        exclusion: Exclusion,
        block_size: int,
    ) -> None:
        dtype = _compute_dtype(rows)
        self.row_vectors = rows.detach().to(dtype)
        self.column_vectors = self.row_vectors if columns is None else columns.detach().to(dtype)
        self.symmetric = columns is None
        self.scale, self.group_scale = scale, group_scale
        self.exclusion, self.block_size = exclusion, block_size
        largest = max(float(s.detach()) for s in (scale, group_scale) if s is not None)
        self.sum_dtype = torch.float64 if largest > FLOAT32_SCALE else dtype
        self.buffer = rows.new_empty(block_size * block_size, dtype=dtype)
        self.row_ranges = _id_ranges(exclusion.row_ids, block_size)
        self.column_ranges = self.row_ranges if columns is None else _id_ranges(exclusion.column_ids, block_size)

    def blocks(self) -> Iterator[_Block]:
        for start in range(0, len(self.row_vectors), self.block_size):
            rows = slice(start, min(start + self.block_size, len(self.row_vectors)))
            for left in range(start if self.symmetric else 0, len(self.column_vectors), self.block_size):
                columns = slice(left, min(left + self.block_size, len(self.column_vectors)))
                yield _Block(rows, columns, self.symmetric and left != start)

    def exponentials(self, block: _Block, keep_cosines: bool = False) -> tuple[Tensor, Tensor]:
        """Exponentials of a block's scaled similarities, 0 where excluded, and its cosines if they are to be kept."""
        rows, columns = self.row_vectors[block.rows], self.column_vectors[block.columns]
        cosines = self.buffer[: len(rows) * len(columns)].view(len(rows), len(columns))
        torch.mm(rows, columns.T, out=cosines)
        excluded = self.exclusion.mask(block.rows, block.columns, cosines, self._may_share_ids(block))
        kept = cosines.clone() if keep_cosines else cosines
        exponentials = self.times_scale(cosines, block).to(self.sum_dtype).exp_()
        return exponentials if excluded is None else exponentials.masked_fill_(excluded, 0.0), kept

    def _may_share_ids(self, block: _Block) -> bool:
        low, high = self.row_ranges[block.rows.start // self.block_size]
        other_low, other_high = self.column_ranges[block.columns.start // self.block_size]
        return low <= other_high and other_low <= high

    def times_scale(self, values: Tensor, block: _Block) -> Tensor:
        """Multiply a block by the scale of each entry, in place."""
        if self.group_scale is None:
            return values.mul_(self.scale)
        in_group = self.exclusion.in_group(block.rows, block.columns)
        return values.mul_(torch.where(in_group, self.group_scale, self.scale))

    def add_scale_grads(self, grads: list[Tensor], products: Tensor, block: _Block) -> None:
        """Add a block's share of the gradients of both scales; `products` are score gradients times cosines."""
        if self.group_scale is None:
            grads[0] += products.sum()
            return
        in_group = self.exclusion.in_group(block.rows, block.columns)
        grads[0] += products.masked_fill(in_group, 0.0).sum()
        grads[1] += products.masked_fill(~in_group, 0.0).sum()


def _id_ranges(ids: Tensor, block_size: int) -> list[tuple[int, int]]:
    """Smallest and largest id of each block, to skip the comparison where two blocks cannot share one."""
    return [(int(block.min()), int(block.max())) for block in ids.split(block_size)]
