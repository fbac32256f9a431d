"""Milvus behind the index protocol: a server or a cluster by its URI, or an embedded file (Milvus Lite)."""

import logging
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Self

import numpy as np
import pyarrow as pa
from filelock import BaseFileLock

from conjoin.retrieval.encoder import ModelIdentity
from conjoin.retrieval.filter_text import MilvusDialect, condition_text, json_value, milvus_text
from conjoin.retrieval.filters import Condition
from conjoin.retrieval.index.base import INDEX, SavedIndex, check_not_replaced, read_index, save_index
from conjoin.retrieval.index.table import Hits, Rows, Scanned, TableIndex, in_parts
from conjoin.retrieval.kept_rows import unify
from conjoin.storage import check_place, lock_folder

_KEY, _ID, _VECTOR, _DIGEST, _COLUMNS = "key", "id", "vector", "digest", "columns"
_SINCE, _UNTIL, _ALWAYS = "since", "until", 2**62
_PLACE = "place"
_LONGEST = 65_535
_ROWS_AT_ONCE = 1000
_ATTEMPTS = 3
_WAIT = 1.0
"""Seconds before the second attempt; twice as many before each further one."""


class MilvusIndex(TableIndex):
    """A collection of Milvus; the folder of the index holds its address.

    Each row says since which state of the index it is there, and until which. A search reads the state that the
    manifest recorded when the index was loaded, so a change is seen once `save` has recorded the next state. Killed
    before that, the index stays as it was; the next change takes the unfinished one back.

    Set `MILVUS_TOKEN` if the server asks for a token; it is not stored.

    Args:
        model: Which model made the vectors; recorded, and checked by `search_items`.
        uri: `http://host:19530` of a server, or the path of a file for Milvus Lite.
        timeout: Seconds to wait for the server.

    Raises:
        ConnectionError: The server cannot be reached, after several attempts.
    """

    kind = "milvus"

    def __init__(self, model: ModelIdentity | None = None, uri: str = "", *, timeout: float = 30.0) -> None:
        super().__init__(model)
        if not uri:
            raise ValueError("pass the uri of a Milvus server (http://host:19530), or the path of a file")
        self._milvus = _import_milvus()
        self.dimension: int | None = None
        self.uri = uri if "://" in uri else str(Path(uri).resolve())
        self.timeout = timeout
        self._name = f"conjoin_{secrets.token_hex(8)}"
        self._folder: Path | None = None  # where the index is saved
        self._state, self._count, self._next_place = 0, 0, 0
        self._columns = pa.schema([])
        self._is_changing = False
        self._lock: BaseFileLock | None = None
        self._client = self._connect()

    def _connect(self) -> Any:  # noqa: ANN401 - pymilvus' class
        for attempt in range(_ATTEMPTS):
            try:
                return self._milvus.MilvusClient(
                    self.uri, token=os.environ.get("MILVUS_TOKEN", ""), timeout=self.timeout
                )
            except (self._milvus.MilvusException, OSError) as error:
                failed: Exception = error
                if attempt < _ATTEMPTS - 1:
                    time.sleep(_WAIT * 2**attempt)
        hint = "" if "://" in self.uri else "; one process at a time opens a file of Milvus Lite"
        raise ConnectionError(
            f"cannot reach Milvus at {self.uri!r} after {_ATTEMPTS} attempts: {failed}{hint}"
        ) from failed

    def _call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """Call the client, which tries again by itself where that helps."""
        try:
            return function(*args, timeout=self.timeout, **kwargs)
        except (self._milvus.MilvusException, OSError) as error:
            raise ConnectionError(
                f"Milvus at {self.uri!r} failed ({error}); the index is as it was when it was last saved"
            ) from error

    @property
    def _reading(self) -> int:
        """The state that is read: the one in the making, if there are changes."""
        return self._state + self._is_changing

    @property
    def _now(self) -> str:
        """Holds for the rows of the state that is read."""
        return f"{_SINCE} <= {self._reading} and {_UNTIL} > {self._reading}"

    def __len__(self) -> int:
        return self._count

    def _schema(self) -> pa.Schema:
        return self._columns if _ID in self._columns.names else self._columns.insert(0, pa.field(_ID, pa.string()))

    def _scan(self) -> Iterator[Scanned]:
        names = [_PLACE, _ID, _DIGEST]
        for rows in self._pages(self._now, names):
            yield Scanned(*([row[name] for row in rows] for name in names))

    def _pages(self, where: str, columns: list[str]) -> Iterator[list[dict[str, Any]]]:
        """The rows that an expression holds for, in parts."""
        pages = self._call(
            self._client.query_iterator, self._name, batch_size=_ROWS_AT_ONCE, filter=where, output_fields=columns
        )
        while rows := self._call(lambda timeout: pages.next()):
            yield list(rows)
        pages.close()

    def _known(self, ids: Sequence[str]) -> set[str]:
        return {row[_ID] for rows in self._find(ids, [_ID]) for row in rows}

    def _read(self, ids: Sequence[str]) -> dict[str, dict[str, Any]]:
        found = {row[_ID]: row[_COLUMNS] for rows in self._find(ids, [_ID, _COLUMNS]) for row in rows}
        types = {field.name: field.type for field in self._columns if pa.types.is_temporal(field.type)}
        for row in found.values():
            row |= {name: pa.scalar(row[name]).cast(type_).as_py() for name, type_ in types.items() if name in row}
        return found

    def _find(self, ids: Sequence[str], columns: list[str]) -> Iterator[list[dict[str, Any]]]:
        for some in in_parts(ids):
            yield from self._pages(f"{self._among(some)} and {self._now}", columns)

    def _among(self, ids: Sequence[str]) -> str:
        return f"{_ID} in [{', '.join(map(milvus_text, ids))}]"

    def _expression(self, condition: Condition) -> str:
        return condition_text(condition, self._schema(), MilvusDialect(_COLUMNS, _ID, "://" in self.uri))

    def _check_columns(self, columns: pa.Schema) -> None:
        unify([self._columns, columns])

    def _insert(self, rows: Iterable[Rows], dimension: int, columns: pa.Schema) -> None:
        kept = pa.schema([field for field in columns if field.name != _ID])
        self._columns = unify([self._columns, kept])
        self._begin(dimension)
        for some in rows:
            for start in range(0, len(some.ids), _ROWS_AT_ONCE):
                records = self._records(some, slice(start, start + _ROWS_AT_ONCE))
                self._call(self._client.insert, self._name, records)
                self._count += len(records)
        self.dimension = dimension

    def _records(self, rows: Rows, chosen: slice) -> list[dict[str, Any]]:
        """Rows as Milvus takes them."""
        ids, vectors = rows.ids[chosen], rows.vectors[chosen]
        kept: list[dict[str, Any]] = [{}] * len(ids)
        if rows.columns is not None:
            kept = rows.columns.slice(chosen.start, len(ids)).to_pylist()
        records = []
        for id_, vector, digest, row in zip(ids, vectors, rows.digests[chosen].tolist(), kept, strict=True):
            if len(id_.encode("utf-8", "surrogatepass")) > _LONGEST:
                raise ValueError(f"the id {id_[:60]!r}... is longer than Milvus takes ({_LONGEST} bytes)")
            records.append(
                {
                    _KEY: f"{self._reading}/{self._next_place}",
                    _ID: id_,
                    _PLACE: self._next_place,
                    _SINCE: self._reading,
                    _UNTIL: _ALWAYS,
                    _DIGEST: digest,
                    _COLUMNS: {name: json_value(value) for name, value in row.items() if value is not None},
                    _VECTOR: vector,
                }
            )
            self._next_place += 1
        return records

    def _delete(self, ids: Sequence[str]) -> None:
        self._begin(int(self.dimension or 0))
        for some in in_parts(ids):
            self._end(f"{self._among(some)} and {self._now}", self._reading)
        self._count -= len(ids)

    def _end(self, where: str, until: int) -> None:
        """Let the rows that an expression holds for end with the state before `until`."""
        own = f"{_SINCE} == {self._reading}"
        self._call(self._client.delete, self._name, filter=f"{where} and {own}")  # no saved state has them
        for rows in list(self._pages(where, ["*"])):
            self._call(self._client.upsert, self._name, [row | {_UNTIL: until} for row in rows])

    def _begin(self, dimension: int) -> None:
        """Prepare a change: lock the index, make the collection, or take an unfinished change back."""
        if self._is_changing:
            return
        if self._folder is not None:
            lock = lock_folder(self._folder)
            try:
                check_not_replaced(self._folder, {"table": self._name, "state": self._state})
            except ValueError:
                lock.release()
                raise
            self._lock = lock
        if self.dimension is None:
            self._create(dimension)
        else:
            self._call(self._client.delete, self._name, filter=f"{_SINCE} > {self._state}")
            for rows in list(self._pages(f"{_UNTIL} == {self._state + 1}", ["*"])):
                self._call(self._client.upsert, self._name, [row | {_UNTIL: _ALWAYS} for row in rows])
        self._is_changing = True

    def _create(self, dimension: int) -> None:
        client, types = self._client, self._milvus.DataType
        schema = client.create_schema(auto_id=False, enable_dynamic_field=False)
        schema.add_field(_KEY, types.VARCHAR, is_primary=True, max_length=_LONGEST)
        schema.add_field(_ID, types.VARCHAR, max_length=_LONGEST)
        for name in (_PLACE, _SINCE, _UNTIL, _DIGEST):
            schema.add_field(name, types.INT64)
        schema.add_field(_COLUMNS, types.JSON)
        schema.add_field(_VECTOR, types.FLOAT_VECTOR, dim=dimension)
        indexed = client.prepare_index_params()
        indexed.add_index(_VECTOR, index_type="AUTOINDEX", metric_type="IP")
        self._call(
            client.create_collection, self._name, schema=schema, index_params=indexed, consistency_level="Strong"
        )

    def _nearest(self, queries: np.ndarray, k: int, where: str | None) -> list[Hits]:
        wanted = self._now if where is None else f"({where}) and {self._now}"
        found = self._call(
            self._client.search,
            self._name,
            data=queries.tolist(),
            limit=max(1, min(k, self._count)),
            filter=wanted,
            output_fields=[_ID, _PLACE],
            anns_field=_VECTOR,
        )
        hits = []
        for query in found:
            rows = sorted(query, key=lambda row: (-row["distance"], row["entity"][_PLACE]))
            scores = np.array([row["distance"] for row in rows], dtype=np.float32)
            hits.append(Hits([row["entity"][_ID] for row in rows], scores))
        return hits

    def save(self, directory: str | Path) -> None:
        """Record the state of the collection in a folder; the rows stay in Milvus.

        Raises:
            ValueError: The index is empty, `directory` holds something else, or another process writes into it.
            ConnectionError: The server failed; the index is as it was when it was last saved.
        """
        target = Path(directory)
        if self.dimension is None:
            save_index(self, target, {})
        if self._folder is not None and target.resolve() != self._folder.resolve():
            raise ValueError(f"the rows of this index lie in Milvus for {str(self._folder)!r}: save it there")
        if self._lock is None:
            check_place(target, INDEX)
            target.mkdir(parents=True, exist_ok=True)
            self._lock = lock_folder(target)
        state = self._reading
        columns = self._schema().serialize().to_pybytes().hex()
        options = {"uri": self.uri, "table": self._name, "state": state, "next": self._next_place, "columns": columns}
        save_index(self, target, {}, options, is_locked=True)
        before, self._state, self._folder, self._is_changing = self._state, state, target, False
        try:
            if before:  # what ended before the state that is read until now, nobody reads any more
                self._call(self._client.delete, self._name, filter=f"{_UNTIL} <= {before}")
        finally:
            self._lock.release()
            self._lock = None

    @classmethod
    def load(cls, directory: str | Path) -> Self:
        """Connect to a saved index; it sees the state that is recorded now.

        Raises:
            FileNotFoundError: There is none in `directory`.
            ValueError: It is damaged or of another kind.
            ConnectionError: The server cannot be reached, after several attempts.
        """
        return read_index(directory, (cls.kind,), cls._read_saved)

    @classmethod
    def _read_saved(cls, saved: SavedIndex) -> Self:
        options, key = saved.options, saved.folder.manifest.key
        index = cls(saved.model, options["uri"])
        index.recall, index._folder = saved.recall, saved.folder.folder
        index._name, index._state, index._next_place = options["table"], options["state"], options["next"]
        index._columns = pa.ipc.read_schema(pa.py_buffer(bytes.fromhex(options["columns"])))
        index.dimension, index._count = key["dimension"], key["count"]
        if not index._call(index._client.has_collection, index._name):
            raise ValueError(f"Milvus at {index.uri!r} has no collection {index._name!r}; {INDEX.remedy} again")
        index._call(index._client.load_collection, index._name)  # a file that was opened anew has released it
        return index


def _import_milvus() -> ModuleType:
    try:
        import pymilvus
    except ImportError as error:
        raise ImportError('this index needs pymilvus: pip install "conjoin[milvus]"') from error
    for name in ("pymilvus", "milvus_lite"):  # they warn of what Milvus Lite lacks; errors are raised
        logging.getLogger(name).setLevel(logging.CRITICAL)
    return pymilvus
