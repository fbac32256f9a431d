"""Checks of vectors and of searches, and Matryoshka truncation."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

_NORM_TOLERANCE = 1e-2  # float16 and bfloat16 vectors are a little off 1


class SearchResult(NamedTuple):
    """The best matches of every query, best first.

    Attributes:
        ids: One list per query, at most k long.
        scores: `(Q, K)` float32 inner products, K the length of the longest list; `-inf` where a list is shorter.
    """

    ids: list[list[str]]
    scores: np.ndarray


def check_vectors(vectors: np.ndarray, dimension: int | None, ids: Sequence[str] | None = None) -> np.ndarray:
    """Return the vectors `(N, D)` as contiguous float32 if they can be stored (`ids` given) or searched for.

    Raises:
        ValueError: Another shape, values that are not finite, or rows not of length 1; the message names the row.
    """
    kind = "queries" if ids is None else "embeddings"
    array = np.ascontiguousarray(vectors, dtype=np.float32)
    if array.ndim != 2 or array.shape[1] == 0:
        raise ValueError(f"{kind} must be a matrix (N, D), got the shape {array.shape}")
    if dimension is not None and array.shape[1] != dimension:
        raise ValueError(f"the {kind} have {array.shape[1]} dimensions, expected {dimension}")
    norms = np.sqrt(np.einsum("nd,nd->n", array, array, dtype=np.float64))
    bad = ~(np.abs(norms - 1) <= _NORM_TOLERANCE)  # true for NaN as well
    if bad.any():
        row = int(bad.argmax())
        name = f"query {row}" if ids is None else f"the embedding of {ids[row]!r}"
        problem = f"has norm {norms[row]:.4g}, expected an L2-normalised vector"
        raise ValueError(f"{name} {problem if np.isfinite(norms[row]) else 'has values that are not finite'}")
    return array


def check_search(queries: np.ndarray, k: int, dimension: int | None) -> np.ndarray:
    """Return the queries as `check_vectors` does, if `k` neighbours of them can be searched for."""
    if isinstance(k, bool) or not isinstance(k, int | np.integer) or k < 1:
        raise ValueError(f"k must be a positive integer, got {k!r}")
    return check_vectors(queries, dimension)


def check_dims(dims: int, dimension: int, name: str) -> None:
    """Make sure that the vectors of `name` can be truncated from length `dimension` to `dims`.

    Raises:
        ValueError: `dims` is not from 1 to `dimension`.
    """
    if not 1 <= dims <= dimension:
        raise ValueError(f"dims must be from 1 to {dimension}, the dimension of {name}, got {dims}")


def truncate(vectors: np.ndarray, dims: int) -> np.ndarray:
    """The `dims` leading numbers of vectors `(N, D)`, L2-normalised again, float32; a zero vector stays zero."""
    short = np.asarray(vectors[:, :dims], dtype=np.float32)
    norms = np.linalg.norm(short, axis=1, keepdims=True)
    return np.divide(short, norms, out=np.zeros_like(short), where=norms > 0)
