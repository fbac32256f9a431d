"""Bounds, symmetries and naive definitions of the metrics, on random rankings with ties."""

import numpy as np
import pytest

pytest.importorskip("hypothesis")

from hypothesis import given, strategies as st

from conjoin.evaluation import bootstrap_ci, chance_hit_rate, chance_mrr, score_rankings, triplet_wins
from conjoin.evaluation.metrics import rank_of_relevant


@st.composite
def rankings(draw):
    """Rankings of some of 8 ids, and what is relevant of them."""
    queries = draw(st.integers(1, 5))
    orders = [draw(st.permutations(range(8)))[: draw(st.integers(0, 8))] for _ in range(queries)]
    return orders, [draw(st.sets(st.integers(0, 9), min_size=1, max_size=5)) for _ in range(queries)]


@st.composite
def scored(draw):
    """Scores of few different values, so that many are ties, and what is relevant."""
    rows, columns = draw(st.integers(1, 4)), draw(st.integers(1, 7))
    size = rows * columns
    scores = np.array(draw(st.lists(st.sampled_from([-1.0, 0.0, 0.5, 1.0]), min_size=size, max_size=size)))
    relevant = np.array(draw(st.lists(st.booleans(), min_size=size, max_size=size))).reshape(rows, columns)
    relevant[np.arange(rows), draw(st.integers(0, columns - 1))] = True
    return scores.reshape(rows, columns), relevant


@given(rankings(), st.integers(1, 10), st.randoms(use_true_random=False))
def test_scores_of_rankings(found, k, random):
    ranked, relevant = found
    scores = score_rankings(ranked, relevant, k)
    for query, (order, wanted) in enumerate(zip(ranked, relevant, strict=True)):
        right = [key in wanted for key in order[:k]]
        assert scores.hit[query] == any(right)
        assert scores.recall[query] == pytest.approx(sum(right) / len(wanted))
        assert scores.reciprocal_rank[query] == (1 / (1 + right.index(True)) if any(right) else 0)
    assert (scores.recall <= scores.hit).all() and (scores.reciprocal_rank <= scores.hit).all()
    further = score_rankings(ranked, relevant, k + 1)
    assert all((after >= before).all() for before, after in zip(scores, further, strict=True))
    order = random.sample(range(len(ranked)), len(ranked))
    shuffled = score_rankings([ranked[place] for place in order], [relevant[place] for place in order], k)
    names = {key: f"id {key}" for key in range(10)}
    renamed = score_rankings(
        [[names[key] for key in row] for row in ranked], [{names[key] for key in row} for row in relevant], k
    )
    for before, moved, other in zip(scores, shuffled, renamed, strict=True):
        np.testing.assert_array_equal(before[order], moved)
        np.testing.assert_array_equal(before, other)


@given(scored(), st.randoms(use_true_random=False))
def test_ranks_count_ties_as_failures(found, random):
    scores, relevant = found
    ranks = rank_of_relevant(scores, relevant).numpy()
    for row, rank in enumerate(ranks):
        best = max(scores[row][relevant[row]])
        assert rank == 1 + sum(score >= best for score in scores[row][~relevant[row]])
    order = random.sample(range(scores.shape[1]), scores.shape[1])
    np.testing.assert_array_equal(rank_of_relevant(scores[:, order], relevant[:, order]).numpy(), ranks)
    np.testing.assert_array_equal(rank_of_relevant(2 * scores + 3, relevant).numpy(), ranks)
    constant = rank_of_relevant(np.zeros_like(scores), relevant).numpy()
    np.testing.assert_array_equal(constant, 1 + (~relevant).sum(1))
    assert (ranks <= constant).all()


@given(st.integers(1, 6), st.integers(2, 5), st.integers(0, 99))
def test_triplets_do_not_depend_on_length_or_rotation(count, width, seed):
    rng = np.random.default_rng(seed)
    anchor, positive, negative = rng.standard_normal((3, count, width))
    positive[0] = negative[0]  # a tie
    wins = triplet_wins(anchor, positive, negative).numpy()
    unit = [rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in (anchor, positive, negative)]
    naive = (unit[0] * unit[1]).sum(1) > (unit[0] * unit[2]).sum(1) + 1e-12
    np.testing.assert_array_equal(wins, naive)
    assert not wins[0]
    lengths = rng.uniform(0.1, 10, (3, count, 1))
    scaled = (rows * length for rows, length in zip((anchor, positive, negative), lengths, strict=True))
    np.testing.assert_array_equal(triplet_wins(*scaled).numpy(), wins)
    assert not (wins & triplet_wins(anchor, negative, positive).numpy()).any()


@given(st.lists(st.floats(0, 1), min_size=1, max_size=20), st.integers(0, 5))
def test_an_interval_lies_within_the_values(values, seed):
    low, high = bootstrap_ci(values, resamples=50, seed=seed)
    assert min(values) - 1e-9 <= low <= high <= max(values) + 1e-9


@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 15))
def test_chance_is_a_probability_that_grows(relevant, gallery, k):
    relevant = min(relevant, gallery)
    hit, further = (chance_hit_rate(relevant, gallery, cut) for cut in (k, k + 1))
    assert 0 < chance_mrr(relevant, gallery, k) <= hit + 1e-12 and hit <= further + 1e-12 <= 1 + 2e-12
    assert chance_hit_rate(relevant, gallery, gallery) == pytest.approx(1)
