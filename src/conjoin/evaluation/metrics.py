"""Retrieval metrics as pure functions: rankings or embeddings in, a number out.

Every metric is a mean over queries. `score_rankings` of `rank_metrics` and `triplet_wins` return the values per query,
for `bootstrap_ci`. "Recall@k" in the multimodal literature is a hit rate (any relevant item among the first k), there
`hit_rate_at_k`. `recall_at_k` is the fraction of the relevant items among the first k.
"""

from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from conjoin.evaluation.rank_metrics import Floats

_RESAMPLE_BLOCK = 2**22
Array = Tensor | np.ndarray
BLOCK_SCORES = 2**24
"""Scores in memory at once (64 MiB of float32); a larger query x candidate matrix is computed in blocks."""


def triplet_precision(anchor: Array, positive: Array, negative: Array, variant: Array | None = None) -> float:
    """Symmetric triplet precision: mean of [cos(f, f⁺) > cos(f, f⁻)] (sym-MM2MM); ties are failures.

    Args:
        anchor: f `(N, D)`; all inputs are normalised here.
        positive: f⁺ `(N, D)`.
        negative: f⁻ `(N, D)`.
        variant: f′ `(N, D)`, compared with the negative in the anchor's place: cos(f, f⁺) > cos(f′, f⁻). A triplet
            without a variant repeats its anchor's row, which gives the plain comparison.

    Raises:
        ValueError: Shapes differ, no rows, or a row is NaN, infinite or zero.
    """
    return float(triplet_wins(anchor, positive, negative, variant).double().mean())


def triplet_wins(anchor: Array, positive: Array, negative: Array, variant: Array | None = None) -> Tensor:
    """Which triplets `triplet_precision` counts as right, `(N,)` bool; the same arguments and errors."""
    named = {"anchor": anchor, "positive": positive, "negative": negative}
    if variant is not None:
        named["variant"] = variant
    rows = {name: unit_rows(value, name) for name, value in named.items()}
    shapes = {name: tuple(value.shape) for name, value in rows.items()}
    if len(set(shapes.values())) > 1 or not len(rows["anchor"]):
        raise ValueError(f"anchor, positive, negative and variant must share one shape (N > 0, D), got {shapes}")
    right = (rows["anchor"] * rows["positive"]).sum(dim=1)
    wrong = (rows.get("variant", rows["anchor"]) * rows["negative"]).sum(dim=1)
    tolerance = max(tie_tolerance(value.dtype) for value in rows.values())
    return right > wrong + tolerance


