import math

import naive_losses as naive
import pytest
import torch
from naive_losses import assert_same, leaf, scalar

from conjoin.losses import info_nce, mac, mac_hard_temperature, multi_positive, symmetric_info_nce


@pytest.mark.parametrize("margin", [None, 0.1])
@pytest.mark.parametrize("with_ids", [False, True])
@pytest.mark.parametrize("with_positives", [False, True])
def test_info_nce_equals_the_naive_loop(with_positives, with_ids, margin):
    q, c, t = leaf(5, 6, seed=0), leaf(9, 6, seed=1), scalar(0.2)
    positives = torch.tensor([8, 0, 3, 3, 5]) if with_positives else None
    ids = torch.tensor([7, 7, 2, 10**15, 4, 4, 1, 7, -3]) if with_ids else None
    loss = info_nce(q, c, t, positive_indices=positives, candidate_ids=ids, false_negative_margin=margin)
    assert_same(loss, naive.info_nce(q, c, t, positives, ids, margin), [q, c, t])


def test_the_margin_and_the_ids_of_this_test_leave_something_out():
    q, c = leaf(5, 6, seed=0), leaf(9, 6, seed=1)
    plain = info_nce(q, c, 0.2)
    assert info_nce(q, c, 0.2, false_negative_margin=0.1) < plain
    assert info_nce(q, c, 0.2, candidate_ids=torch.tensor([7, 7, 2, 9, 4, 4, 1, 7, 3])) < plain


def test_symmetric_info_nce_is_the_mean_of_both_directions():
    a, b, t = leaf(4, 6, seed=0), leaf(4, 6, seed=1), scalar(0.2)
    assert_same(symmetric_info_nce(a, b, t), (naive.info_nce(a, b, t) + naive.info_nce(b, a, t)) / 2, [a, b, t])


@pytest.mark.parametrize("positives", [None, [4, 4, 0]])
def test_mac_equals_the_naive_matrix(positives):
    q, c, t, h = leaf(3, 6, seed=0), leaf(7, 6, seed=1), scalar(0.3), scalar(0.1)
    places = None if positives is None else torch.tensor(positives)
    modality = torch.tensor([0, 1, 1, 2, 0, 2, 1])
    loss = mac(q, c, modality, t, h, positive_indices=places)
    assert_same(loss, naive.mac(q, c, modality, t, h, places), [q, c, t, h])


def test_mac_of_one_modality_is_info_nce_at_the_hard_temperature():
    q, c = leaf(4, 6, seed=0), leaf(4, 6, seed=1)
    loss = mac(q, c, torch.zeros(4, dtype=torch.long), 0.5, 0.1)
    assert_same(loss, info_nce(q, c, 0.1), [q, c])


def test_mac_with_a_margin_leaves_out_what_info_nce_does():
    q, c = leaf(5, 6, seed=0), leaf(9, 6, seed=1)
    modality = torch.arange(9) % 3
    loss = mac(q, c, modality, 0.2, 0.2, false_negative_margin=0.1)
    assert_same(loss, naive.info_nce(q, c, 0.2, margin=0.1), [q, c])


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
    together = multi_positive(a, p, n, 0.3, gathered_ids=torch.tensor([5, 5, 5]))
    assert together.item() == pytest.approx(0.0)  # no negatives are left
    assert multi_positive(a, p, n, 0.3) > 0.1


def test_equal_embeddings_give_the_log_of_the_count():
    same = torch.ones(5, 3, dtype=torch.float64)
    assert info_nce(same, same[:1].repeat(8, 1), 0.07).item() == pytest.approx(math.log(8), abs=1e-12)
    assert symmetric_info_nce(same, same, 0.07).item() == pytest.approx(math.log(5), abs=1e-12)
    assert mac(same, same, torch.zeros(5, dtype=torch.long), 0.07, 0.02).item() == pytest.approx(
        math.log(5), abs=1e-12
    )
    loss = multi_positive(same, same[:, None].repeat(1, 2, 1), same[:, None].repeat(1, 3, 1), 0.07)
    assert loss.item() == pytest.approx(math.log((2 + 3 + 4) / 2), abs=1e-12)


