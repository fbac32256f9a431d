"""Rows on their way into a collection: read, compared with those it has, encoded, and fitted to its columns."""

import itertools
import os
import random
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any, NamedTuple

import datasets
import numpy as np
import pyarrow as pa
from lancedb.table import Table

from conjoin.data.columns import undecoded
from conjoin.data.row_checks import UniqueIds, id_keys
from conjoin.data.row_images import row_item
from conjoin.processing.input_types import count_images
from conjoin.processing.item_error import ItemError
from conjoin.processing.item_inputs import check_parts
from conjoin.retrieval.collection_table import OWN_COLUMNS, TEXT
from conjoin.retrieval.encoder import ItemEncoder
from conjoin.retrieval.options import EncodeOptions
from conjoin.storage import item_digest, row_digest

Row = Mapping[str, Any]
_DIGESTS_AT_ONCE = 2**20
_ATTEMPTS = 20
_WIDER = "_{}_as_double"


class KnownRows(NamedTuple):
    """What is known of some rows, by their ids.

    Attributes:
        found: Whether each is in the collection, `(N,)`.
        stamps: Its `row_stamp` there, `(N,)` int64.
        repeated: Whether its id occurred before in the data, `(N,)`.
    """

    found: np.ndarray
    stamps: np.ndarray
    repeated: np.ndarray


class RowDigests:
    """The rows of a collection and of the data, as 64-bit digests of their ids in sorted blocks.

    A row of the collection takes 17 bytes, another one of the data 8.
    """

    def __init__(self) -> None:
        self._keys: list[np.ndarray] = []
        self._values: list[np.ndarray] = []
        self._seen: list[np.ndarray] = []
        self._recent: list[tuple[np.ndarray, np.ndarray]] = []
        self._new = UniqueIds()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, keys: np.ndarray, values: np.ndarray) -> None:
        """Add rows of the collection: the keys of their ids `(N,)` uint64, and their stamps `(N,)` int64."""
        self._recent.append((keys, values))
        self._count += len(keys)
        if sum(len(some) for some, _ in self._recent) >= _DIGESTS_AT_ONCE:
            self._sort()

    def _sort(self) -> None:
        """Make a block of what was added since the last one: each of them costs time in `find`."""
        if self._recent:
            keys, values = (np.concatenate(parts) for parts in zip(*self._recent, strict=True))
            order = np.argsort(keys)
            self._keys.append(keys[order])
            self._values.append(values[order])
            self._seen.append(np.zeros(len(order), dtype=bool))
            self._recent = []

    def find(self, keys: np.ndarray) -> KnownRows:
        """Look up rows of the data by their keys `(N,)`, and mark them as seen."""
        self._sort()
        is_known, repeated = np.zeros(len(keys), dtype=bool), UniqueIds().add(keys)
        stamps = np.zeros(len(keys), dtype=np.int64)
        for sorted_keys, values, seen in zip(self._keys, self._values, self._seen, strict=True):
            indices = np.minimum(np.searchsorted(sorted_keys, keys), len(sorted_keys) - 1)
            hit = sorted_keys[indices] == keys
            at = indices[hit]
            stamps[hit], is_known[hit] = values[at], True
            repeated[hit] |= seen[at]
            seen[at] = True
        repeated[~is_known] |= self._new.add(keys[~is_known])
        return KnownRows(is_known, stamps, repeated)

    def unseen(self, keys: np.ndarray) -> np.ndarray:
        """Return which of the keys `(N,)` are in the collection and were not looked up by `find`."""
        self._sort()
        left = np.zeros(len(keys), dtype=bool)
        for sorted_keys, seen in zip(self._keys, self._seen, strict=True):
            indices = np.minimum(np.searchsorted(sorted_keys, keys), len(sorted_keys) - 1)
            left |= (sorted_keys[indices] == keys) & ~seen[indices]
        return left


