import math
from itertools import combinations

import numpy as np
import pytest
import torch

from conjoin.evaluation import (
    best_ranks,
    bootstrap_ci,
    chance_hit_rate,
    chance_mrr,
    hit_rate_at_k,
    load_metric,
    mrr_at_k,
    rank_of_relevant,
    recall_at_k,
    triplet_precision,
    triplet_wins,
)
from conjoin.evaluation.metrics import ranks_of_pairs, unit_rows

RANKED = [["a", "b", "c"], ["d", "e", "f"], ["g", "h", "i"]]
RELEVANT = [{"b", "c", "z"}, ["d"], {"x"}]


def test_hand_computed():
    assert hit_rate_at_k(RANKED, RELEVANT, 1) == pytest.approx(1 / 3)
    assert hit_rate_at_k(RANKED, RELEVANT, 2) == pytest.approx(2 / 3)
    assert recall_at_k(RANKED, RELEVANT, 2) == pytest.approx((1 / 3 + 1 + 0) / 3)
    assert recall_at_k(RANKED, RELEVANT, 3) == pytest.approx((2 / 3 + 1 + 0) / 3)
    assert mrr_at_k(RANKED, RELEVANT, 1) == pytest.approx(1 / 3)
    assert mrr_at_k(RANKED, RELEVANT, 3) == pytest.approx((1 / 2 + 1 + 0) / 3)
    # what is beyond the ranking was not returned, and is missed
    assert recall_at_k([["a"]], [{"a", "b"}], 100) == 0.5 and hit_rate_at_k([[]], [{"a"}], 5) == 0.0


@pytest.mark.parametrize(
    ("ranked", "relevant", "k", "message"),
    [
        ([["a"]], [{"a"}], 0, "k must be at least 1, got 0"),
        ([], [], 1, "one relevant set per ranking, got 0 and 0"),
        ([["a"]], [{"a"}, {"b"}], 1, "got 1 and 2"),
        ([["a"], ["b"]], [{"a"}, set()], 1, "query 1 has no relevant id"),
        ([["a", "b", "a"]], [{"a"}], 1, "query 0: the ranking repeats an id"),
        ([["12"]], [{12}], 1, "ids of two kinds never match: ranked '12', relevant 12"),
        (["abc"], [{"a"}], 1, "expected a list of ids, got the string 'abc'"),
    ],
)
def test_bad_rankings(ranked, relevant, k, message):
    with pytest.raises(ValueError, match=message):
        hit_rate_at_k(ranked, relevant, k)


def test_triplet_precision_by_hand():
    anchor = torch.tensor([[1.0, 0], [1, 0], [1, 0], [1, 0]])
    positive = torch.tensor([[2.0, 0], [1, 1], [0, 1], [3, 3]])
    negative = torch.tensor([[0.0, 5], [3, 1], [1, 0], [1, 1]])  # right, wrong, wrong, tie
    assert triplet_wins(anchor, positive, negative).tolist() == [True, False, False, False]
    assert triplet_precision(anchor, positive, negative) == 0.25
    assert triplet_precision(anchor.numpy(), positive.numpy(), negative.numpy()) == 0.25
    variant = anchor.clone()
    variant[1] = torch.tensor([0.0, 1])  # cos(f', f-) falls from 0.95 to 0.32; the other rows have no variant
    assert triplet_precision(anchor, positive, negative, variant) == 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_triplet_ties_fail_whatever_the_length_of_the_vectors(dtype):
    generator = torch.Generator().manual_seed(0)
    anchor, positive = torch.randn(2, 500, 64, generator=generator).to(dtype)
    scale = 2.0 ** torch.randint(-3, 4, (500, 1), generator=generator).to(dtype)
    assert triplet_precision(anchor, positive, positive * scale) == 0.0
    third = positive.float() * 3 if dtype == torch.float32 else positive * 2
    assert triplet_precision(anchor, positive, third) == 0.0
    assert triplet_precision(anchor, anchor * 2, positive) == 1.0


