"""InfoNCE in one and both directions, and its module."""

import naive_losses as naive
import pytest
import torch
from naive_losses import assert_same, leaf, scalar, triple

from conjoin.losses import ContrastiveLoss, info_nce, symmetric_info_nce


@pytest.mark.parametrize("with_ids", [False, True])
@pytest.mark.parametrize("with_positives", [False, True])
def test_info_nce_equals_the_naive_loop(with_positives, with_ids):
    q, c, t = leaf(5, 6, seed=0), leaf(9, 6, seed=1), scalar(0.2)
    positives = torch.tensor([8, 0, 3, 3, 5]) if with_positives else None
    ids = torch.tensor([7, 7, 2, 10**15, 4, 4, 1, 7, -3]) if with_ids else None
    loss = info_nce(q, c, t, positive_indices=positives, candidate_ids=ids)
    assert_same(loss, naive.info_nce(q, c, t, positives, ids), [q, c, t])


def test_symmetric_info_nce_is_the_mean_of_both_directions():
    a, b, t = leaf(4, 6, seed=0), leaf(4, 6, seed=1), scalar(0.2)
    assert_same(symmetric_info_nce(a, b, t), (naive.info_nce(a, b, t) + naive.info_nce(b, a, t)) / 2, [a, b, t])


IDS = torch.tensor([4, 7, 4, 1, 9, 7])


def test_symmetric_info_nce_with_ids():
    a, b, t = leaf(6, 4, seed=0), leaf(6, 4, seed=1), scalar(0.2)
    found = symmetric_info_nce(a, b, t, gathered_ids=IDS)
    there, back = (naive.info_nce(*x, t, ids=IDS) for x in ((a, b), (b, a)))
    assert_same(found, (there + back) / 2, [a, b, t])
    assert abs(found.item() - symmetric_info_nce(a, b, t).item()) > 1e-3


def test_contrastive_loss_is_symmetric_info_nce_and_trains_its_temperature():
    image, text, _ = triple()
    loss = ContrastiveLoss(temperature=0.2)
    terms = loss(image, text)
    assert set(terms) == {"contrastive_loss", "temperature"}
    assert terms["contrastive_loss"].item() == pytest.approx(symmetric_info_nce(image, text, 0.2).item())
    assert terms["temperature"].item() == pytest.approx(0.2) and not terms["temperature"].requires_grad
    terms["contrastive_loss"].backward()
    assert loss.temperature.log_value.grad.abs() > 1e-3


A = torch.eye(3)
ZERO = A * torch.tensor([1.0, 0.0, 1.0])[:, None]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: info_nce(A, A[:2], 0.1), "3 queries but only 2 columns"),
        (lambda: info_nce(A, A[:, :2], 0.1), r"candidates has shape \(3, 2\), expected \('M', 3\)"),
        (lambda: info_nce(A[:0], A, 0.1), r"queries must be \(N, D\) with N > 0, got shape \(0, 3\)"),
        (lambda: info_nce(ZERO, A, 0.1), r"queries\[1\] has norm 0.0; expected a finite vector"),
        (lambda: info_nce(A, A * float("inf"), 0.1), r"candidates\[0\] has norm nan"),
        (lambda: info_nce(A, A, torch.ones(2)), r"temperature must be one number, got a tensor of shape \(2,\)"),
        (
            lambda: info_nce(A, A, 0.1, candidate_ids=torch.arange(2)),
            r"candidate_ids has shape \(2,\), expected \(3,\)",
        ),
        (lambda: symmetric_info_nce(A, A[:2], 0.1), r"b has shape \(2, 3\), expected \(3, 3\)"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
