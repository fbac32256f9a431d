"""Indexes whose rows lie in a database, none of them in memory: what LanceDB and Milvus have in common."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from conjoin.retrieval.encoder import ModelIdentity
from conjoin.retrieval.filters import Condition, parse_condition
from conjoin.retrieval.index.base import SearchResult, Selection, check_positions, check_search, check_vectors
from conjoin.retrieval.index.rows import check_ids
from conjoin.retrieval.row_table import RowPlace, RowTable
from conjoin.retrieval.store import EmbeddingStore
from conjoin.retrieval.store_update import StoreChanges

IDS_AT_ONCE = 5000
"""How many ids stand in one expression."""


class Rows(NamedTuple):
    """Some rows of an index.

    Attributes:
        ids: N ids.
        vectors: `(N, D)` float32.
        digests: `(N,)` int64, of all that is stored of each row; 0 if it is not known.
        columns: What is kept of them, if anything.
    """

    ids: Sequence[str]
    vectors: np.ndarray
    digests: np.ndarray
    columns: pa.Table | None = None


class Scanned(NamedTuple):
    """Some rows as they are stored: where they stand in the order added, their ids and their digests."""

    places: list[int]
    ids: list[str]
    digests: list[int]


class Hits(NamedTuple):
    """The rows found for a query, best first, and their scores."""

    ids: list[str]
    scores: np.ndarray


class TableIndex(ABC):
    """Rows of id, vector, digest and kept columns in a database; see `Index`.

    A digest stands for all that a row holds, so a row with another price is replaced by `follow`.

    Args:
        model: Which model made the vectors; recorded, and checked by `search_items`.
    """

    kind: str
    dimension: int | None

    def __init__(self, model: ModelIdentity | None = None) -> None:
        self.model = model
        self.recall: float | None = None

    @abstractmethod
    def __len__(self) -> int:
        """How many rows there are."""

    @abstractmethod
    def _schema(self) -> pa.Schema:
        """Names and types of the columns: `id` and the kept ones."""

    @abstractmethod
    def _scan(self) -> Iterator[Scanned]:
        """All rows, in parts and in any order."""

    @abstractmethod
    def _known(self, ids: Sequence[str]) -> set[str]:
        """Which of some ids there are."""

    @abstractmethod
    def _read(self, ids: Sequence[str]) -> dict[str, dict[str, Any]]:
        """The kept columns of the rows under some ids."""

    @abstractmethod
    def _check_columns(self, columns: pa.Schema) -> None:
        """Refuse kept columns of names or types that `_insert` does not take."""

    @abstractmethod
    def _insert(self, rows: Iterable[Rows], dimension: int, columns: pa.Schema) -> None:
        """Append rows, with kept columns of these names and types; none of the ids is there."""

    @abstractmethod
    def _delete(self, ids: Sequence[str]) -> None:
        """Remove the rows under some ids, all of which are there."""

    @abstractmethod
    def _among(self, ids: Sequence[str]) -> str:
        """The expression that holds for the rows under some ids."""

    @abstractmethod
    def _expression(self, condition: Condition) -> str:
        """A condition in the language of the database."""

    @abstractmethod
    def _nearest(self, queries: np.ndarray, k: int, where: str | None) -> list[Hits]:
        """The k nearest rows of each query among those that an expression holds for."""

    @property
    def ids(self) -> list[str]:
        """All ids in the order added; read from the database each time."""
        if not self.dimension:
            return []
        pairs = [pair for part in self._scan() for pair in zip(part.places, part.ids, strict=True)]
        return [id_ for _, id_ in sorted(pairs)]

    def some_ids(self, count: int) -> list[str]:
        """At most `count` ids, whichever the database gives first."""
        if not self.dimension:
            return []
        return list(islice(chain.from_iterable(part.ids for part in self._scan()), count))

    def add(self, ids: Sequence[str], embeddings: np.ndarray, *, copy: bool = True) -> None:
        """Append vectors.

        Args:
            ids: N new ids.
            embeddings: `(N, D)`, L2-normalised.
            copy: Unused: the database has a copy of its own.

        Raises:
            ValueError: As `ExactIndex.add`.
        """
        vectors = check_vectors(embeddings, self.dimension, ids)
        check_ids(ids, set())
        check_ids(ids, self._known(ids) if self.dimension else set())
        self._insert([_without_columns(ids, vectors)], vectors.shape[1], pa.schema([]))

    def remove(self, ids: Sequence[str]) -> None:
        """Remove vectors.

        Args:
            ids: Their ids.

        Raises:
            ValueError: An id is not in the index, which stays as it was.
        """
        known = self._known(ids) if self.dimension else set()
        if missing := [id_ for id_ in ids if id_ not in known]:
            raise ValueError(f"the index has no row {missing[0]!r}; nothing was removed")
        if known:
            self._delete(list(dict.fromkeys(ids)))

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
        known = self._known(ids) if self.dimension else set()
        self.remove([id_ for id_ in ids if id_ in known])
        self._insert([_without_columns(ids, vectors)], vectors.shape[1], pa.schema([]))

    def follow(self, store: EmbeddingStore) -> StoreChanges:
        """Make the index hold what a store holds now; its rows are compared by their digests."""
        changes, places = StoreChanges(), RowTable()
        for number in range(store.shards):
            pairs = zip(store.read_ids(number), store.contents(number).tolist(), strict=True)
            places.put((id_, RowPlace(number, place, content, 0)) for place, (id_, content) in enumerate(pairs))
        gone: list[str] = []
        replaced = 0
        for id_, digest in self._pairs():
            found = places.get(id_)
            if found is not None and found.content == digest:
                places.mark(id_)
                changes.unchanged += 1
            else:
                gone.append(id_)
                replaced += found is not None
        columns = pa.schema([]) if store.kept is None else store.kept.schema()
        self._check_columns(columns)
        if gone:
            self._delete(gone)
        new: dict[int, list[int]] = {}
        for shard, place in places.unmarked():
            new.setdefault(shard, []).append(place)
        added = sum(map(len, new.values())) - replaced
        if new or not self.dimension:
            self._insert(_read_new(store, new), store.dimension, columns)
        return replace(changes, added=added, replaced=replaced, removed=len(gone) - replaced)

    def _pairs(self) -> Iterator[tuple[str, int]]:
        if self.dimension:
            for part in self._scan():
                yield from zip(part.ids, part.digests, strict=True)

    def select(self, where: str) -> Condition:
        """Read a condition and make sure that it can be evaluated; the database evaluates it in each search.

        Raises:
            ValueError: The condition cannot be read, names an unknown column, or compares values of different types.
        """
        condition = parse_condition(where)
        condition.check(self._schema())
        return condition

    def rows(self, ids: Sequence[str]) -> list[dict[str, Any]]:
        """What the index knows of the rows under some ids.

        Raises:
            ValueError: An id is not in the index.
        """
        found = self._read(ids) if len(ids) and self.dimension else {}
        if missing := [id_ for id_ in ids if id_ not in found]:
            raise ValueError(f"the index has no row {missing[0]!r}")
        kept = ({name: value for name, value in found[id_].items() if value is not None} for id_ in ids)
        return [{name: row[name] for name in (*_first(row), *sorted(row.keys() - {*_first(row)}))} for row in kept]

    def search(self, queries: np.ndarray, k: int, *, among: Selection | None = None) -> SearchResult:
        """Rank the corpus for each query.

        Args:
            queries: `(Q, D)`, L2-normalised.
            k: How many to return; the whole corpus if it is larger.
            among: The rows that a condition of `select` holds for, or positions `(M,)` in `ids`; all when None.

        Raises:
            ValueError: As `ExactIndex.search`.
        """
        vectors = check_search(self.dimension, queries, k)
        if isinstance(among, Condition):
            where = self._expression(among)
        elif among is not None:
            ids, positions = self.ids, check_positions(len(self), among)
            where = self._among([ids[place] for place in positions])
        else:
            where = None
        is_empty = not len(vectors) or (isinstance(among, np.ndarray) and not len(among))
        hits = [] if is_empty else self._nearest(vectors, k, where)
        hits = hits or [Hits([], np.empty(0, dtype=np.float32))] * len(vectors)
        scores = np.full((len(vectors), max((len(hit.ids) for hit in hits), default=0)), -np.inf, dtype=np.float32)
        for row, hit in zip(scores, hits, strict=True):
            row[: len(hit.ids)] = hit.scores
        return SearchResult([hit.ids for hit in hits], scores)


def in_parts(ids: Sequence[str]) -> Iterator[Sequence[str]]:
    """Ids, as many at a time as stand in one expression."""
    return (ids[start : start + IDS_AT_ONCE] for start in range(0, len(ids), IDS_AT_ONCE))


def _without_columns(ids: Sequence[str], vectors: np.ndarray) -> Rows:
    return Rows(ids, vectors, np.zeros(len(ids), dtype=np.int64))


def _read_new(store: EmbeddingStore, new: dict[int, list[int]]) -> Iterator[Rows]:
    """The rows at some places of the shards of a store."""
    for number in sorted(new):
        ids, vectors = store.read(number)
        places = sorted(new[number])
        columns, digests = store.columns(number), store.contents(number)[places]
        chosen = check_vectors(vectors[places], None, [ids[place] for place in places])
        yield Rows(
            [ids[place] for place in places],
            chosen,
            digests,
            None if columns is None else columns.take(pa.array(places)).drop_columns("id"),
        )


def _first(row: dict[str, Any]) -> list[str]:
    """The columns that stand first in results."""
    return [name for name in ("text", "image") if name in row]
