"""From a store that changed to an index that holds the same rows."""

from pathlib import Path

import numpy as np

from conjoin.retrieval.index.base import Index
from conjoin.retrieval.store import EmbeddingStore
from conjoin.retrieval.store_update import StoreChanges


def update_index(index: Index, store: str | Path | EmbeddingStore) -> StoreChanges:
    """Make an index hold what a store holds now: add, replace and remove vectors, and take over its columns.

    Args:
        index: Built from an earlier state of the store.
        store: The store or its folder.

    Raises:
        ValueError: The index has vectors of another model, or does not say what its vectors were made from; it stays
            as it was.
    """
    opened = store if isinstance(store, EmbeddingStore) else EmbeddingStore.open(store)
    if index.model is None or index.model.fingerprint != opened.model.fingerprint:
        raise ValueError(f"the index has vectors of model {index.model}, the store of {opened.model}; build it again")
    if len(index.ids) and not index.digests.any():
        raise ValueError("the index does not say what its vectors were made from; build it again")
    before = dict(zip(index.ids, index.digests.tolist(), strict=True))
    gone, replaced = set(before), []
    order: dict[str, int] = {}
    new: list[list[int]] = []
    for number in range(opened.shards):
        ids, digests = opened.read(number)[0], opened.digests(number).tolist()
        gone.difference_update(ids)
        changed = [place for place, id_ in enumerate(ids) if before.get(id_) != digests[place]]
        replaced += [ids[place] for place in changed if ids[place] in before]
        new.append(changed)
        order |= dict(zip(ids, range(len(order), len(order) + len(ids)), strict=True))
    index.remove([*gone, *replaced])
    for number, changed in enumerate(new):
        if changed:
            ids, vectors = opened.read(number)
            index.add([ids[place] for place in changed], vectors[changed])
            index.digests[-len(changed) :] = opened.digests(number)[changed]
    index.model = opened.model
    index.kept = None if opened.kept is None else opened.kept.choose(np.array([order[id_] for id_ in index.ids]))
    added = sum(map(len, new)) - len(replaced)
    return StoreChanges(added, len(replaced), len(gone), len(before) - len(gone) - len(replaced))
