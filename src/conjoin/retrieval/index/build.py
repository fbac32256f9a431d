"""From a store to an index, from a folder to an index, from items to results.

To add a backend, write one file with a class that follows `Index` (see `exact.py`), and add one entry to `BACKENDS`.
"""

import os
from collections.abc import Callable, Collection, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from conjoin.retrieval.compact import COMPACT, truncate
from conjoin.retrieval.encoder import ItemEncoder, ModelIdentity
from conjoin.retrieval.index.base import Index, SearchResult, Selection, read_kind
from conjoin.retrieval.index.exact import ExactIndex
from conjoin.retrieval.index.faiss import FaissIndex, training_vectors
from conjoin.retrieval.index.lance import LanceIndex
from conjoin.retrieval.index.milvus import MilvusIndex
from conjoin.retrieval.store import EmbeddingStore


class Backend(NamedTuple):
    """One kind of index.

    Attributes:
        new: Makes an empty one; keyword arguments `model` and the options of the kind.
        load: Reads a saved one from its folder.
        train: Prepares an empty one with a sample `(N, D)` of the vectors, and their number; `None` if it needs none.
        is_exact: Whether it finds the nearest by construction.
    """

    new: Callable[..., Index]
    load: Callable[[Path], Index]
    train: Callable[[Any, np.ndarray, int], None] | None = None
    is_exact: bool = False


BACKENDS: dict[str, Backend] = {
    "exact": Backend(ExactIndex, ExactIndex.load, is_exact=True),
    "flat": Backend(partial(FaissIndex, "flat"), FaissIndex.load, is_exact=True),
    "hnsw": Backend(partial(FaissIndex, "hnsw"), FaissIndex.load),
    **{
        kind: Backend(partial(FaissIndex, kind), FaissIndex.load, FaissIndex.train)
        for kind in ("ivfpq", "ivfpqr", "rabitq", "binary")
    },
    "lancedb": Backend(LanceIndex, LanceIndex.load),
    "milvus": Backend(MilvusIndex, MilvusIndex.load),
}
INDEX_KINDS = tuple(BACKENDS)
_BYTES_AT_ONCE = 8 * 2**30
_DEPTH = 10
"""How many of the nearest the recall counts."""


def new_index(kind: str = "exact", model: ModelIdentity | None = None, **options: Any) -> Index:  # noqa: ANN401
    """An empty index.

    Args:
        kind: `"exact"`; one of FAISS: `"flat"`, `"hnsw"`, `"ivfpq"`, `"ivfpqr"`, `"rabitq"`, `"binary"`; `"lancedb"`;
            `"milvus"`.
        model: Which model makes the vectors.
        options: Further arguments of `ExactIndex`, `FaissIndex`, `LanceIndex` or `MilvusIndex`.

    Raises:
        ValueError: There is no such kind.
    """
    return _backend(kind).new(model=model, **options)


def build_index(
    store: str | Path | EmbeddingStore,
    kind: str = "exact",
    *,
    recall_queries: int = 100,
    **options: Any,  # noqa: ANN401
) -> Index:
    """Index the vectors of a store, shard by shard.

    Args:
        store: A store or its folder.
        kind: As for `new_index`.
        recall_queries: Vectors of the store that an approximate index is searched for, to measure its recall@10
            against the exact ranking (`Index.recall`); 0 measures nothing.
        options: As for `new_index`.
    """
    opened = store if isinstance(store, EmbeddingStore) else EmbeddingStore.open(store)
    if kind == "exact" and opened.dtype in COMPACT:
        options.setdefault("dtype", opened.dtype)
    index, backend = new_index(kind, opened.model, **options), BACKENDS[kind]
    if backend.train is not None:
        backend.train(index, opened.sample(training_vectors(len(opened)))[1], len(opened))
    index.follow(opened)
    if isinstance(index, LanceIndex):
        index.prepare()
    is_exact = backend.is_exact and options.get("dtype") in (None, "float32", opened.dtype)
    if recall_queries and not is_exact:
        index.recall = measure_recall(index, opened, recall_queries)
    return index


def measure_recall(index: Index, store: EmbeddingStore, queries: int = 100) -> float | None:
    """The mean share of the ten nearest of a vector, itself left out, that an index finds.

    Args:
        index: Of the store.
        store: What the exact ranking reads, once.
        queries: How many of its vectors to search for.

    Returns:
        The recall@10; None if there is one vector only.
    """
    ids, vectors = store.sample(queries)
    exact = search_store(store, vectors, _DEPTH + 1).ids
    found = index.search(vectors, _DEPTH + 1).ids
    shares = []
    for own, wanted, names in zip(ids, exact, found, strict=True):
        right = [name for name in wanted if name != own][:_DEPTH]
        if right:
            shares.append(len(set(right) & set([name for name in names if name != own][:_DEPTH])) / len(right))
    return float(np.mean(shares)) if shares else None


