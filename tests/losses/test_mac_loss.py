"""The modality-adaptive contrastive loss and its schedule."""

import math

import naive_losses as naive
import pytest
import torch
from naive_losses import assert_same, leaf, scalar

from conjoin.losses import info_nce, mac, mac_hard_temperature


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


def test_mac_hard_temperature():
    assert mac_hard_temperature(0.05, 0.2, 0.0) == mac_hard_temperature(0.05, 0.0, 0.7) == 0.05
    for progress in (0.5, 1.0):
        assert mac_hard_temperature(0.05, 0.2, progress) == pytest.approx(0.05 * math.exp(-0.2 * progress), rel=1e-12)
    for progress in (0.25, 0.5, 0.8, 1.0):
        held = 0.03 * math.exp(-0.5 * min(2 * progress, 1))
        assert mac_hard_temperature(0.03, 0.5, progress, hold_after=0.5) == pytest.approx(held, rel=1e-12)
    assert [mac_hard_temperature(0.05, 0.2, p, round_to=3) for p in (0.0, 0.5, 1.0)] == [0.05, 0.045, 0.041]


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


IDS = torch.tensor([4, 7, 4, 1, 9, 7, 7, 3, 2])
PLACES = torch.tensor([8, 0, 3, 3, 1, 2])


@pytest.mark.parametrize("ids", [None, IDS])
@pytest.mark.parametrize("hard", [0.1, 0.5])
def test_mac_with_ids(hard, ids):
    q, c, t, h = leaf(6, 4, seed=0), leaf(9, 4, seed=1), scalar(0.2), scalar(hard)
    modality = torch.tensor([0, 2, 0, 1, 1, 0, 2, 1, 0])
    rest = {"positive_indices": PLACES, "candidate_ids": ids}
    assert_same(mac(q, c, modality, t, h, **rest), naive.mac(q, c, modality, t, h, PLACES, ids), [q, c, t, h])


A = torch.eye(3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: mac(A, A, torch.arange(2), 0.1, 0.1), r"candidate_modality has shape \(2,\), expected \(3,\)"),
        (lambda: mac(A, A, torch.arange(3), 0.1, 0.0), "hard_temperature must be a positive number, got 0.0"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
