"""The rows of an index in memory, which its backends keep the same way: their ids, digests and kept columns."""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save

from conjoin.retrieval.encoder import ModelIdentity
from conjoin.retrieval.filters import parse_condition
from conjoin.retrieval.index.base import SavedIndex, Selection, check_positions, check_vectors, save_index
from conjoin.retrieval.kept_rows import KeptRows
from conjoin.retrieval.store import EmbeddingStore
from conjoin.retrieval.store_update import StoreChanges
from conjoin.storage import Manifest

IDS, VECTORS = 0, 1
"""The numbers of the first files of a saved index; `kept` and `rows` follow, if it has them."""


class IndexRows(ABC):
    """Ids in the order added, what their vectors were made from, and what is kept of them.

    Attributes:
        kept: What the store keeps of the rows beside their vectors, in the order of `ids`, if known.
        digests: What each vector was made from `(N,)` int64, 0 where it is not known; equal digests, equal vectors.
    """

    kind: str

    def __init__(self, model: ModelIdentity | None = None) -> None:
        self.ids: list[str] = []
        self.dimension: int | None = None
        self.model = model
        self.recall: float | None = None
        self.kept: KeptRows | None = None
        self.digests = np.empty(0, dtype=np.int64)
        self._saved: tuple[Path, Manifest] | None = None  # where it was loaded from or saved, and the state of then

    def __len__(self) -> int:
        return len(self.ids)

    @cached_property
    def _known(self) -> set[str]:
        """The ids, to look up; an index that is only searched does without."""
        return set(self.ids)

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
        self._known.difference_update(gone)
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

    def follow(self, store: EmbeddingStore) -> StoreChanges:
        """Make the index hold what a store holds now: add, replace and remove vectors, and take over its columns.

        Raises:
            ValueError: The index does not say what its vectors were made from; it stays as it was.
        """
        if len(self.ids) and not self.digests.any():
            raise ValueError("the index does not say what its vectors were made from; build it again")
        before = dict(zip(self.ids, self.digests.tolist(), strict=True))
        gone, replaced = set(before), []
        order: dict[str, int] = {}
        new: list[list[int]] = []
        for number in range(store.shards if before else 0):
            ids, digests = store.read_ids(number), store.digests(number).tolist()
            gone.difference_update(ids)
            changed = [place for place, id_ in enumerate(ids) if before.get(id_) != digests[place]]
            replaced += [ids[place] for place in changed if ids[place] in before]
            new.append(changed)
            order |= dict(zip(ids, range(len(order), len(order) + len(ids)), strict=True))
        self.remove([*gone, *replaced])
        for number in range(store.shards):
            if not before or new[number]:
                self._add_shard(store, number, new[number] if before else None)
        self.kept = store.kept
        if before and self.kept is not None:
            self.kept = self.kept.choose(np.array([order[id_] for id_ in self.ids]))
        left = len(before) - len(gone) - len(replaced)
        return StoreChanges(len(self.ids) - left - len(replaced), len(replaced), len(gone), left)

    def _add_shard(self, store: EmbeddingStore, number: int, places: list[int] | None) -> None:
        """Add the rows at some places of a shard, or all of them, whose vectors may then stay in their file."""
        (ids, vectors), digests = store.read(number), store.digests(number)
        if places is not None:
            ids, vectors, digests = [ids[place] for place in places], vectors[places], digests[places]
        self.add(ids, vectors, copy=False)
        self.digests[len(self.ids) - len(ids) :] = digests

    def select(self, where: str) -> np.ndarray:
        """The positions `(M,)` in `ids` of the rows that a condition holds for, ascending.

        Raises:
            ValueError: The condition cannot be read, names an unknown column, or compares values of different types;
                the index has no columns.
        """
        condition = parse_condition(where)
        if self.kept is None:
            raise ValueError(
                f"the index keeps no columns, so it cannot be filtered by {where!r}; encode and index again"
            )
        return condition.select(self.kept)

    def rows(self, ids: Sequence[str]) -> list[dict[str, Any]]:
        """What the index knows of the rows under some ids.

        Raises:
            ValueError: An id is not in the index.
        """
        wanted = set(ids)
        positions = {id_: position for position, id_ in enumerate(self.ids) if id_ in wanted}
        if missing := [id_ for id_ in ids if id_ not in positions]:
            raise ValueError(f"the index has no row {missing[0]!r}")
        if self.kept is None:
            return [{} for _ in ids]
        return self.kept.take([positions[id_] for id_ in ids])

    def _positions(self, among: Selection) -> np.ndarray:
        """Positions `(M,)` of rows, ascending."""
        return check_positions(len(self), among if isinstance(among, np.ndarray) else self.select(among.text))

    def _save(
        self,
        directory: str | Path,
        file: str,
        write: Callable[[Path], object],
        options: Mapping[str, Any] | None = None,
        rows: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        """Save the index with its vectors in `file`, which `write` makes, and with further arrays of its rows.

        Raises:
            ValueError: Another process changed the index there since this one was loaded or saved.
        """
        files: dict[str, Callable[[Path], object]] = {
            "ids.json": lambda path: path.write_text(json.dumps(self.ids), encoding="ascii"),
            file: write,
        }
        if self.kept is not None:
            files["kept.parquet"] = self.kept.write
        arrays = {**({"digests": self.digests} if self.digests.any() else {}), **(rows or {})}
        if arrays:
            files["rows.safetensors"] = lambda path: path.write_bytes(save(arrays))
        folder = Path(directory).resolve()
        replaces = self._saved[1] if self._saved is not None and self._saved[0] == folder else None
        self._saved = folder, save_index(self, directory, files, options, replaces=replaces)

    def _add_ids(self, new: Sequence[str]) -> None:
        """Append ids if all of them are new; otherwise change nothing and raise ValueError."""
        check_ids(new, self._known)
        self._known.update(new)
        self.ids.extend(new)
        self.digests = np.concatenate([self.digests, np.zeros(len(new), dtype=np.int64)])

    def _load_rows(self, saved: SavedIndex) -> dict[str, np.ndarray]:
        """Take over the rows of a saved index; returns the further arrays that it was saved with."""
        self.recall = saved.recall
        self._saved = saved.folder.folder.resolve(), saved.folder.manifest
        numbers = saved.files()
        if "kept" in numbers:
            self.kept = KeptRows.open(saved.folder.path(numbers["kept"]))
        rows = load_file(saved.folder.path(numbers["rows"])) if "rows" in numbers else {}
        self.ids = json.loads(saved.folder.path(IDS).read_text(encoding="ascii"))
        self.digests = rows.pop("digests", np.zeros(len(self.ids), dtype=np.int64))
        return rows


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
