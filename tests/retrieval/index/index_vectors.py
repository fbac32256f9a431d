"""Vectors, filled indexes and the ranking by sorting everything."""

import numpy as np

from conjoin.retrieval import INDEX_KINDS, Index, new_index

DATABASES = ("lancedb", "milvus")
IN_MEMORY = [kind for kind in INDEX_KINDS if kind not in DATABASES]


def unit(count: int, dimension: int, seed: int = 0) -> np.ndarray:
    vectors = np.random.default_rng(seed).standard_normal((count, dimension)).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def clustered(count: int, dimension: int, seed: int = 0) -> np.ndarray:
    """Vectors around 50 centres, as embeddings are, not spread evenly."""
    centres = unit(50, dimension, 99)
    vectors = centres[np.arange(count) % 50] + 0.7 * unit(count, dimension, seed)
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def names(count: int, start: int = 0) -> list[str]:
    return [f"doc/{number}" for number in range(start, start + count)]


def filled(kind: str, vectors: np.ndarray, **options) -> Index:
    index = new_index(kind, **options)
    index.add(names(len(vectors)), vectors)
    return index


def naive(corpus: np.ndarray, queries: np.ndarray, k: int) -> tuple[list[list[str]], np.ndarray]:
    scores = (queries.astype(np.float64) @ corpus.astype(np.float64).T).astype(np.float32)
    order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    return [[f"doc/{column}" for column in row] for row in order], np.take_along_axis(scores, order, 1)
