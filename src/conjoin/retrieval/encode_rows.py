"""Rows on their way into a collection: read in chunks, compared with those it has, encoded, made an Arrow table."""

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import numpy as np
import pyarrow as pa
from lancedb.table import Table

from conjoin.data.columns import undecoded
from conjoin.data.row_checks import Skipped, UniqueIds, id_keys, require_unique
from conjoin.data.row_images import row_item
from conjoin.processing.input_types import count_images
from conjoin.processing.item_error import ItemError
from conjoin.processing.item_inputs import check_parts
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
SECONDS_PER_COMMIT = 20.0


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
    try:
        str(id_).encode()
    except UnicodeEncodeError as error:
        raise ItemError(name, f"the id {id_!r:.80} is no valid Unicode text: {error.reason}") from error
    return str(id_)


class KnownRows:
    """The rows that a table has at first, by 64-bit digests of their ids, in 17 bytes each.

    Attributes:
        states: Of each row of the table: 0 if the data did not have it yet, 1 if it had, 2 if it cannot be used now.
    """

    def __init__(self, uri: str | Path, table: Table | None) -> None:
        self.uri, self.table, self._ids = uri, table, UniqueIds()
        keys, digests = [np.empty(0, dtype=np.uint64)], [np.empty(0, dtype=np.int64)]
        with reading(uri):
            for batch in () if table is None else table.search().select(["id", ROW_DIGEST]).to_batches():
                keys.append(id_keys(batch["id"].to_pylist()))
                digests.append(batch[ROW_DIGEST].to_numpy())
        all_keys = np.concatenate(keys)
        order = np.argsort(all_keys)
        self._keys, self._digests = all_keys[order], np.concatenate(digests)[order]
        self.states = np.zeros(len(order), dtype=np.uint8)

    def positions(self, ids: Sequence[str]) -> np.ndarray:
        """Return where the table's rows of some ids stand in `states`, `(N,)`; -1 for those that it has not."""
        return self._positions(id_keys(ids))

    def _positions(self, keys: np.ndarray) -> np.ndarray:
        if not len(self._keys):
            return np.full(len(keys), -1)
        at = np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)
        return np.where(self._keys[at] == keys, at, -1)

    def see(self, ids: Sequence[str], start: int | None) -> np.ndarray:
        """Note rows of the data, and return their `positions`.

        Args:
            ids: Of the rows.
            start: The number of the first one in the data; None if it is not known.

        Raises:
            ItemError: An id occurred before.
        """
        keys = id_keys(ids)
        require_unique(ids, self._ids.add(keys), start)
        positions = self._positions(keys)
        self.states[positions[positions >= 0]] = 1
        return positions

    def digests(self, positions: np.ndarray) -> np.ndarray:
        """Return the row digests at some positions, `(N,)` int64; 0 for position -1."""
        return (
            np.where(positions >= 0, self._digests[positions], 0) if len(self._digests) else np.zeros(len(positions))
        )

    def vectors(self, digests: Mapping[str, int]) -> dict[str, np.ndarray]:
        """Return the vectors of the ids whose rows in the table have the given item digests."""
        found: dict[str, np.ndarray] = {}
        for where in id_conditions(list(digests)):
            if self.table is not None:
                with reading(self.uri):
                    stored = (
                        self.table.search().where(where).select(["id", ITEM_DIGEST, VECTOR]).to_arrow().to_pylist()
                    )
                same = (row for row in stored if row[ITEM_DIGEST] == digests[row["id"]])
                found |= {row["id"]: np.array(row[VECTOR], dtype=np.float32) for row in same}
        return found


class Encoded(NamedTuple):
    """Some rows of a chunk.

    Attributes:
        new: Those that the table has not, as it holds them.
        changed: Those that it has otherwise, likewise.
        encoded: How many of them went through the model.
        unchanged: How many rows are in the table as they are in the data.
        skipped: Those that cannot be used.
        parts: `"image"` and `"text"`, as far as rows have them.
        several: Whether a row has several images.
    """

    new: pa.Table | None = None
    changed: pa.Table | None = None
    encoded: int = 0
    unchanged: int = 0
    skipped: Sequence[Skipped] = ()
    parts: frozenset[str] = frozenset()
    several: bool = False


