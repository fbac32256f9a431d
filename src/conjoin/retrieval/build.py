"""From a store to an index, from a folder to an index, from items to results."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from conjoin.retrieval.embedding_store import EmbeddingStore
from conjoin.retrieval.encoder import ItemEncoder, ModelIdentity
from conjoin.retrieval.faiss_index import KINDS as FAISS_KINDS
from conjoin.retrieval.faiss_index import FaissIndex
from conjoin.retrieval.index import ExactIndex, Index, SearchResult, read_kind

INDEX_KINDS = (ExactIndex.kind, *FAISS_KINDS)
_TRAINING_VECTORS = 262_144


def new_index(kind: str = "exact", model: ModelIdentity | None = None, **options: Any) -> Index:  # noqa: ANN401
    """An empty index.

    Args:
        kind: `"exact"`, or one of FAISS: `"flat"`, `"hnsw"`, `"ivfpq"`.
        model: Which model makes the vectors.
        options: Further arguments of `ExactIndex` or `FaissIndex`.
    """
    if kind not in INDEX_KINDS:
        raise ValueError(f"unknown kind {kind!r} of index; expected one of {list(INDEX_KINDS)}")
    return ExactIndex(model, **options) if kind == ExactIndex.kind else FaissIndex(kind, model, **options)


def build_index(store: str | Path | EmbeddingStore, kind: str = "exact", **options: Any) -> Index:  # noqa: ANN401
    """Index the vectors of a store, shard by shard.

    Args:
        store: A store or its folder.
        kind: As for `new_index`.
        options: As for `new_index`.
    """
    opened = store if isinstance(store, EmbeddingStore) else EmbeddingStore.open(store)
    index = new_index(kind, opened.model, **options)
    if isinstance(index, FaissIndex) and index.kind == "ivfpq":
        index.train(_training_sample(opened))
    for ids, embeddings in opened:
        index.add(ids, embeddings)
    return index


def load_index(directory: str | Path) -> Index:
    """Read a saved index of any kind.

    Raises:
        FileNotFoundError: There is none in `directory`.
        ValueError: It is damaged or of an unknown kind.
    """
    directory = Path(directory)
    return ExactIndex.load(directory) if read_kind(directory) == ExactIndex.kind else FaissIndex.load(directory)


def search_items(index: Index, encoder: ItemEncoder, items: Sequence[Any], k: int = 10) -> SearchResult:
    """Encode items and search an index for them.

    Args:
        index: What to search.
        encoder: Must hold the model that made the vectors of the index.
        items: The queries: strings, images, `{"text", "image"}` or chat messages.
        k: Results per query.

    Raises:
        ValueError: The index was built with another model; and as `ItemEncoder.encode` and `Index.search`.
    """
    check_model(index, encoder)
    return index.search(encoder.encode(items), k)


def check_model(index: Index, encoder: ItemEncoder) -> None:
    """Make sure that vectors of `encoder` can be compared with those of `index`.

    Raises:
        ValueError: The index was built with another model.
    """
    if index.model is not None and index.model.fingerprint != encoder.fingerprint:
        raise ValueError(
            f"the index was built with model {index.model}, these queries come from {encoder.identity}; "
            "their vectors cannot be compared: search with the first or encode the corpus with the second"
        )


def _training_sample(store: EmbeddingStore) -> np.ndarray:
    """Every n-th vector of the store, `(N, D)` float32, at most `_TRAINING_VECTORS` of them."""
    step = -(-len(store) // _TRAINING_VECTORS)
    return np.concatenate([np.asarray(embeddings[::step], dtype=np.float32) for _, embeddings in store])