def test_mac_hard_temperature():
    assert mac_hard_temperature(0.05, 0.2, 0.0) == 0.05
    assert mac_hard_temperature(0.05, 0.2, 1.0) == pytest.approx(0.05 * math.exp(-0.2), abs=1e-15)
    assert mac_hard_temperature(0.05, 0.0, 0.7) == 0.05
    assert mac_hard_temperature(0.03, 0.5, 0.25, hold_after=0.5) == pytest.approx(0.03 * math.exp(-0.25), abs=1e-15)
    for progress in (0.5, 0.8, 1.0):
        assert mac_hard_temperature(0.03, 0.5, progress, hold_after=0.5) == pytest.approx(0.03 * math.exp(-0.5))
    assert mac_hard_temperature(0.03, 0.5, 1.0, round_to=3) == 0.018


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0.0, 0.2, 0.5), "temperature must be a positive number, got 0.0"),
        ((0.05, 0.2, 1.5), r"progress=1.5 must lie in \[0, 1\]"),
        ((0.05, 0.2, 0.5, None, 0.0), r"hold_after=0.0 must lie in \(0, 1\]"),
        ((0.05, 9.0, 1.0, 3), "rounded to 3 decimals must be a positive number, got 0.0"),
    ],
)
def test_mac_hard_temperature_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        mac_hard_temperature(*arguments)


def test_one_pair_has_no_negatives_and_a_loss_of_zero():
    q, c = leaf(1, 6, seed=0), leaf(1, 6, seed=1)
    for loss in (info_nce(q, c, 0.1), symmetric_info_nce(q, c, 0.1), mac(q, c, torch.tensor([0]), 0.1, 0.05)):
        assert loss.item() == 0.0
        assert all((g == 0).all() for g in torch.autograd.grad(loss, [q, c]))


A = torch.eye(3)
ZERO = A * torch.tensor([1.0, 0.0, 1.0])[:, None]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: info_nce(A, A[:2], 0.1), "3 queries but only 2 columns"),
        (lambda: info_nce(A, A[:, :2], 0.1), r"candidates has shape \(3, 2\), expected \('M', 3\)"),
        (lambda: info_nce(A[:0], A, 0.1), r"queries must be \(N, D\) with N > 0, got shape \(0, 3\)"),
        (lambda: info_nce(A[0], A, 0.1), r"queries must be \(N, D\)"),
        (lambda: info_nce(ZERO, A, 0.1), r"queries\[1\] has norm 0.0; expected a finite vector"),
        (lambda: info_nce(A, A / ZERO, 0.1), r"candidates\[0\] has norm nan"),
        (lambda: info_nce(A, A * float("inf"), 0.1), r"candidates\[0\] has norm nan"),
        (lambda: info_nce(A, A, 0.0), "temperature must be a positive number, got 0.0"),
        (lambda: info_nce(A, A, -0.1), "temperature must be a positive number, got -0.1"),
        (lambda: info_nce(A, A, float("nan")), "temperature must be a positive number, got nan"),
        (lambda: info_nce(A, A, torch.ones(2)), r"temperature must be one number, got a tensor of shape \(2,\)"),
        (lambda: info_nce(A, A, 1e-3), r"scale \(1 / temperature\) 1000 is outside \(0, 650\]"),
        (lambda: info_nce(A, A, 0.1, positive_indices=torch.tensor([0, 1, 3])), r"lie in \[0, 3\], expected \[0, 2\]"),
        (
            lambda: info_nce(A, A, 0.1, candidate_ids=torch.arange(2)),
            r"candidate_ids has shape \(2,\), expected \(3,\)",
        ),
        (lambda: symmetric_info_nce(A, A[:2], 0.1), r"b has shape \(2, 3\), expected \(3, 3\)"),
        (lambda: mac(A, A, torch.arange(2), 0.1, 0.1), r"candidate_modality has shape \(2,\), expected \(3,\)"),
        (lambda: mac(A, A, torch.arange(3), 0.1, 0.0), "hard_temperature must be a positive number, got 0.0"),
        (lambda: multi_positive(A, A, A[:, None], 0.1), r"positives has shape \(3, 3\), expected \(3, \*, 3\)"),
        (lambda: multi_positive(A, ZERO[:, None], A[:, None], 0.1), r"positives\[\(1, 0\)\] has norm 0.0"),
        (
            lambda: multi_positive(A, A[:, None], A[:, None], 0.1, torch.ones(3, 2)),
            r"positive_mask has shape \(3, 2\), expected \(3, 1\)",
        ),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
