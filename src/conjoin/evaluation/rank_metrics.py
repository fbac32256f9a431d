"""Metrics of rankings as pure functions of ids. A Space on the Hub has a copy of this file, nothing else of ours."""

from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Ids = Sequence[Hashable]
Floats = NDArray[np.float64]


class RankingScores(NamedTuple):
    """Per-query values `(N,)` of one cut-off k."""

    hit: Floats
    """1 if any relevant id is among the first k."""
    recall: Floats
    """Fraction of the relevant ids among the first k."""
    reciprocal_rank: Floats
    """1 / rank of the first relevant id, 0 if it is not among the first k."""


def hit_rate_at_k(ranked_ids: Sequence[Ids], relevant_ids: Sequence[Collection[Hashable]], k: int) -> float:
    """Fraction of queries with at least one relevant id among the first `k` (often printed as "Recall@k").

    Args:
        ranked_ids: For each query the ids found, best first; may be shorter than `k`.
        relevant_ids: For each query the ids that are right, at least one.
        k: Cut-off, from 1.

    Raises:
        ValueError: See `score_rankings`.
    """
    return float(score_rankings(ranked_ids, relevant_ids, k).hit.mean())


def recall_at_k(ranked_ids: Sequence[Ids], relevant_ids: Sequence[Collection[Hashable]], k: int) -> float:
    """Mean fraction of a query's relevant ids that are among the first `k`.

    Arguments as in `hit_rate_at_k`.
    """
    return float(score_rankings(ranked_ids, relevant_ids, k).recall.mean())


def mrr_at_k(ranked_ids: Sequence[Ids], relevant_ids: Sequence[Collection[Hashable]], k: int) -> float:
    """Mean of 1 / rank of the first relevant id, 0 beyond `k`.

    Arguments as in `hit_rate_at_k`.
    """
    return float(score_rankings(ranked_ids, relevant_ids, k).reciprocal_rank.mean())


def score_rankings(ranked_ids: Sequence[Ids], relevant_ids: Sequence[Collection[Hashable]], k: int) -> RankingScores:
    """Per-query hit, recall and reciprocal rank at `k`.

    Raises:
        ValueError: `k` < 1, no queries, lengths differ, a query has no relevant id, a ranking repeats an id, or
            one side has string ids and the other does not (they could never match).
    """
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
    if not len(ranked_ids) or len(ranked_ids) != len(relevant_ids):
        raise ValueError(f"expected one relevant set per ranking, got {len(ranked_ids)} and {len(relevant_ids)}")
    values = np.zeros((3, len(ranked_ids)))
    for query, (ranked, relevant) in enumerate(zip(ranked_ids, relevant_ids, strict=True)):
        if isinstance(ranked, str) or isinstance(relevant, str):
            raise ValueError(f"query {query}: expected a list of ids, got the string {ranked!r} or {relevant!r}")
        wanted = set(relevant)
        if not wanted:
            raise ValueError(f"query {query} has no relevant id; leave it out or give it one")
        if len(set(ranked)) != len(ranked):
            raise ValueError(f"query {query}: the ranking repeats an id: {ranked!r}")
        if len(ranked) and isinstance(ranked[0], str) != isinstance(right := next(iter(wanted)), str):
            raise ValueError(f"query {query}: ids of two kinds never match: ranked {ranked[0]!r}, relevant {right!r}")
        ranks = [rank for rank, id_ in enumerate(ranked[:k], start=1) if id_ in wanted]
        if ranks:
            values[:, query] = 1.0, len(ranks) / len(wanted), 1 / ranks[0]
    return RankingScores(*values)


def metric_class(metric: Callable[..., float]) -> Any:  # noqa: ANN401 - the library is untyped
    """Make a class for the library `evaluate` of one of the metrics of this file.

    Its `predictions` are the ranked ids and its `references` the relevant ids, each as texts; `k` is 10 by default.
    """
    import datasets
    import evaluate

    class RankingMetric(evaluate.Metric):
        def _info(self) -> Any:  # noqa: ANN401
            ids = datasets.List(datasets.Value("string"))
            features = datasets.Features({"predictions": ids, "references": ids})
            return evaluate.MetricInfo(str(metric.__doc__), "", features)

        def _compute(self, predictions: list[list[str]], references: list[list[str]], k: int = 10) -> dict[str, float]:
            return {metric.__name__: metric(predictions, references, k)}

    RankingMetric.__name__ = metric.__name__  # the library derives its name and its files from it
    return RankingMetric


def load_metric(name: str) -> Any:  # noqa: ANN401 - the library is untyped
    """Return `hit_rate_at_k`, `recall_at_k` or `mrr_at_k` as a metric of the library `evaluate`, without a network.

    Raises:
        ImportError: `evaluate` is not installed.
        ValueError: No metric of this name.
    """
    metrics = {metric.__name__: metric for metric in (hit_rate_at_k, recall_at_k, mrr_at_k)}
    if name not in metrics:
        raise ValueError(f"there is no metric {name!r}; expected one of {', '.join(metrics)}")
    try:
        return metric_class(metrics[name])()
    except ImportError as error:
        raise ImportError('evaluate is not installed; run: pip install "conjoin[evaluate]"') from error
