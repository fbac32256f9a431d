"""Vectors: checks, Matryoshka truncation, and exact ranking by inner product.

The exact ranking is the oracle of every index, and the search of small collections. Scores are accumulated in float64
and rounded to float32, so equal vectors score equal wherever they stand, and ties are ranked by position. A product in
float32 selects the few candidates for that: everything within its worst rounding error of the k-th best.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

_NORM_TOLERANCE = 1e-2  # float16 and bfloat16 vectors are a little off 1
_CORPUS_BLOCK = 16384
_QUERIES_AT_ONCE = 1024
_ROUGH_QUERIES = 256  # whose rough scores stay in the cache of a CPU
_NUMBERS_AT_ONCE = 2**17  # of the exact products, likewise
_FEW_PER_QUERY = 4
_GROUPS_PER_RESULT = 8


class SearchResult(NamedTuple):
    """The best matches of every query, best first.

    Attributes:
        ids: One list per query, at most k long.
        scores: `(Q, K)` float32 inner products, K the length of the longest list; `-inf` where a list is shorter.
    """

    ids: list[list[str]]
    scores: np.ndarray


Ranking = tuple[list[str], np.ndarray]
"""The ids and the scores of the results of one query, best first."""


def as_result(rankings: list[Ranking]) -> SearchResult:
    """Join the rankings of several queries to a result."""
    scores = np.full((len(rankings), max((len(ids) for ids, _ in rankings), default=0)), -np.inf, dtype=np.float32)
    for row, (ids, values) in zip(scores, rankings, strict=True):
        row[: len(ids)] = values
    return SearchResult([ids for ids, _ in rankings], scores)


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


def exact_search(
    queries: np.ndarray,
    vectors: np.ndarray | Iterable[np.ndarray],
    k: int,
    *,
    among: np.ndarray | None = None,
    device: str | torch.device = "cpu",
) -> tuple[np.ndarray, np.ndarray]:
    """Rank vectors for each query, exactly.

    Args:
        queries: `(Q, D)`, L2-normalised.
        vectors: `(N, D)`, float32 or float16; or such matrices one after the other, read once and not kept.
        k: How many to return; all vectors if there are fewer.
        among: Positions `(M,)`, ascending, that alone are ranked; all when None.
        device: Where the vectors are multiplied.

    Returns:
        Positions `(Q, K)` int64 and scores `(Q, K)` float32, best first; K is the lesser of k and the vectors ranked.

    Raises:
        ValueError: `k` below 1, or queries of another dimension, not finite or not normalised.
    """
    device = torch.device(device)
    checked = check_search(queries, k, vectors.shape[1] if isinstance(vectors, np.ndarray) else None)
    searches = [
        _Best(torch.tensor(checked[start : start + _QUERIES_AT_ONCE], device=device), k)
        for start in range(0, len(checked), _QUERIES_AT_ONCE)
    ]
    ranked = 0
    for positions, block in _blocks(vectors, among):
        ranked += len(block)
        moved = torch.from_numpy(block).to(device).float()
        for search in searches:
            search.add(positions, moved)
    results = [search.result(min(k, ranked)) for search in searches]
    if not results:
        return np.empty((0, min(k, ranked)), dtype=np.int64), np.empty((0, min(k, ranked)), dtype=np.float32)
    return np.concatenate([part[0] for part in results]), np.concatenate([part[1] for part in results])


class _Best:
    """The best vectors so far for a few queries `(q, D)`."""

    def __init__(self, queries: torch.Tensor, k: int) -> None:
        self.queries, self.k = queries, k
        self.doubles = queries.cpu().numpy().astype(np.float64)
        self.margin = _rounding_margin(queries.shape[1])
        self.floor = torch.full((len(queries), 1), -torch.inf, device=queries.device)
        self.rows, self.positions = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
        self.scores = np.empty(0, dtype=np.float32)
        self.ranked = 0

    def add(self, positions: np.ndarray, block: torch.Tensor) -> None:
        """Rank a block `(n, D)` of vectors that stand at some positions."""
        self.ranked += len(block)
        rows, columns = _candidates(self.queries, block, self.k, self.floor, self.margin)
        if len(rows) == 0:
            return
        self.rows = np.concatenate([self.rows, rows])
        self.positions = np.concatenate([self.positions, positions[columns]])
        self.scores = np.concatenate([self.scores, _exact_scores(self.doubles, block, rows, columns)])
        self._keep_best()
        if self.ranked >= self.k:
            worst = torch.from_numpy(self.scores.reshape(len(self.queries), self.k)[:, -1:].copy())
            self.floor = torch.maximum(self.floor, worst.to(self.floor.device) - self.margin)

    def _keep_best(self) -> None:
        """Sort by query, then falling score, then position; keep the k best of every query."""
        order = np.lexsort((self.positions, -self.scores, self.rows))
        rows = self.rows[order]
        rank = np.arange(len(rows)) - np.searchsorted(rows, rows)
        kept = order[rank < self.k]
        self.rows, self.positions, self.scores = rows[rank < self.k], self.positions[kept], self.scores[kept]

    def result(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Positions and scores `(q, count)`."""
        shape = len(self.queries), count
        return self.positions.reshape(shape), self.scores.reshape(shape)


