"""Which columns are the positives and which are not negatives: positions and ids of the rows of a batch."""

import torch
from torch import Tensor

from conjoin.ops import Exclusion, gather_with_gradient

from .checks import check_length


def check_positions(count: int, columns: Tensor, positions: Tensor | None, name: str) -> None:
    """Check that each of `count` rows has its own column: at `positions`, or at its own index if None.

    Raises:
        ValueError: There are fewer columns than rows, or a position is not one of a column.
    """
    if positions is None:
        if len(columns) < count:
            raise ValueError(f"{count} {name} but only {len(columns)} columns, and no positions among them")
        return
    check_length(positions, "positions", count)
    if positions.min() < 0 or positions.max() >= len(columns):
        raise ValueError(f"positions lie in [{positions.min()}, {positions.max()}], expected [0, {len(columns) - 1}]")


def own_columns(columns: Tensor, count: int, positions: Tensor | None) -> Tensor:
    """The column `(count, ...)` at each row's position, the first ones by default."""
    if positions is not None:
        return columns.index_select(0, positions)
    return columns if len(columns) == count else columns[:count]


def exclude_own(columns: Tensor, count: int, positions: Tensor | None, ids: Tensor | None, name: str) -> Exclusion:
    """Exclude each row's own column and, with `ids`, all columns of the same id.

    Args:
        columns: `(M, D)`.
        count: How many rows there are.
        positions: `(count,)` the index of each row's own column, checked; the row's index by default.
        ids: `(M,)` integers naming what each column shows; all different by default.
        name: Of `ids`, in messages.

    Raises:
        ValueError: There is not one id per column.
    """
    if ids is None:
        if positions is None:
            return Exclusion(diagonals=(0,))
        return Exclusion(ids=(positions, torch.arange(len(columns), device=columns.device)))
    check_length(ids, name, len(columns))
    return Exclusion(ids=(own_columns(ids, count, positions), ids))


def masked_negatives(ids: Tensor) -> Tensor:
    """How many other rows of all devices share a row's id, the mean over all rows.

    Args:
        ids: `(N,)` integers of this device's rows.
    """
    counts = gather_with_gradient(ids).unique(return_counts=True)[1]
    return (counts * (counts - 1)).sum() / counts.sum()