class RowSource:
    """Rows in order, once, in chunks; their images stay undecoded where that is possible.

    Args:
        rows: Mappings, or a dataset.
        chunk: Rows of a chunk.
        rank: Which of several processes this is; it gets the chunks `rank`, `rank + world_size` ...
        world_size: How many they are.

    Attributes:
        count: How many rows there are, if that is known.
        position: How many were read so far.
        sums: A checksum of the ids of the chunks of each process, as far as this one reads them.
    """

    def __init__(self, rows: Iterable[Row], chunk: int, rank: int = 0, world_size: int = 1) -> None:
        self.chunk, self.rank, self.world_size = chunk, rank, world_size
        self.count = len(rows) if isinstance(rows, Sized) else None
        self.position = 0
        self.sums = [0] * world_size
        self._dataset: datasets.Dataset | None = None
        self._iterator: Iterator[Row] = iter(())
        if isinstance(rows, datasets.Dataset):
            _require_id(rows.column_names)
            self._dataset = undecoded(rows)
        elif isinstance(rows, datasets.IterableDataset):
            _require_id(rows.column_names or ["id"])
            self._iterator = iter(rows.decode(False) if rows.features else rows)
        else:
            self._iterator = iter(rows)

    def __iter__(self) -> Iterator[tuple[int, list[str], list[Row] | None]]:
        """The first row and the ids of each chunk, and its rows if they are for this process; process 0 sees all."""
        for number in itertools.count():
            is_own = number % self.world_size == self.rank
            rows = self._next(is_own)
            if not rows:
                return
            ids = [self._id(row, index) for index, row in enumerate(rows)] if is_own or self.rank == 0 else []
            if self.world_size > 1:
                self.sums[number % self.world_size] ^= int(np.bitwise_xor.reduce(id_keys(ids)))
            start = self.position
            self.position += len(rows)
            yield start, ids, rows if is_own else None

    def _next(self, is_own: bool) -> list[Row]:
        if self._dataset is None:
            return list(itertools.islice(self._iterator, self.chunk))
        chosen = range(self.position, min(self.position + self.chunk, len(self._dataset)))
        if not is_own:
            ids = self._dataset["id"][chosen.start : chosen.stop] if self.rank == 0 else [None] * len(chosen)
            return [{"id": id_} for id_ in ids]
        columns = self._dataset[chosen.start : chosen.stop] if chosen else {}
        return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]

    def _id(self, row: Row, index: int) -> str:
        name = f"row {self.position + index}"
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


class RowEncoder:
    """Encodes rows, and records what they are made of.

    Args:
        encoder: Computes the vectors.
        options: Which prompt the rows get, and in which role.
        skip: Whether rows that cannot be used are left out.

    Attributes:
        parts: The parts that the rows so far had.
        has_several: Whether one of them had several images.
    """

    def __init__(self, encoder: ItemEncoder, options: EncodeOptions, skip: bool) -> None:
        self.encoder, self.skip = encoder, skip
        self.how: dict[str, Any] = {"role": options.role, "prompt": options.prompt, "prompt_name": options.prompt_name}
        self.parts: set[str] = set()
        self.has_several = False

    def encode(
        self,
        ids: Sequence[str],
        rows: Sequence[Row],
        parts: Sequence[Mapping[str, Any]],
        bar: Any,  # noqa: ANN401 - a progress bar
    ) -> tuple[np.ndarray, dict[int, str]]:
        """Encode the parts of rows; returns the vectors `(n, D)` of those that can be used, and why others cannot.

        Raises:
            ValueError: A row cannot be used, and `skip` is not set.
        """
        inputs: list[Any] = []
        reasons: dict[int, str] = {}
        for index, (id_, row) in enumerate(zip(ids, rows, strict=True)):
            item, problem = _input(id_, row, parts[index])
            inputs.append(item)
            if problem is not None and not self.skip:
                raise ValueError(problem)
            if problem is not None:
                reasons[index] = problem
        usable = [index for index in range(len(rows)) if index not in reasons]
        bar.update(len(reasons))
        if not usable:
            return np.empty((0, 0), dtype=np.float32), reasons

        def skip_item(position: int, error: Exception) -> None:
            reasons[usable[position]] = str(error)

        options: dict[str, Any] = self.how | ({"on_unusable": skip_item} if self.skip else {})
        chosen = [inputs[index] for index in usable], [ids[index] for index in usable]
        vectors = self.encoder.encode(*chosen, on_batch=bar.update, **options)
        used = [position for position, index in enumerate(usable) if index not in reasons]
        for position in used:
            self.note(parts[usable[position]])
        return vectors[used], reasons

    def note(self, parts: Mapping[str, Any]) -> None:
        """Record what a row is made of."""
        self.parts.update(parts)
        if isinstance(parts.get("image"), list):
            self.has_several |= count_images(row_item(parts)) > 1


