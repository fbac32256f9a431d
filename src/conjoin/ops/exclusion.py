"""Which columns are not negatives of a row."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor


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
