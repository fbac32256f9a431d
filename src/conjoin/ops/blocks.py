"""Exponentials of a scaled similarity matrix, their sums and the gradients of these, block by block."""

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from .exclusion import Exclusion

BLOCK_ASPECT = 4
"""Columns of a block for each of its rows."""

WHOLE_ROWS = 1024
"""A symmetric matrix of at most this many rows, and no wider than a block, is one block: 4 MiB of float32."""

STRIPS = 8
"""The least number of strips of a larger symmetric matrix; low ones, because diagonal squares are computed whole."""

LARGEST_EXPONENT = {torch.float32: 70.0, torch.float64: 650.0}
"""Exponents up to these are summed without overflow; larger scales are shifted down to them."""


class Groups(NamedTuple):
    """Another scale between a row and a column of one group.

    Args:
        scale: 1 / temperature within a group.
        rows: `(N,)` integers.
        columns: `(M,)` integers.
    """

    scale: float
    rows: Tensor
    columns: Tensor

    def same(self, rows: slice, columns: slice, dtype: torch.dtype) -> Tensor:
        """1 where row and column of a block are of one group, else 0."""
        return (self.rows[rows, None] == self.columns[columns]).to(dtype)

    def scales(self, other: float, same: Tensor) -> Tensor:
        """The scale of every entry of a block, `other` across groups; overwrites `same`."""
        return same.mul_(self.scale - other).add_(other)


class Layout(NamedTuple):
    """How a matrix is computed.

    Args:
        scale: 1 / temperature.
        exclusion: Which entries are zero.
        block_size: Rows of a block; a block has `BLOCK_ASPECT` times as many columns.
        kept_bytes: Size up to which the forward pass keeps the matrix for the backward pass.
        both_sides: Whether the sums of the columns are wanted too.
        groups: Another scale for some of the entries.
    """

    scale: float
    exclusion: Exclusion
    block_size: int
    kept_bytes: int
    both_sides: bool = False
    groups: Groups | None = None

    @property
    def largest_scale(self) -> float:
        """The largest scale of an entry."""
        return self.scale if self.groups is None else max(self.scale, self.groups.scale)


class Gradients(NamedTuple):
    """Gradients of a weighted sum of log-sum-exps; the columns' is part of the rows' if the matrix is symmetric."""

    rows: Tensor
    columns: Tensor | None
    scale: Tensor
    group_scale: Tensor | None


