"""The rows of an index, which every backend keeps the same way: their ids, digests and kept columns."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from conjoin.retrieval.index.base import SavedIndex, check_vectors
from conjoin.retrieval.kept_rows import KeptRows


class IndexRows(ABC):
    """Ids in the order added, what their vectors were made from, and what is kept of them."""

    def __init__(self) -> None:
        self.ids: list[str] = []
        self.dimension: int | None = None
        self.kept: KeptRows | None = None
        self.digests = np.empty(0, dtype=np.int64)
        self._known: set[str] = set()

    @abstractmethod
    def add(self, ids: Sequence[str], embeddings: np.ndarray, *, copy: bool = True) -> None:
        """Append vectors."""

    @abstractmethod
    def _remove(self, places: np.ndarray, left: np.ndarray) -> None:
        """Remove the vectors at the positions `places`; those at the positions `left` stay."""

    def remove(self, ids: Sequence[str]) -> None:
        """Remove vectors.

        Args:
            ids: Their ids.

        Raises:
            ValueError: An id is not in the index, which stays as it was.
        """
        gone = set(ids)
        if missing := [id_ for id_ in ids if id_ not in self._known]:
            raise ValueError(f"the index has no row {missing[0]!r}; nothing was removed")
        if not gone:
            return
        is_gone = np.fromiter((id_ in gone for id_ in self.ids), dtype=bool, count=len(self.ids))
        left = np.flatnonzero(~is_gone)
        self._remove(np.flatnonzero(is_gone), left)
        self.ids = [self.ids[place] for place in left]
        self.digests = self.digests[left]
        self._known -= gone
        if self.kept is not None:
            self.kept = self.kept.choose(left)

    def update(self, ids: Sequence[str], embeddings: np.ndarray) -> None:
        """Replace the vectors under the ids that are in the index, and append the others; all come last then.

        What the index keeps of the rows that it replaces is dropped; `update_index` takes it from a store.

        Args:
            ids: N ids.
            embeddings: `(N, D)`, L2-normalised.

        Raises:
            ValueError: As `add`, except that the ids may be in the index, which stays as it was.
        """
        vectors = check_vectors(embeddings, self.dimension, ids)
        check_ids(ids, set())
        self.remove([id_ for id_ in ids if id_ in self._known])
        self.add(ids, vectors)

    def _add_ids(self, new: Sequence[str], digests: np.ndarray | None = None) -> None:
        """Append ids if all of them are new; otherwise change nothing and raise ValueError."""
        check_ids(new, self._known)
        self._known.update(new)
        self.ids.extend(new)
        added = np.zeros(len(new), dtype=np.int64) if digests is None else digests
        self.digests = np.concatenate([self.digests, added])

    def _load_rows(self, saved: SavedIndex) -> None:
        """Take over the rows of a saved index."""
        self.kept = saved.kept
        self._add_ids(saved.ids, saved.rows.get("digests"))


def check_ids(new: Sequence[str], known: set[str]) -> None:
    """Make sure that ids are strings and unique.

    Raises:
        ValueError: The message names the one that is not.
    """
    added: set[str] = set()
    for id_ in new:
        if not isinstance(id_, str):
            raise ValueError(f"ids must be strings, got {id_!r} ({type(id_).__name__})")
        if id_ in known or id_ in added:
            raise ValueError(f"the id {id_!r} occurs twice; ids must be unique")
        added.add(id_)
