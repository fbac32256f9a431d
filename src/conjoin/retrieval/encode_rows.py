"""Rows on their way into a collection: read in chunks, compared with those it has, encoded, made an Arrow table."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import datasets
import numpy as np
import pyarrow as pa
from lancedb.table import Table

from conjoin.data.columns import undecoded
from conjoin.data.row_checks import Skipped, UniqueIds, id_keys, repeated_id
from conjoin.data.row_images import row_item
from conjoin.processing.item_error import ItemError
from conjoin.processing.item_inputs import check_parts, check_unicode
from conjoin.retrieval.collection_table import (
    ITEM_DIGEST,
    OWN_COLUMNS,
    PICTURE,
    ROW_DIGEST,
    TEXT,
    VECTOR,
    id_conditions,
    reading,
)
from conjoin.retrieval.encoder import ItemEncoder
from conjoin.retrieval.options import EncodeOptions
from conjoin.retrieval.pictures import make_thumbnail
from conjoin.retrieval.vectors import check_vectors
from conjoin.storage import item_digest, row_digest

Row = Mapping[str, Any]
Record = dict[str, Any]
"""A row as the table holds it."""


def read_chunks(rows: Iterable[Row], size: int) -> Iterator[tuple[int, list[str], list[Row]]]:
    """The number of the first row, the ids and the rows of each chunk; images stay undecoded where that is possible.

    Raises:
        ItemError: A row is no mapping, or its id is no text and no whole number.
    """
    batches: Iterator[list[Row]]
    if isinstance(rows, datasets.Dataset | datasets.IterableDataset):
        if "id" not in (rows.column_names or ["id"]):
            raise ValueError(f'the dataset has no column "id", it has {rows.column_names}')
        columns = undecoded(rows).iter(size)
        batches = ([dict(zip(each, row, strict=True)) for row in zip(*each.values(), strict=True)] for each in columns)
    else:
        iterator = iter(rows)
        batches = iter(lambda: [row for _, row in zip(range(size), iterator, strict=False)], [])
    start = 0
    for batch in batches:
        yield start, [_id(row, f"row {start + index}") for index, row in enumerate(batch)], batch
        start += len(batch)


def _id(row: Row, name: str) -> str:
    if not isinstance(row, Mapping):
        raise ItemError(name, f'expected a mapping with "id" and "image" and/or "text", got {row!r:.80}')
    id_ = row.get("id")
    if isinstance(id_, bool) or not isinstance(id_, str | int) or id_ == "":
        raise ItemError(name, f"the id must be a string or an integer, got {id_!r:.80} (keys {list(row)})")
    return check_unicode(str(id_), name)


class KnownRows:
    """The rows that a table has at first, by 64-bit digests of their ids, in 17 bytes each.

    Attributes:
        states: Of each row of the table: 0 if the data did not have it yet, 1 if it had, 2 if it cannot be used now.
    """

    def __init__(self, uri: str | os.PathLike[str], table: Table | None) -> None:
        self.uri, self.table, self._ids = str(uri), table, UniqueIds()
        keys, digests = [np.empty(0, dtype=np.uint64)], [np.empty(0, dtype=np.int64)]
        with reading(self.uri):
            for batch in () if table is None else table.search().select(["id", ROW_DIGEST]).to_batches():
                keys.append(id_keys(batch["id"].to_pylist()))
                digests.append(batch[ROW_DIGEST].to_numpy())
        all_keys = np.concatenate(keys)
        order = np.argsort(all_keys)
        self._keys, self.digests = all_keys[order], np.concatenate(digests)[order]
        self.states = np.zeros(len(order), dtype=np.uint8)

    def positions(self, ids: Sequence[str]) -> np.ndarray:
        """Where the table's rows of some ids stand in `states` and `digests`, `(N,)`; -1 for those that it has not."""
        if not len(self._keys):
            return np.full(len(ids), -1)
        keys = id_keys(ids)
        at = np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)
        return np.where(self._keys[at] == keys, at, -1)

    def see(self, ids: Sequence[str], start: int) -> None:
        """Note rows of the data, the first of which has the number `start`.

        Raises:
            ItemError: An id occurred before.
        """
        repeated = self._ids.add(id_keys(ids))
        if repeated.any():
            index = int(repeated.argmax())
            raise repeated_id(ids[index], f"row {start + index}")
        positions = self.positions(ids)
        self.states[positions[positions >= 0]] = 1

    def vectors(self, digests: Mapping[str, int]) -> dict[str, np.ndarray]:
        """The vectors of the ids whose rows in the table have the given item digests."""
        found: dict[str, np.ndarray] = {}
        for where in id_conditions(list(digests)) if self.table is not None else ():
            with reading(self.uri):
                stored = self.table.search().where(where).select(["id", ITEM_DIGEST, VECTOR]).to_arrow()  # type: ignore[union-attr]
            same = (row for row in stored.to_pylist() if row[ITEM_DIGEST] == digests[row["id"]])
            found |= {row["id"]: np.array(row[VECTOR], dtype=np.float32) for row in same}
        return found


