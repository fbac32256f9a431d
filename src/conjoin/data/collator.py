"""Collation of dataset rows into a batch of model inputs."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from transformers import BatchFeature

from conjoin.data.interleaved import row_item


class ItemProcessor(Protocol):
    """The interface of this package's processors: items in, one batch out, `ids` named in error messages."""

    def __call__(
        self,
        items: Sequence[Any],
        *,
        instruction: str | Sequence[str | None] | None = None,
        ids: Sequence[str] | None = None,
    ) -> BatchFeature:
        """Prepare the items, each under its instruction."""


class ItemCollator:
    """Makes one item of each row and passes them all to the processor.

    A row without an image is a text item, and vice versa; a row with a list of images may be interleaved, see
    `load_pairs`. Error messages name a row by its `id`, if it has one.

    Args:
        processor: Called as `processor(items, ids=ids)`.
        columns: The columns of the image and of the text; None excludes that modality.

    Raises:
        ValueError: On construction if both columns are None; on a call if the batch is empty, or a row has neither
            column or an unusable text or image.
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

    def _item(self, row: Mapping[str, Any], row_id: str) -> Any:  # noqa: ANN401 - an item
        parts = {part: row.get(column) for part, column in self.columns.items() if column is not None}
        item = {part: value for part, value in parts.items() if value is not None}
        if not item:
            wanted = " nor ".join(repr(column) for column in self.columns.values() if column is not None)
            raise ValueError(f"row with id {row_id!r} has neither {wanted}; its columns are {', '.join(row)}")
        return row_item(item, f"row with id {row_id!r}")