def encode_rows(
    start: int | None,
    ids: Sequence[str],
    rows: Sequence[Row],
    known: KnownRows,
    encoder: ItemEncoder,
    options: EncodeOptions,
    bar: Any,  # noqa: ANN401 - a progress bar
) -> Iterator[Encoded]:
    """Encode the rows of a chunk that are new or changed; what is done is given every 20 seconds, and before an error.

    Args:
        start: The number of the first row in the data; None if it is not known.
        ids: Of the rows.
        rows: The rows.
        known: The rows of the table.
        encoder: Computes the vectors.
        options: How.
        bar: Shows progress.

    Raises:
        ValueError: A row cannot be used, and such rows are not to be skipped; or a column cannot be kept.
    """
    positions = known.positions(ids)
    parts = [_parts(row, id_) for id_, row in zip(ids, rows, strict=True)]
    digests = [_row_digest(*each) for each in zip(rows, parts, strict=True)]
    is_same = (positions >= 0) & (known.digests(positions) == np.array(digests, dtype=np.int64))
    changed = np.flatnonzero(~is_same).tolist()
    contents = {index: _digest(item_digest, parts[index]) for index in changed}
    stored = known.vectors({ids[index]: contents[index] for index in changed if positions[index] >= 0})
    vectors = {index: stored[ids[index]] for index in changed if ids[index] in stored}
    items: dict[int, Any] = {}
    skipped: list[Skipped] = []

    def skip(index: int, error: Exception) -> None:
        if options.on_error == "raise":
            raise error
        skipped.append(Skipped(None, None if start is None else start + index, ids[index], str(error)))

    for index in (index for index in changed if index not in vectors):
        try:
            items[index] = _item(rows[index], parts[index], f"item {ids[index]!r}")
        except ValueError as error:
            skip(index, error)
    bar.update(len(rows) - len(items))
    order = list(items)

    def done(unchanged: int) -> Encoded:
        """What is encoded since the last time."""
        used = sorted(vectors)
        seen = [parts[index] for index in (*used, *(np.flatnonzero(is_same).tolist() if unchanged else ()))]
        tables: list[pa.Table | None] = []
        for is_new in (True, False):
            some = [index for index in used if (positions[index] < 0) == is_new]
            tables.append(_table([(ids[n], rows[n], vectors[n], contents[n], digests[n]) for n in some], options))
        images = [each["image"] for each in seen if isinstance(each.get("image"), list)]
        several = any(count_images(row_item({"image": image})) > 1 for image in images)
        encoded = sum(index in items for index in used)
        result = Encoded(tables[0], tables[1], encoded, unchanged, (*skipped,), frozenset().union(*seen), several)
        vectors.clear()
        skipped.clear()
        return result

    how: dict[str, Any] = {"role": options.role, "prompt": options.prompt, "prompt_name": options.prompt_name}
    how["on_unusable"] = lambda position, error: skip(order[position], error)
    since = time.monotonic()
    try:
        chosen = [items[index] for index in order], [ids[index] for index in order]
        for batch, usable, encoded in encoder.encode_batches(*chosen, **how) if items else ():
            vectors |= zip((order[position] for position in usable), encoded, strict=True)
            bar.update(len(batch))
            if time.monotonic() - since > SECONDS_PER_COMMIT:
                yield done(0)
                since = time.monotonic()
    except (Exception, KeyboardInterrupt):
        yield done(0)
        raise
    yield done(int(is_same.sum()))


def _digest(function: Any, values: Mapping[str, Any]) -> int:  # noqa: ANN401
    """A digest of values; 0 if they cannot be read: encoding them says why."""
    try:
        return int(function(values))
    except (RecursionError, OSError, ValueError):
        return 0


def _row_digest(row: Row, parts: Mapping[str, Any]) -> int:
    return _digest(row_digest, {**parts, "metadata": row.get("metadata") or {}}) if parts else 0


def _parts(row: Row, id_: str) -> dict[str, Any]:
    """The image and the text of a row, those it has; none of a row with a problem."""
    if row.get("problem") is not None:
        return {}
    return check_parts({key: row[key] for key in ("image", "text") if row.get(key) is not None}, f"item {id_!r}")


def _item(row: Row, parts: Mapping[str, Any], name: str) -> Any:  # noqa: ANN401
    if row.get("problem") is not None:
        raise ValueError(str(row["problem"]))
    return row_item(parts, name)


def image_paths(image: Any) -> list[str]:  # noqa: ANN401 - an image or several
    """Return the paths or URLs of an image or of several; images without one, such as bytes, are left out."""
    several = image if isinstance(image, list | tuple) else [image]
    named = [single.get("path") if isinstance(single, Mapping) else single for single in several]
    paths = [str(path) for path in named if path and isinstance(path, str | os.PathLike)]
    return [path for path in paths if not path.startswith("data:")]


