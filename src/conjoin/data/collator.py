"""From dataset rows to a batch of model inputs."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from transformers import BatchFeature


class ItemProcessor(Protocol):
    """What this package's processors have in common: items in, one batch out, `ids` named in error messages."""

    def __call__(self, items: Sequence[Any], *, ids: Sequence[str] | None = None) -> BatchFeature:
        """Prepare the items."""


class ItemCollator:
    """Makes one item of each row and passes them all to the processor.

    A row without an image is a text item and the reverse. Rows with an `id` are named by it in error messages.

    Args:
        processor: Called as `processor(items, ids=ids)`.
        columns: The columns of the image and of the text; None in place of one leaves that modality out.

    Raises:
        ValueError: On construction if both columns are None; on a call if the batch is empty, a row has neither, or
            a text or image of it cannot be used.
    """

    def __init__(self, processor: ItemProcessor, columns: tuple[str | None, str | None] = ("image", "text")) -> None:
        if columns[0] is None and columns[1] is None:
            raise ValueError("columns is (None, None); name an image column, a text column or both")
        self.processor = processor
        self.columns = dict(zip(("image", "text"), columns, strict=True))

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> BatchFeature:
        """Collate `N` rows to the processor's batch, every tensor with `N` rows."""
        if not rows:
            raise ValueError("got an empty batch: no rows")
        ids = [str(row.get("id", index)) for index, row in enumerate(rows)]
        return self.processor([self._item(row, row_id) for row, row_id in zip(rows, ids, strict=True)], ids=ids)

    def _item(self, row: Mapping[str, Any], row_id: str) -> dict[str, Any]:
        parts = {part: row.get(column) for part, column in self.columns.items() if column is not None}
        item = {part: value for part, value in parts.items() if value is not None}
        if not item:
            wanted = " nor ".join(repr(column) for column in self.columns.values() if column is not None)
            raise ValueError(f"row with id {row_id!r} has neither {wanted}; its columns are {', '.join(row)}")
        return item
