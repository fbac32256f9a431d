"""The one contrastive kernel: log-sum-exp over blocks of a similarity matrix that never exists as a whole.

InfoNCE, multi-positive, MAC and GCL all need, for every row, the log of the summed exponentials of its scaled
similarities to the columns that are its negatives. The positives are few per row and are added by the loss itself.

Rows and columns are unit vectors, so a score lies in [-scale, scale] and a constant shift keeps exp in range: there is
no running maximum, and each block is touched once by the product, once by exp and once by the sums. The backward pass
computes the blocks again. Memory grows with the number of rows and columns, not with their product.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .exclusion import Exclusion, Labels

BLOCK_SIZE, BLOCK_ASPECT = 1024, 4
"""Rows of a block, and how many times more columns it has: 16 MiB of float32.

Wide blocks need few calls, each of which waits for the slowest thread; the diagonal is still followed row by row.
"""

LARGEST_EXPONENT = {torch.float32: 70.0, torch.float64: 650.0}
"""Exponents up to these are summed without overflow; larger scales are shifted down to them."""

FLOAT32_SCALE = 78.0
"""Up to this scale no exponential of a score vanishes in float32, however small (temperature 0.0128)."""


def cross_logsumexp(
    rows: Tensor,
    columns: Tensor,
    scale: Tensor | float,
    exclusion: Exclusion,
    *,
    block_size: int = BLOCK_SIZE,
) -> tuple[Tensor, Tensor]:
    """Log-sum-exp of the scaled similarities of each row to its negatives among the columns.

    Args:
        rows: `(N, D)` unit vectors.
        columns: `(M, D)` unit vectors.
        scale: 1 / temperature, a float or a 0-d tensor (with gradient).
        exclusion: Which columns are not negatives.
        block_size: Rows computed at once, with `BLOCK_ASPECT` times as many columns.

    Returns:
        `(N,)` log-sum-exp, minus infinity for a row without negatives, and `(N,)` how many columns were left out for
        lying above their row's threshold alone.

    Raises:
        ValueError: The scale is not in (0, 650].
    """
    return _BlockedLogSumExp.apply(rows, columns, scale_tensor(scale, rows), exclusion, block_size)


def self_logsumexp(
    vectors: Tensor, scale: Tensor | float, exclusion: Exclusion, *, block_size: int = BLOCK_SIZE
) -> Tensor:
    """`cross_logsumexp(vectors, vectors, ...)` at half the cost: the matrix is symmetric, so half the blocks do.

    Args:
        vectors: `(N, D)` unit vectors, rows and columns at once.
        scale: 1 / temperature.
        exclusion: Must be symmetric: no thresholds.
        block_size: Rows computed at once, with `BLOCK_ASPECT` times as many columns.

    Raises:
        ValueError: As `cross_logsumexp`, or the exclusion has thresholds.
    """
    if exclusion.thresholds is not None:
        raise ValueError("thresholds differ by row, so the matrix is not symmetric; use cross_logsumexp")
    return _BlockedLogSumExp.apply(vectors, None, scale_tensor(scale, vectors), exclusion, block_size)[0]


def grouped_logsumexp(
    rows: Tensor,
    columns: Tensor,
    scale: Tensor | float,
    group_scale: Tensor | float,
    row_groups: Tensor,
    column_groups: Tensor,
    exclusion: Exclusion,
    *,
    block_size: int = BLOCK_SIZE,
) -> tuple[Tensor, Tensor]:
    """`cross_logsumexp` with `group_scale` between a row and a column of one group, `scale` between the others.

    The matrix is cut along the groups, so that every block has a single scale.

    Args:
        rows: `(N, D)` unit vectors.
        columns: `(M, D)` unit vectors.
        scale: 1 / temperature across groups.
        group_scale: 1 / temperature within a group.
        row_groups: `(N,)` integers.
        column_groups: `(M,)` integers.
        exclusion: Which columns are not negatives, by ids and thresholds.
        block_size: Rows computed at once, with `BLOCK_ASPECT` times as many columns.
    """
    sums = rows.new_full((2, len(rows)), float("-inf"))
    masked = torch.zeros_like(row_groups, dtype=torch.long)
    for group in row_groups.unique():
        mine = (row_groups == group).nonzero().squeeze(1)
        for kind, kind_scale in enumerate((group_scale, scale)):
            theirs = ((column_groups == group) == (kind == 0)).nonzero().squeeze(1)
            thresholds = None if exclusion.thresholds is None else exclusion.thresholds[mine]
            part = Exclusion(exclusion.row_ids[mine], exclusion.column_ids[theirs], thresholds=thresholds)
            found, left_out = cross_logsumexp(rows[mine], columns[theirs], kind_scale, part, block_size=block_size)
            sums = sums.index_put((torch.full_like(mine, kind), mine), found)
            masked[mine] += left_out
    return sums.logsumexp(0), masked


def scale_tensor(scale: Tensor | float, like: Tensor) -> Tensor:
    """The scale as a 0-d tensor in the dtype computed in.

    Raises:
        ValueError: It is not in (0, 650].
    """
    tensor = torch.as_tensor(scale, dtype=compute_dtype(like), device=like.device)
    value = float(tensor.detach())
    largest = LARGEST_EXPONENT[torch.float64]
    if not 0.0 < value <= largest:
        raise ValueError(f"scale (1 / temperature) {value:.4g} is outside (0, {largest:.0f}]")
    return tensor


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """float64 for float64, float32 for everything else."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


