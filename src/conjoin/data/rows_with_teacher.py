"""Rows with what a cache of a teacher holds for them."""

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor
from torch.utils.data import Dataset

from conjoin.storage import RowCache

ROW_NAMES = "row_names"
"""The tensor `(rows,)` of a cache that names what its rows were made from."""


class TeacherRowCache(RowCache):
    """A cache of a teacher's states, in which every row is known by a name; `make` stores it as `ROW_NAMES`."""

    named_by: ClassVar[str]
    """The fields of a row that `row_name` hashes."""

    @staticmethod
    def row_name(row: Mapping[str, Any], index: int) -> int:
        """A digest of what the row at `index` is made from."""
        raise NotImplementedError

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = super().__getitem__(index)
        del row[ROW_NAMES]
        return row

    def name(self, index: int) -> int:
        """The `row_name` of the row that was cached at `index`."""
        return int(super().__getitem__(index)[ROW_NAMES])


class RowsWithTeacher(Dataset[dict[str, Any]]):
    """Rows with their cached states as the field `teacher`, for the collator that reads it.

    Args:
        rows: The rows that were cached, in the same order, without random changes of their images.
        cache: Of these rows.

    Raises:
        ValueError: The number of rows differs; or, on reading a row, its name differs from the cached one.
    """

    def __init__(self, rows: Any, cache: TeacherRowCache) -> None:  # noqa: ANN401 - any sequence of rows
        if len(rows) != len(cache):
            raise ValueError(f"{len(rows)} rows, but the {cache.kind} in {str(cache.folder)!r} has {len(cache)}")
        self.rows, self.cache = rows, cache

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self.rows[index]
        if self.cache.row_name(row, index) != self.cache.name(index):
            raise ValueError(
                f"row {index} (id {row.get('id', index)!r}) is not the one in the {self.cache.kind} in "
                f"{str(self.cache.folder)!r}: its {self.cache.named_by} differs"
            )
        return {**row, "teacher": self.cache[index]}
