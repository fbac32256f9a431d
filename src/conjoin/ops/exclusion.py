"""Which columns are not a row's negatives, told block by block."""

from typing import NamedTuple

import torch
from torch import Tensor


class Exclusion(NamedTuple):
    """Columns left out of a row's sum: those with the row's id, and what the optional rules add.

    Args:
        row_ids: `(N,)` integers.
        column_ids: `(M,)`.
        row_groups: `(N,)` integers; if given, the columns of the row's own group are left out too.
        column_groups: `(M,)`.
        thresholds: `(N,)` cosines; columns above their row's are taken for false negatives and left out.
    """

    row_ids: Tensor
    column_ids: Tensor
    row_groups: Tensor | None = None
    column_groups: Tensor | None = None
    thresholds: Tensor | None = None

    def labels(self, block_size: int) -> list["Labels"]:
        """Return the label pairs whose equality excludes an entry."""
        labels = [Labels(self.row_ids, self.column_ids, block_size)]
        if self.row_groups is not None and self.column_groups is not None:
            labels.append(Labels(self.row_groups, self.column_groups, block_size))
        return labels


class Labels:
    """Labels of rows and columns, with the range of every block, so that most blocks need no comparison.

    Args:
        rows: `(N,)` integers.
        columns: `(M,)` integers.
        block_size: Rows and columns of a block.
    """

    def __init__(self, rows: Tensor, columns: Tensor, block_size: int) -> None:
        both = torch.cat([columns, rows])
        values, inverse = both.unique(return_inverse=True)
        places = torch.arange(len(both), device=both.device)
        first = torch.full_like(values, len(both), dtype=torch.long).scatter_reduce_(0, inverse, places, "amin")
        # A label becomes the place where it first occurs: ranges are narrow then, whatever the ids are (hashes, say).
        self.columns, self.rows = first[inverse].split([len(columns), len(rows)])
        self.block_size = block_size
        self.row_ranges, self.column_ranges = (_ranges(labels, block_size) for labels in (self.rows, self.columns))

    def equal(self, rows: slice, columns: slice) -> Tensor | bool:
        """Which entries of a block join equal labels: `(rows, columns)` bool, or one bool if all or none do."""
        low, high = self.row_ranges[rows.start // self.block_size]
        left, right = self.column_ranges[columns.start // self.block_size]
        if high < left or right < low:
            return False
        if low == high == left == right:
            return True
        return self.rows[rows, None] == self.columns[columns]


def _ranges(labels: Tensor, block_size: int) -> list[list[int]]:
    """Smallest and largest label of every block."""
    if not len(labels):
        return []
    return torch.stack([torch.stack(part.aminmax()) for part in labels.split(block_size)]).tolist()
