"""From a store to an index, from a folder to an index, from items to results.

To add a backend, write one file with a class that follows `Index` (see `exact.py`), and add one entry to `BACKENDS`.
"""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from conjoin.retrieval.encoder import ItemEncoder, ModelIdentity
from conjoin.retrieval.filters import parse_condition
from conjoin.retrieval.index.base import Index, SearchResult, read_kind
from conjoin.retrieval.index.exact import ExactIndex
from conjoin.retrieval.index.faiss import FaissIndex
from conjoin.retrieval.store import EmbeddingStore


class Backend(NamedTuple):
    """One kind of index.

    Attributes:
        new: Makes an empty one; keyword arguments `model` and the options of the kind.
        load: Reads a saved one from its folder.
        train: Prepares an empty one with a sample `(N, D)` of the vectors; `None` if the kind needs none.
    """

    new: Callable[..., Index]
    load: Callable[[Path], Index]
    train: Callable[[Any, np.ndarray], None] | None = None


BACKENDS: dict[str, Backend] = {
    "exact": Backend(ExactIndex, ExactIndex.load),
    "flat": Backend(partial(FaissIndex, "flat"), FaissIndex.load),
    "hnsw": Backend(partial(FaissIndex, "hnsw"), FaissIndex.load),
    "ivfpq": Backend(partial(FaissIndex, "ivfpq"), FaissIndex.load, FaissIndex.train),
}
INDEX_KINDS = tuple(BACKENDS)
_TRAINING_VECTORS = 262_144
_BYTES_AT_ONCE = 8 * 2**30


def new_index(kind: str = "exact", model: ModelIdentity | None = None, **options: Any) -> Index:  # noqa: ANN401
    """An empty index.

    Args:
        kind: `"exact"`, or one of FAISS: `"flat"`, `"hnsw"`, `"ivfpq"`.
        model: Which model makes the vectors.
        options: Further arguments of `ExactIndex` or `FaissIndex`.

    Raises:
        ValueError: There is no such kind.
    """
    return _backend(kind).new(model=model, **options)


def build_index(store: str | Path | EmbeddingStore, kind: str = "exact", **options: Any) -> Index:  # noqa: ANN401
    """Index the vectors of a store, shard by shard.

    Args:
        store: A store or its folder.
        kind: As for `new_index`.
        options: As for `new_index`.
    """
    opened = store if isinstance(store, EmbeddingStore) else EmbeddingStore.open(store)
    index = new_index(kind, opened.model, **options)
    train = BACKENDS[kind].train
    if train is not None:
        train(index, _training_sample(opened))
    for ids, embeddings in opened:
        index.add(ids, embeddings, copy=False)
    index.digests = np.concatenate([opened.digests(number) for number in range(opened.shards)])
    index.kept = opened.kept
    return index


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
    among = None if where is None else select_rows(index, where)
    return index.search(encoder.encode(items), k, among=among)


def select_rows(index: Index, where: str) -> np.ndarray:
    """The positions `(M,)` in `index.ids` of the rows that a condition holds for, ascending.

    Args:
        index: Whose kept columns the condition names.
        where: As `conjoin.retrieval.filters` describes.

    Raises:
        ValueError: The condition cannot be read, names an unknown column, or compares values of different types; the
            index has no columns.
    """
    condition = parse_condition(where)
    if index.kept is None:
        raise ValueError(f"the index keeps no columns, so it cannot be filtered by {where!r}; encode and index again")
    return condition.select(index.kept)


def rows_of(index: Index, ids: Sequence[str]) -> list[dict[str, Any]]:
    """What an index knows of rows, such as those that a search found.

    Args:
        index: Where they were found.
        ids: Their ids.

    Returns:
        One mapping for each, with those it has of `"text"`, `"image"` (its path) and the columns that were kept.
    """
    if index.kept is None:
        return [{} for _ in ids]
    wanted = set(ids)
    positions = {id_: position for position, id_ in enumerate(index.ids) if id_ in wanted}
    return index.kept.take([positions[id_] for id_ in ids])


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


def _training_sample(store: EmbeddingStore) -> np.ndarray:
    """Every n-th vector of the store, `(N, D)` float32, at most `_TRAINING_VECTORS` of them."""
    step = -(-len(store) // _TRAINING_VECTORS)
    return np.concatenate([np.asarray(embeddings[::step], dtype=np.float32) for _, embeddings in store])