class Blocks:
    """One pass over the blocks of `exp(scale * rows @ columns.T - shift)`, zero where excluded.

    Args:
        rows: `(N, D)`.
        columns: `(M, D)`; None means the rows themselves. The matrix is symmetric then. A small one is one block. Each
            strip of rows of a larger one starts at the diagonal, and the entries to the right of the diagonal square
            also stand for their mirror images.
        layout: How the matrix is computed.
        dtype: The dtype of the computation.
    """

    def __init__(self, rows: Tensor, columns: Tensor | None, layout: Layout, dtype: torch.dtype) -> None:
        self.rows = rows.detach().to(dtype)
        self.columns = self.rows if columns is None else columns.detach().to(dtype)
        self.symmetric = columns is None
        self.both_sides = layout.both_sides or self.symmetric
        self.layout = layout
        self.shift = max(0.0, layout.largest_scale - LARGEST_EXPONENT[dtype])
        height, width = layout.block_size, BLOCK_ASPECT * layout.block_size
        if self.symmetric and len(self.rows) <= min(WHOLE_ROWS, width):
            height = width
        elif self.symmetric:
            entries, height = height * width, min(height, max(1, len(self.rows) // STRIPS))
            width = entries // height
        self.slices = list(_slices(len(self.rows), len(self.columns), height, width, self.symmetric))

    @cached_property
    def scaled_rows(self) -> Tensor:
        """The rows times the scale."""
        return self.rows * self.layout.scale

    def sums(self, keep: bool) -> tuple[Tensor, Tensor | None, list[Tensor]]:
        """The sums of the rows `(N,)`, those of the columns `(M,)` if wanted, and the blocks if they are kept.

        The sums of a symmetric matrix are those of its rows.

        Args:
            keep: Keep the blocks if they fit into `kept_bytes`.
        """
        count = sum((rows.stop - rows.start) * (columns.stop - columns.start) for rows, columns in self.slices)
        keep = keep and count * self.rows.element_size() <= self.layout.kept_bytes
        row_sums = self.rows.new_zeros(len(self.rows))
        column_sums = self.rows.new_zeros(len(self.columns)) if self.both_sides and not self.symmetric else None
        mirrored = row_sums if self.symmetric else column_sums
        kept, buffer = [], None if keep else self._buffer()
        for rows, columns in self.slices:
            block = self._values(rows, columns, buffer)
            row_sums[rows] += block.sum(1)
            if mirrored is not None:
                others = self._others(rows, columns)
                mirrored[others] += block[:, others.start - columns.start :].sum(0)
            if keep:
                kept.append(block)
        return row_sums, column_sums, kept

    def gradients(
        self, row_factors: Tensor, column_factors: Tensor | None, kept: Sequence[Tensor], wanted: tuple[bool, bool]
    ) -> Gradients:
        """Gradients of `sum_i g_i lse_i` (and of the like sum over the columns).

        Args:
            row_factors: `(N,)` `g_i / sum_i`.
            column_factors: `(M,)` likewise, if the sums of the columns were wanted; `row_factors` if symmetric.
            kept: The blocks that `sums` returned, computed again if there are none.
            wanted: Whether the gradients of the columns and of the two scales of groups are wanted.
        """
        row_grad = torch.empty_like(self.rows)
        column_grad = row_grad if self.symmetric else torch.empty_like(self.columns) if wanted[0] else None
        groups = self.layout.groups
        group_grad = self.rows.new_zeros(()) if groups is not None and wanted[1] else None
        buffer, memory = None if kept else self._buffer(), self._buffer()
        for number, (rows, columns) in enumerate(self.slices):
            block = kept[number] if kept else self._values(rows, columns, buffer)
            weights = self._weights(block, row_factors[rows, None], column_factors, columns, memory)
            if groups is not None:
                same = groups.same(rows, columns, weights.dtype)
                if group_grad is not None:
                    group_grad += self._scores(block).mul_(weights).mul_(same).sum()
                weights *= groups.scales(self.layout.scale, same)
            row_grad[rows].addmm_(weights, self.columns[columns], beta=int(columns.start > 0))
            if column_grad is not None:
                others = self._others(rows, columns)
                part = weights[:, others.start - columns.start :]
                column_grad[others].addmm_(part.T, self.rows[rows], beta=int(rows.start > 0))
        # The gradient of the rows holds the sum of the weighted entries, and twice if the matrix is symmetric.
        total = torch.dot(row_grad.flatten(), self.rows.flatten()) / (2 if self.symmetric else 1)
        columns_too = None if self.symmetric else column_grad
        if groups is None:
            for grad in (row_grad, columns_too):
                if grad is not None:
                    grad *= self.layout.scale
            return Gradients(row_grad, columns_too, total, None)
        if group_grad is None:
            return Gradients(row_grad, columns_too, total / self.layout.scale, None)
        return Gradients(row_grad, columns_too, (total - group_grad) / self.layout.scale, group_grad / groups.scale)

    def _weights(
        self, block: Tensor, row_factors: Tensor, column_factors: Tensor | None, columns: slice, memory: Tensor
    ) -> Tensor:
        """The gradient with respect to the scores of a block."""
        weights = _view(memory, block.shape)
        if column_factors is None:
            return torch.mul(block, row_factors, out=weights)
        return torch.add(row_factors, column_factors[columns], out=weights).mul_(block)

    def _values(self, rows: slice, columns: slice, buffer: Tensor | None) -> Tensor:
        """The exponentials of a block, in `buffer` if there is one."""
        layout, right = self.layout, self.columns[columns]
        left = (self.scaled_rows if layout.groups is None else self.rows)[rows]
        shape = (len(left), len(right))
        scores = left.new_empty(shape) if buffer is None else _view(buffer, shape)
        torch.mm(left, right.T, out=scores)
        if layout.groups is not None:
            scores *= layout.groups.scales(layout.scale, layout.groups.same(rows, columns, scores.dtype))
        if self.shift:
            scores -= self.shift
        scores.exp_()
        layout.exclusion.clear(scores, rows, columns)
        return scores

    def _scores(self, block: Tensor) -> Tensor:
        """The scores whose exponentials a block holds; finite where these are 0."""
        return block.clamp(min=torch.finfo(block.dtype).tiny).log_().add_(self.shift)

    def _others(self, rows: slice, columns: slice) -> slice:
        """The columns whose sums a block adds to: all, or those right of the diagonal square if symmetric."""
        return slice(max(rows.stop, columns.start), columns.stop) if self.symmetric else columns

    def _buffer(self) -> Tensor:
        """Memory of the largest block."""
        rows, columns = self.slices[0]
        return self.rows.new_empty((rows.stop - rows.start) * (columns.stop - columns.start))


def _view(buffer: Tensor, shape: Sequence[int]) -> Tensor:
    return buffer[: shape[0] * shape[1]].view(shape[0], shape[1])


def _slices(rows: int, columns: int, height: int, width: int, symmetric: bool) -> Iterator[tuple[slice, slice]]:
    """Cut `(rows, columns)` into blocks; of a symmetric matrix those that start on or right of the diagonal."""
    for top in range(0, rows, height):
        for left in range(top if symmetric else 0, columns, width):
            yield slice(top, min(top + height, rows)), slice(left, min(left + width, columns))
