"""A collection in Milvus, for one that grows beyond a machine: copied there from its table, searched the same."""

import json
import logging
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow as pa

from conjoin.progress import progress
from conjoin.retrieval.collection import Collection, known_values, milvus_address
from conjoin.retrieval.encoder import ModelIdentity, recorded_identity
from conjoin.retrieval.results import Ranking, Searchable, by_score
from conjoin.retrieval.vectors import check_search
from conjoin.retrieval.words import WordQuery

_METADATA, _SCHEMA = "conjoin", "conjoin_schema"
_ROWS_AT_ONCE = 1000
_LONGEST = 65_535


class MilvusCollection(Searchable):
    """A collection in Milvus; see `Collection` for what its methods do.

    The name of the collection is an alias of the copy that was made last, so readers see whole states.

    Args:
        uri: `http://HOST:PORT/NAME`, or `FILE.db/NAME` for a file of Milvus Lite. In the environment, `MILVUS_TOKEN`
            is the token of the server `MILVUS_URI` (`http://HOST:PORT`), and is sent to no other.

    Raises:
        ConnectionError: The server does not answer.
        FileNotFoundError: It has no such collection.
        ImportError: pymilvus is not installed.
        ValueError: The address is none of Milvus, or no collection of this package is there.
    """

    has_words = False

    def __init__(self, uri: str | Path) -> None:
        self.uri = str(uri)
        self._call, name = _connect(self.uri)
        if not self._call("has_collection", name):
            raise FileNotFoundError(f"there is no collection at {self.uri!r}: run `conjoin copy`")
        described = self._call("describe_collection", name)
        properties = described.get("properties", {})
        if _METADATA not in properties:
            raise ValueError(f"the collection at {self.uri!r} was not copied there by `conjoin copy`")
        self._name, self._metadata = name, json.loads(properties[_METADATA])
        self.schema: pa.Schema = pa.ipc.read_schema(pa.py_buffer(bytes.fromhex(properties[_SCHEMA])))
        self.dimension: int = next(
            field["params"]["dim"] for field in described["fields"] if field["name"] == "vector"
        )
        self._call("load_collection", name)

    def __len__(self) -> int:
        """How many rows there are."""
        return int(self._call("query", self._name, filter="", output_fields=["count(*)"])[0]["count(*)"])

    @property
    def model(self) -> ModelIdentity:
        """As of `Collection`."""
        return recorded_identity(self._metadata)

    def rank(
        self,
        vectors: np.ndarray | None,
        k: int = 10,
        *,
        where: str | None = None,
        words: Sequence[str | WordQuery] | None = None,
    ) -> Ranking:
        """As `Collection.rank`, with a condition in Milvus's language, such as `price < 50 and category == "shoes"`.

        Raises:
            ValueError: As `Collection.rank`; or `words`, which Milvus does not index here.
            ConnectionError: The server does not answer.
        """
        if words is not None or vectors is None:
            raise ValueError(f"the collection {self.uri!r} is in Milvus, which has vectors only")
        queries = check_search(vectors, k, self.dimension)
        found = self._call("search", self._name, data=queries.tolist(), limit=int(k), filter=where or "")
        return Ranking.join(
            by_score([hit["id"] for hit in hits], np.array([hit["distance"] for hit in hits])) for hits in found
        )

    def rows(self, ids: Sequence[str], pictures: bool = False) -> list[dict[str, Any]]:
        """As `Collection.rows`; thumbnails are not copied, and dates are texts."""
        by_id: dict[str, dict[str, Any]] = {}
        for start in range(0, len(ids), _ROWS_AT_ONCE):
            chosen = json.dumps([*ids[start : start + _ROWS_AT_ONCE]], ensure_ascii=False)  # Lite takes no parameters
            for row in self._call("query", self._name, filter=f"id in {chosen}", output_fields=["*"]):
                by_id[row["id"]] = {name: value for name, value in row.items() if name not in ("vector", "row_kind")}
        if missing := [id_ for id_ in ids if id_ not in by_id]:
            raise ValueError(f"the collection has no row {missing[0]!r}")
        return [by_id[id_] for id_ in ids]


