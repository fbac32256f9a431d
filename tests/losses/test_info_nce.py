"""InfoNCE, its symmetric form, and MAC."""

import math

import naive_losses
import pytest
import torch
from naive_losses import assert_same, embeddings, learned

from conjoin.losses import info_nce, mac, mac_hard_temperature, symmetric_info_nce

IDS = torch.tensor([4, 7, 4, 1, 9, 7, 7, 3, 2])


@pytest.mark.parametrize("margin", [None, 0.1, -0.3])
@pytest.mark.parametrize("ids", [None, IDS])
@pytest.mark.parametrize("places", [None, torch.tensor([8, 0, 3, 3, 1, 2])])
def test_info_nce_equals_the_naive_loss(places, ids, margin):
    queries, candidates = embeddings((6, 4), (9, 4))
    temperature = learned(0.2)
    found = info_nce(
        queries,
        candidates,
        temperature,
        positive_indices=places,
        candidate_ids=ids,
        false_negative_margin=margin,
    )
    expected = naive_losses.info_nce(queries, candidates, temperature, places, ids, margin)
    assert_same(found, expected, (queries, candidates, temperature))


def test_the_masks_change_the_loss():
    queries, candidates = embeddings((6, 4), (9, 4))
    losses = {
        info_nce(queries, candidates, 0.2, candidate_ids=ids, false_negative_margin=margin).item()
        for ids in (None, IDS)
        for margin in (None, -0.3)
    }
    assert len(losses) == 4


def test_symmetric_is_the_mean_of_both_directions():
    a, b = embeddings((6, 4), (6, 4))
    temperature = learned(0.2)
    found = symmetric_info_nce(a, b, temperature, gathered_ids=IDS[:6], false_negative_margin=0.4)
    expected = sum(naive_losses.info_nce(*x, temperature, ids=IDS[:6], margin=0.4) for x in ((a, b), (b, a))) / 2
    assert_same(found, expected, (a, b, temperature))


def test_local_rows_against_gathered_columns_average_to_the_full_batch():
    a, b = embeddings((6, 4), (6, 4))
    temperature = learned(0.2)
    parts = [
        symmetric_info_nce(
            a[rows],
            b[rows],
            temperature,
            gathered_a=a,
            gathered_b=b,
            gathered_ids=IDS[:6],
            positive_indices=rows,
        )
        for rows in torch.arange(6).split(2)
    ]
    whole = symmetric_info_nce(a, b, temperature, gathered_ids=IDS[:6])
    assert_same(sum(parts) / 3, whole, (a, b, temperature))


@pytest.mark.parametrize("margin", [None, 0.1])
@pytest.mark.parametrize("ids", [None, IDS])
@pytest.mark.parametrize("hard", [0.1, 0.2, 0.5])
def test_mac_equals_the_naive_loss(hard, ids, margin):
    queries, candidates = embeddings((6, 4), (9, 4))
    modality = torch.tensor([0, 2, 0, 1, 1, 0, 2, 1, 0])
    places = torch.tensor([8, 0, 3, 3, 1, 2])
    temperature, hard_temperature = learned(0.2), learned(hard)
    found = mac(
        queries,
        candidates,
        modality,
        temperature,
        hard_temperature,
        positive_indices=places,
        candidate_ids=ids,
        false_negative_margin=margin,
    )
    expected = naive_losses.info_nce(
        queries, candidates, temperature, places, ids, margin, hard_temperature, modality
    )
    assert_same(found, expected, (queries, candidates, temperature, hard_temperature))


def test_mac_with_equal_temperatures_is_info_nce():
    queries, candidates = embeddings((6, 4), (9, 4))
    modality = torch.arange(9) % 2
    assert_same(
        mac(queries, candidates, modality, 0.2, 0.2), info_nce(queries, candidates, 0.2), (queries, candidates)
    )


def test_mac_of_one_modality_uses_the_hard_temperature_alone():
    queries, candidates = embeddings((6, 4), (9, 4))
    found = mac(queries, candidates, torch.full((9,), 5), 0.9, 0.2)
    assert_same(found, info_nce(queries, candidates, 0.2), (queries, candidates))


def test_equal_embeddings_cost_the_log_of_the_count():
    queries, candidates = torch.ones(6, 4), torch.full((9, 4), 3.0)
    expected = pytest.approx(math.log(9), abs=1e-6)
    assert info_nce(queries, candidates, 0.07).item() == expected
    assert mac(queries, candidates, torch.arange(9), 0.07, 0.07).item() == expected
    assert symmetric_info_nce(queries, queries, 0.07).item() == pytest.approx(math.log(6), abs=1e-6)
    ids = torch.tensor([0, 1, 2, 3, 4, 5, 5, 5, 5])  # the last query has one negative candidate of each other id
    counts = torch.tensor([9.0, 9, 9, 9, 9, 6])
    assert info_nce(queries, candidates, 0.07, candidate_ids=ids).item() == pytest.approx(counts.log().mean().item())


