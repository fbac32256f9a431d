"""Rows with what a cache holds for them."""

from typing import Any

from torch.utils.data import Dataset

from conjoin.storage import RowShards


class TaughtRows(Dataset[dict[str, Any]]):
    """Rows with their cached states as the field `teacher`, for the collator that reads it.

    Args:
        rows: The rows that were cached, in the same order, without random changes of their images.
        cache: Of these rows.

    Raises:
        ValueError: The number of rows differs; or, on reading a row, its name differs from the cached one.
    """

    def __init__(self, rows: Any, cache: RowShards) -> None:  # noqa: ANN401 - any sequence of rows
        if len(rows) != len(cache):
            raise ValueError(f"{len(rows)} rows, but the {cache.kind.name} in {str(cache.folder)!r} has {len(cache)}")
        self.rows, self.cache = rows, cache

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self.rows[index]
        if self.cache.row_name(row, index) != self.cache.name(index):
            raise ValueError(
                f"row {index} (id {row.get('id', index)!r}) is not the one in the {self.cache.kind.name} in "
                f"{str(self.cache.folder)!r}: its {self.cache.named_by} differs"
            )
        return {**row, "teacher": self.cache[index]}