def copy_to_milvus(collection: Collection, uri: str | Path, show_progress: bool = False) -> MilvusCollection:
    """Copy a collection to Milvus; readers see the copy before, if any, until this one is whole.

    The copy is `NAME_0`, `NAME_1` ... in Milvus, and `NAME` its alias. A copy that fails or that Ctrl-C stops is
    removed; that of a killed process stays in Milvus without the alias until it is dropped there.

    Args:
        collection: What to copy.
        uri: As for `MilvusCollection`.
        show_progress: Show a bar.

    Raises:
        ConnectionError: The server does not answer.
        ValueError: Milvus refuses a row or a column; the message is its own.
    """
    do, alias = _connect(str(uri))
    before = do("describe_alias", alias)["collection_name"] if do("has_collection", alias) else None
    taken = set(do("list_collections"))
    name = next(name for number in range(len(taken) + 1) if (name := f"{alias}_{number}") not in taken)
    milvus = _import_milvus()
    types, schema = milvus.DataType, milvus.MilvusClient.create_schema(auto_id=False, enable_dynamic_field=True)
    schema.add_field("id", types.VARCHAR, is_primary=True, max_length=_LONGEST)
    schema.add_field("vector", types.FLOAT_VECTOR, dim=collection.dimension)
    indexed = milvus.MilvusClient.prepare_index_params()
    indexed.add_index("vector", index_type="AUTOINDEX", metric_type="IP")
    described = {
        _METADATA: json.dumps(dict(collection.metadata)),
        _SCHEMA: collection.schema.serialize().to_pybytes().hex(),
    }
    options = {"schema": schema, "index_params": indexed, "consistency_level": "Strong", "properties": described}
    do("create_collection", name, **options)
    columns = [name for name in collection.schema.names if name != "id"] + ["row_kind"]
    try:
        with progress(total=len(collection), desc="copying", unit="row", show=show_progress) as bar:
            for batch in collection.scan(["id", "vector", *columns]):
                for start in range(0, len(batch), _ROWS_AT_ONCE):
                    rows = batch.slice(start, _ROWS_AT_ONCE).to_pylist()
                    do("insert", name, [_as_stored(row) for row in rows])
                    bar.update(len(rows))
    except BaseException:  # Ctrl-C as well
        with suppress(ConnectionError, ValueError):
            do("drop_collection", name)
        raise
    if before is None:
        do("create_alias", name, alias)
    else:
        do("alter_alias", name, alias)
        do("drop_collection", before)
    return MilvusCollection(uri)


def _as_stored(row: dict[str, Any]) -> dict[str, Any]:
    """A row as Milvus takes it: one image is no list, and what it has no type for is a text."""
    plain = (str, bool, int, float, list, dict)
    return {name: value if isinstance(value, plain) else str(value) for name, value in known_values(row).items()}


def _connect(uri: str) -> tuple[Callable[..., Any], str]:
    """What calls a method of Milvus's client, and the name of the collection.

    Raises:
        ConnectionError: The server does not answer.
        ValueError: It is no address of Milvus; or, of a call, Milvus refuses; the message is its own.
    """
    match = milvus_address(uri)
    if match is None:
        raise ValueError(f"{uri!r} is no address of a collection in Milvus; expected http://HOST:PORT/NAME")
    milvus = _import_milvus()
    owner = os.environ.get("MILVUS_URI", "").rstrip("/")  # a token belongs to one server
    token = os.environ.get("MILVUS_TOKEN", "") if match[1] == owner else ""
    try:
        client = milvus.MilvusClient(match[1], token=token)
    except milvus.MilvusException as error:
        raise ConnectionError(f"Milvus at {uri!r} does not answer: {error.message}") from error

    def call(method: str, *args: Any, **options: Any) -> Any:  # noqa: ANN401 - pymilvus has no types
        try:
            return getattr(client, method)(*args, **options)
        except milvus.MilvusException as error:
            if error.code in (1, 2) and "connect" in str(error).lower():
                raise ConnectionError(f"Milvus at {uri!r} does not answer: {error.message}") from error
            raise ValueError(f"Milvus at {uri!r} refuses {method}: {error.message}") from error

    return call, match[2]


def _import_milvus() -> ModuleType:
    try:
        import pymilvus
    except ImportError as error:
        raise ImportError('a collection in Milvus needs pymilvus: pip install "conjoin[milvus]"') from error
    for name in ("pymilvus", "milvus_lite"):  # they warn of what Milvus Lite lacks; errors are raised
        logging.getLogger(name).setLevel(logging.CRITICAL)
    return pymilvus
