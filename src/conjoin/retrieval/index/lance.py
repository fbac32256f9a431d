"""LanceDB behind the index protocol: an embedded database on disk, with filters and versions."""

import os
import secrets
import shutil
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any, Self

import numpy as np
import pyarrow as pa
from filelock import BaseFileLock

from conjoin.retrieval.encoder import ModelIdentity
from conjoin.retrieval.filter_text import LanceDialect, condition_text, original_name, sql_text, stored_name
from conjoin.retrieval.filters import Condition
from conjoin.retrieval.index.base import INDEX, SavedIndex, check_not_replaced, read_index, save_index
from conjoin.retrieval.index.table import Hits, Rows, Scanned, TableIndex, in_parts
from conjoin.retrieval.kept_rows import concat, unify
from conjoin.storage import DamagedError, check_place, lock_folder

_VECTOR, _DIGEST, _PLACE, _ID = "_vector", "_digest", "_place", "id"
_HIDDEN = (_VECTOR, _DIGEST, _PLACE)
_RESERVED = (*_HIDDEN, "_distance", "query_index")
"""Names that a search gives to its own columns, too."""
_PARTITIONS_FROM = 100_000
"""Rows from which on the vectors are partitioned; below it a search compares with all of them."""
_ROWS_AT_ONCE = 8192
_KEPT_FOR = timedelta(days=1)
"""How long the files of earlier versions stay, for readers that opened them."""
_FOREVER = timedelta(days=36_500)
"""Longer than any version is old."""


