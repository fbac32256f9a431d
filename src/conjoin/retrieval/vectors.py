"""Vectors: checks, Matryoshka truncation, and exact ranking by inner product.

The exact ranking is the oracle of every index, and the search of small collections. Scores are accumulated in float64
and rounded to float32, so equal vectors score equal wherever they stand, and ties are ranked by position. A product in
float32 selects the few candidates for that: everything within its worst rounding error of the k-th best.
"""

import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from importlib.util import find_spec
from itertools import islice

import numpy as np
import torch

_NORM_TOLERANCE = 1e-2  # float16 and bfloat16 vectors are a little off 1
_CORPUS_BLOCK, _DEVICE_BLOCK = 2**16, 2**18
"""Vectors ranked at once, in the memory of the machine and where they are on the device."""
_TORCH_BLOCK, _GPU_BLOCK = (128, 8192), (1024, 2**16)
"""Queries and vectors of one product of torch; on a CPU its scores stay in the cache."""
_HAS_FAISS = sys.platform == "linux" and find_spec("faiss") is not None  # elsewhere its OpenMP stops that of torch
_LARGE, _MANY_QUERIES = 2**14, 200
"""Vectors and queries from which on FAISS takes less time than torch."""
_SPARE = 8
_NUMBERS_AT_ONCE = 2**17  # of the exact products, likewise in the cache


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


def check_truncation(width: int, dimension: int, name: str) -> None:
    """Make sure that the vectors of `name` can be truncated from length `dimension` to `width`.

    Raises:
        ValueError: `width` is not from 1 to `dimension`.
    """
    if not 1 <= width <= dimension:
        raise ValueError(f"truncate_dim must be from 1 to {dimension}, the dimension of {name}, got {width}")


def truncate(vectors: np.ndarray, width: int) -> np.ndarray:
    """The `width` leading numbers of vectors `(N, D)`, L2-normalised again, float32; a zero vector stays zero."""
    short = np.asarray(vectors[:, :width], dtype=np.float32)
    norms = np.linalg.norm(short, axis=1, keepdims=True)
    return np.divide(short, norms, out=np.zeros_like(short), where=norms > 0)


def subtract_centers(
    vectors: np.ndarray, kinds: Sequence[str], centers: Mapping[str, Sequence[float] | np.ndarray]
) -> np.ndarray:
    """Vectors `(N, D)`, each less the center of its kind, L2-normalised again, float32.

    Raises:
        ValueError: A kind has no center, or a vector equals it.
    """
    if missing := sorted({*kinds} - {*centers}):
        raise ValueError(f"the kind {missing[0]!r} has no mean to subtract; there are those of {', '.join(centers)}")
    moved = vectors.astype(np.float64) - np.array([centers[kind] for kind in kinds]).reshape(-1, vectors.shape[1])
    norms = np.linalg.norm(moved, axis=1, keepdims=True)
    if (norms < 1e-6).any():
        raise ValueError(f"a vector of the kind {kinds[int(norms.argmin())]!r} equals the mean of its kind")
    return (moved / norms).astype(np.float32)


def exact_search(
    queries: np.ndarray,
    vectors: np.ndarray | torch.Tensor | Iterable[np.ndarray],
    k: int,
    *,
    among: np.ndarray | None = None,
    device: str | torch.device = "cpu",
) -> tuple[np.ndarray, np.ndarray]:
    """Rank vectors for each query, exactly.

    Args:
        queries: `(Q, D)`, L2-normalised.
        vectors: `(N, D)`, float32 or float16: an array, or a tensor, which is ranked where it is; or such arrays one
            after the other, read once and not kept.
        k: How many to return; all vectors if there are fewer.
        among: Positions `(M,)`, ascending, that alone are ranked; all when None.
        device: Where the vectors of arrays are multiplied; a single query is not worth the copy to a GPU.

    Returns:
        Positions `(Q, K)` int64 and scores `(Q, K)` float32, best first; K is the lesser of k and the vectors ranked.

    Raises:
        ValueError: `k` below 1, or queries of another dimension, not finite or not normalised.
    """
    queries = check_search(queries, k, vectors.shape[1] if isinstance(vectors, np.ndarray | torch.Tensor) else None)
    blocks, device = _blocks(vectors, among), "cpu" if len(queries) == 1 else torch.device(device)
    if isinstance(vectors, torch.Tensor):
        device = vectors.device
    elif torch.device(device).type == "cuda":
        blocks = _copied(blocks, torch.device(device))
    doubles, moved = queries.astype(np.float64), torch.tensor(queries, device=device)
    margin = _rounding_margin(queries.shape[1])
    floor = torch.full((len(queries),), -torch.inf, device=device)
    rows, places, scores = np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.float32)
    ranked = 0
    for positions, part in blocks:
        ranked += len(part)
        block = part.float()
        depth = min(k + _SPARE, len(block))
        rough, columns = _best_of_block(moved, block, depth)
        least = floor if depth < k else torch.maximum(floor, rough[:, k - 1] - margin)
        reached = rough >= least[:, None]
        has_more = reached[:, -1] if depth < len(block) else torch.zeros_like(reached[:, -1])  # read one by one below
        row, rank = (reached & ~has_more[:, None]).nonzero(as_tuple=True)
        new_rows, chosen = row.cpu().numpy(), columns[row, rank].cpu().numpy()
        found = [(new_rows, positions[chosen], _exact_scores(doubles, block, new_rows, chosen))]
        for query in has_more.nonzero().flatten().tolist():
            chosen = (block @ moved[query] >= least[query]).nonzero().flatten().cpu().numpy()
            own = _exact_scores(doubles, block, np.full(len(chosen), query), chosen)
            best = np.argsort(-own, kind="stable")[:k]
            found.append((np.full(len(best), query), positions[chosen[best]], own[best]))
        rows, places, scores = map(np.concatenate, zip((rows, places, scores), *found, strict=True))
        order = np.lexsort((places, -scores, rows))  # by query, falling score and position: keep the k best
        place_of = np.arange(len(rows)) - np.searchsorted(rows[order], rows[order])
        order = order[place_of < k]
        rows, places, scores = rows[order], places[order], scores[order]
        if ranked >= k:
            floor = torch.from_numpy(scores.reshape(-1, k)[:, -1] - margin).to(device)
    shape = len(queries), min(k, ranked)
    return places.reshape(shape), scores.reshape(shape)