class Blocks:
    """One pass over the blocks of `exp(scale * rows @ columns.T - shift)`, zero where excluded.

    Args:
        rows: `(N, D)`.
        columns: `(M, D)`; None means the rows themselves. The matrix is symmetric then, and a block of rows starts at
            the diagonal: what lies right of its square there stands for its mirror image, too.
        scale: 1 / temperature.
        exclusion: Which entries are zero.
        block_size: Rows of a block; `BLOCK_ASPECT` times as many columns.
        dtype: What is computed in.
    """

    def __init__(
        self,
        rows: Tensor,
        columns: Tensor | None,
        scale: float,
        exclusion: Exclusion,
        block_size: int,
        dtype: torch.dtype,
    ) -> None:
        self.rows = rows.detach().to(dtype)
        self.columns = self.rows if columns is None else columns.detach().to(dtype)
        self.symmetric = columns is None
        self.scale = scale
        self.scaled_rows = self.rows * scale
        self.shift = max(0.0, scale - LARGEST_EXPONENT[dtype])
        self.labels: list[Labels] = exclusion.labels(block_size)
        self.thresholds = None if exclusion.thresholds is None else exclusion.thresholds.to(dtype) * scale
        self.block_size = block_size
        self.width = BLOCK_ASPECT * block_size
        self.buffer = self.rows.new_empty(min(block_size, len(self.rows)) * min(self.width, len(self.columns)))
        self.masked = torch.zeros(len(self.rows), dtype=torch.long, device=rows.device)

    def sums(self) -> Tensor:
        """The sum of every row `(N,)`; counts in `masked` what lay above the thresholds."""
        sums = self.rows.new_zeros(len(self.rows))
        for rows, columns, block in self:
            sums[rows] += block.sum(1)
            if self.symmetric:
                mirrored = _right_of_square(rows, columns)
                sums[mirrored] += block[:, mirrored.start - columns.start :].sum(0)
        return sums

    def gradients(self, factors: Tensor, with_columns: bool = True) -> tuple[Tensor, Tensor | None, Tensor]:
        """Gradients of `sum_i g_i lse_i` with respect to rows, columns and scale.

        Args:
            factors: `(N,)` `g_i / sum_i`.
            with_columns: Whether the columns' is wanted; if symmetric it is part of the rows'.
        """
        row_grad = torch.zeros_like(self.rows)
        column_grad = row_grad if self.symmetric else torch.zeros_like(self.columns) if with_columns else None
        for rows, columns, block in self:
            if self.symmetric:
                block *= factors[rows, None] + factors[columns]
            else:
                block *= factors[rows, None]
            row_grad[rows].addmm_(block, self.columns[columns])
            if column_grad is not None:
                others = _right_of_square(rows, columns) if self.symmetric else columns
                column_grad[others].addmm_(block[:, others.start - columns.start :].T, self.rows[rows])
        # sum_ij w_ij cos_ij is what the rows' gradient holds already; a symmetric one holds every entry twice.
        scale_grad = (row_grad * self.rows).sum() / (2 if self.symmetric else 1)
        row_grad *= self.scale
        if column_grad is not None and not self.symmetric:
            column_grad *= self.scale
        return row_grad, None if self.symmetric else column_grad, scale_grad

    def __iter__(self) -> Iterator[tuple[slice, slice, Tensor]]:
        """Yield rows, columns and the values between them, in a buffer that the next block overwrites."""
        for rows in _slices(0, len(self.rows), self.block_size):
            for columns in _slices(rows.start if self.symmetric else 0, len(self.columns), self.width):
                parts = list(_slices(columns.start, columns.stop, self.block_size))
                excluded = [(part, labels.equal(rows, part)) for labels in self.labels for part in parts]
                if len({part.start for part, found in excluded if found is True}) < len(parts):
                    yield rows, columns, self._values(rows, columns, excluded)

    def _values(self, rows: slice, columns: slice, excluded: list[tuple[slice, Tensor | bool]]) -> Tensor:
        left, right = self.scaled_rows[rows], self.columns[columns]
        scores = self.buffer[: len(left) * len(right)].view(len(left), len(right))
        torch.mm(left, right.T, out=scores)
        for part, found in excluded:
            if found is not False:
                square = scores[:, part.start - columns.start : part.stop - columns.start]
                square.masked_fill_(torch.as_tensor(found, device=scores.device), float("-inf"))
        if self.thresholds is not None:
            above = scores > self.thresholds[rows, None]
            self.masked[rows] += above.sum(1)
            scores.masked_fill_(above, float("-inf"))
        if self.shift:
            scores -= self.shift
        return scores.exp_()