ROWS, ALONE = torch.ones(3, 2), torch.tensor([[1.0], [math.nan], [1]])
LABELS = torch.arange(3)
EYE = torch.eye(2, dtype=torch.bool)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: triplet_precision(ROWS, ROWS, ROWS * ALONE), r"negative: 1 rows are NaN.* at index \[1\]"),
        (lambda: triplet_precision(ROWS, ROWS, ROWS, ROWS * math.inf), "variant: 3 rows are NaN, infinite or zero"),
        (lambda: triplet_precision(ROWS, ROWS * LABELS[:, None], ROWS), "positive: 1 rows"),
        (lambda: triplet_precision(ROWS, ROWS[:2], ROWS), "must share one shape"),
        (lambda: triplet_precision(*ROWS), r"must be a matrix \(N, D\), got shape \(2,\)"),
        (lambda: rank_of_relevant(torch.tensor([[0.0, 1], [math.nan, 0]]), EYE), "scores of query 1 hold NaN"),
        (lambda: rank_of_relevant(ROWS[:2], EYE & EYE[0]), r"1 queries have no relevant candidate.* index \[1\]"),
        (lambda: rank_of_relevant(torch.zeros(2, 3), EYE), r"must both be \(N, M\)"),
        (lambda: best_ranks(ROWS, ROWS, LABELS, LABELS[:2]), r"\(3, 3\) and relevant \(3, 2\) must both be"),
        (lambda: best_ranks(ROWS[:2], ROWS, LABELS, LABELS), "2 queries have 3 labels"),
        (lambda: best_ranks(ROWS, ROWS[:0], LABELS, LABELS[:0]), "3 queries have no relevant candidate"),
        (lambda: best_ranks(ROWS * ALONE, ROWS, LABELS, LABELS), "queries: 1 rows are NaN"),
        (lambda: chance_hit_rate([1, 6], 5, 1), r"must lie in 1\.\.5"),
        *(
            (lambda values=values: bootstrap_ci(values), r"expected finite values \(N,\) or \(S, N\)")
            for values in ([], [0.5, math.nan], [[[1.0]]], [math.inf])
        ),
    ],
)
def test_refusals(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_bootstrap_is_seeded_and_contains_the_mean():
    values = np.random.default_rng(0).random(300)
    low, high = bootstrap_ci(values)
    assert low < values.mean() < high
    assert bootstrap_ci(values) == (low, high) == bootstrap_ci(torch.tensor(values))
    assert bootstrap_ci(values, seed=1) != (low, high)
    narrow = bootstrap_ci(values, level=0.5)
    assert low < narrow[0] < narrow[1] < high
    assert bootstrap_ci([0.25] * 7) == (0.25, 0.25)


def test_bootstrap_equals_drawing_indices():
    values = np.random.default_rng(2).exponential(size=120)
    draws = np.random.default_rng(3).integers(120, size=(20000, 120))
    naive = np.quantile(values[draws].mean(axis=1), (0.025, 0.975))
    assert bootstrap_ci(values, resamples=20000) == pytest.approx(naive, abs=0.01)


def test_bootstrap_of_several_seeds_resamples_seeds_and_queries():
    rng = np.random.default_rng(5)
    values = rng.random((5, 80)) + rng.normal(0, 0.3, (5, 1))
    seeds, queries = rng.integers(5, size=(20000, 5)), rng.integers(80, size=(20000, 80))
    means = np.array([values[rows][:, columns].mean() for rows, columns in zip(seeds, queries, strict=True)])
    found = bootstrap_ci(values, resamples=20000)
    assert found == pytest.approx(np.quantile(means, (0.025, 0.975)), abs=0.02)
    low, high = bootstrap_ci(values.mean(axis=0))  # as if the seeds were fixed
    assert found[1] - found[0] > 2 * (high - low)
    assert bootstrap_ci(values[:1]) == bootstrap_ci(values[0])


def test_chance_equals_counting_every_order():
    size = 7
    for relevant in (1, 2, 3):
        placements = [min(places) for places in combinations(range(1, size + 1), relevant)]
        for k in (1, 3, 7, 10):
            hits = np.mean([best <= k for best in placements])
            mrr = np.mean([1 / best if best <= k else 0 for best in placements])
            assert chance_hit_rate(relevant, size, k) == pytest.approx(hits)
            assert chance_mrr(relevant, size, k) == pytest.approx(mrr)
    each = [chance_hit_rate(relevant, size, 2) for relevant in (1, 3)]
    assert chance_hit_rate([1, 3], size, 2) == pytest.approx(sum(each) / 2)
    assert chance_hit_rate(1, 370, 10) == pytest.approx(10 / 370)
    assert chance_hit_rate([1, 2], [4, 10], 1) == pytest.approx((1 / 4 + 2 / 10) / 2)  # galleries of their own


def naive_rank(scores, relevant):
    best = max(s for s, r in zip(scores, relevant, strict=True) if r)
    return 1 + sum(s >= best for s, r in zip(scores, relevant, strict=True) if not r)


@pytest.fixture(params=[1, 100, 2**24])
def block_scores(request, monkeypatch):
    """Scores in memory at once."""
    monkeypatch.setattr("conjoin.evaluation.metrics.BLOCK_SCORES", request.param)


def test_ranks_of_pairs_equal_a_naive_loop(block_scores):
    generator = torch.Generator().manual_seed(0)
    queries, candidates = (torch.randint(-1, 2, (count, 3), generator=generator).double() for count in (9, 14))
    queries[:, 0] = candidates[:, 0] = 2.0
    relevant = torch.rand(9, 14, generator=generator) < 0.2
    relevant[:, 3] |= ~relevant.any(dim=1)
    scores = unit_rows(queries) @ unit_rows(candidates).T
    expected = [naive_rank(*row) for row in zip(scores.mul(1e9).round(), relevant, strict=True)]
    pairs = relevant.nonzero()[torch.randperm(int(relevant.sum()), generator=generator)]
    assert ranks_of_pairs(queries, candidates, pairs).tolist() == expected
    with pytest.raises(ValueError, match="have no relevant candidate"):
        ranks_of_pairs(queries, candidates, pairs[pairs[:, 0] != 4])


def test_blocks_do_not_change_ranks(block_scores):
    generator = torch.Generator().manual_seed(0)
    queries, candidates = torch.randn(40, 8, generator=generator), torch.randn(60, 8, generator=generator)
    asked, found = torch.arange(40) % 20, torch.arange(60) % 20
    ranks = best_ranks(queries, candidates, asked, found)
    scores = (unit_rows(queries).double() @ unit_rows(candidates).double().T).tolist()
    relevant = (asked[:, None] == found).tolist()
    assert ranks.tolist() == [naive_rank(*row) for row in zip(scores, relevant, strict=True)]
    assert ranks.unique().numel() > 5


def test_duplicates_of_the_right_candidate_are_ties_whatever_the_matrix_product_rounds():
    generator = torch.Generator().manual_seed(0)
    queries, right = torch.randn(100, 513, generator=generator), torch.randn(100, 513, generator=generator)
    twice = torch.cat((right, torch.randn(31, 513, generator=generator) * 0.1, right * 3))
    labels = torch.cat((torch.arange(100), torch.full((131,), -1)))
    once = best_ranks(queries, twice[:131], torch.arange(100), labels[:131])
    both = best_ranks(queries, twice, torch.arange(100), labels)
    assert bool((both >= once + 1).all())


def test_a_second_label_makes_candidates_relevant_too(block_scores):
    queries = torch.eye(3)
    candidates = torch.tensor([[0.6, 0.8, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0], [0.9, 0.0, 0.1]])
    labels = torch.tensor([0, 1, 2]), torch.tensor([0, 1, 2, 3])
    texts = torch.tensor([7, 8, 9]), torch.tensor([7, 8, 9, 7])
    assert best_ranks(queries, candidates, *labels).tolist() == [3, 4, 1]
    assert best_ranks(queries, candidates, *labels, texts=texts).tolist() == [2, 4, 1]


@pytest.mark.parametrize("metric", [hit_rate_at_k, recall_at_k, mrr_at_k])
def test_metrics_of_the_library_evaluate_equal_the_functions(metric):
    pytest.importorskip("evaluate")
    ranked, relevant = [["a", "b", "c"], ["d", "e", "f"]], [["b", "c", "z"], ["x"]]
    loaded = load_metric(metric.__name__)
    for k in (1, 2, 3):
        found = loaded.compute(predictions=ranked, references=relevant, k=k)
        assert found == {loaded.name: metric(ranked, relevant, k)}