class Encoded(NamedTuple):
    """Some rows of a chunk.

    Attributes:
        records: The new and the changed ones, with their numbers in the data.
        encoded: How many of them went through the model.
        unchanged: How many rows are in the table as they are in the data.
        skipped: Those that cannot be used.
        several: Whether an item has several images.
    """

    records: Sequence[tuple[int, Record]]
    encoded: int = 0
    unchanged: int = 0
    skipped: Sequence[Skipped] = ()
    several: bool = False


def encode_rows(
    start: int, ids: Sequence[str], rows: Sequence[Row], known: KnownRows, encoder: ItemEncoder, options: EncodeOptions
) -> Iterator[Encoded]:
    """Encode the rows of a chunk that are new or changed: first what needs no model, then batch by batch.

    Args:
        start: The number of the first row in the data.
        ids: Of the rows.
        rows: The rows.
        known: The rows of the table.
        encoder: Computes the vectors.
        options: How.

    Raises:
        ValueError: A row cannot be used, and such rows are not to be skipped; or a column cannot be kept.
    """
    positions = known.positions(ids)
    changed: dict[int, tuple[dict[str, Any], int, int]] = {}  # the parts, the item digest and the row digest
    skipped: list[Skipped] = []

    def skip(index: int, error: Exception) -> None:
        if options.on_error == "raise":
            raise error
        skipped.append(Skipped(None, start + index, ids[index], str(error)))

    def record(index: int, vector: np.ndarray) -> tuple[int, Record]:
        parts, item, digest = changed[index]
        row, name = rows[index], f"item {ids[index]!r}"
        values = {"id": ids[index], VECTOR: vector, ITEM_DIGEST: item, ROW_DIGEST: digest, **_kept_values(row, name)}
        if "image" in parts:
            values["image"] = image_paths(parts["image"]) or None
            if options.keep_pictures:
                values[PICTURE] = make_thumbnail(parts["image"], options.keep_pictures, name)
        return start + index, values

    for index, row in enumerate(rows):
        try:
            if row.get("problem") is not None:
                raise ValueError(str(row["problem"]))
            given = {key: row[key] for key in ("image", "text") if row.get(key) is not None}
            parts = check_parts(given, f"item {ids[index]!r}")
        except ValueError as error:
            skip(index, error)
            continue
        digest = _digest(row_digest, {**parts, "metadata": row.get("metadata") or {}})
        if positions[index] < 0 or known.digests[positions[index]] != digest:
            changed[index] = parts, _digest(item_digest, parts), digest
    unchanged = len(rows) - len(changed) - len(skipped)
    stored = known.vectors({ids[index]: each[1] for index, each in changed.items() if positions[index] >= 0})
    items: dict[int, Any] = {}
    for index, (parts, _, _) in changed.items():
        if ids[index] not in stored:
            try:
                items[index] = row_item(parts, f"item {ids[index]!r}")
            except ValueError as error:
                skip(index, error)
    order = list(items)
    lists = [parts["image"] for index, (parts, _, _) in changed.items() if index in items and "image" in parts]
    several = any(isinstance(each, list) and sum(one is not None for one in each) > 1 for each in lists)
    moved = [record(index, stored[ids[index]]) for index in changed if ids[index] in stored]
    yield Encoded(moved, 0, unchanged, skipped[:], several)
    skipped.clear()
    batches = encoder.encode_batches(
        [items[index] for index in order],
        [ids[index] for index in order],
        role=options.role,
        prompt=options.prompt,
        prompt_name=options.prompt_name,
        on_unusable=lambda position, error: skip(order[position], error),
    )
    for _, usable, vectors in batches if items else ():
        records = [record(order[position], vector) for position, vector in zip(usable, vectors, strict=True)]
        yield Encoded(records, len(records), 0, skipped[:])
        skipped.clear()


