"""The rows of a source, their digests, and their vectors."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any

import datasets
import numpy as np

from conjoin.data.image_columns import undecoded
from conjoin.data.interleaved import InterleavingError, row_item
from conjoin.processing.input_types import count_images
from conjoin.retrieval.encoder import ItemEncoder
from conjoin.retrieval.row_table import RowTable
from conjoin.storage import item_digest, row_digest

Row = Mapping[str, Any]
BATCHES_AT_ONCE = 16


class RowSource:
    """Rows in order, once; their images stay undecoded where that is possible."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self._dataset: datasets.Dataset | None = None
        self._iterator: Iterator[Row] = iter(())
        self._seen = RowTable()
        self.position = 0
        self.count: int | None = None
        if isinstance(rows, Sized):
            self.count = len(rows)
        if isinstance(rows, datasets.Dataset):
            _require_id(rows.column_names)
            self._dataset = undecoded(rows)
        elif isinstance(rows, datasets.IterableDataset):
            _require_id(rows.column_names or ["id"])
            self._iterator = iter(rows.decode(False) if rows.features else rows)
        else:
            self._iterator = iter(rows)

    def take(self, count: int) -> tuple[list[str], list[Row]]:
        """The next `count` rows, fewer at the end, and their ids."""
        if self._dataset is None:
            rows = list(itertools.islice(self._iterator, count))
        else:
            columns = self._dataset[self.position : self.position + count]
            rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        return [self._next_id(row) for row in rows], rows

    def skip(self, count: int) -> None:
        """Pass over the next `count` rows, fewer at the end, without checking them."""
        if self._dataset is None:
            self.position += sum(1 for _ in itertools.islice(self._iterator, count))
        else:
            self.position = min(self.position + count, len(self._dataset))

    def _next_id(self, row: Row) -> str:
        """Check and count a row."""
        name = f"row {self.position}"
        if not isinstance(row, Mapping):
            raise ValueError(f'{name}: expected a mapping with "id" and "image" and/or "text", got {row!r:.80}')
        id_ = row.get("id")
        if isinstance(id_, bool) or not isinstance(id_, str | int) or id_ == "":
            raise ValueError(f"{name}: the id must be a string or an integer, got {id_!r:.80} (keys {list(row)})")
        if not self._seen.add(str(id_)):
            raise ValueError(f"{name}: the id {str(id_)!r} occurs twice; ids must be unique")
        self.position += 1
        return str(id_)


class RowEncoder:
    """Encodes rows, and records what they are made of.

    Args:
        encoder: Computes the vectors.
        instruction: Given to the model with every row.
        skip: Whether rows that cannot be used are left out.

    Attributes:
        parts: The parts that the rows so far had.
        has_several: Whether one of them had several images.
    """

    def __init__(self, encoder: ItemEncoder, instruction: str | None, skip: bool) -> None:
        self.encoder, self.instruction, self.skip = encoder, instruction, skip
        self.parts: set[str] = set()
        self.has_several = False
        self.rows_at_once = BATCHES_AT_ONCE * encoder.batch_size

    def encode(self, ids: Sequence[str], rows: Sequence[Row], bar: Any) -> tuple[np.ndarray, dict[int, str]]:  # noqa: ANN401
        """Encode rows; returns the vectors `(n, D)` of those that can be used, and why the others cannot, by place.

        Raises:
            ValueError: A row cannot be used, and `skip` is not set.
        """
        found = [_input(id_, row) for id_, row in zip(ids, rows, strict=True)]
        reasons = {place: problem for place, (_, problem) in enumerate(found) if problem is not None}
        if reasons and not self.skip:
            raise ValueError(next(iter(reasons.values())))
        places = [place for place in range(len(rows)) if place not in reasons]
        bar.update(len(reasons))
        if not places:
            return np.empty((0, self.encoder.dimension), dtype=np.float32), reasons
        parts = [row_parts(ids[place], rows[place]) for place in places]
        names = [ids[place] for place in places]
        inputs = [found[place][0] for place in places]

        def leave_out(position: int, error: Exception) -> None:
            reasons[places[position]] = str(error)

        options: dict[str, Any] = {"on_unusable": leave_out} if self.skip else {}
        vectors = self.encoder.encode(inputs, names, on_batch=bar.update, instruction=self.instruction, **options)
        used = [position for position, place in enumerate(places) if place not in reasons]
        self.parts.update(*(parts[position] for position in used))
        self.has_several |= any(count_images(inputs[position]) > 1 for position in used)
        return vectors[used], reasons

    def note(self, id_: str, row: Row) -> None:
        """Record what a row is made of whose vector is there already."""
        self.parts.update(row_parts(id_, row))
        self.has_several |= count_images(_input(id_, row)[0]) > 1


def row_items(ids: Sequence[str], rows: Sequence[Row]) -> list[int]:
    """The `item_digest` of what is encoded of each row."""
    return [item_digest(row_parts(id_, row)) for id_, row in zip(ids, rows, strict=True)]


def row_content(id_: str, row: Row) -> int:
    """The digest of what is encoded and kept of a row, or of why nothing is."""
    if row.get("problem") is not None:
        return row_digest({"problem": row["problem"]})
    return row_digest(row_parts(id_, row) | ({"kept": row["kept"]} if row.get("kept") else {}))


def row_parts(id_: str, row: Row) -> dict[str, Any]:
    """The image and the text of a row, those it has.

    Raises:
        ValueError: It has neither.
    """
    parts = {key: row[key] for key in ("image", "text") if row.get(key) is not None}
    if not parts:
        raise ValueError(f'item {id_!r} has neither "image" nor "text"; its row has the keys {list(row)}')
    return parts


def _input(id_: str, row: Row) -> tuple[Any, str | None]:
    """The item to encode of a row, and why there is none."""
    if row.get("problem") is not None:
        return None, str(row["problem"])
    try:
        return row_item(row_parts(id_, row), f"item {id_!r}"), None
    except InterleavingError as error:
        return None, str(error)


def _require_id(columns: list[str]) -> None:
    if "id" not in columns:
        raise ValueError(f'the dataset has no column "id", it has {columns}')
