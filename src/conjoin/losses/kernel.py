"""The contrastive kernel: log-sum-exp over the rows of a similarity matrix, with exclusions.

Every contrastive loss needs, for every row, the log of the summed exponentials of its scaled similarities to the
columns that are its negatives. The positives are few per row; the loss adds them.

Rows and columns are unit vectors, so a score lies in [-scale, scale] and a constant shift keeps exp in range without a
running maximum. The matrix is computed in blocks that fit into the cache of a processor. If all exponentials together
fit into `KEPT_BYTES`, the forward pass keeps them and the backward pass needs two products. Beyond this limit the
backward pass computes the blocks again, and memory grows with the number of rows and columns, not with their product.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

BLOCK_SIZE = 256
"""Rows of a block on a CPU: 1 MiB of float32 with its 1,024 columns."""
DEVICE_BLOCK_SIZE = 2048
"""Rows of a block on other devices, where every call has a fixed cost: 64 MiB of float32."""
BLOCK_ASPECT = 4
"""Columns of a block for each of its rows."""
WHOLE_ROWS = 1024
"""A symmetric matrix of at most this many rows, and no wider than a block, is one block: 4 MiB of float32."""
STRIPS = 8
"""The least number of strips of a larger symmetric matrix; low ones, because diagonal squares are computed whole."""
KEPT_BYTES = 2**28
"""Exponentials kept for the backward pass, in bytes: 256 MiB, 8,192 x 8,192 in float32."""
LARGEST_EXPONENT = {torch.float32: 70.0, torch.float64: 650.0}
"""Exponents up to these are summed without overflow; larger scales are shifted down to them."""
FLOAT32_SCALE = 78.0
"""Up to this scale no exponential of a score vanishes in float32, however small (temperature 0.0128)."""

Labels = tuple[Tensor, Tensor]
"""`(N,)` and `(M,)` integers of rows and columns."""


class Exclusion(NamedTuple):
    """Entries left out of the sums; an entry is excluded if any of the given rules excludes it.

    Args:
        diagonals: Column `i + k` is excluded from row i for each offset k. This rule needs no tensor and costs least.
        labels: Columns with the row's label are excluded, for each pair of labels of rows and columns.
        limits: `(N,)`; columns whose similarity to the row is above its limit are excluded. Not with groups.
    """

    diagonals: tuple[int, ...] = ()
    labels: tuple[Labels, ...] = ()
    limits: Tensor | None = None

    def clear(self, block: Tensor, rows: slice, columns: slice) -> None:
        """Set the excluded entries of a block, all of them finite, to 0 in place."""
        for offset in self.diagonals:
            diagonal = rows.start + offset - columns.start
            if -block.shape[0] < diagonal < block.shape[1]:
                torch.diagonal(block, diagonal).zero_()
        for of_rows, of_columns in self.labels:
            # A product is faster than masked_fill_, whose speed depends on the pattern of the mask.
            block.mul_(of_rows[rows, None] != of_columns[columns])


class Matrix(NamedTuple):
    """What is summed.

    Args:
        scale: 1 / temperature.
        exclusion: Which entries are zero.
        both_sides: Whether the sums of the columns are wanted too.
        groups: Entries of one group have the scale `group_scale`.
        group_scale: 1 / temperature within a group.
    """

    scale: float
    exclusion: Exclusion
    both_sides: bool = False
    groups: Labels | None = None
    group_scale: float = 0.0


class Blocks:
    """One pass over the blocks of `exp(scale * rows @ columns.T - shift)`, zero where excluded.

    Args:
        rows: `(N, D)`.
        columns: `(M, D)`; None means the rows themselves. The matrix is symmetric then. A small one is one block. Each
            strip of rows of a larger one starts at the diagonal, and the entries to the right of the diagonal square
            also stand for their mirror images.
        matrix: What is summed.
        dtype: The dtype of the computation.
    """

    def __init__(self, rows: Tensor, columns: Tensor | None, matrix: Matrix, dtype: torch.dtype) -> None:
        self.rows = rows.detach().to(dtype)
        self.columns = self.rows if columns is None else columns.detach().to(dtype)
        self.symmetric, self.matrix = columns is None, matrix
        self.largest_scale = max(matrix.scale, matrix.group_scale)
        self.shift = max(0.0, self.largest_scale - LARGEST_EXPONENT[dtype])
        limits = matrix.exclusion.limits
        self.bounds = None if limits is None else (limits.to(dtype) * matrix.scale - self.shift).exp()
        height = BLOCK_SIZE if rows.device.type == "cpu" else DEVICE_BLOCK_SIZE
        width, count = BLOCK_ASPECT * height, len(rows)
        if self.symmetric and count <= min(WHOLE_ROWS, width):
            height = width
        elif self.symmetric:
            entries, height = height * width, min(height, max(1, count // STRIPS))
            width = entries // height
        self.slices = [
            (slice(top, min(top + height, count)), slice(left, min(left + width, len(self.columns))))
            for top in range(0, count, height)
            for left in range(top if self.symmetric else 0, len(self.columns), width)
        ]

    def sums(self, keep: bool) -> tuple[Tensor, Tensor | None, list[Tensor]]:
        """The sums of the rows `(N,)`, those of the columns `(M,)` if wanted, and the blocks if they are kept.

        Args:
            keep: Keep the blocks if they fit into `KEPT_BYTES`.
        """
        count = sum((rows.stop - rows.start) * (columns.stop - columns.start) for rows, columns in self.slices)
        keep = keep and count * self.rows.element_size() <= KEPT_BYTES
        row_sums = self.rows.new_zeros(len(self.rows))
        column_sums = self.rows.new_zeros(len(self.columns)) if self.matrix.both_sides else None
        mirrored = row_sums if self.symmetric else column_sums
        kept, buffer, left = [], None if keep else self._buffer(), self._left()
        for rows, columns in self.slices:
            block = self._exponentials(left[rows], rows, columns, buffer)
            row_sums[rows] += block.sum(1)
            if mirrored is not None:
                others = self._others(rows, columns)
                mirrored[others] += block[:, others.start - columns.start :].sum(0)
            if keep:
                kept.append(block)
        return row_sums, column_sums, kept

    def gradients(
        self, row_factors: Tensor, column_factors: Tensor | None, kept: Sequence[Tensor], wanted: tuple[bool, bool]
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
        """Gradients of `sum_i g_i lse_i` (and of the like sum over the columns) by rows, columns and both scales.

        Args:
            row_factors: `(N,)` `g_i / sum_i`.
            column_factors: `(M,)` likewise, if the sums of the columns were wanted; `row_factors` if symmetric.
            kept: The blocks that `sums` returned, computed again if there are none.
            wanted: Whether the gradients of the columns and of the two scales of groups are wanted.
        """
        scale, groups = self.matrix.scale, self.matrix.groups
        row_grad = torch.empty_like(self.rows)
        column_grad = row_grad if self.symmetric else torch.empty_like(self.columns) if wanted[0] else None
        group_grad = self.rows.new_zeros(()) if groups is not None and wanted[1] else None
        memory = self._buffer()
        buffer, left = (None, self.rows) if kept else (self._buffer(), self._left())
        for number, (rows, columns) in enumerate(self.slices):
            block = kept[number] if kept else self._exponentials(left[rows], rows, columns, buffer)
            weights = memory[: block.numel()].view(block.shape)  # the gradient of the scores
            if column_factors is None:
                torch.mul(block, row_factors[rows, None], out=weights)
            else:
                torch.add(row_factors[rows, None], column_factors[columns], out=weights).mul_(block)
            if groups is not None:
                same = (groups[0][rows, None] == groups[1][columns]).to(block.dtype)
                if group_grad is not None:  # scores are logs of their exponentials; finite where these are 0
                    scores = block.clamp(min=torch.finfo(block.dtype).tiny).log_().add_(self.shift)
                    group_grad += scores.mul_(weights).mul_(same).sum()
                weights *= same.mul_(self.matrix.group_scale - scale).add_(scale)
            row_grad[rows].addmm_(weights, self.columns[columns], beta=int(columns.start > 0))
            if column_grad is not None:
                others = self._others(rows, columns)
                part = weights[:, others.start - columns.start :]
                column_grad[others].addmm_(part.T, self.rows[rows], beta=int(rows.start > 0))
        # The gradient of the rows holds the sum of the weighted entries, and twice if the matrix is symmetric.
        total = torch.dot(row_grad.flatten(), self.rows.flatten()) / (2 if self.symmetric else 1)
        if groups is None:
            row_grad *= scale
            if column_grad is not None and not self.symmetric:
                column_grad *= scale
            return row_grad, column_grad, total, None
        if group_grad is None:
            return row_grad, column_grad, total / scale, None
        return row_grad, column_grad, (total - group_grad) / scale, group_grad / self.matrix.group_scale

    def _left(self) -> Tensor:
        """The left factor of the scores: the rows times the scale, if there is one scale."""
        return self.rows * self.matrix.scale if self.matrix.groups is None else self.rows

    def _exponentials(self, left: Tensor, rows: slice, columns: slice, buffer: Tensor | None) -> Tensor:
        """The exponentials of a block, in `buffer` if there is one."""
        groups, right = self.matrix.groups, self.columns[columns]
        shape = (len(left), len(right))
        scores = left.new_empty(shape) if buffer is None else buffer[: shape[0] * shape[1]].view(shape)
        torch.mm(left, right.T, out=scores)  # autocast does not reach a product into a given tensor
        if groups is not None:
            same = (groups[0][rows, None] == groups[1][columns]).to(scores.dtype)
            scores *= same.mul_(self.matrix.group_scale - self.matrix.scale).add_(self.matrix.scale)
        if self.shift:
            scores -= self.shift
        scores.exp_()
        if self.bounds is not None:
            scores *= scores <= self.bounds[rows, None]
        self.matrix.exclusion.clear(scores, rows, columns)
        return scores

    def _others(self, rows: slice, columns: slice) -> slice:
        """The columns whose sums a block adds to: all, or those right of the diagonal square if symmetric."""
        return slice(max(rows.stop, columns.start), columns.stop) if self.symmetric else columns

    def _buffer(self) -> Tensor:
        """Memory of the largest block."""
        rows, columns = self.slices[0]
        return self.rows.new_empty((rows.stop - rows.start) * (columns.stop - columns.start))


def logsumexp(
    rows: Tensor,
    columns: Tensor | None,
    scale: Tensor | float,
    exclusion: Exclusion,
    groups: Labels | None = None,
    group_scale: Tensor | float | None = None,
) -> Tensor:
    """Log-sum-exp of the scaled similarities of each row to its negatives among the columns.

    Args:
        rows: `(N, D)` unit vectors.
        columns: `(M, D)` unit vectors; None means the rows themselves, whose matrix is computed on one side of its
            diagonal only if it is large. The exclusion must be symmetric then.
        scale: 1 / temperature, a float or a 0-d tensor (with gradient).
        exclusion: Which columns are not negatives.
        groups: `(N,)` and `(M,)` integers: a row and a column of one group have the scale `group_scale`.
        group_scale: 1 / temperature within a group.

    Returns:
        `(N,)` log-sum-exp, minus infinity for a row without negatives.

    Raises:
        ValueError: A scale is not in (0, 650].
    """
    (tensor, value), (group_tensor, group_value) = _scalar(scale, rows), (None, 0.0)
    if groups is not None and group_scale is not None:
        group_tensor, group_value = _scalar(group_scale, rows)
    return _LogSumExp.apply(rows, columns, tensor, group_tensor, Matrix(value, exclusion, False, groups, group_value))[
        0
    ]


def pair_logsumexp(
    rows: Tensor, columns: Tensor, scale: Tensor | float, exclusion: Exclusion
) -> tuple[Tensor, Tensor]:
    """`logsumexp` in both directions from one matrix: over the columns of each row, and over the rows of each column.

    Returns:
        `(N,)` and `(M,)` log-sum-exp, minus infinity without negatives.
    """
    tensor, value = _scalar(scale, rows)
    return _LogSumExp.apply(rows, columns, tensor, None, Matrix(value, exclusion, both_sides=True))


def _scalar(scale: Tensor | float, like: Tensor) -> tuple[Tensor, float]:
    """The scale as a 0-d tensor in the dtype of the computation, and its value.

    Raises:
        ValueError: It is not in (0, 650].
    """
    value = float(scale.detach() if isinstance(scale, Tensor) else scale)
    if not 0.0 < value <= LARGEST_EXPONENT[torch.float64]:
        raise ValueError(f"scale (1 / temperature) {value:.4g} is outside (0, {LARGEST_EXPONENT[torch.float64]:.0f}]")
    return torch.as_tensor(scale, dtype=_compute_dtype(like), device=like.device), value


def _compute_dtype(tensor: Tensor) -> torch.dtype:
    """float64 for float64, float32 for everything else."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