def _digest(function: Callable[[Mapping[str, Any]], int], values: Mapping[str, Any]) -> int:
    """A digest of values; 0 if they cannot be read: encoding them says why."""
    try:
        return function(values)
    except (RecursionError, OSError, ValueError):
        return 0


def image_paths(image: Any) -> list[str]:  # noqa: ANN401 - an image or several
    """Return the paths or URLs of an image or of several; images without one, such as bytes, are left out."""
    several = image if isinstance(image, list | tuple) else [image]
    named = [single.get("path") if isinstance(single, Mapping) else single for single in several]
    paths = [str(path) for path in named if isinstance(path, str | os.PathLike) and path]
    return [path for path in paths if not path.startswith("data:")]


def _kept_values(row: Row, name: str) -> dict[str, Any]:
    """The text of a row and its `"metadata"`.

    Raises:
        ItemError: `"metadata"` is no mapping from names, or has a name that no column can have.
    """
    text = {TEXT: row[TEXT]} if isinstance(row.get(TEXT), str) else {}
    kept = row.get("metadata") or {}
    if not isinstance(kept, Mapping) or not all(isinstance(column, str) and column for column in kept):
        raise ItemError(name, f'"metadata" must be a mapping from names to values, got {kept!r:.80}')
    for column in kept:
        if column in (*OWN_COLUMNS, "image", *text) or column.startswith("_") or {*column} & {".", "`"}:
            own = f"{', '.join((*OWN_COLUMNS, 'image'))} and names with _ at first are the collection's own"
            raise ItemError(
                name, f'"metadata" holds {column!r}, which cannot be a column: {own}, "." and "`" mean more'
            )
    return text | dict(kept)


def to_table(records: Sequence[Record], dtype: str) -> pa.Table:
    """Records as a table, with a column for each name that one of them has.

    Raises:
        ValueError: A column cannot be kept, or a vector is not finite.
    """
    vectors = np.stack([record[VECTOR] for record in records]).astype(dtype)
    check_vectors(vectors, None, [record["id"] for record in records])
    columns: dict[str, pa.Array] = {}
    for name in dict.fromkeys(name for record in records for name in record):
        values = [record.get(name) for record in records] if name != VECTOR else []
        try:
            if name == VECTOR:
                column = pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), vectors.shape[1])
            elif name == "image":
                column = pa.array(values, pa.list_(pa.string()))
            else:
                column = pa.array(values)
            if pa.types.is_struct(column.type) and column.type.num_fields == 0:
                raise ValueError("its values are empty mappings")
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"the column {name!r} cannot be kept: {error}") from error
        columns[name] = column
    return pa.table(columns)


def cast_to_schema(rows: pa.Table, table: Table) -> pa.Table:
    """Give rows the columns of a table, which first gets the columns that are new.

    Raises:
        ValueError: A column holds values of another type than before.
    """
    known = {*table.schema.names}
    if added := [each for each in rows.schema if each.name not in known and not pa.types.is_null(each.type)]:
        table.add_columns(added)
    columns = []
    for field in table.schema:
        column = rows[field.name] if field.name in rows.column_names else pa.nulls(len(rows), field.type)
        try:
            both = [pa.schema([pa.field(field.name, kind)]) for kind in (field.type, column.type)]
            if pa.types.is_nested(field.type) and field.name != VECTOR:  # a cast drops fields that are new
                if pa.unify_schemas(both, promote_options="permissive").field(0).type != field.type:
                    raise pa.ArrowInvalid("it is another one")
            columns.append(column.cast(field.type))
        except pa.ArrowException as error:
            raise ValueError(
                f"the column {field.name!r} of the collection holds {field.type}, and some of its rows have "
                f"{column.type} now ({error}); give all its values one type, such as --keep {field.name}:number"
            ) from error
    return pa.table(columns, schema=table.schema)
