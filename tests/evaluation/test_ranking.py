import math

import numpy as np
import pytest
import torch

from conjoin.evaluation import best_ranks, rank_of_relevant
from conjoin.evaluation.ranking import count_at_least, ranks_of_pairs, unit_rows


def naive_rank(scores, relevant):
    best = max(s for s, r in zip(scores, relevant, strict=True) if r)
    return 1 + sum(s >= best for s, r in zip(scores, relevant, strict=True) if not r)


def test_rank_by_hand():
    scores = torch.tensor([[0.9, 0.5, 0.1], [0.5, 0.5, 0.5], [0.2, 0.8, 0.8], [1.0, 2.0, 3.0]])
    relevant = torch.tensor([[1, 0, 0], [0, 1, 0], [1, 1, 0], [1, 0, 1]]).bool()
    assert rank_of_relevant(scores, relevant).tolist() == [1, 3, 2, 1]


def test_a_constant_model_gets_the_last_rank():
    assert rank_of_relevant(np.zeros((4, 10)), np.eye(4, 10, dtype=bool)).tolist() == [10] * 4
    ones = torch.ones(3, 5)
    assert best_ranks(ones, ones, torch.arange(3), torch.arange(3)).tolist() == [3] * 3


def test_rank_equals_a_naive_loop_with_many_ties():
    rng = np.random.default_rng(0)
    scores = rng.integers(0, 4, size=(200, 12)).astype(float)
    relevant = rng.random((200, 12)) < 0.2
    relevant[np.arange(200), rng.integers(0, 12, 200)] = True
    expected = [naive_rank(*row) for row in zip(scores, relevant, strict=True)]
    assert rank_of_relevant(scores, relevant).tolist() == expected
    assert rank_of_relevant(scores.astype(int), relevant).tolist() == expected


@pytest.mark.parametrize("block_scores", [1, 40, 2**24])
def test_ranks_of_pairs_equal_a_naive_loop(block_scores):
    generator = torch.Generator().manual_seed(0)
    queries, candidates = (torch.randint(-1, 2, (count, 3), generator=generator).double() for count in (9, 14))
    queries[:, 0] = candidates[:, 0] = 2.0
    relevant = torch.rand(9, 14, generator=generator) < 0.2
    relevant[:, 3] |= ~relevant.any(dim=1)
    scores = unit_rows(queries) @ unit_rows(candidates).T
    expected = [naive_rank(*row) for row in zip(scores.mul(1e9).round(), relevant, strict=True)]
    pairs = relevant.nonzero()[torch.randperm(int(relevant.sum()), generator=generator)]
    assert ranks_of_pairs(queries, candidates, pairs, block_scores).tolist() == expected
    with pytest.raises(ValueError, match="have no relevant candidate"):
        ranks_of_pairs(queries, candidates, pairs[pairs[:, 0] != 4], block_scores)


def test_bad_scores():
    eye = torch.eye(2, dtype=torch.bool)
    with pytest.raises(ValueError, match="scores of query 1 hold NaN"):
        rank_of_relevant(torch.tensor([[0.0, 1], [math.nan, 0]]), eye)
    with pytest.raises(ValueError, match=r"1 queries have no relevant candidate, the first at index \[1\]"):
        rank_of_relevant(torch.zeros(2, 2), torch.tensor([[True, False], [False, False]]))
    with pytest.raises(ValueError, match=r"must both be \(N, M\)"):
        rank_of_relevant(torch.zeros(2, 3), eye)


@pytest.mark.parametrize("block_scores", [1, 100, 2**24])
def test_blocks_do_not_change_ranks(block_scores):
    generator = torch.Generator().manual_seed(0)
    queries, candidates = torch.randn(40, 8, generator=generator), torch.randn(60, 8, generator=generator)
    asked, found = torch.arange(40) % 20, torch.arange(60) % 20
    ranks = best_ranks(queries, candidates, asked, found, block_scores=block_scores)
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


def test_ignored_candidates_leave_the_pool():
    rows = torch.eye(3) + 0.1
    plain = best_ranks(rows, rows, torch.tensor([1, 2, 0]), torch.arange(3))
    without = best_ranks(rows, rows, torch.tensor([1, 2, 0]), torch.arange(3), ignored_labels=torch.arange(3))
    assert (plain - without).tolist() == [1, 1, 1]


def test_bad_embeddings():
    rows = torch.ones(2, 3)
    with pytest.raises(ValueError, match=r"queries have width 3, candidates 4: one model for both\?"):
        best_ranks(rows, torch.ones(2, 4), torch.arange(2), torch.arange(2))
    with pytest.raises(ValueError, match="candidates: 2 embeddings but labels of shape"):
        best_ranks(rows, rows, torch.arange(2), torch.arange(3))
    with pytest.raises(ValueError, match="the gallery is empty"):
        best_ranks(rows, rows[:0], torch.arange(2), torch.arange(0))
    with pytest.raises(ValueError, match="queries: 1 rows are NaN"):
        best_ranks(torch.tensor([[math.inf, 0, 0], [1, 1, 1]]), rows, torch.arange(2), torch.arange(2))


def test_counting_a_stream_equals_counting_at_once():
    generator = torch.Generator().manual_seed(0)
    queries = unit_rows(torch.randn(9, 4, generator=generator))
    stream = torch.randn(101, 4, generator=generator)
    thresholds = torch.linspace(-0.5, 0.9, 9)
    expected = (queries @ unit_rows(stream).T >= thresholds[:, None]).sum(dim=1)
    counts, total = count_at_least(queries, thresholds, stream.split(17), block_scores=30)
    assert counts.equal(expected)
    assert total == 101
    with pytest.raises(ValueError, match="distractor block 1 has width 5"):
        count_at_least(queries, thresholds, [stream, torch.ones(1, 5)])


def test_a_second_label_makes_candidates_relevant_too():
    queries = torch.eye(3)
    candidates = torch.tensor([[0.6, 0.8, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0], [0.9, 0.0, 0.1]])
    labels = torch.tensor([0, 1, 2]), torch.tensor([0, 1, 2, 3])
    texts = torch.tensor([7, 8, 9]), torch.tensor([7, 8, 9, 7])
    assert best_ranks(queries, candidates, *labels).tolist() == [3, 4, 1]
    for block_scores in (1, 2**24):
        found = best_ranks(queries, candidates, *labels, texts=texts, block_scores=block_scores)
        assert found.tolist() == [2, 4, 1]