def bootstrap_ci(
    values: ArrayLike | Tensor, level: float = 0.95, resamples: int = 10000, seed: int = 0
) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean of `values`.

    A resample of n values is the count of each distinct value, and these counts follow a multinomial. Sampling them
    gives the same distribution as sampling n indices, and costs only the number of distinct values. Of several seeds,
    seeds and queries are resampled together, the queries alike for all seeds. Few seeds give an interval that is too
    narrow: the resampled mean of S seeds has (S − 1) / S of the variance.

    Args:
        values: `(N,)` per-query values, or `(S, N)` of S seeds (training runs) on the same queries.
        level: Coverage, between 0 and 1.
        resamples: Number of bootstrap samples (SOLAR App. L: 10,000).
        seed: Of the generator; equal seeds give equal intervals.

    Returns:
        The lower and upper bound.

    Raises:
        ValueError: No values, or a value is not finite.
    """
    sample = np.asarray(values.cpu() if isinstance(values, Tensor) else values, dtype=np.float64)
    if sample.ndim not in (1, 2) or not sample.size or not np.isfinite(sample).all():
        raise ValueError(f"expected finite values (N,) or (S, N), and some of them, got shape {sample.shape}")
    seeds = sample.reshape(-1, sample.shape[-1])
    distinct, counts = np.unique(seeds, axis=1, return_counts=True)
    generator = np.random.default_rng(seed)
    rows = max(1, _RESAMPLE_BLOCK // len(counts))
    means = []
    for start in range(0, resamples, rows):
        size = min(rows, resamples - start)
        by_seed = generator.multinomial(counts.sum(), counts / counts.sum(), size=size) @ distinct.T / counts.sum()
        if len(seeds) == 1:
            means.append(by_seed[:, 0])
        else:
            times = generator.multinomial(len(seeds), np.full(len(seeds), 1 / len(seeds)), size=size)
            means.append((by_seed * times).sum(axis=1) / len(seeds))
    tail = (1 - level) / 2
    low, high = np.quantile(np.concatenate(means), (tail, 1 - tail))
    return float(low), float(high)


def chance_hit_rate(relevant_counts: ArrayLike, gallery_size: ArrayLike, k: int) -> float:
    """Expected hit rate at `k` of a random order: mean of 1 − C(M−R, k) / C(M, k), exactly.

    Args:
        relevant_counts: R of each query `(N,)`, or one number for all.
        gallery_size: M, the number of candidates of each query `(N,)`, or one number for all.
        k: Cut-off.

    Raises:
        ValueError: A count is not in 1..M.
    """
    return float(1 - _chance_of_missing(relevant_counts, gallery_size, k)[:, -1].mean())


def chance_mrr(relevant_counts: ArrayLike, gallery_size: ArrayLike, k: int) -> float:
    """Expected MRR at `k` of a random order: mean of Σ_r P(first relevant at rank r) / r; as `chance_hit_rate`."""
    missing = _chance_of_missing(relevant_counts, gallery_size, k)
    return float(((missing[:, :-1] - missing[:, 1:]) / np.arange(1, k + 1)).sum(axis=1).mean())


def _chance_of_missing(relevant_counts: ArrayLike, gallery_size: ArrayLike, k: int) -> Floats:
    """P(no relevant candidate among the first r) for r = 0..k, `(N, k + 1)`."""
    relevant, size = (np.atleast_1d(np.asarray(each))[:, None] for each in (relevant_counts, gallery_size))
    if not relevant.size or (relevant < 1).any() or (relevant > size).any():
        raise ValueError(f"relevant counts must lie in 1..{size.max()} (the gallery), got {relevant.ravel()[:5]}")
    drawn = np.minimum(np.arange(k), size - 1)
    factors = np.clip((size - relevant - drawn) / (size - drawn), 0, 1)
    return np.cumprod(np.concatenate((np.ones((len(factors), 1)), factors), axis=1), axis=1)


def tie_tolerance(dtype: torch.dtype) -> float:
    """The largest difference between two cosines of this dtype that is a tie (8 units of rounding)."""
    return 8 * torch.finfo(dtype).eps


def unit_rows(embeddings: Array, name: str = "embeddings") -> Tensor:
    """L2-normalise the rows of `embeddings` `(N, D)`; half precision and integers become float32.

    Raises:
        ValueError: Not a matrix, or a row is NaN, infinite or zero (it has no direction).
    """
    rows = torch.as_tensor(embeddings).detach()
    if rows.ndim != 2:
        raise ValueError(f"{name} must be a matrix (N, D), got shape {tuple(rows.shape)}")
    if rows.dtype != torch.float64:
        rows = rows.float()
    norms = rows.norm(dim=1, keepdim=True)
    bad = (~torch.isfinite(norms) | (norms == 0)).squeeze(1).nonzero().flatten().tolist()
    if bad:
        raise ValueError(f"{name}: {len(bad)} rows are NaN, infinite or zero, the first at index {bad[:3]}")
    return rows / norms


def rank_of_relevant(scores: Array, relevant: Array, tolerance: float = 0.0) -> Tensor:
    """Rank of the best relevant candidate of each query, from 1; ties count as better candidates.

    Args:
        scores: `(N, M)`, higher is better; `-inf` removes a candidate from the ranking.
        relevant: `(N, M)` bool, at least one true in each row. Relevant candidates do not count against each other.
        tolerance: A candidate whose score is at most this far below the best relevant one is a tie.

    Returns:
        `(N,)` int64.

    Raises:
        ValueError: Shapes differ, a score is NaN, or a query has no relevant candidate.
    """
    scores, relevant = torch.as_tensor(scores), torch.as_tensor(relevant).bool()
    if scores.ndim != 2 or scores.shape != relevant.shape:
        raise ValueError(f"scores {tuple(scores.shape)} and relevant {tuple(relevant.shape)} must both be (N, M)")
    if scores.isnan().any():
        raise ValueError(f"scores of query {int(scores.isnan().any(dim=1).nonzero()[0])} hold NaN")
    orphans = (~relevant.any(dim=1)).nonzero().flatten().tolist()
    if orphans:
        raise ValueError(f"{len(orphans)} queries have no relevant candidate, the first at index {orphans[:3]}")
    best = scores.masked_fill(~relevant, float("-inf")).amax(dim=1, keepdim=True)
    return 1 + ((scores >= best - tolerance) & ~relevant).sum(dim=1)


def ranks_of_ids(
    ids: Sequence[Sequence[str]], scores: np.ndarray, right: Iterable[Collection[str]]
) -> tuple[np.ndarray, np.ndarray]:
    """Rank of the best right candidate of each query among those found, and which of these are right.

    Args:
        ids: The candidates that each query found, best first.
        scores: Of them `(N, K)`, `-inf` where a list is shorter.
        right: The right ids of each query.

    Returns:
        `(N,)` ranks as `rank_of_relevant` counts them, K + 1 where no right candidate was found; and `(N, K)` bool.
    """
    is_right = np.zeros(scores.shape, dtype=bool)
    for row, names, wanted in zip(is_right, ids, right, strict=True):
        row[: len(names)] = [name in wanted for name in names]
    ranks, hit = np.full(len(scores), 1 + scores.shape[1]), is_right.any(axis=1)
    if hit.any():
        ranks[hit] = rank_of_relevant(scores[hit], is_right[hit], tie_tolerance(torch.float32)).numpy()
    return ranks, is_right


def best_ranks(
    queries: Array,
    candidates: Array,
    query_labels: Tensor,
    candidate_labels: Tensor,
    texts: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """`rank_of_relevant` by cosine similarity, one block of queries at a time.

    Args:
        queries: `(N, D)`, normalised here.
        candidates: `(M, D)`, normalised here.
        query_labels: `(N,)` int; a candidate is relevant to a query if their labels are equal.
        candidate_labels: `(M,)` int.
        texts: Further labels `(N,)` and `(M,)` of the queries and candidates; a candidate is relevant if either its
            label or its further label is the query's.

    Returns:
        `(N,)` int64 ranks, from 1.

    Raises:
        ValueError: Lengths differ, embeddings are not finite, or a query has no relevant candidate.
    """
    if len(query_labels) != len(queries):
        raise ValueError(f"{len(queries)} queries have {len(query_labels)} labels")

    def relevant(block: slice) -> Tensor:
        same = query_labels[block, None] == candidate_labels
        return same if texts is None else same | (texts[0][block, None] == texts[1]).to(same.device)

    return _ranks(queries, candidates, relevant)


def ranks_of_pairs(queries: Array, candidates: Array, pairs: Tensor) -> Tensor:
    """`rank_of_relevant` by cosine similarity, where pairs name the right candidates, one block of queries at a time.

    Args:
        queries: `(N, D)`, normalised here.
        candidates: `(M, D)`, normalised here.
        pairs: `(P, 2)` int: the number of a query, and the number of a candidate that is right for it.

    Returns:
        `(N,)` int64 ranks, from 1.

    Raises:
        ValueError: Embeddings are not finite, or a query has no right candidate.
    """

    def relevant(block: slice) -> Tensor:
        own = pairs[(pairs[:, 0] >= block.start) & (pairs[:, 0] < block.stop)]
        right = torch.zeros(block.stop - block.start, len(candidates), dtype=torch.bool, device=pairs.device)
        right[own[:, 0] - block.start, own[:, 1]] = True
        return right

    return _ranks(queries, candidates, relevant)


def _ranks(queries: Array, candidates: Array, relevant: Callable[[slice], Tensor]) -> Tensor:
    """`rank_of_relevant` by cosine similarity, one block of queries at a time; `relevant` gives `(n, M)` bool."""
    q = unit_rows(queries, "queries")
    c = unit_rows(candidates, "candidates").to(q)
    ranks = [torch.empty(0, dtype=torch.long)]
    for start in range(0, len(q), size := max(1, BLOCK_SCORES // max(1, len(c)))):
        block = slice(start, min(start + size, len(q)))
        scores = q[block] @ c.T
        ranks.append(rank_of_relevant(scores, relevant(block).to(scores.device), tie_tolerance(scores.dtype)).cpu())
    return torch.cat(ranks)