def row_stamp(row: Row, parts: Mapping[str, Any]) -> int:
    """A digest of all that a collection takes of a row; of an image file, its path, size and time.

    Of a row that is a text alone, it is the `item_digest` of the text.
    """
    if "image" not in parts and not row.get("metadata"):
        return item_digest(parts)
    return row_digest({**parts, "metadata": row.get("metadata") or {}})


def row_parts(id_: str, row: Row) -> dict[str, Any]:
    """The image and the text of a row, those it has.

    Raises:
        ValueError: It has neither.
    """
    parts = {key: row[key] for key in ("image", "text") if row.get(key) is not None}
    return check_parts(parts, f"item {id_!r}")


def image_paths(image: Any) -> list[str]:  # noqa: ANN401 - an image or several
    """Return the paths or URLs of an image or of several; images without one, such as bytes, are skipped."""
    paths = []
    for single in image if isinstance(image, list | tuple) else [] if image is None else [image]:
        path = single.get("path") if isinstance(single, Mapping) else single
        if isinstance(path, str | os.PathLike) and not str(path).startswith("data:"):
            paths.append(str(path))
    return [path for path in paths if path]


def kept_values(row: Row, name: str) -> dict[str, Any]:
    """Return the kept values of a row: its text, its image's paths, and its `"metadata"`.

    Raises:
        ValueError: `"metadata"` is no mapping, or names a column of the collection's own.
    """
    text = {TEXT: row["text"]} if isinstance(row.get(TEXT), str) else {}
    known, kept = {"image": row.get("image"), **text}, row.get("metadata") or {}
    if not kept:
        return known
    if not isinstance(kept, Mapping):
        raise ItemError(name, f'"metadata" must be a mapping from names to values, got {kept!r:.80}')
    if odd := [column for column in kept if not isinstance(column, str) or not column]:
        raise ItemError(name, f'"metadata" holds {odd[0]!r}; the name of a column must be a text')
    if odd := [column for column in kept if "." in column or "`" in column]:
        raise ItemError(name, f'"metadata" holds {odd[0]!r}; the name of a column must be without "." and "`"')
    if odd := [column for column in kept if column in (*OWN_COLUMNS, *known) or column.startswith("_")]:
        reason = "the name of a column that the collection has of its own; give it another name in the data"
        raise ItemError(name, f'"metadata" holds {odd[0]!r}, {reason}')
    return known | dict(kept)


def _input(id_: str, row: Row, parts: Mapping[str, Any]) -> tuple[Any, str | None]:
    """The item to encode of a row, and why there is none."""
    if row.get("problem") is not None:
        return None, str(row["problem"])
    try:
        return row_item(parts, f"item {id_!r}"), None
    except ItemError as error:
        return None, str(error)


def _require_id(columns: list[str]) -> None:
    if "id" not in columns:
        raise ValueError(f'the dataset has no column "id", it has {columns}')


