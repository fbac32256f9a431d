"""Small temperatures, half precision, and rows that lose all or some of what they would be compared to."""

import math

import naive_losses as naive
import pytest
import torch
from naive_losses import assert_same, leaf, scalar

from conjoin.losses import gcl, info_nce, mac, mac_hard_temperature, multi_positive, symmetric_info_nce

IDS = torch.tensor([4, 7, 4, 1, 9, 7, 7, 3, 2])
PLACES = torch.tensor([8, 0, 3, 3, 1, 2])


def triple(count=32, width=16, dtype=torch.float32):
    return [leaf(count, width, seed=seed, dtype=dtype) for seed in range(3)]


LOSSES = {
    "info_nce": (lambda a, b, c, t: info_nce(a, torch.cat([b, c]), t), naive.info_nce),
    "mac": (
        lambda a, b, c, t: mac(a, torch.cat([b, c]), torch.arange(2 * len(b)) % 3, t, t * 0.8),
        lambda a, bc, t: naive.mac(a, bc, torch.arange(len(bc)) % 3, t, t * 0.8),
    ),
    "multi_positive": (
        lambda a, b, c, t: multi_positive(a, b[:, None], c[:, None], t),
        lambda a, bc, t: naive.multi_positive(a, bc[: len(a), None], bc[len(a) :, None], t),
    ),
    "gcl": (gcl, lambda a, bc, t: naive.gcl(a, bc[: len(a)], bc[len(a) :], t)),
}


def pair_of(name):
    """The loss and its naive form, of the same arguments."""
    loss, reference = LOSSES[name]
    return loss, lambda a, b, c, t: reference(a, torch.cat([b, c]), t)


@pytest.mark.parametrize("temperature", [0.05, 0.01, 0.005])
@pytest.mark.parametrize("name", LOSSES)
def test_float32_equals_float64_down_to_small_temperatures(name, temperature):
    loss, reference = pair_of(name)
    inputs = [*triple(count=12), scalar(temperature, torch.float32)]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    found, expected = loss(*inputs), reference(*exact)
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    mine, theirs = torch.autograd.grad(found, inputs), torch.autograd.grad(expected, exact)
    for grad, right in zip(mine, theirs, strict=True):
        assert right.norm() > 1e-3
        assert (grad - right).norm() < 1e-4 * right.norm()


@pytest.mark.parametrize("name", LOSSES)
def test_bfloat16_embeddings_lose_only_the_rounding_of_their_gradients(name):
    loss, reference = pair_of(name)
    inputs = triple(count=12, dtype=torch.bfloat16)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    found, expected = loss(*inputs, 0.05), reference(*exact, 0.05)
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    mine, theirs = torch.autograd.grad(found, inputs), torch.autograd.grad(expected, exact)
    for grad, right in zip(mine, theirs, strict=True):
        assert grad.dtype == torch.bfloat16 and right.norm() > 1e-3
        assert (grad - right).norm() < 1e-2 * right.norm()


@pytest.mark.parametrize("name", LOSSES)
def test_autocast_changes_nothing(name):
    loss = LOSSES[name][0]
    inputs = [*triple(), scalar(0.05, torch.float32)]
    plain = loss(*inputs)
    expected = torch.autograd.grad(plain, inputs)
    with torch.autocast("cpu", torch.bfloat16):
        assert (inputs[0] @ inputs[1].T).dtype == torch.bfloat16
        cast = loss(*inputs)
        found = torch.autograd.grad(cast, inputs)
    torch.testing.assert_close(cast, plain, rtol=1e-6, atol=0)
    for mine, theirs in zip(found, expected, strict=True):
        assert theirs.norm() > 1e-3
        assert (mine - theirs).norm() < 1e-5 * theirs.norm()


@pytest.mark.parametrize("side", [0, 1, 2])
@pytest.mark.parametrize("name", LOSSES)
def test_gradient_to_one_input_only(name, side):
    loss, reference = pair_of(name)
    inputs = triple(count=6, dtype=torch.float64)
    alone = [x if i == side else x.detach() for i, x in enumerate(inputs)]
    assert_same(loss(*alone, 0.2), reference(*alone, 0.2), [inputs[side]])


@pytest.mark.parametrize("margin", [None, 0.1, -0.3])
@pytest.mark.parametrize("ids", [None, IDS])
@pytest.mark.parametrize("hard", [0.1, 0.5])
def test_mac_with_ids_and_margin(hard, ids, margin):
    q, c, t, h = leaf(6, 4, seed=0), leaf(9, 4, seed=1), scalar(0.2), scalar(hard)
    modality = torch.tensor([0, 2, 0, 1, 1, 0, 2, 1, 0])
    rest = {"positive_indices": PLACES, "candidate_ids": ids, "false_negative_margin": margin}
    assert_same(mac(q, c, modality, t, h, **rest), naive.mac(q, c, modality, t, h, PLACES, ids, margin), [q, c, t, h])