def _table(encoded: Sequence[tuple[str, Row, np.ndarray, int, int]], options: EncodeOptions) -> pa.Table | None:
    """Rows as the table holds them, of their ids, vectors, item digests and row digests; None without rows.

    Raises:
        ValueError: A column cannot be kept, or a vector is not finite.
    """
    if not encoded:
        return None
    ids, rows, vectors, contents, digests = zip(*encoded, strict=True)
    numbers = np.stack(vectors).astype(options.dtype)
    check_vectors(numbers, None, ids)
    names = [f"item {id_!r}" for id_ in ids]
    kept = [_kept_values(row, name) for row, name in zip(rows, names, strict=True)]
    columns = {
        "id": pa.array(ids),
        VECTOR: pa.FixedSizeListArray.from_arrays(pa.array(numbers.reshape(-1)), numbers.shape[1]),
        "image": pa.array([image_paths(row.get("image")) or None for row in rows], pa.list_(pa.string())),
        ITEM_DIGEST: pa.array(contents, pa.int64()),
        ROW_DIGEST: pa.array(digests, pa.int64()),
    }
    for column in dict.fromkeys(column for values in kept for column in values):
        columns[column] = _column(column, [values.get(column) for values in kept])
    if options.keep_pictures:
        pictures = [None if row.get("image") is None else make_thumbnail(row["image"], options.keep_pictures, name)
                    for row, name in zip(rows, names, strict=True)]  # fmt: skip
        columns[PICTURE] = pa.array(pictures, pa.binary())
    return pa.table(columns)


def _kept_values(row: Row, name: str) -> dict[str, Any]:
    """The text of a row and its `"metadata"`.

    Raises:
        ItemError: `"metadata"` is no mapping, or has a name that no column can have.
    """
    text = {TEXT: row[TEXT]} if isinstance(row.get(TEXT), str) else {}
    kept = row.get("metadata") or {}
    if not isinstance(kept, Mapping):
        raise ItemError(name, f'"metadata" must be a mapping from names to values, got {kept!r:.80}')
    for column in kept:
        if not isinstance(column, str) or not column:
            problem = "the name of a column must be a text"
        elif "." in column or "`" in column:
            problem = 'the name of a column must be without "." and "`"'
        elif column in (*OWN_COLUMNS, "image", *text) or column.startswith("_"):
            problem = "the name of a column that the collection has of its own; give it another name in the data"
        else:
            continue
        raise ItemError(name, f'"metadata" holds {column!r}; {problem}')
    return text | dict(kept)


def kept_types(rows: Iterable[Row]) -> dict[str, pa.DataType]:
    """The types of the kept columns, where the source knows them."""
    features = rows.features if isinstance(rows, datasets.Dataset | datasets.IterableDataset) else None
    kept = (features or {}).get("metadata")
    schema = datasets.Features(kept).arrow_schema if isinstance(kept, dict) else ()
    return {field.name: field.type for field in schema if not pa.types.is_null(field.type)}


def _column(name: str, values: Sequence[Any]) -> pa.Array:
    """Values as a column.

    Raises:
        ValueError: They are of different types, or of one that no column has.
    """
    try:
        try:
            column = pa.array(values)
        except UnicodeEncodeError:  # lone surrogates
            column = pa.array([v.encode("utf-8", "replace").decode() if isinstance(v, str) else v for v in values])
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"the column {name!r} cannot be kept: {error}") from error
    if pa.types.is_struct(column.type) and column.type.num_fields == 0:
        raise ValueError(f"the column {name!r} cannot be kept: its values are empty mappings")
    return column


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
            if new := _fields(column.type) - _fields(field.type):  # which a cast drops
                raise pa.ArrowInvalid(f"the field {sorted(new)[0]!r} is new")
            columns.append(column.cast(field.type))
        except pa.ArrowException as error:
            raise ValueError(
                f"the column {field.name!r} of the collection holds {field.type}, and some of its rows have "
                f"{column.type} now ({error}); give all its values one type, such as --keep {field.name}:number"
            ) from error
    return pa.table(columns, schema=table.schema)


def _fields(kind: pa.DataType) -> set[str]:
    """The names of the fields of mappings, within lists and mappings too."""
    if pa.types.is_list(kind):
        return _fields(kind.value_type)
    inner = [kind.field(index) for index in range(kind.num_fields)] if pa.types.is_struct(kind) else []
    return {field.name for field in inner}.union(*(_fields(field.type) for field in inner))