def kept_types(rows: Iterable[Mapping[str, Any]]) -> dict[str, pa.DataType]:
    """The types of the kept columns, where the source knows them."""
    features = rows.features if isinstance(rows, datasets.Dataset | datasets.IterableDataset) else None
    kept = (features or {}).get("metadata")
    if not isinstance(kept, dict):
        return {}
    return {
        field.name: field.type for field in datasets.Features(kept).arrow_schema if not pa.types.is_null(field.type)
    }


def make_column(name: str, values: Sequence[Any]) -> pa.Array:
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


def fit(rows: pa.Table, table: Table, is_shared: bool = False) -> pa.Table:
    """Give rows the columns of the table, and the table the columns of the rows.

    Args:
        rows: To be written.
        table: Where.
        is_shared: Whether other processes write into the table as well.

    Raises:
        ValueError: A column holds values of another type than before.
    """
    _add_columns(table, [field for field in rows.schema if not pa.types.is_null(field.type)])
    schema = table.schema
    for field in rows.schema:
        if pa.types.is_floating(field.type) and pa.types.is_integer(schema.field(field.name).type):
            _widen(table, field.name, is_shared)
            schema = table.schema
    columns = []
    for field in schema:
        try:
            column = rows[field.name] if field.name in rows.column_names else pa.nulls(len(rows), field.type)
            if new := _new_fields(column.type, field.type):
                raise pa.ArrowInvalid(f"the field {new[0]!r} is new")
            columns.append(column.cast(field.type))
        except pa.ArrowException as error:
            raise ValueError(
                f"the column {field.name!r} of the collection holds {field.type}, and some of its rows have "
                f"{rows.schema.field(field.name).type} now ({error}); give all its values one type"
            ) from error
    return pa.table(columns, schema=schema)


def finish_widening(table: Table) -> None:
    """End what `fit` began in a process that was killed."""
    names = table.schema.names
    for name in names:
        if (wider := _WIDER.format(name)) in names:
            table.drop_columns([wider])
            names.remove(wider)
    for wider in names:
        if wider.startswith("_"):
            _rename(table, wider, wider.removeprefix("_").removesuffix("_as_double"))


def _add_columns(table: Table, fields: list[pa.Field]) -> None:
    """Add the columns that a table lacks; other processes may add columns or rows at the same time."""
    for attempt in range(_ATTEMPTS):
        names = table.schema.names
        missing = [field for field in fields if field.name not in names]
        if not missing:
            return
        try:
            table.add_columns([pa.field(field.name, field.type) for field in missing])
        except RuntimeError as error:
            if "commit conflict" not in str(error) or attempt == _ATTEMPTS - 1:
                raise
            time.sleep(attempt * random.random() / 10)
        table.checkout_latest()


def _widen(table: Table, name: str, is_shared: bool) -> None:
    """Make a column of integers one of fractions.

    Raises:
        ValueError: Other processes write: the integers that they add meanwhile would be lost.
    """
    if is_shared:
        raise ValueError(
            f"the column {name!r} of the collection holds integers, and some rows have fractions: give all its values "
            "one type, or run the same with one process, which changes the column"
        )
    wider = _WIDER.format(name)
    quoted = "`" + name.replace("`", "``") + "`"
    table.add_columns({wider: f"cast({quoted} as double)"})
    table.drop_columns([name])
    _rename(table, wider, name)


def _rename(table: Table, name: str, new: str) -> None:
    change: Any = {"path": name, "rename": new}  # its type is too narrow in lancedb 0.40
    table.alter_columns(change)


def _new_fields(given: pa.DataType, known: pa.DataType) -> list[str]:
    """The fields of mappings, within lists too, that a column does not know: a cast would drop them."""
    if pa.types.is_struct(given) and pa.types.is_struct(known):
        fields = [given.field(index) for index in range(given.num_fields)]
        known_names = {known.field(index).name for index in range(known.num_fields)}
        new = [field.name for field in fields if field.name not in known_names]
        return new or [name for field in fields for name in _new_fields(field.type, known.field(field.name).type)]
    if pa.types.is_list(given) and pa.types.is_list(known):
        return _new_fields(given.value_type, known.value_type)
    return []