@pytest.mark.parametrize("temperature", [0.05, 0.01, 0.005])
def test_float32_equals_float64_down_to_small_temperatures(temperature):
    queries, candidates = embeddings((32, 16), (40, 16), dtype=torch.float32)
    t = learned(temperature, torch.float32)
    double = [x.detach().double().requires_grad_() for x in (queries, candidates, t)]
    found, expected = info_nce(queries, candidates, t), naive_losses.info_nce(*double)
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    mine, theirs = torch.autograd.grad(found, (queries, candidates, t)), torch.autograd.grad(expected, double)
    for grad, reference in zip(mine, theirs, strict=True):
        assert 0 < (grad - reference).norm() + reference.norm()
        assert (grad - reference).norm() < 1e-4 * reference.norm()


def test_bfloat16_embeddings_lose_only_their_own_rounding():
    queries, candidates = embeddings((32, 16), (40, 16), dtype=torch.bfloat16)
    exact = [x.detach().double().requires_grad_() for x in (queries, candidates)]
    found, expected = info_nce(queries, candidates, 0.05), naive_losses.info_nce(*exact, 0.05)
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    mine, theirs = torch.autograd.grad(found, (queries, candidates)), torch.autograd.grad(expected, exact)
    for grad, reference in zip(mine, theirs, strict=True):
        assert grad.dtype == torch.bfloat16
        assert (grad - reference).norm() < 5e-3 * reference.norm()


def test_gradient_to_one_side_only():
    queries, candidates = embeddings((6, 4), (9, 4))
    loss = info_nce(queries, candidates.detach(), 0.2)
    expected = naive_losses.info_nce(queries, candidates, 0.2)
    assert_same(loss, expected, (queries,))
    loss = info_nce(queries.detach(), candidates, 0.2)
    assert_same(loss, expected := naive_losses.info_nce(queries, candidates, 0.2), (candidates,))
    assert expected > 0


def test_one_pair_has_no_negatives_and_costs_nothing():
    a, b = embeddings((1, 4), (1, 4))
    temperature, hard = learned(0.2), learned(0.1)
    losses = (
        info_nce(a, b, temperature),
        symmetric_info_nce(a, b, temperature),
        mac(a, b, torch.zeros(1), temperature, hard),
    )
    for loss in losses:
        assert loss.item() == 0
        for grad in torch.autograd.grad(loss, (a, b, temperature), allow_unused=True):
            assert grad is None or not grad.any()


def test_a_query_whose_candidates_all_share_its_id_adds_nothing():
    queries, candidates = embeddings((2, 4), (5, 4))
    ids = torch.tensor([0, 1, 0, 0, 0])
    alone = info_nce(queries[1:], candidates, 0.2, positive_indices=torch.tensor([1]), candidate_ids=ids)
    both = info_nce(queries, candidates, 0.2, candidate_ids=torch.tensor([0, 1, 0, 0, 0]))
    first = info_nce(queries[:1], candidates[[0, 2, 3, 4]], 0.2, candidate_ids=torch.zeros(4))
    assert first.item() == 0
    grad = torch.autograd.grad(first, queries, retain_graph=True)[0]
    assert torch.equal(grad, torch.zeros_like(grad))
    assert both.item() > alone.item() / 2 > 0


def test_a_temperature_of_one_element_may_have_any_shape():
    queries, candidates = embeddings((6, 4), (9, 4))
    temperature = torch.tensor([0.2], dtype=torch.float64, requires_grad=True)
    loss = info_nce(queries, candidates, temperature)
    assert_same(loss, naive_losses.info_nce(queries, candidates, temperature[0]), (queries, temperature))


def test_mac_hard_temperature():
    assert mac_hard_temperature(0.05, 0.2, 0.0) == 0.05
    assert mac_hard_temperature(0.05, 0.2, 0.5) == pytest.approx(0.05 * math.exp(-0.1), rel=1e-12)
    assert mac_hard_temperature(0.05, 0.2, 1.0) == pytest.approx(0.04093653765389909, rel=1e-12)
    assert mac_hard_temperature(0.05, 0.2, 0.5, round_to=3) == 0.045
    assert mac_hard_temperature(0.05, 0.2, 1.0, round_to=3) == 0.041
    assert mac_hard_temperature(0.05, 0.2, 0.25, hold_after=0.5) == mac_hard_temperature(0.05, 0.2, 0.5)
    assert mac_hard_temperature(0.05, 0.2, 0.5, hold_after=0.5) == mac_hard_temperature(0.05, 0.2, 1.0)
    assert mac_hard_temperature(0.05, 0.2, 0.9, hold_after=0.5) == mac_hard_temperature(0.05, 0.2, 1.0)
    assert mac_hard_temperature(0.03, 0.5, 1.0, round_to=3, hold_after=0.5) == 0.018
    assert mac_hard_temperature(0.05, 0.0, 0.7) == 0.05


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0.0, 0.2, 0.5), "temperature must be a positive number, got 0.0"),
        ((0.05, 0.2, 1.5), r"progress=1.5 must lie in \[0, 1\]"),
        ((0.05, 0.2, -0.1), r"progress=-0.1 must lie in \[0, 1\]"),
        ((0.05, 0.2, 0.5, None, 0.0), r"hold_after=0.0 must lie in \(0, 1\]"),
        ((0.0004, 0.2, 0.5, 3), "temperature rounded to 3 decimals must be a positive number, got 0.0"),
    ],
)
def test_mac_hard_temperature_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        mac_hard_temperature(*arguments)
