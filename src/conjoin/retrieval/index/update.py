"""From a store that changed to an index that holds the same rows."""

from pathlib import Path

from conjoin.retrieval.index.base import Index
from conjoin.retrieval.store import EmbeddingStore
from conjoin.retrieval.store_update import StoreChanges


def update_index(index: Index, store: str | Path | EmbeddingStore) -> StoreChanges:
    """Make an index hold what a store holds now: add, replace and remove vectors, and take over its columns.

    Args:
        index: Built from an earlier state of the store.
        store: The store or its folder.

    Raises:
        ValueError: The index has vectors of another model or input type, or does not say what its vectors were made
            from; it stays as it was.
    """
    opened = store if isinstance(store, EmbeddingStore) else EmbeddingStore.open(store)
    if index.dimension is not None and index.dimension < opened.dimension:  # an index of truncated vectors
        opened = EmbeddingStore.open(opened.directory, opened.verify, index.dimension)
    if index.model is None or index.model.fingerprint != opened.model.fingerprint:
        raise ValueError(f"the index has vectors of model {index.model}, the store of {opened.model}; build it again")
    types = {index.model.input_type, opened.model.input_type} - {None}
    if len(types) > 1:
        raise ValueError(
            f"the index has vectors of input type {index.model.input_type!r}, the store of "
            f"{opened.model.input_type!r}; build it again"
        )
    changes = index.follow(opened)
    index.model = opened.model
    return changes
