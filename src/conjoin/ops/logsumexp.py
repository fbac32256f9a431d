"""The contrastive kernel: log-sum-exp over the rows of a similarity matrix, with exclusions.

Every contrastive loss needs, for every row, the log of the summed exponentials of its scaled similarities to the
columns that are its negatives. The positives are few per row; the loss adds them.

Rows and columns are unit vectors, so a score lies in [-scale, scale] and a constant shift keeps exp in range without a
running maximum. The matrix is computed in blocks that fit into the cache of a processor. If all exponentials together
fit into `KEPT_BYTES`, the forward pass keeps them and the backward pass needs two products. Beyond this limit the
backward pass computes the blocks again, and memory grows with the number of rows and columns, not with their product.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .blocks import LARGEST_EXPONENT, Blocks, Groups, Layout
from .exclusion import Exclusion

BLOCK_SIZE = 256
"""Rows of a block on a CPU: 1 MiB of float32 with its 1,024 columns."""

DEVICE_BLOCK_SIZE = 2048
"""Rows of a block on other devices, where every call has a fixed cost: 64 MiB of float32."""

KEPT_BYTES = 2**28
"""Exponentials kept for the backward pass, in bytes: 256 MiB, 8,192 x 8,192 in float32."""

FLOAT32_SCALE = 78.0
"""Up to this scale no exponential of a score vanishes in float32, however small (temperature 0.0128)."""


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
    row_groups: Tensor,
    column_groups: Tensor,
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
        row_groups: `(N,)` integers.
        column_groups: `(M,)` integers.
        exclusion: Which columns are not negatives.
        block_size: As in `cross_logsumexp`.
        kept_bytes: As in `cross_logsumexp`.

    Raises:
        ValueError: As `cross_logsumexp`, for either scale.
    """
    layout, tensor = _layout(rows, scale, exclusion, block_size, kept_bytes)
    group_tensor, value = _scale_tensor(group_scale, rows)
    layout = layout._replace(groups=Groups(value, row_groups, column_groups))
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
