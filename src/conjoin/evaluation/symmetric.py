"""The symmetric multimodal-to-multimodal protocol (sym-MM2MM; SOLAR section 4, METHODS "sym-MM2MM evaluation").

In each triplet (X, X⁺, X⁻), X⁺ has the meaning of X, and X⁻ looks similar but has another meaning.
"""

from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from conjoin.evaluation.metrics import Array, best_ranks, count_at_least, integer_labels, triplet_wins, unit_rows
from conjoin.evaluation.results import Metric, Symmetric


class TripletVectors(NamedTuple):
    """The embeddings of N triplets; they need not be normalised.

    Args:
        anchor: f `(N, D)`.
        positive: f⁺ `(N, D)`.
        negative: f⁻ `(N, D)`.
        variant: f′ `(N, D)`, see `triplet_precision`: a triplet without a variant repeats its anchor's row.
        ids: For each triplet the ids of (X, X⁺, X⁻). An item that occurs in several triplets enters the pool once.
            Without ids, all 3 N items are different.
        kinds: For each triplet the kind of its negative, if it has one.
    """

    anchor: Array
    positive: Array
    negative: Array
    variant: Array | None = None
    ids: Sequence[tuple[Hashable, Hashable, Hashable]] | None = None
    kinds: Sequence[str | None] = ()


class SymmetricOutcomes(NamedTuple):
    """The outcome of each triplet.

    Args:
        wins: `(N,)` bool, cos(f, f⁺) > cos(f, f⁻).
        ranks: `(N,)` the rank of X⁺, from 1.
        pool: Candidates of each query.
    """

    wins: Tensor
    ranks: Tensor
    pool: int


def symmetric_outcomes(triplets: TripletVectors, distractors: Iterable[Array] = ()) -> SymmetricOutcomes:
    """Return what `evaluate_symmetric` averages, for comparisons triplet by triplet; the same arguments and errors."""
    wins = triplet_wins(triplets.anchor, triplets.positive, triplets.negative, triplets.variant).cpu()
    return SymmetricOutcomes(wins, *_ranks(triplets, distractors))


def evaluate_symmetric(
    triplets: TripletVectors,
    distractors: Iterable[Array] = (),
    ks: Sequence[int] = (1, 5, 10),
    resamples: int = 10000,
    seed: int = 0,
    name: str = "symmetric",
) -> Symmetric:
    """Precision, Recall@k, their mean mR, and Avg = (mR + Precision) / 2, with bootstrap intervals over triplets.

    Recall@k searches X⁺ in the pool: the distractors and the items of all triplets, without X itself. The variant X′
    enters the precision only. Ties count as failures. Precision is also given for each kind of negative by itself.

    Args:
        triplets: The embeddings, ids and kinds of the triplets.
        distractors: Blocks `(B, D)`, read once and one at a time, so they need not fit in memory together.
        ks: Cut-offs.
        resamples: Bootstrap samples per interval.
        seed: Of the bootstrap.
        name: Of the result.

    Raises:
        ValueError: Shapes differ, embeddings are not finite, or two items of one triplet share an id.
    """
    is_win, ranks, pool = symmetric_outcomes(triplets, distractors)
    wins = is_win.double()
    hits = torch.stack([(ranks <= k).double() for k in ks])
    mean_recall = hits.mean(dim=0)
    recall_chance = [min(k / pool, 1.0) for k in ks]
    mean_chance = sum(recall_chance) / len(ks)

    def metric(values: Tensor, chance: float) -> Metric:
        return Metric.from_values(values, chance, resamples, seed)

    metrics = {"precision": metric(wins, 0.5)}
    for kind in sorted({kind for kind in triplets.kinds if kind is not None}):
        chosen = torch.tensor([other == kind for other in triplets.kinds])
        metrics[f"precision, {kind.replace('_', ' ')}"] = metric(wins[chosen], 0.5)
    metrics |= {f"recall@{k}": metric(hits[row], recall_chance[row]) for row, k in enumerate(ks)}
    metrics["mean_recall"] = metric(mean_recall, mean_chance)
    metrics["average"] = metric((mean_recall + wins) / 2, (mean_chance + 0.5) / 2)
    return Symmetric(name, len(wins), pool, metrics)


def _ranks(triplets: TripletVectors, distractors: Iterable[Array]) -> tuple[Tensor, int]:
    """Rank of each X⁺ `(N,)`, from 1, and the size of the pool."""
    anchors, positives = unit_rows(triplets.anchor, "anchor"), unit_rows(triplets.positive, "positive")
    rows, ids = torch.cat((anchors, positives, unit_rows(triplets.negative, "negative"))), triplets.ids
    named = [(f"{n}X", f"{n}+", f"{n}-") for n in range(len(anchors))] if ids is None else ids
    _check_ids(named, len(anchors))
    (labels,) = integer_labels([triple[part] for part in range(3) for triple in named])
    first: dict[int, int] = {}
    for row, label in enumerate(labels.tolist()):
        first.setdefault(label, row)
    pool, pool_labels = rows[list(first.values())], torch.tensor(list(first))
    query_labels, positive_labels, _ = labels.chunk(3)
    ranks = best_ranks(anchors, pool, positive_labels, pool_labels, ignored_labels=query_labels)
    ahead, total = count_at_least(anchors, (anchors * positives).sum(dim=1), distractors)
    return ranks + ahead.cpu(), len(pool) - 1 + total


def _check_ids(ids: Sequence[tuple[Hashable, Hashable, Hashable]], triplets: int) -> None:
    if len(ids) != triplets:
        raise ValueError(f"{triplets} triplets but {len(ids)} id triples")
    for number, triple in enumerate(ids):
        if len(set(triple)) != 3 or len(triple) != 3:
            raise ValueError(f"triplet {number}: expected the ids of three different items, got {tuple(triple)}")
