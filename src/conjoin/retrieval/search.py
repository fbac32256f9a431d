"""From an address to something that is searched, and from items to results."""

import os
from collections.abc import Collection as Container, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import torch

from conjoin.hub.load import is_own_model
from conjoin.retrieval.collection import Collection
from conjoin.retrieval.encoder import ItemEncoder, ModelIdentity
from conjoin.retrieval.exact import exact_search
from conjoin.retrieval.faiss_index import FaissIndex
from conjoin.retrieval.milvus import MilvusCollection, is_milvus
from conjoin.retrieval.vectors import SearchResult, truncate

SERVED_BYTES = 10**9
"""Vectors of a collection that a server keeps in memory."""


class Searchable(Protocol):
    """What can be searched: a `Collection`, a `FaissIndex` of one, a `MilvusCollection`.

    Attributes:
        uri: Where it lies.
        dimension: Length of a vector.
    """

    uri: str
    dimension: int

    def __len__(self) -> int:
        """How many rows there are."""

    @property
    def model(self) -> ModelIdentity:
        """The model that made the vectors, and its input type if there are items with several images."""

    @property
    def schema(self) -> pa.Schema:
        """Names and types of the columns that a condition may name."""

    def search(
        self, vectors: np.ndarray, k: int = 10, *, where: str | None = None, text: str | Sequence[str] | None = None
    ) -> SearchResult:
        """The k most similar rows to each query `(Q, D)`; see `Collection.search`."""

    def rows(self, ids: Sequence[str], pictures: bool = False) -> list[dict[str, Any]]:
        """What is known of some rows; see `Collection.rows`."""

    def check(self, where: str) -> None:
        """Make sure that a condition can be evaluated."""

    def select(self, where: str) -> list[str]:
        """The ids of the rows that a condition holds for."""


def open_collection(uri: str | Path, memory: int = 0) -> Searchable:
    """Open what can be searched at an address.

    Args:
        uri: A folder, `s3://`, `gs://`, `az://`, `hf://datasets/OWNER/NAME`; or `http://HOST:PORT/NAME` for a
            collection in Milvus.
        memory: As for `Collection`. A FAISS index beside the table is used in any case, if it is of its version.

    Raises:
        FileNotFoundError: There is nothing.
        ValueError: It is unfinished, damaged, or something else.
        ConnectionError: A server does not answer.
    """
    if is_milvus(uri):
        return MilvusCollection.open(uri)
    return FaissIndex.open(uri) if FaissIndex.is_current(uri) else Collection.open(uri, memory=memory)


def search_items(
    collection: Searchable,
    encoder: ItemEncoder,
    items: Sequence[Any],
    k: int = 10,
    *,
    where: str | None = None,
    text: str | Sequence[str] | None = None,
) -> SearchResult:
    """Encode items and search a collection for them.

    Args:
        collection: What to search.
        encoder: Must hold the model that made the vectors of the collection.
        items: The queries: strings, images, `{"text", "image"}` or chat messages.
        k: Results per query.
        where: Search only the rows that a condition holds for, such as `"category = 'shoes' and price < 50"`.
        text: Words to find as well; see `Collection.search`.

    Raises:
        ValueError: The collection was made with another model; and as `ItemEncoder.encode` and `Collection.search`.
    """
    check_model(collection, encoder)
    return collection.search(query_vectors(collection, encoder.encode(items)), k, where=where, text=text)


def query_vectors(collection: Searchable, vectors: np.ndarray) -> np.ndarray:
    """Embeddings `(N, D)` of queries by the model of a collection, truncated as its vectors are (Matryoshka)."""
    return truncate(vectors, collection.dimension) if collection.dimension < vectors.shape[1] else vectors


def search_exactly(
    collection: Collection,
    queries: np.ndarray,
    k: int,
    *,
    ids: Container[str] | None = None,
    device: str | torch.device = "cpu",
) -> SearchResult:
    """Rank a collection for queries with the exact ranker, in one pass over its vectors; pass all queries together.

    Args:
        collection: What to rank.
        queries: `(Q, D)`, L2-normalised.
        k: How many to return.
        ids: Rank these rows only.
        device: Where to rank.

    Raises:
        ValueError: None of the `ids` is in the collection; and as `exact_search`.
    """
    among = None
    if ids is not None:
        wanted = set(ids)
        among = np.array([place for place, id_ in enumerate(collection.ids) if id_ in wanted], dtype=np.int64)
        if not len(among):
            raise ValueError(f"none of the ids to search among is in the collection {collection.uri!r}")
    names: list[pa.Array] = []

    def blocks() -> Iterator[np.ndarray]:
        for own, vectors in collection.batches():
            names.append(own)
            yield vectors

    positions, scores = exact_search(queries, blocks(), k, among=among, device=device)
    found = pa.chunked_array(names, pa.string()).take(pa.array(positions.reshape(-1))).to_pylist()
    count = positions.shape[1]
    return SearchResult([found[start * count : (start + 1) * count] for start in range(len(positions))], scores)


def check_model(collection: Searchable, encoder: ItemEncoder) -> None:
    """Make sure that vectors of `encoder` can be compared with those of a collection.

    Raises:
        ValueError: It was made with another model, or of items with several images under another input type.
    """
    model = collection.model
    if model.fingerprint != encoder.fingerprint:
        raise ValueError(
            f"the collection was made with model {model}, these queries come from {encoder.identity}; "
            "their vectors cannot be compared: search with the first or encode the data with the second"
        )
    if model.input_type not in (None, encoder.input_type):
        raise ValueError(
            f"the collection has items with several images under input type {model.input_type}, these queries are "
            f"encoded under {encoder.input_type}; their vectors cannot be compared: search with "
            f"--input {model.input_type} (input_type) or encode the data with --input {encoder.input_type}"
        )


def recorded_model(collection: Searchable) -> str:
    """The local folder that a collection records, if it holds a model of this package.

    A collection may come from anywhere, so nothing else is loaded on its word.

    Raises:
        FileNotFoundError: The folder is gone.
        ValueError: Another model is recorded.
    """
    name = collection.model.name
    is_local = Path(name).is_absolute()
    if is_local and not Path(name).is_dir():
        raise FileNotFoundError(f"the model that made the collection is no longer at {name!r}: pass --model")
    if not is_local or not os.path.isfile(Path(name) / "config.json") or not is_own_model(name):
        raise ValueError(
            f"the collection was made with {name!r}, which is not a local model of this package: pass --model {name} "
            "to load it"
        )
    return name