class _LogSumExp(torch.autograd.Function):
    """Log-sum-exp of rows, and of columns if both sides are wanted."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        rows: Tensor,
        columns: Tensor | None,
        scale: Tensor,
        group_scale: Tensor | None,
        matrix: Matrix,
    ) -> tuple[Tensor | None, ...]:
        dtype, keep = _compute_dtype(rows), any(ctx.needs_input_grad)
        blocks = Blocks(rows, columns, matrix, dtype)
        *sums, kept = blocks.sums(keep)
        if dtype == torch.float32 and blocks.largest_scale > FLOAT32_SCALE:
            least = max(len(blocks.rows), len(blocks.columns)) * torch.finfo(dtype).tiny / torch.finfo(dtype).eps
            if any(bool((values < least).any()) for values in sums if values is not None):  # too far below the shift
                dtype = torch.float64
                blocks = Blocks(rows, columns, matrix, dtype)
                *sums, kept = blocks.sums(keep)
        ctx.save_for_backward(rows, columns, *sums, *kept)
        ctx.matrix, ctx.dtype = matrix, dtype
        logs = (None if values is None else values.log() + blocks.shift for values in sums)
        return tuple(None if log is None else log.to(_compute_dtype(rows)) for log in logs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, row_grad: Tensor, column_grad: Tensor | None) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        rows, columns, row_sums, column_sums, *kept = ctx.saved_tensors
        blocks = Blocks(rows, columns, ctx.matrix, ctx.dtype)
        row_factors = _factors(row_grad, row_sums)
        column_factors = row_factors if blocks.symmetric else None
        if column_sums is not None and column_grad is not None:
            column_factors = _factors(column_grad, column_sums)
        wanted = (ctx.needs_input_grad[1], ctx.needs_input_grad[2] or ctx.needs_input_grad[3])
        of_rows, of_columns, *of_scales = blocks.gradients(row_factors, column_factors, kept, wanted)
        of_columns = None if columns is None or of_columns is None else of_columns.to(columns.dtype)
        of_scales = [None if grad is None else grad.to(_compute_dtype(rows)) for grad in of_scales]
        return of_rows.to(rows.dtype), of_columns, *of_scales, None


def _factors(grad: Tensor, sums: Tensor) -> Tensor:
    """`grad / sums`, 0 without negatives, where there is no gradient."""
    return torch.where(sums > 0, grad.to(sums.dtype) / sums, 0.0)