class LanceIndex(TableIndex):
    """A table of LanceDB in the folder of the index; memory is flat in the number of rows.

    Few vectors are all compared, which is exact. Many are partitioned and compressed (IVF-PQ), and the best are
    rescored with the stored vectors. Scores are inner products with the stored vectors in any case.

    A change writes a new version of the table, which readers see once `save` has recorded it in the manifest. Killed
    before that, the index stays as it was. From the first change to `save`, the folder is locked.

    Args:
        model: Which model made the vectors; recorded, and checked by `search_items`.
        directory: Where the index will be saved; without it the table lies in a temporary folder until then.
        partitions: Partitions of the vectors; None for the library's choice (0 below 100,000 rows), 0 for none.
        probes: Partitions looked into: more is slower and more exact.
        refine: Candidates rescored for each result.
    """

    kind = "lancedb"

    def __init__(
        self,
        model: ModelIdentity | None = None,
        directory: str | Path | None = None,
        *,
        partitions: int | None = None,
        probes: int = 32,
        refine: int = 20,
    ) -> None:
        super().__init__(model)
        self._lancedb = _import_lancedb()
        self.dimension: int | None = None
        self.options: dict[str, Any] = {"partitions": partitions, "probes": probes, "refine": refine}
        if directory is not None:
            check_place(directory, INDEX, r"rows-[0-9a-f]{16}\.lance")
        self._temporary = tempfile.TemporaryDirectory() if directory is None else None
        self._folder = Path(directory or (self._temporary.name if self._temporary else ""))
        self._name = f"rows-{secrets.token_hex(8)}"
        self._version: int | None = None  # that is recorded
        self._table: Any = None
        self._lock: BaseFileLock | None = None
        self._is_partitioned = False
        self._next = 0  # the place of the next row

    def __len__(self) -> int:
        return 0 if self._table is None else int(self._table.count_rows())

    def _schema(self) -> pa.Schema:
        fields = [field for field in self._table.schema if field.name not in _HIDDEN]
        return pa.schema([field.with_name(original_name(field.name)) for field in fields])

    def _scan(self) -> Iterator[Scanned]:
        names = [_PLACE, _ID, _DIGEST]
        with self._reading():
            for batch in self._table.search().select(names).to_batches(_ROWS_AT_ONCE):
                yield Scanned(*(batch[name].to_pylist() for name in names))

    def _known(self, ids: Sequence[str]) -> set[str]:
        return set(self._read(ids, [_ID]))

    def _read(self, ids: Sequence[str], columns: list[str] | None = None) -> dict[str, dict[str, Any]]:
        names = columns or [name for name in self._table.schema.names if name not in _HIDDEN]
        found: dict[str, dict[str, Any]] = {}
        for some in in_parts(ids):
            with self._reading():
                rows = self._table.search().where(self._among(some)).select(names).to_list()
            found |= {row.pop(_ID): {original_name(name): value for name, value in row.items()} for row in rows}
        return found

    def _among(self, ids: Sequence[str]) -> str:
        return f"`{_ID}` in ({', '.join(map(sql_text, ids))})" if len(ids) else "false"

    def _expression(self, condition: Condition) -> str:
        return condition_text(condition, self._schema(), LanceDialect())

    def _insert(self, rows: Iterable[Rows], dimension: int, columns: pa.Schema) -> None:
        self._begin()
        kept = [field.with_name(stored_name(field.name)) for field in columns if field.name != _ID]
        vector = pa.field(_VECTOR, pa.list_(pa.float32(), dimension))
        own = [pa.field(_ID, pa.string()), vector, pa.field(_DIGEST, pa.int64()), pa.field(_PLACE, pa.int64())]
        schema = pa.schema([*own, *kept])
        with self._writing():
            if self._table is not None:
                schema = self._fit(schema)
            source = _Source(rows, schema, self._next)
            reader = pa.RecordBatchReader.from_batches(schema, source)
            try:
                if self._table is None:
                    self._table = self._database().create_table(self._name, reader, schema=schema)
                    self._index_ids()
                else:
                    self._table.add(reader)
            except (RuntimeError, OSError, ValueError):
                if source.error is not None:
                    raise source.error from None
                raise
        self.dimension, self._next = dimension, source.next

    def _check_columns(self, columns: pa.Schema) -> None:
        if taken := [name for name in columns.names if name in _RESERVED]:
            raise ValueError(f"the kept column {taken[0]!r} has a name that the index uses; keep it under another one")
        old = {} if self._table is None else {field.name: field.type for field in self._schema()}
        for field in unify([columns, pa.schema([(name, old[name]) for name in columns.names if name in old])]):
            before = old.get(field.name, field.type)
            if field.type != before and pa.types.is_nested(before):
                raise ValueError(
                    f"the kept column {field.name!r} has the type {before} in the index, {field.type} now; build the "
                    "index again"
                )

    def _index_ids(self) -> None:
        """Make rows quick to find by their ids."""
        if len(self):
            self._table.create_index(_ID, config=self._lancedb.index.BTree())

    def _fit(self, schema: pa.Schema) -> pa.Schema:
        """Give the table the columns of `schema`; returns those of the table then."""
        old = {field.name: field.type for field in self._table.schema}
        for field in unify([schema, pa.schema([(name, old[name]) for name in schema.names if name in old])]):
            if field.name not in old:
                self._table.add_columns(pa.schema([field]))
            elif field.type != old[field.name] and pa.types.is_null(old[field.name]):
                self._table.drop_columns([field.name])
                self._table.add_columns(pa.schema([field]))
            elif field.type != old[field.name]:
                self._table.add_columns({"_cast": f"arrow_cast(`{field.name}`, '{_cast_name(field.type)}')"})
                self._table.drop_columns([field.name])
                self._table.alter_columns({"path": "_cast", "rename": field.name})
        return self._table.schema

    def _delete(self, ids: Sequence[str]) -> None:
        self._begin()
        with self._writing():
            for some in in_parts(ids):
                self._table.delete(self._among(some))

    def _nearest(self, queries: np.ndarray, k: int, where: str | None) -> list[Hits]:
        search = self._table.search(queries, vector_column_name=_VECTOR).distance_type("dot")
        if where is not None:
            search = search.where(where, prefilter=True)
        if self._is_partitioned:
            search = search.nprobes(self.options["probes"]).refine_factor(self.options["refine"])
        with self._reading():
            found = search.select([_ID, _VECTOR, _PLACE, "_distance"]).limit(k).to_arrow()
        numbers = found["query_index"].to_numpy() if len(queries) > 1 else np.zeros(len(found), dtype=np.int64)
        vectors = found[_VECTOR].combine_chunks().flatten().to_numpy(zero_copy_only=False)
        vectors = vectors.reshape(len(found), queries.shape[1]).astype(np.float64)
        scores = np.einsum("nd,nd->n", vectors, queries[numbers].astype(np.float64)).astype(np.float32)
        order = np.lexsort((found[_PLACE].to_numpy(), -scores, numbers))
        ids = found[_ID].to_pylist()
        starts = np.searchsorted(numbers[order], np.arange(len(queries) + 1))
        parts = [order[start:end] for start, end in pairwise(starts)]
        return [Hits([ids[place] for place in part], scores[part]) for part in parts]

    def _begin(self) -> None:
        """Prepare the folder for a change: lock it, and take back what an interrupted change left."""
        if self._lock is not None:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        lock = lock_folder(self._folder)
        try:
            if self._version is not None:
                check_not_replaced(self._folder, {"table": self._name, "version": self._version})
                with self._writing():
                    self._table.checkout_latest()
                    if self._table.version != self._version:
                        self._table.restore(self._version)
        except BaseException:
            lock.release()
            raise
        self._lock = lock

    def save(self, directory: str | Path) -> None:
        """Write the index; whatever happens, `directory` holds either the old index or the new one.

        Raises:
            ValueError: The index is empty, `directory` holds something else, or another process writes into it.
            OSError: The disk is full or fails.
        """
        target = Path(directory)
        if self.dimension is None:
            save_index(self, target, {})
        if self._temporary is not None or target.resolve() != self._folder.resolve():
            self._move(target)
        self._begin()
        with self._writing():
            self._finish()
            options = self.options | {"table": self._name, "version": int(self._table.version), "next": self._next}
            save_index(self, target, {}, options, is_locked=True)
        self._version = int(self._table.version)
        with suppress(RuntimeError, OSError):  # the index is saved; the next time cleans up as well
            self._table.optimize(cleanup_older_than=_KEPT_FOR)
        self._release()

    def _move(self, target: Path) -> None:
        """Copy the table into another folder and use it there."""
        check_place(target, INDEX, r"rows-[0-9a-f]{16}\.lance")
        target.mkdir(parents=True, exist_ok=True)
        lock = lock_folder(target)
        name = f"rows-{secrets.token_hex(8)}"
        try:
            shutil.copytree(self._folder / f"{self._name}.lance", target / f"{name}.lance")
        except BaseException:
            shutil.rmtree(target / f"{name}.lance", ignore_errors=True)
            lock.release()
            raise
        version = self._table.version
        self._release()
        self._folder, self._name, self._lock, self._temporary = target, name, lock, None
        self._table = self._open(version)
        self._table.checkout_latest()
        if self._table.version != version:
            self._table.restore(version)

    def _finish(self) -> None:
        """Bring the table's own indexes up to date and merge small files."""
        wanted: int | None = self.options["partitions"]
        if wanted is None and len(self) >= _PARTITIONS_FROM and not self._is_partitioned:
            wanted = round(len(self) ** 0.5)
        if wanted and not self._is_partitioned:
            config = self._lancedb.index.IvfPq(
                distance_type="dot", num_partitions=wanted, num_sub_vectors=_subvectors(int(self.dimension or 0))
            )
            self._table.create_index(_VECTOR, config=config)
            self._is_partitioned = True
        self._table.optimize(cleanup_older_than=_FOREVER)  # the manifest still names an earlier version

    def prepare(self) -> None:
        """Make partitions now, as `save` does; a search before then compares with every vector."""
        self._begin()
        with self._writing():
            self._finish()

    @classmethod
    def load(cls, directory: str | Path) -> Self:
        """Read a saved index; it sees the version that is recorded now.

        Raises:
            FileNotFoundError: There is none in `directory`.
            ValueError: It is damaged or of another kind.
        """
        return read_index(directory, (cls.kind,), cls._read_saved)

    @classmethod
    def _read_saved(cls, saved: SavedIndex) -> Self:
        options = {name: saved.options[name] for name in ("partitions", "probes", "refine")}
        index = cls(saved.model, saved.folder.folder, **options)
        index.recall = saved.recall
        index._name, index._version = saved.options["table"], saved.options["version"]
        index._next = saved.options["next"]
        index._table = index._open(index._version)
        with index._reading():
            index.dimension = index._table.schema.field(_VECTOR).type.list_size
            index._is_partitioned = any(_VECTOR in each.columns for each in index._table.list_indices())
        return index

    def _database(self) -> Any:  # noqa: ANN401 - lancedb's class
        return self._lancedb.connect(str(self._folder))

    def _open(self, version: int | None) -> Any:  # noqa: ANN401 - lancedb's class
        with self._reading():
            table = self._database().open_table(self._name)
            table.checkout(version)
            return table

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, OSError, ValueError) as error:
            raise DamagedError(
                f"LanceDB cannot read the table {self._name!r} in {str(self._folder)!r} ({_first_line(error)}); "
                f"{INDEX.remedy} again"
            ) from error

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", category=UserWarning)
                yield
        except (RuntimeError, OSError) as error:
            raise OSError(
                f"{_first_line(error)} while writing the table {self._name!r} in {str(self._folder)!r}: the index is "
                "as it was before; make room and run the same again"
            ) from error


