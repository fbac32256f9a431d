"""The contrastive kernel: log-sum-exp over the rows of a similarity matrix, with exclusions.

Every contrastive loss needs, for every row, the log of the summed exponentials of its scaled similarities to the
columns that are its negatives. The positives are few per row; the loss adds them.

Rows and columns are unit vectors, so a score lies in [-scale, scale] and a constant shift keeps exp in range without a
running maximum. The matrix is computed in blocks that fit into the cache of a processor. If all exponentials together
fit into `KEPT_BYTES`, the forward pass keeps them and the backward pass needs two products. Beyond this limit the
backward pass computes the blocks again, and memory grows with the number of rows and columns, not with their product.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

BLOCK_ASPECT = 4
"""Columns of a block for each of its rows."""
WHOLE_ROWS = 1024
"""A symmetric matrix of at most this many rows, and no wider than a block, is one block: 4 MiB of float32."""
STRIPS = 8
"""The least number of strips of a larger symmetric matrix; low ones, because diagonal squares are computed whole."""
LARGEST_EXPONENT = {torch.float32: 70.0, torch.float64: 650.0}
"""Exponents up to these are summed without overflow; larger scales are shifted down to them."""
BLOCK_SIZE = 256
"""Rows of a block on a CPU: 1 MiB of float32 with its 1,024 columns."""
DEVICE_BLOCK_SIZE = 2048
"""Rows of a block on other devices, where every call has a fixed cost: 64 MiB of float32."""
KEPT_BYTES = 2**28
"""Exponentials kept for the backward pass, in bytes: 256 MiB, 8,192 x 8,192 in float32."""
FLOAT32_SCALE = 78.0
"""Up to this scale no exponential of a score vanishes in float32, however small (temperature 0.0128)."""


class Exclusion(NamedTuple):
    """Entries left out of the sums; an entry is excluded if any of the given rules excludes it.

    Args:
        diagonals: Column `i + k` is excluded from row i for each offset k. This rule needs no tensor and costs least.
        ids: `(N,)` and `(M,)` integers of rows and columns; columns with the row's id are excluded.
        groups: `(N,)` and `(M,)` integers; columns of the row's group are excluded.
    """

    diagonals: tuple[int, ...] = ()
    ids: tuple[Tensor, Tensor] | None = None
    groups: tuple[Tensor, Tensor] | None = None

    def clear(self, block: Tensor, rows: slice, columns: slice) -> None:
        """Set the excluded entries of a block of the `(N, M)` matrix to 0 in place.

        Args:
            block: The finite values of `rows` and `columns`.
            rows: Rows of the block.
            columns: Columns of the block.
        """
        for diagonal in self._diagonals(block, rows, columns):
            diagonal.zero_()
        for labels in (self.ids, self.groups):
            if labels is not None:
                # A product is faster than masked_fill_, whose speed depends on the pattern of the mask.
                block.mul_(labels[0][rows, None] != labels[1][columns])

    def _diagonals(self, block: Tensor, rows: slice, columns: slice) -> Iterator[Tensor]:
        height, width = block.shape
        for offset in self.diagonals:
            diagonal = rows.start + offset - columns.start
            if -height < diagonal < width:
                yield torch.diagonal(block, diagonal)


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


def cross_logsumexp(
    rows: Tensor,
    columns: Tensor,
    scale: Tensor | float,
    exclusion: Exclusion,
    *,
    block_size: int | None = None,
    kept_bytes: int | None = None,
) -> Tensor:
    """Log-sum-exp of the scaled similarities of each row to its negatives among the columns.

    Args:
        rows: `(N, D)` unit vectors.
        columns: `(M, D)` unit vectors.
        scale: 1 / temperature, a float or a 0-d tensor (with gradient).
        exclusion: Which columns are not negatives.
        block_size: Rows of a block; by default `BLOCK_SIZE` or `DEVICE_BLOCK_SIZE`.
        kept_bytes: Size of the matrix up to which it is kept for the backward pass, by default
            `KEPT_BYTES`; 0 never keeps it.

    Returns:
        `(N,)` log-sum-exp, minus infinity for a row without negatives.

    Raises:
        ValueError: The scale is not in (0, 650].
    """
    layout, tensor = _layout(rows, scale, exclusion, block_size, kept_bytes)
    return _LogSumExp.apply(rows, columns, tensor, None, layout)[0]


def pair_logsumexp(
    rows: Tensor,
    columns: Tensor,
    scale: Tensor | float,
    exclusion: Exclusion,
    *,
    block_size: int | None = None,
    kept_bytes: int | None = None,
) -> tuple[Tensor, Tensor]:
    """`cross_logsumexp` in both directions from one matrix: over the columns of each row, and over the rows of each.

    Args:
        rows: `(N, D)` unit vectors.
        columns: `(M, D)` unit vectors.
        scale: 1 / temperature.
        exclusion: Which pairs of row and column are not negatives of each other.
        block_size: As in `cross_logsumexp`.
        kept_bytes: As in `cross_logsumexp`.

    Returns:
        `(N,)` and `(M,)` log-sum-exp, minus infinity without negatives.

    Raises:
        ValueError: As `cross_logsumexp`.
    """
    layout, tensor = _layout(rows, scale, exclusion, block_size, kept_bytes)
    return _LogSumExp.apply(rows, columns, tensor, None, layout._replace(both_sides=True))


def self_logsumexp(
    vectors: Tensor,
    scale: Tensor | float,
    exclusion: Exclusion,
    *,
    block_size: int | None = None,
    kept_bytes: int | None = None,
) -> Tensor:
    """`cross_logsumexp(vectors, vectors, ...)`; a large matrix is computed on one side of its diagonal only.

    Args:
        vectors: `(N, D)` unit vectors, rows and columns at once.
        scale: 1 / temperature.
        exclusion: Must be symmetric.
        block_size: As in `cross_logsumexp`; up to `WHOLE_ROWS` rows that are no more than the columns of a block, the
            matrix is one block.
        kept_bytes: As in `cross_logsumexp`.

    Raises:
        ValueError: As `cross_logsumexp`.
    """
    layout, tensor = _layout(vectors, scale, exclusion, block_size, kept_bytes)
    return _LogSumExp.apply(vectors, None, tensor, None, layout)[0]


def grouped_logsumexp(
    rows: Tensor,
    columns: Tensor,
    scale: Tensor | float,
    group_scale: Tensor | float,
    groups: tuple[Tensor, Tensor],
    exclusion: Exclusion,
    *,
    block_size: int | None = None,
    kept_bytes: int | None = None,
) -> Tensor:
    """`cross_logsumexp` with `group_scale` between a row and a column of one group, `scale` between the others.

    Args:
        rows: `(N, D)` unit vectors.
        columns: `(M, D)` unit vectors.
        scale: 1 / temperature across groups.
        group_scale: 1 / temperature within a group.
        groups: `(N,)` and `(M,)` integers of rows and columns.
        exclusion: Which columns are not negatives.
        block_size: As in `cross_logsumexp`.
        kept_bytes: As in `cross_logsumexp`.

    Raises:
        ValueError: As `cross_logsumexp`, for either scale.
    """
    layout, tensor = _layout(rows, scale, exclusion, block_size, kept_bytes)
    group_tensor, value = _scale_tensor(group_scale, rows)
    layout = layout._replace(groups=Groups(value, *groups))
    return _LogSumExp.apply(rows, columns, tensor, group_tensor, layout)[0]


def _layout(
    rows: Tensor, scale: Tensor | float, exclusion: Exclusion, block_size: int | None, kept_bytes: int | None
) -> tuple[Layout, Tensor]:
    tensor, value = _scale_tensor(scale, rows)
    if block_size is None:
        block_size = BLOCK_SIZE if rows.device.type == "cpu" else DEVICE_BLOCK_SIZE
    return Layout(value, exclusion, block_size, KEPT_BYTES if kept_bytes is None else kept_bytes), tensor


def _scale_tensor(scale: Tensor | float, like: Tensor) -> tuple[Tensor, float]:
    """The scale as a 0-d tensor in the dtype of the computation, and its value.

    Raises:
        ValueError: It is not in (0, 650].
    """
    value = float(scale.detach() if isinstance(scale, Tensor) else scale)
    largest = LARGEST_EXPONENT[torch.float64]
    if not 0.0 < value <= largest:
        raise ValueError(f"scale (1 / temperature) {value:.4g} is outside (0, {largest:.0f}]")
    return torch.as_tensor(scale, dtype=_compute_dtype(like), device=like.device), value


def _compute_dtype(tensor: Tensor) -> torch.dtype:
    """float64 for float64, float32 for everything else."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


