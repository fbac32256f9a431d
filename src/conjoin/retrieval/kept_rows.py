"""What is known of each row beside its vector: its text, the path of its image, and the columns that were kept.

A store holds one table per shard, as Parquet inside the shard; an index one Parquet file.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from conjoin.processing.input_types import concatenate_images
from conjoin.processing.item_images import load_image

_ROWS_PER_GROUP = 4096
_STRINGS = ("text", "image")


class KeptRows:
    """Tables of rows, one after the other, read when they are needed.

    Args:
        sizes: How many rows each table has.
        read: Returns the table of a number, or only some of its columns.
        places: Which of the rows there are, in this order; all when None.
    """

    def __init__(
        self, sizes: Sequence[int], read: Callable[[int, list[str] | None], pa.Table], places: np.ndarray | None = None
    ) -> None:
        self._sizes, self._starts = list(sizes), np.cumsum([0, *sizes])
        self._read = read
        self._places = places

    def __len__(self) -> int:
        return int(self._starts[-1]) if self._places is None else len(self._places)

    def __iter__(self) -> Iterator[pa.Table]:
        return self.tables()

    def tables(self, columns: list[str] | None = None) -> Iterator[pa.Table]:
        """All rows in order, in tables; of the columns, those named that a table has."""
        if self._places is None:
            yield from (self._read(number, columns) for number in range(len(self._sizes)))
            return
        for start in range(0, len(self._places), _ROWS_PER_GROUP):
            split = list(self._split(self._places[start : start + _ROWS_PER_GROUP]))
            found = [self._read(number, columns).take(pa.array(inside)) for number, inside, _ in split]
            order = np.argsort(np.concatenate([where for _, _, where in split]))
            yield concat(found).take(pa.array(order))

    def choose(self, positions: np.ndarray) -> "KeptRows":
        """The rows at some positions, in that order; none beyond the last row."""
        wanted = np.asarray(positions, dtype=np.int64)
        wanted = wanted[wanted < len(self)]
        return KeptRows(self._sizes, self._read, wanted if self._places is None else self._places[wanted])

    def take(self, positions: Sequence[int]) -> list[dict[str, Any]]:
        """The values of the rows at some positions, those that they have; none beyond the last row."""
        rows: list[dict[str, Any]] = [{} for _ in positions]
        wanted = np.asarray(positions, dtype=np.int64)
        known = np.flatnonzero(wanted < len(self))
        places = wanted[known] if self._places is None else self._places[wanted[known]]
        for number, inside, where in self._split(places):
            found = self._read(number, None).take(pa.array(inside)).to_pylist()
            for place, row in zip(known[where].tolist(), found, strict=True):
                rows[place] = {name: value for name, value in row.items() if name != "id" and value is not None}
        return rows

    def _split(self, places: np.ndarray) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """The numbers of the tables of some rows, with where the rows stand in the table and in `places`."""
        numbers = np.searchsorted(self._starts, places, side="right") - 1
        for number in np.unique(numbers).tolist():
            where = np.flatnonzero(numbers == number)
            yield number, places[where] - self._starts[number], where

    def schema(self) -> pa.Schema:
        """Names and types of the columns of all tables.

        Raises:
            ValueError: A column holds numbers in one table and texts in another.
        """
        return unify([table.schema for table in self])

    def write(self, path: Path) -> None:
        """Write all tables into one Parquet file.

        Raises:
            ValueError: As `schema`.
        """
        schema = self.schema()
        with pq.ParquetWriter(path, schema, compression="zstd") as writer:
            for table in self:
                whole = pa.concat_tables([schema.empty_table(), table], promote_options="permissive")
                writer.write_table(whole, row_group_size=_ROWS_PER_GROUP)

    @classmethod
    def of(cls, ids: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> "KeptRows":
        """Keep rows in memory.

        Args:
            ids: Of the rows of an index, in its order.
            rows: Their values by column.
        """
        names = dict.fromkeys(name for row in rows for name in row)
        columns = {name: [row.get(name) for row in rows] for name in names}
        table = pa.table({"id": list(ids), **columns})

        def read(number: int, columns: list[str] | None) -> pa.Table:
            if columns is None:
                return table
            return table.select(["id", *(name for name in columns if name in names)])

        return cls([len(ids)], read)

    @classmethod
    def open(cls, path: Path) -> "KeptRows":
        """Open what `write` wrote."""
        file = pq.ParquetFile(path, memory_map=True)
        sizes = [file.metadata.row_group(number).num_rows for number in range(file.num_row_groups)]

        def read(number: int, columns: list[str] | None) -> pa.Table:
            return read_columns(file, columns, number)

        return cls(sizes, read)


def unify(schemas: Sequence[pa.Schema]) -> pa.Schema:
    """The columns of several tables; columns of integers and fractions become fractions.

    Raises:
        ValueError: A column holds numbers in one table and texts in another.
    """
    try:
        return pa.unify_schemas(schemas, promote_options="permissive")
    except pa.ArrowException as error:
        raise _different_types(error) from error


def concat(tables: Sequence[pa.Table]) -> pa.Table:
    """Tables one after the other; columns of integers and fractions become fractions.

    Raises:
        ValueError: A column holds numbers in one table and texts in another.
    """
    try:
        return pa.concat_tables(tables, promote_options="permissive")
    except pa.ArrowException as error:
        raise _different_types(error) from error


def _different_types(error: Exception) -> ValueError:
    return ValueError(
        f"a kept column has several types: {error}; give all its values one type and encode again, or build the index "
        "again if only the index has the other type"
    )


def read_columns(file: pq.ParquetFile, columns: list[str] | None, group: int | None = None) -> pa.Table:
    """Read a Parquet file or one group of its rows: all columns, or `id` and the named ones that it has."""
    if columns is not None:
        columns = ["id", *(name for name in columns if name in file.schema_arrow.names and name != "id")]
    return file.read(columns) if group is None else file.read_row_group(group, columns)


def kept_values(row: Mapping[str, Any], name: str) -> dict[str, Any]:
    """What is kept of a row: its text, the path of its image, and its `"kept"`.

    Args:
        row: A row, as `encode_corpus` takes it.
        name: Of the row, in messages.

    Raises:
        ValueError: `"kept"` is no mapping, or holds an id.
    """
    kept = row.get("kept")
    if kept is not None and not isinstance(kept, Mapping):
        raise ValueError(f'{name}: "kept" must be a mapping from names to values, got {kept!r:.80}')
    if kept and "id" in kept:
        raise ValueError(f'{name}: "kept" holds an "id"; the id of the row is kept already')
    text, image = row.get("text"), row.get("image")
    own = {}
    if isinstance(text, str):
        own["text"] = text
    if paths := list(filter(None, map(_path, image if isinstance(image, list) else [image]))):
        own["image"] = ", ".join(paths)
    return own | dict(kept or {})


def picture_paths(kept: str) -> list[str]:
    """The paths that `kept_values` joined in the column `image` of a row."""
    return [kept] if Path(kept).is_file() else kept.split(", ")


def read_picture(kept: str, name: str = "item") -> Image.Image:
    """Read the picture of a kept row; several are shown as one, as input type `cat` makes it.

    Args:
        kept: The column `image` of the row.
        name: Of the row, in messages.

    Raises:
        FileNotFoundError: As `load_image`.
        ValueError: As `load_image`.
    """
    pictures = [load_image(path, name) for path in picture_paths(kept)]
    return pictures[0] if len(pictures) == 1 else concatenate_images(pictures)


def _path(image: Any) -> str:  # noqa: ANN401
    """The path or URL of an image, empty if it has none."""
    path = image.get("path") if isinstance(image, Mapping) else image
    return str(path) if isinstance(path, str | os.PathLike) and not str(path).startswith("data:") else ""


def to_parquet(ids: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], bytes]:
    """The names of the columns of `rows`, and a Parquet file of these columns and `id`.

    Raises:
        ValueError: The values of a column are of different types.
    """
    names = list(dict.fromkeys(name for row in rows for name in row))
    columns = {"id": pa.array(map(_utf8, ids), pa.string())}
    for name in names:
        values = [_utf8(value) if isinstance(value, str) else value for value in (row.get(name) for row in rows)]
        try:
            columns[name] = pa.array(values, pa.string() if name in _STRINGS else None)
            pq.write_table(pa.table({name: columns[name][:0]}), pa.BufferOutputStream())  # an empty object has no type
        except (pa.ArrowException, TypeError, UnicodeEncodeError) as error:
            raise ValueError(f"the column {name!r} cannot be kept: {error}") from error
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), sink, compression="zstd")
    return names, sink.getvalue().to_pybytes()


def _utf8(text: str) -> str:
    """A text without the lone surrogates that Parquet cannot hold."""
    return text.encode("utf-8", "replace").decode("utf-8")
