"""What an anchor's positives are, how similar they are to it, and the items that a reranker compares."""

import hashlib
import json
from collections import defaultdict
from typing import Any, NamedTuple, Self

import datasets
import numpy as np

from conjoin.data.pair_sources import AnyDataset
from conjoin.data.row_images import row_item
from conjoin.retrieval.collection import Collection
from conjoin.retrieval.mining.miners import view_rows
from conjoin.storage import text_digest

_PAIRS_AT_ONCE = 8192


class Embedded(NamedTuple):
    """The embeddings of a view of all rows.

    Attributes:
        ids: Of the N rows, in their order.
        vectors: `(N, D)`.
        digest: Equal for equal ids and vectors.
    """

    ids: list[str]
    vectors: np.ndarray
    digest: str

    @classmethod
    def load(cls, collection: Collection, rows: AnyDataset) -> Self:
        """Read the embeddings of some rows."""
        ids = [str(row["id"]) for row in rows.select_columns("id")]
        vectors = collection.vectors(ids)
        return cls(ids, vectors, hashlib.sha256(repr(ids).encode() + vectors.tobytes()).hexdigest())


class Excluded(NamedTuple):
    """Which candidates are no negatives of which anchors, by name."""

    of_candidates: dict[str, str]
    of_anchors: dict[str, str]

    def excludes(self, anchor: str, candidate: str) -> bool:
        """Whether the candidate is the anchor itself or of its group."""
        group = self.of_anchors.get(anchor)
        return candidate == anchor or (group is not None and group == self.of_candidates.get(candidate))

    def digest(self) -> str:
        """A checksum of the groups."""
        return text_digest(json.dumps([sorted(groups.items()) for groups in self]))


class Positives:
    """The candidates that are right for each anchor: the one of its id, and those of its group.

    Args:
        corpus: The embeddings of the candidates.
        excluded: The groups.
        is_same: Whether the candidate of an anchor's id is the anchor itself, in the same view, so no positive.
        miner: Its name, for messages.
    """

    def __init__(self, corpus: Embedded, excluded: Excluded, is_same: bool, miner: str) -> None:
        self.corpus, self.excluded, self.is_same, self.miner = corpus, excluded, is_same, miner
        self._indices = {id_: index for index, id_ in enumerate(corpus.ids)}
        self._members: dict[str, list[str]] = defaultdict(list)
        for id_, group in excluded.of_candidates.items():
            self._members[group].append(id_)

    def indices(self, anchor: str) -> list[int]:
        """Return the indices of an anchor's positives in the corpus.

        Raises:
            ValueError: It has none.
        """
        members = self._members.get(self.excluded.of_anchors.get(anchor, ""), [])
        names = dict.fromkeys([anchor, *members])
        indices = [
            self._indices[name] for name in names if name in self._indices and not (self.is_same and name == anchor)
        ]
        if not indices:
            raise ValueError(
                f"miner {self.miner!r} has a margin, but the anchor {anchor!r} has no positive among the candidates"
                + (" other than itself" if self.is_same else "")
                + ": compare another view, or name a group column"
            )
        return indices

    def scores(self, ids: list[str], vectors: np.ndarray) -> list[float]:
        """Return the least cosine of each of N anchors, with vectors `(N, D)`, to one of its positives."""
        indices = [self.indices(id_) for id_ in ids]
        rows = np.repeat(np.arange(len(ids)), [len(some) for some in indices])
        different, numbers = np.unique([index for some in indices for index in some], return_inverse=True)
        anchors, positives = np.asarray(vectors, dtype=np.float32), self.corpus.vectors[different].astype(np.float32)
        least = np.full(len(ids), np.inf)
        for start in range(0, len(rows), _PAIRS_AT_ONCE):
            some = slice(start, start + _PAIRS_AT_ONCE)
            np.minimum.at(least, rows[some], np.einsum("nd,nd->n", anchors[rows[some]], positives[numbers[some]]))
        return least.tolist()


class ViewItems(NamedTuple):
    """The rows of anchors and candidates as items.

    Attributes:
        anchors: In the order of their embeddings.
        corpus: Likewise.
    """

    anchors: AnyDataset
    corpus: AnyDataset

    def anchor(self, view: str, index: int) -> Any:  # noqa: ANN401 - an item
        """Return a view of the anchor at an index."""
        return _item(self.anchors, view, index)

    def candidate(self, view: str, index: int) -> Any:  # noqa: ANN401 - an item
        """Return a view of the candidate at an index."""
        return _item(self.corpus, view, index)


def _item(rows: AnyDataset, view: str, index: int) -> Any:  # noqa: ANN401 - an item
    if not isinstance(rows, datasets.Dataset):
        raise ValueError(f"a reranker reads rows by their index; expected a dataset, got {type(rows).__name__}")
    row = view_rows(rows, view)[index]
    return row_item({part: value for part, value in row.items() if part != "id"}, f"row {row['id']!r}")