def test_symmetric_info_nce_with_ids_and_margin():
    a, b, t = leaf(6, 4, seed=0), leaf(6, 4, seed=1), scalar(0.2)
    found = symmetric_info_nce(a, b, t, gathered_ids=IDS[:6], false_negative_margin=0.4)
    there, back = (naive.info_nce(*x, t, ids=IDS[:6], margin=0.4) for x in ((a, b), (b, a)))
    assert_same(found, (there + back) / 2, [a, b, t])
    assert abs(found.item() - symmetric_info_nce(a, b, t).item()) > 1e-3


def test_multi_positive_with_ids():
    inputs = [leaf(5, 4, seed=0), leaf(5, 2, 4, seed=1), leaf(5, 3, 4, seed=2), scalar(0.2)]
    ids = torch.tensor([3, 5, 3, 5, 1])
    assert_same(multi_positive(*inputs, gathered_ids=ids), naive.multi_positive(*inputs, ids=ids), inputs)


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


@pytest.mark.parametrize("name", ["info_nce", "mac"])
def test_a_query_whose_candidates_all_share_its_id_adds_nothing(name):
    q, c, t = leaf(2, 4, seed=0), leaf(5, 4, seed=1), scalar(0.2)
    ids = torch.tensor([0, 1, 0, 0, 0])

    def loss(rows, candidates, **rest):
        if name == "info_nce":
            return info_nce(q[rows], candidates, t, **rest)
        return mac(q[rows], candidates, torch.arange(len(candidates)) % 2, t, t, **rest)

    lonely = loss(slice(0, 1), c[[0, 2, 3, 4]], candidate_ids=ids[[0, 2, 3, 4]])
    assert lonely.item() == 0
    assert all(grad.isfinite().all() and not grad.any() for grad in torch.autograd.grad(lonely, [q, c, t]))
    with_other = loss(slice(0, 2), c, candidate_ids=ids)
    other = loss(slice(1, 2), c, candidate_ids=ids, positive_indices=torch.tensor([1]))
    whole = (other + loss(slice(0, 1), c, candidate_ids=ids)) / 2
    assert_same(with_other, whole, [q, c, t])


@pytest.mark.parametrize("ring", [False, True])
def test_gcl_of_rows_that_all_show_the_same_keeps_each_pair_to_itself(ring):
    x, t = triple(4, 6, torch.float64), scalar(0.2)
    found = gcl(*x, t, ids=torch.zeros(4, dtype=torch.long), ring=ring)
    alone = sum(gcl(*(view[i : i + 1] for view in x), t) for i in range(4)) / 4
    assert_same(found, alone, [*x, t])


@pytest.mark.parametrize("flags", [(True, False, False), (False, True, True)])
def test_gcl_over_shares_with_ids_and_missing_modalities(flags):
    x, t = triple(6, 4, torch.float64), scalar(0.2)
    present = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 1, 1], [0, 0, 0], [1, 1, 1], [1, 1, 0]]).bool()
    ids = IDS[:6]
    shares = [
        gcl(
            *(view[rows] for view in x),
            t,
            *flags,
            present=present[rows],
            ids=ids[rows],
            gathered=tuple(x),
            gathered_present=present,
            gathered_ids=ids,
            positions=rows,
        )
        for rows in torch.arange(6).split(2)
    ]
    assert len({share.item() for share in shares}) == 3
    assert_same(sum(shares) / 3, naive.gcl(*x, t, *flags, present=present, ids=ids), [*x, t])


def test_gathered_columns_and_what_is_missing_come_together():
    x = triple(4)
    with pytest.raises(ValueError, match="gathered_present beside present"):
        gcl(*x, 0.1, gathered=tuple(x), positions=torch.arange(4), present=torch.ones(4, 3))


def test_a_missing_modality_may_be_given_by_any_number():
    x = triple(4)
    present = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 1, 1], [1, 1, 0]])
    assert gcl(*x, 0.1, present=present).item() == gcl(*x, 0.1, present=present.bool()).item() > 0


@pytest.mark.parametrize("name", LOSSES)
def test_a_temperature_of_one_element_may_have_any_shape(name):
    loss, reference = pair_of(name)
    inputs = [*triple(6, dtype=torch.float64), torch.tensor([0.2], dtype=torch.float64, requires_grad=True)]
    assert_same(loss(*inputs), reference(*inputs[:3], inputs[3][0]), inputs)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(("temperature", "message"), [(0.0, "got 0.0"), (float("nan"), "got nan"), (1e-3, "650")])
def test_every_loss_refuses_a_temperature_it_cannot_use(name, temperature, message):
    with pytest.raises(ValueError, match=message):
        LOSSES[name][0](*triple(), temperature)


def test_hard_temperature_at_the_papers_settings():
    assert mac_hard_temperature(0.05, 0.2, 0.5) == pytest.approx(0.04524187090179798, rel=1e-12)
    assert mac_hard_temperature(0.05, 0.2, 1.0) == pytest.approx(0.04093653765389909, rel=1e-12)
    assert [mac_hard_temperature(0.05, 0.2, p, round_to=3) for p in (0.0, 0.5, 1.0)] == [0.05, 0.045, 0.041]
    assert mac_hard_temperature(0.05, 0.2, 0.25, hold_after=0.5) == mac_hard_temperature(0.05, 0.2, 0.5)
    assert mac_hard_temperature(0.05, 0.2, 0.5, hold_after=0.5) == mac_hard_temperature(0.05, 0.2, 1.0)