class _LogSumExp(torch.autograd.Function):
    """Log-sum-exp of rows, and of columns if the layout asks for both sides."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        rows: Tensor,
        columns: Tensor | None,
        scale: Tensor,
        group_scale: Tensor | None,
        layout: Layout,
    ) -> tuple[Tensor | None, ...]:
        dtype, keep = _compute_dtype(rows), any(ctx.needs_input_grad)
        blocks = Blocks(rows, columns, layout, dtype)
        row_sums, column_sums, kept = blocks.sums(keep)
        if dtype == torch.float32 and _vanish(blocks, row_sums, column_sums):
            dtype = torch.float64
            blocks = Blocks(rows, columns, layout, dtype)
            row_sums, column_sums, kept = blocks.sums(keep)
        ctx.save_for_backward(rows, columns, row_sums, column_sums, *kept)
        ctx.layout, ctx.dtype = layout, dtype
        logs = (None if sums is None else sums.log() + blocks.shift for sums in (row_sums, column_sums))
        return tuple(None if log is None else log.to(_compute_dtype(rows)) for log in logs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, row_grad: Tensor, column_grad: Tensor | None) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        rows, columns, row_sums, column_sums, *kept = ctx.saved_tensors
        blocks = Blocks(rows, columns, ctx.layout, ctx.dtype)
        row_factors = _factors(row_grad, row_sums)
        column_factors = row_factors if blocks.symmetric else None
        if column_sums is not None and column_grad is not None:
            column_factors = _factors(column_grad, column_sums)
        wanted = (ctx.needs_input_grad[1], ctx.needs_input_grad[2] or ctx.needs_input_grad[3])
        gradients = blocks.gradients(row_factors, column_factors, kept, wanted)
        scale_dtype = _compute_dtype(rows)
        return (
            gradients.rows.to(rows.dtype),
            None if gradients.columns is None else gradients.columns.to(columns.dtype),
            gradients.scale.to(scale_dtype),
            None if gradients.group_scale is None else gradients.group_scale.to(scale_dtype),
            None,
        )


def _vanish(blocks: Blocks, *sums: Tensor | None) -> bool:
    """Whether a sum lies too far below the shift for float32."""
    if blocks.layout.largest_scale <= FLOAT32_SCALE:
        return False
    info = torch.finfo(torch.float32)
    least = max(len(blocks.rows), len(blocks.columns)) * info.tiny / info.eps
    return any(bool((values < least).any()) for values in sums if values is not None)


def _factors(grad: Tensor, sums: Tensor) -> Tensor:
    """`grad / sums`, 0 without negatives, where there is no gradient."""
    return torch.where(sums > 0, grad.to(sums.dtype) / sums, 0.0)