class _Source:
    """The batches of some rows in the columns of a table; keeps an error that the database would change."""

    def __init__(self, rows: Iterable[Rows], schema: pa.Schema, place: int) -> None:
        self.rows, self.schema, self.next = rows, schema, place
        self.error: Exception | None = None

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        try:
            for some in self.rows:
                yield from _to_arrow(some, self.schema, self.next).to_batches()
                self.next += len(some.ids)
        except Exception as error:
            self.error = error
            raise


def _to_arrow(rows: Rows, schema: pa.Schema, place: int) -> pa.Table:
    """Rows as a table with the columns of `schema`, the first at `place`."""
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(rows.vectors.ravel()), rows.vectors.shape[1])
    try:
        ids = pa.array(rows.ids, pa.string())
    except UnicodeEncodeError as error:
        raise ValueError(f"the id {error.object!r} has characters that UTF-8 cannot hold") from error
    places = pa.array(np.arange(place, place + len(rows.ids)))
    columns = {_ID: ids, _VECTOR: vectors, _DIGEST: pa.array(rows.digests), _PLACE: places}
    if rows.columns is not None:
        columns |= {stored_name(name): rows.columns[name] for name in rows.columns.column_names}
    return concat([schema.empty_table(), pa.table(columns)]).select(schema.names).cast(schema)


def _subvectors(dimension: int) -> int:
    """Bytes of a compressed vector: the largest divisor of the dimension up to an eighth of it."""
    return max(size for size in range(1, max(1, dimension // 8) + 1) if dimension % size == 0)


def _cast_name(type_: pa.DataType) -> str:
    """What Arrow's SQL calls a type."""
    return {"double": "Float64", "float": "Float32", "string": "Utf8"}.get(str(type_), str(type_).capitalize())


def _first_line(error: Exception) -> str:
    return str(error).split("\n")[0].split(", /")[0]


def _import_lancedb() -> ModuleType:
    os.environ.setdefault("LANCE_LOG", "error")
    try:
        import lancedb
        import lancedb.index
    except ImportError as error:
        raise ImportError('this index needs LanceDB: pip install "conjoin[lancedb]"') from error
    return lancedb
