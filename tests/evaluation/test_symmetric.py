import numpy as np
import pytest
import torch

from conjoin.evaluation import TripletVectors, evaluate_symmetric, triplet_precision


def triplets(rows=30, seed=0):
    generator = torch.Generator().manual_seed(seed)
    anchor = torch.randn(rows, 12, generator=generator)
    positive = anchor + 1.2 * torch.randn(rows, 12, generator=generator)
    negative = anchor + 1.6 * torch.randn(rows, 12, generator=generator)
    return anchor, positive, negative, torch.randn(200, 12, generator=generator)


def naive_hits(anchor, positive, negative, distractors, k):
    unit = [torch.nn.functional.normalize(part.double()) for part in (anchor, positive, negative, distractors)]
    anchor, positive, negative, distractors = unit
    hits = []
    for i in range(len(anchor)):
        others = [anchor[j] for j in range(len(anchor)) if j != i]
        others += [positive[j] for j in range(len(anchor)) if j != i]
        others += [*negative, *distractors]
        right = float(anchor[i] @ positive[i])
        hits.append(sum(float(anchor[i] @ other) >= right for other in others) < k)
    return np.mean(hits)


@pytest.mark.parametrize("block", [1, 64, 1000])
def test_equals_a_naive_loop(block):
    anchor, positive, negative, distractors = triplets()
    result = evaluate_symmetric(TripletVectors(anchor, positive, negative), distractors.split(block), resamples=100)
    assert result.pool == 3 * 30 - 1 + 200
    recalls = [result.metrics[f"recall@{k}"].value for k in (1, 5, 10)]
    assert recalls == pytest.approx([naive_hits(anchor, positive, negative, distractors, k) for k in (1, 5, 10)])
    assert 0 < recalls[0] < recalls[2] < 1
    precision = triplet_precision(anchor, positive, negative)
    assert result.metrics["precision"].value == pytest.approx(precision)
    assert result.metrics["mean_recall"].value == pytest.approx(np.mean(recalls))
    assert result.metrics["average"].value == pytest.approx((np.mean(recalls) + precision) / 2)
    assert all(metric.low <= metric.value <= metric.high for metric in result.metrics.values())
    assert result.metrics["recall@5"].chance == pytest.approx(5 / 289)


def test_the_variant_serves_the_precision_only():
    anchor, positive, negative, _ = triplets()
    plain = evaluate_symmetric(TripletVectors(anchor, positive, negative), resamples=50)
    variant = anchor.clone()
    variant[:10] = -negative[:10]
    other = evaluate_symmetric(TripletVectors(anchor, positive, negative, variant), resamples=50)
    assert other.metrics["precision"].value > plain.metrics["precision"].value
    assert other.metrics["recall@1"] == plain.metrics["recall@1"]


def test_the_query_is_not_in_its_own_pool_but_ties_fail():
    same = torch.eye(4)
    easy = evaluate_symmetric(TripletVectors(same, same, torch.roll(same, 1, 0) + 0.1 * same), resamples=10)
    assert easy.metrics["recall@1"].value == 1.0
    hard = evaluate_symmetric(TripletVectors(same, same, torch.roll(same, 1, 0)), [same], resamples=10)
    assert hard.metrics["recall@1"].value == 0.0
    collapsed = evaluate_symmetric(TripletVectors(torch.ones(4, 3), torch.ones(4, 3), torch.ones(4, 3)), resamples=10)
    assert {metric.value for metric in collapsed.metrics.values()} == {0.0}


def test_items_with_one_id_enter_the_pool_once():
    items = dict(zip("abc", torch.eye(3) + 0.2, strict=True))
    near = {name: vector + 0.01 for name, vector in items.items()}
    triples = [("a1", "a2", "b2"), ("b1", "b2", "c2"), ("c1", "c2", "a2")]

    def rows(part):
        table = items if part == 0 else near
        return torch.stack([table[triple[part][0]] for triple in triples])

    apart = evaluate_symmetric(TripletVectors(rows(0), rows(1), rows(2)), resamples=10)
    shared = evaluate_symmetric(TripletVectors(rows(0), rows(1), rows(2), ids=triples), resamples=10)
    assert apart.metrics["recall@1"].value == 0.0  # each positive is also another triplet's negative
    assert shared.metrics["recall@1"].value == 1.0
    assert (apart.pool, shared.pool) == (8, 5)


def test_swapped_triplets_share_their_items():
    x, y, z = torch.eye(4)[:3] + torch.tensor([[0, 0, 0, 1.0], [0, 0, 0, 1.0], [0, 0, 0, 0.2]])
    anchor, positive, negative = torch.stack((x, y)), torch.stack((y, x)), torch.stack((z, z))
    result = evaluate_symmetric(
        TripletVectors(anchor, positive, negative, ids=[("x", "y", "z"), ("y", "x", "z")]), resamples=10
    )
    assert result.metrics["recall@1"].value == 1.0
    assert result.pool == 2


def test_bad_input():
    anchor, positive, negative, distractors = triplets()
    with pytest.raises(ValueError, match="triplet 1: expected the ids of three different items"):
        ids = [(f"{n}a", f"{n}b", f"{n}b" if n == 1 else f"{n}c") for n in range(30)]
        evaluate_symmetric(TripletVectors(anchor, positive, negative, ids=ids))
    with pytest.raises(ValueError, match="30 triplets but 1 id triples"):
        evaluate_symmetric(TripletVectors(anchor, positive, negative, ids=[("a", "b", "c")]))
    distractors[3] = float("nan")
    with pytest.raises(ValueError, match="distractor block 0: 1 rows are NaN"):
        evaluate_symmetric(TripletVectors(anchor, positive, negative), [distractors])