def _blocks(
    vectors: np.ndarray | Iterable[np.ndarray], among: np.ndarray | None
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The vectors to rank, block by block, each with the positions `(n,)` of its rows."""
    offset = 0
    for part in [vectors] if isinstance(vectors, np.ndarray) else vectors:
        for start in range(0, len(part), _CORPUS_BLOCK):
            block = part[start : start + _CORPUS_BLOCK]
            positions = np.arange(offset, offset + len(block))
            offset += len(block)
            if among is not None:
                first, end = np.searchsorted(among, [positions[0], positions[-1] + 1])
                if first == end:
                    continue
                positions, block = among[first:end], block[among[first:end] - positions[0]]
            yield positions, np.ascontiguousarray(block)


def _rounding_margin(dimension: int) -> float:
    """Twice the worst error of a `dimension`-long float32 inner product of unit vectors, and a bit."""
    try:
        is_full = torch.get_float32_matmul_precision() == "highest"
    except RuntimeError:  # reduced by `torch.backends.fp32_precision`, as `tf32` of training arguments does
        is_full = False
    # Else factors may be rounded to bfloat16.
    return 3 * dimension * float(np.finfo(np.float32).eps) if is_full else 2.0**-5


def _candidates(
    queries: torch.Tensor, block: torch.Tensor, k: int, floor: torch.Tensor, margin: float
) -> tuple[np.ndarray, np.ndarray]:
    """Rows `(P,)` of queries and of a block that may be among the k best, where the scores so far reach `floor`.

    On a CPU numpy multiplies, a few queries at a time: its library is the faster one on some processors, above all for
    a single query. A floor of the block itself is only computed where too many rows reach the one so far.
    """
    if block.device.type != "cpu":
        rough = queries @ block.T
        if len(block) >= k:
            floor = torch.maximum(floor, rough.topk(k).values[:, -1:] - margin)
        found_rows, found_columns = (rough >= floor).nonzero(as_tuple=True)
        return found_rows.cpu().numpy(), found_columns.cpu().numpy()
    rows, columns, start = [], [], 0
    vectors = block.numpy().T
    for part, least in zip(queries.split(_ROUGH_QUERIES), floor.split(_ROUGH_QUERIES), strict=True):
        scores = part.numpy() @ vectors
        reached = scores >= least.numpy()
        if len(block) >= k and np.count_nonzero(reached) > _FEW_PER_QUERY * k * len(part):
            reached = scores >= np.maximum(least.numpy(), _reached_by(scores, k) - margin)
        row, column = np.divmod(np.flatnonzero(reached), len(block))
        rows.append(row + start)
        columns.append(column)
        start += len(part)
    return np.concatenate(rows), np.concatenate(columns)


def _reached_by(scores: np.ndarray, k: int) -> np.ndarray:
    """A bound `(q, 1)` that at least k of the scores `(q, n)` of each row reach: the k-th best maximum of groups."""
    groups = _GROUPS_PER_RESULT * k
    size = scores.shape[1] // groups
    if size > 1:
        parts = torch.from_numpy(scores)[:, : groups * size].unflatten(1, (groups, size))
        scores = parts.amax(2).numpy()  # numpy takes 20 times as long
    return np.partition(scores, -k, axis=1)[:, [-k]]


def _exact_scores(queries: np.ndarray, block: torch.Tensor, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Inner products of the given pairs `(P,)` of float64 queries and rows of `block`, as float32."""
    candidates, where = np.unique(columns, return_inverse=True)
    vectors = block[torch.from_numpy(candidates).to(block.device)].cpu().numpy().astype(np.float64)
    scores = np.empty(len(rows), dtype=np.float32)
    pairs_at_once = max(1, _NUMBERS_AT_ONCE // queries.shape[1])
    for start in range(0, len(rows), pairs_at_once):
        some = slice(start, start + pairs_at_once)
        scores[some] = np.einsum("pd,pd->p", queries[rows[some]], vectors[where[some]])
    return scores
