"""Retrieval metrics as pure functions: rankings or embeddings in, a number out.

Every metric is a mean over queries. `score_rankings` and `triplet_wins` return the values per query, for
`bootstrap_ci`. "Recall@k" in the multimodal literature is a hit rate (any relevant item among the first k), here
`hit_rate_at_k`. `recall_at_k` is the fraction of the relevant items among the first k.
"""

import numpy as np
from numpy.typing import ArrayLike
from torch import Tensor

from conjoin.evaluation.rank_metrics import (
    Floats,
    RankingScores as RankingScores,
    hit_rate_at_k as hit_rate_at_k,
    mrr_at_k as mrr_at_k,
    recall_at_k as recall_at_k,
    score_rankings as score_rankings,
)
from conjoin.evaluation.ranking import Array, tie_tolerance, unit_rows

_RESAMPLE_BLOCK = 2**22


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
        ValueError: No values, a value is not finite, or `level` or `resamples` is out of range.
    """
    sample = np.asarray(values.cpu() if isinstance(values, Tensor) else values, dtype=np.float64)
    if sample.ndim not in (1, 2) or not sample.size or not np.isfinite(sample).all():
        raise ValueError(f"expected finite values (N,) or (S, N), and some of them, got shape {sample.shape}")
    if not 0 < level < 1 or resamples < 1:
        raise ValueError(f"expected 0 < level < 1 and resamples >= 1, got {level} and {resamples}")
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


def chance_hit_rate(relevant_counts: ArrayLike, gallery_size: int, k: int) -> float:
    """Expected hit rate at `k` of a random order: mean of 1 − C(M−R, k) / C(M, k), exactly.

    Args:
        relevant_counts: R of each query `(N,)`, or one number for all.
        gallery_size: M, the number of candidates of each query.
        k: Cut-off.

    Raises:
        ValueError: A count is not in 1..M.
    """
    return float(1 - _chance_of_missing(relevant_counts, gallery_size, k)[:, -1].mean())


def chance_mrr(relevant_counts: ArrayLike, gallery_size: int, k: int) -> float:
    """Expected MRR at `k` of a random order: mean of Σ_r P(first relevant at rank r) / r; as `chance_hit_rate`."""
    missing = _chance_of_missing(relevant_counts, gallery_size, k)
    return float(((missing[:, :-1] - missing[:, 1:]) / np.arange(1, k + 1)).sum(axis=1).mean())


def _chance_of_missing(relevant_counts: ArrayLike, gallery_size: int, k: int) -> Floats:
    """P(no relevant candidate among the first r) for r = 0..k, `(N, k + 1)`."""
    relevant = np.atleast_1d(np.asarray(relevant_counts))[:, None]
    if not relevant.size or relevant.min() < 1 or relevant.max() > gallery_size:
        raise ValueError(f"relevant counts must lie in 1..{gallery_size} (the gallery), got {relevant.ravel()[:5]}")
    drawn = np.minimum(np.arange(k), gallery_size - 1)
    factors = np.clip((gallery_size - relevant - drawn) / (gallery_size - drawn), 0, 1)
    return np.cumprod(np.concatenate((np.ones_like(relevant, dtype=np.float64), factors), axis=1), axis=1)