def _blocks(
    vectors: np.ndarray | torch.Tensor | Iterable[np.ndarray], among: np.ndarray | None
) -> Iterator[tuple[np.ndarray, torch.Tensor]]:
    """The vectors to rank, block by block, each with the positions `(n,)` of its rows."""
    offset, size = 0, _DEVICE_BLOCK if isinstance(vectors, torch.Tensor) else _CORPUS_BLOCK
    for part in [vectors] if isinstance(vectors, np.ndarray | torch.Tensor) else vectors:
        for start in range(0, len(part), size):
            block = part[start : start + size]
            positions = np.arange(offset, offset + len(block))
            offset += len(block)
            if among is not None:
                first, end = np.searchsorted(among, [positions[0], positions[-1] + 1])
                if first == end:
                    continue
                positions, block = among[first:end], block[among[first:end] - positions[0]]
            yield positions, block if torch.is_tensor(block) else torch.from_numpy(np.ascontiguousarray(block))


def _copied(
    blocks: Iterator[tuple[np.ndarray, torch.Tensor]], device: torch.device
) -> Iterator[tuple[np.ndarray, torch.Tensor]]:
    """The blocks on a GPU; a thread pins and copies the next one while this one is ranked."""
    stream = torch.cuda.Stream(device)

    def copy(part: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event]:
        with torch.cuda.stream(stream):
            return part.pin_memory().to(device, non_blocking=True), stream.record_event()

    with ThreadPoolExecutor(1) as thread:
        coming = deque([(positions, thread.submit(copy, part)) for positions, part in islice(blocks, 1)])
        while coming:
            coming.extend((positions, thread.submit(copy, part)) for positions, part in islice(blocks, 1))
            positions, future = coming.popleft()
            block, is_there = future.result()
            torch.cuda.current_stream(device).wait_event(is_there)
            block.record_stream(torch.cuda.current_stream(device))
            yield positions, block


def _rounding_margin(dimension: int) -> float:
    """Twice the worst error of a `dimension`-long float32 inner product of unit vectors, and a bit."""
    try:
        is_full = torch.get_float32_matmul_precision() == "highest"
    except RuntimeError:  # reduced by `torch.backends.fp32_precision`, as `tf32` of training arguments does
        is_full = False
    # Else factors may be rounded to bfloat16.
    return 3 * dimension * float(np.finfo(np.float32).eps) if is_full else 2.0**-5


def _best_of_block(queries: torch.Tensor, block: torch.Tensor, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rough scores and rows `(q, depth)` of the best of a block, falling.

    FAISS is bound by the memory for one query and by the arithmetic for many; between them torch is faster.
    """
    is_few_or_many = len(queries) == 1 or len(queries) >= _MANY_QUERIES
    if _HAS_FAISS and block.device.type == "cpu" and is_few_or_many and len(block) >= _LARGE:
        faiss = import_module("faiss")
        scores, rows = faiss.knn(queries.numpy(), block.numpy(), depth, metric=faiss.METRIC_INNER_PRODUCT)
        return torch.from_numpy(scores), torch.from_numpy(rows)
    queries_at_once, vectors_at_once = _TORCH_BLOCK if block.device.type == "cpu" else _GPU_BLOCK
    results = []
    for some in queries.split(queries_at_once):
        best = [(some @ part.T).topk(min(depth, len(part))) for part in block.split(vectors_at_once)]
        rows = torch.cat([each.indices + n * vectors_at_once for n, each in enumerate(best)], 1)
        chosen = torch.cat([each.values for each in best], 1).topk(depth)
        results.append((chosen.values, rows.gather(1, chosen.indices)))
    values, rows = (torch.cat(each) for each in zip(*results, strict=True))
    return values, rows


def _exact_scores(queries: np.ndarray, block: torch.Tensor, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Inner products of the given pairs `(P,)` of float64 queries and rows of `block`, as float32."""
    scores = np.empty(len(rows), dtype=np.float32)
    pairs_at_once = max(1, _NUMBERS_AT_ONCE // queries.shape[1])
    for start in range(0, len(rows), pairs_at_once):
        some = slice(start, start + pairs_at_once)
        vectors = block[torch.from_numpy(columns[some]).to(block.device)].cpu().numpy()
        scores[some] = np.einsum("pd,pd->p", queries[rows[some]], vectors, dtype=np.float64)
    return scores