def default_kind(store: EmbeddingStore) -> str:
    """`"exact"`; beyond half of this machine's memory `"lancedb"`, where it is installed."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 2**34
    is_large = 4 * len(store) * store.dimension > memory / 2
    return "lancedb" if is_large and find_spec("lancedb") is not None else "exact"


def search_store(
    store: EmbeddingStore,
    queries: np.ndarray,
    k: int,
    *,
    ids: Collection[str] | None = None,
    device: str | torch.device = "cpu",
    rows_at_once: int | None = None,
) -> SearchResult:
    """Exact search of a store of any size: what `ExactIndex` would find, with a part of the vectors in memory.

    The store is read once, so pass all queries together.

    Args:
        store: What to search.
        queries: `(Q, D)`, L2-normalised.
        k: How many to return.
        ids: Search among these only.
        device: Where to search.
        rows_at_once: Vectors indexed at a time, in whole shards; as many as 8 GiB hold when None.

    Raises:
        ValueError: None of the `ids` is in the store; and as `ExactIndex.search`.
    """
    limit = rows_at_once or _BYTES_AT_ONCE // (4 * store.dimension)
    wanted = None if ids is None else set(ids)
    best: SearchResult | None = None
    part = ExactIndex(device=device)
    for names, vectors in store:
        kept = [place for place, name in enumerate(names) if wanted is None or name in wanted]
        if kept:
            chosen = vectors if len(kept) == len(names) else vectors[kept]
            part.add([names[place] for place in kept], chosen, copy=False)
        if len(part.ids) >= limit:
            best = _better(best, part.search(queries, k), k)
            part = ExactIndex(device=device)
    if part.ids:
        best = _better(best, part.search(queries, k), k)
    if best is None:
        raise ValueError(f"none of the ids to search among is in the store {str(store.directory)!r}")
    return best


def load_index(directory: str | Path) -> Index:
    """Read a saved index of any kind.

    Raises:
        FileNotFoundError: There is none in `directory`.
        ValueError: It is damaged or of an unknown kind.
    """
    return _backend(read_kind(directory)).load(Path(directory))


def search_items(
    index: Index, encoder: ItemEncoder, items: Sequence[Any], k: int = 10, *, where: str | None = None
) -> SearchResult:
    """Encode items and search an index for them.

    Args:
        index: What to search.
        encoder: Must hold the model that made the vectors of the index.
        items: The queries: strings, images, `{"text", "image"}` or chat messages.
        k: Results per query.
        where: Search only the rows that a condition holds for, such as `"category = 'shoes' and price < 50"`; see
            `conjoin.retrieval.filters`.

    Raises:
        ValueError: The index was built with another model; and as `select_rows`, `ItemEncoder.encode` and
            `Index.search`.
    """
    check_model(index, encoder)
    among = None if where is None else index.select(where)
    return index.search(query_vectors(index, encoder.encode(items)), k, among=among)


def query_vectors(index: Index, vectors: np.ndarray) -> np.ndarray:
    """Embeddings `(N, D)` of queries by the model of an index, truncated as the vectors of the index are."""
    if index.model is not None and index.dimension is not None and index.dimension < vectors.shape[1]:
        return truncate(vectors, index.dimension)
    return vectors


def select_rows(index: Index, where: str) -> Selection:
    """The rows that a condition holds for, as `Index.search` takes them.

    Args:
        index: Whose kept columns the condition names.
        where: As `conjoin.retrieval.filters` describes.

    Returns:
        Their positions `(M,)` in `index.ids`, ascending; of an index in a database the condition, which is evaluated
        in each search.

    Raises:
        ValueError: The condition cannot be read, names an unknown column, or compares values of different types; the
            index has no columns.
    """
    return index.select(where)


def rows_of(index: Index, ids: Sequence[str]) -> list[dict[str, Any]]:
    """What an index knows of rows, such as those that a search found.

    Args:
        index: Where they were found.
        ids: Their ids.

    Returns:
        One mapping for each, with those it has of `"text"`, `"image"` (its path) and the columns that were kept.

    Raises:
        ValueError: An id is not in the index.
    """
    return index.rows(ids)


def check_model(index: Index, encoder: ItemEncoder) -> None:
    """Make sure that vectors of `encoder` can be compared with those of `index`.

    Raises:
        ValueError: The index was built with another model, or of items with several images under another input type.
    """
    if index.model is not None and index.model.fingerprint != encoder.fingerprint:
        raise ValueError(
            f"the index was built with model {index.model}, these queries come from {encoder.identity}; "
            "their vectors cannot be compared: search with the first or encode the corpus with the second"
        )
    if index.model is not None and index.model.input_type not in (None, encoder.input_type):
        raise ValueError(
            f"the index has items with several images under input type {index.model.input_type}, these queries are "
            f"encoded under {encoder.input_type}; their vectors cannot be compared: search with "
            f"--input {index.model.input_type} (input_type) or encode the corpus with --input {encoder.input_type}"
        )


def _backend(kind: str) -> Backend:
    if kind not in BACKENDS:
        raise ValueError(f"unknown kind {kind!r} of index; expected one of {list(BACKENDS)}")
    return BACKENDS[kind]


def _better(first: SearchResult | None, second: SearchResult, k: int) -> SearchResult:
    """The `k` best of both, those of the first before equal ones of the second."""
    if first is None:
        return second
    scores = np.concatenate([first.scores, second.scores], axis=1)
    order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    names = [[*some, *others] for some, others in zip(first.ids, second.ids, strict=True)]
    ids = [[row[place] for place in places] for row, places in zip(names, order.tolist(), strict=True)]
    return SearchResult(ids, np.take_along_axis(scores, order, axis=1))
