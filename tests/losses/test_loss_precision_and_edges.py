"""Small temperatures, half precision, and batches whose rows have few or no negatives."""

import math

import naive_losses as naive
import pytest
import torch
from conjoin.ops import logsumexp as kernel
from naive_losses import assert_same, leaf, scalar, triple

from conjoin.losses import gcl, info_nce, mac, multi_positive, symmetric_info_nce

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


@pytest.mark.parametrize("kept_bytes", [0, kernel.KEPT_BYTES], ids=["recomputed", "kept"])
@pytest.mark.parametrize("block_size", [2, 5, 256])
@pytest.mark.parametrize("name", [*LOSSES, "symmetric_info_nce"])
def test_both_paths_of_the_kernel_equal_the_naive_loop(name, block_size, kept_bytes, monkeypatch):
    monkeypatch.setattr(kernel, "KEPT_BYTES", kept_bytes)
    monkeypatch.setattr(kernel, "BLOCK_SIZE", block_size)
    inputs = [*triple(9, 5), scalar(0.2)]
    if name == "symmetric_info_nce":
        a, b, t = inputs = [inputs[0], inputs[1], inputs[3]]
        assert_same(symmetric_info_nce(a, b, t), (naive.info_nce(a, b, t) + naive.info_nce(b, a, t)) / 2, inputs)
        return
    loss, reference = pair_of(name)
    assert_same(loss(*inputs), reference(*inputs), inputs)


@pytest.mark.parametrize("temperature", [0.05, 0.01, 0.005])
@pytest.mark.parametrize("name", LOSSES)
def test_float32_equals_float64_down_to_small_temperatures(name, temperature):
    loss, reference = pair_of(name)
    inputs = [*triple(12, 16, torch.float32), scalar(temperature, torch.float32)]
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
    inputs = triple(12, 16, torch.bfloat16)
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
    inputs = [*triple(32, 16, torch.float32), scalar(0.05, torch.float32)]
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


@pytest.mark.parametrize("name", LOSSES)
def test_a_temperature_of_one_element_may_have_any_shape(name):
    loss, reference = pair_of(name)
    inputs = [*triple(6), torch.tensor([0.2], dtype=torch.float64, requires_grad=True)]
    assert_same(loss(*inputs), reference(*inputs[:3], inputs[3][0]), inputs)


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_refuses_a_temperature_it_cannot_use(name):
    positive, scale = (
        "temperature must be a positive number, got",
        r"scale \(1 / temperature\) 1000 is outside \(0, 650\]",
    )
    for temperature in (0.0, -0.1, float("nan"), 1e-3):
        with pytest.raises(ValueError, match=scale if temperature == 1e-3 else f"{positive} {temperature}"):
            LOSSES[name][0](*triple(), temperature)


def test_equal_embeddings_give_the_log_of_the_count():
    same = torch.ones(5, 3, dtype=torch.float64)
    assert info_nce(same, same[:1].repeat(8, 1), 0.07).item() == pytest.approx(math.log(8), abs=1e-12)
    assert symmetric_info_nce(same, same, 0.07).item() == pytest.approx(math.log(5), abs=1e-12)
    assert mac(same, same, torch.zeros(5, dtype=torch.long), 0.07, 0.02).item() == pytest.approx(
        math.log(5), abs=1e-12
    )
    loss = multi_positive(same, same[:, None].repeat(1, 2, 1), same[:, None].repeat(1, 3, 1), 0.07)
    assert loss.item() == pytest.approx(math.log((2 + 3 + 4) / 2), abs=1e-12)


def test_one_pair_has_no_negatives_and_a_loss_of_zero():
    q, c = leaf(1, 6, seed=0), leaf(1, 6, seed=1)
    for loss in (info_nce(q, c, 0.1), symmetric_info_nce(q, c, 0.1), mac(q, c, torch.tensor([0]), 0.1, 0.05)):
        assert loss.item() == 0.0
        assert all((g == 0).all() for g in torch.autograd.grad(loss, [q, c]))
