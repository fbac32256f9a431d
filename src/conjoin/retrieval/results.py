"""What can be searched, and what a search gives: a ranking of ids, and the hits made of it, with their rows."""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa

from conjoin.retrieval.encoder import ModelIdentity
from conjoin.retrieval.notebook import Described, table_with_pictures
from conjoin.retrieval.pictures import picture_folders

_MOST_SHOWN = 50
"""Hits that a notebook shows."""


@dataclass(frozen=True)
class Hit:
    """A row that was found.

    Attributes:
        id: Its id.
        score: What it is ranked by, higher is better; not a number where nothing was searched for.
        row: Its text, the path of its image (several: a list) and its kept columns, as far as it has them.
    """

    id: str
    score: float
    row: dict[str, Any]


class Hits(list[list[Hit]]):
    """The hits of each query, best first.

    Args:
        queries: The hits.
        collection: Where they were found, whose pictures a notebook shows.
    """

    def __init__(self, queries: Iterable[list[Hit]] = (), collection: "Searchable | None" = None) -> None:
        super().__init__(queries)
        self.collection = collection

    @property
    def ids(self) -> list[list[str]]:
        """Their ids."""
        return [[hit.id for hit in hits] for hits in self]

    def to_pandas(self) -> pd.DataFrame:
        """A row for each hit: `query` and `rank`, from 1, `id`, `score`, and the columns of its row of other names."""
        return pd.DataFrame(self._rows()) if any(self) else pd.DataFrame(columns=["query", "rank", "id", "score"])

    def _rows(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        for number, hits in enumerate(self, start=1):
            for rank, hit in enumerate(hits, start=1):
                own = {"query": number, "rank": rank, "id": hit.id, "score": hit.score}
                rows.append(own | {name: value for name, value in hit.row.items() if name not in own})
        return rows

    def _repr_html_(self) -> str:
        rows = self._rows()[:_MOST_SHOWN]
        if self.collection is None:
            return table_with_pictures(rows, ())
        known = self.collection.rows([row["id"] for row in rows], pictures=True)
        shown = [row | {"picture": other.get("picture")} for row, other in zip(rows, known, strict=True)]
        return table_with_pictures(shown, picture_folders(self.collection.uri))


class Ranking(NamedTuple):
    """The ids of the best rows of each query, best first.

    Attributes:
        ids: One list per query, at most k long.
        scores: `(Q, K)` float32, K the length of the longest list; `-inf` where a list is shorter.
    """

    ids: list[list[str]]
    scores: np.ndarray

    @classmethod
    def join(cls, queries: Iterable[tuple[list[str], np.ndarray]]) -> "Ranking":
        """Join the ids and the scores of several queries."""
        pairs = list(queries)
        scores = np.full((len(pairs), max((len(ids) for ids, _ in pairs), default=0)), -np.inf, dtype=np.float32)
        for row, (ids, values) in zip(scores, pairs, strict=True):
            row[: len(ids)] = values
        return cls([ids for ids, _ in pairs], scores)

    @classmethod
    def at(cls, ids: pa.Array | pa.ChunkedArray, positions: np.ndarray, scores: np.ndarray) -> "Ranking":
        """The ids at the positions `(Q, K)` that `exact_search` gave, with its scores."""
        names, count = ids.take(pa.array(positions.reshape(-1))).to_pylist(), positions.shape[1]
        return cls([names[row * count : (row + 1) * count] for row in range(len(positions))], scores)

    def queries(self, start: int = 0) -> list[tuple[list[str], np.ndarray]]:
        """The ids and the scores of each query, without those before `start`."""
        return [(ids[start:], row[start : len(ids)]) for ids, row in zip(self.ids, self.scores, strict=True)]


def by_score(ids: Sequence[str], scores: np.ndarray) -> tuple[list[str], np.ndarray]:
    """Sort ids by falling scores `(N,)`; equal ones by the ids."""
    pairs = sorted(zip((-scores).tolist(), ids, strict=True))
    return [id_ for _, id_ in pairs], np.array([-score for score, _ in pairs], dtype=np.float32)


class Searchable(Described):
    """A collection, wherever its rows are.

    Attributes:
        uri: Its address, as given.
        schema: Names and types of the columns that a condition may name.
        dimension: Length of the vectors.
        has_words: Whether the default ranking also compares words.
        rank: Ranks the rows for queries; see `Collection.rank`.
        rows: Reads the rows of ids; see `Collection.rows`.
    """

    uri: str
    schema: pa.Schema
    dimension: int
    has_words: bool
    rank: Callable[..., Ranking]
    rows: Callable[..., list[dict[str, Any]]]

    @abstractmethod
    def __len__(self) -> int:
        """How many rows there are."""

    def facts(self) -> dict[str, Any]:
        """Address, rows, dimension, model and columns."""
        facts = {"uri": self.uri, "rows": len(self), "dimension": self.dimension, "model": self.model.name}
        return facts | {"columns": self.schema.names}

    @property
    @abstractmethod
    def model(self) -> ModelIdentity:
        """The model that made the vectors, and its input type if there are items with several images."""

    def search(self, vectors: np.ndarray | None, k: int = 10, *, pictures: bool = False, **how: Any) -> Hits:  # noqa: ANN401
        """Find the rows that are most similar to each query: `rank`, and their rows.

        Args:
            vectors: As for `rank`.
            k: As for `rank`.
            pictures: As for `rows`.
            how: Further arguments of `rank`.
        """
        return self.hits(self.rank(vectors, k, **how), pictures=pictures)

    def hits(self, ranking: Ranking, offset: int = 0, pictures: bool = False) -> Hits:
        """Read the rows of a ranking, all together, without the first `offset` of each query."""
        queries = ranking.queries(offset)
        names = list(dict.fromkeys(id_ for ids, _ in queries for id_ in ids))
        rows = dict(zip(names, self.rows(names, pictures), strict=True))
        for row in rows.values():
            del row["id"]
        found = ([Hit(id_, score, rows[id_]) for id_, score in zip(ids, scores.tolist(), strict=True)]
                 for ids, scores in queries)  # fmt: skip
        return Hits(found, self)