def _slices(start: int, stop: int, size: int) -> Iterator[slice]:
    return (slice(place, min(place + size, stop)) for place in range(start, stop, size))


def _right_of_square(rows: slice, columns: slice) -> slice:
    return slice(max(rows.stop, columns.start), columns.stop)


class _BlockedLogSumExp(torch.autograd.Function):
    """Forward keeps one number per row; backward computes the blocks again."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        rows: Tensor,
        columns: Tensor | None,
        scale: Tensor,
        exclusion: Exclusion,
        block_size: int,
    ) -> tuple[Tensor, Tensor]:
        dtype = compute_dtype(rows)
        blocks = Blocks(rows, columns, float(scale), exclusion, block_size, dtype)
        sums = blocks.sums()
        if dtype == torch.float32 and blocks.scale > FLOAT32_SCALE:
            info = torch.finfo(dtype)
            if (sums < len(blocks.columns) * info.tiny / info.eps).any():  # too far below the shift for float32
                dtype = torch.float64
                blocks = Blocks(rows, columns, float(scale), exclusion, block_size, dtype)
                sums = blocks.sums()
        ctx.save_for_backward(rows, columns, sums)
        ctx.arguments = (float(scale), exclusion, block_size, dtype)
        ctx.mark_non_differentiable(blocks.masked)
        return (sums.log() + blocks.shift).to(compute_dtype(rows)), blocks.masked

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _masked: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        rows, columns, sums = ctx.saved_tensors
        blocks = Blocks(rows, columns, *ctx.arguments)
        row_grad, column_grad, scale_grad = blocks.gradients(row_factors(grad, sums), ctx.needs_input_grad[1])
        return (
            row_grad.to(rows.dtype),
            None if column_grad is None else column_grad.to(columns.dtype),
            scale_grad.to(compute_dtype(rows)),
            None,
            None,
        )


def row_factors(grad: Tensor, sums: Tensor) -> Tensor:
    """`grad / sums`, 0 for a row without negatives: it has no gradient."""
    return torch.where(sums > 0, grad.to(sums.dtype) / sums, 0.0)
