"""The embeddings that mining compares, in the order of their rows."""

import hashlib
from typing import NamedTuple, Self

import numpy as np

from conjoin.data.pair_sources import AnyDataset
from conjoin.retrieval.collection import Collection


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
