"""Anchors with several positives and negatives of their own."""

import math

import naive_losses as naive
import pytest
import torch
from conjoin.ops import Gathered
from naive_losses import assert_same, leaf, scalar

from conjoin.losses import multi_positive

POSITIVE_MASK = torch.tensor([[True, True], [True, False], [False, False], [False, True]])
NEGATIVE_MASK = torch.tensor([[True] * 3, [False] * 3, [True, False, True], [False, True, False]])


@pytest.mark.parametrize("masked", [False, True])
def test_multi_positive_equals_the_naive_loop(masked):
    a, p, n, t = leaf(4, 6, seed=0), leaf(4, 2, 6, seed=1), leaf(4, 3, 6, seed=2), scalar(0.3)
    masks = (POSITIVE_MASK, NEGATIVE_MASK) if masked else (None, None)
    assert_same(multi_positive(a, p, n, t, *masks), naive.multi_positive(a, p, n, t, *masks), [a, p, n, t])


def test_multi_positive_ignores_whatever_masked_vectors_hold():
    a, p, n = leaf(4, 6, seed=0), leaf(4, 2, 6, seed=1), leaf(4, 3, 6, seed=2)
    clean = multi_positive(a, p, n, 0.3, POSITIVE_MASK, NEGATIVE_MASK)
    with torch.no_grad():
        p[~POSITIVE_MASK] = float("nan")
        n[~NEGATIVE_MASK] = 0.0
    loss = multi_positive(a, p, n, 0.3, POSITIVE_MASK, NEGATIVE_MASK)
    assert loss == clean
    assert all(g.isfinite().all() for g in torch.autograd.grad(loss, [a, p, n]))


def test_multi_positive_without_any_positive_is_zero_with_zero_gradients():
    a, p, n = leaf(3, 6, seed=0), leaf(3, 2, 6, seed=1), leaf(3, 0, 6, seed=2)
    loss = multi_positive(a, p, n, 0.3, torch.zeros(3, 2, dtype=torch.bool))
    assert loss == 0.0
    assert all((g == 0).all() for g in torch.autograd.grad(loss, [a, p], allow_unused=True))


def test_multi_positive_ids_take_anchors_out():
    a, p, n = leaf(3, 6, seed=0), leaf(3, 1, 6, seed=1), leaf(3, 0, 6, seed=2)
    together = multi_positive(a, p, n, 0.3, ids=torch.tensor([5, 5, 5]))
    assert together.item() == pytest.approx(0.0)  # no negatives are left
    assert multi_positive(a, p, n, 0.3) > 0.1


def test_multi_positive_with_ids():
    inputs = [leaf(5, 4, seed=0), leaf(5, 2, 4, seed=1), leaf(5, 3, 4, seed=2), scalar(0.2)]
    ids = torch.tensor([3, 5, 3, 5, 1])
    assert_same(multi_positive(*inputs, ids=ids), naive.multi_positive(*inputs, ids=ids), inputs)


def test_multi_positive_of_one_anchor_has_its_own_negatives():
    inputs = [leaf(1, 4, seed=0), leaf(1, 2, 4, seed=1), leaf(1, 3, 4, seed=2), scalar(0.2)]
    assert_same(multi_positive(*inputs), naive.multi_positive(*inputs), inputs)


def test_an_anchor_without_positives_is_still_a_negative_of_the_others():
    inputs = [leaf(3, 4, seed=0), leaf(3, 1, 4, seed=1), leaf(3, 0, 4, seed=2)]
    loss = multi_positive(*inputs, 0.2, torch.tensor([[True], [False], [True]]))
    assert torch.autograd.grad(loss, inputs[0])[0][1].abs().min() > 0


def test_masked_out_positives_and_negatives_count_no_longer():
    ones = torch.ones(3, 4, 5)
    positive_mask = torch.tensor([[1, 1], [0, 1], [0, 0]]).bool()
    negative_mask = torch.tensor([[1, 1, 1], [0, 0, 1], [1, 1, 1]]).bool()
    loss = multi_positive(ones[:, 0], ones[:, :2], ones[:, :3], 0.07, positive_mask, negative_mask)
    assert loss.item() == pytest.approx((math.log((2 + 3 + 2) / 2) + math.log(1 + 1 + 2)) / 2, abs=1e-6)


A = torch.eye(3)
ZERO = A * torch.tensor([1.0, 0.0, 1.0])[:, None]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: multi_positive(A, A, A[:, None], 0.1), r"positives has shape \(3, 3\), expected \(3, \*, 3\)"),
        (lambda: multi_positive(A, ZERO[:, None], A[:, None], 0.1), r"positives\[\(1, 0\)\] has norm 0.0"),
        (
            lambda: multi_positive(A, A[:, None], A[:, None], 0.1, torch.ones(3, 2)),
            r"positive_mask has shape \(3, 2\), expected \(3, 1\)",
        ),
        (
            lambda: multi_positive(
                A, A[:, None], A[:, None], 0.1, ids=torch.arange(3), gathered=Gathered((A,), torch.arange(3))
            ),
            "gathered needs ids beside ids",
        ),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
