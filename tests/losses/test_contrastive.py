"""The contrastive losses: their formulas, precision, edge cases, and what the kernel costs."""

import itertools
import math
from functools import partial

import naive_losses as naive
import pytest
import torch
from naive_losses import Largest, assert_near, assert_same, leaf, scalar
from torch.utils.flop_counter import FlopCounterMode

from conjoin import losses
from conjoin.losses import ContrastiveLoss, GclLoss, Temperature, gather_rows, info_nce, kernel

PLACES = torch.tensor([8, 0, 3, 3, 1, 2])
IDS = torch.tensor([4, 7, 4, 1, 9, 7])
CANDIDATE_IDS = torch.tensor([4, 7, 4, 1, 9, 7, 10**15, -3, 2])
PAIRS_OF_IDS = torch.stack([CANDIDATE_IDS, torch.tensor([1, 2, 3, 1, 5, 6, 2, 8, 1])], dim=1)
SCORES = torch.tensor([[9.5, 1.0, 0.0], [1.0, 1.0, 1.0], [0.0, 3.0, -2.0]] * 2)
MODALITY = torch.tensor([0, 2, 0, 1, 1, 0, 2, 1, 0])
POSITIVES = torch.tensor([[1, 1], [1, 0], [0, 0], [0, 1], [1, 1], [1, 0]])
NEGATIVES = torch.tensor([[1, 1, 1], [0, 0, 0], [1, 0, 1], [0, 1, 0], [0, 0, 1], [1, 1, 1]])
PRESENT = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 1, 1], [0, 0, 0], [1, 1, 1], [1, 1, 0]])
PLACED, NAMED = {"positive_indices": PLACES}, {"candidate_ids": CANDIDATE_IDS}


def triple(count=6, width=4, dtype=torch.float64):
    return [leaf(count, width, seed=seed, dtype=dtype) for seed in range(3)]


VIEWS, COOL, HOT = triple(), scalar(0.2), scalar(0.5)
PAIR, TO_CANDIDATES = VIEWS[:2], [VIEWS[0], leaf(9, 4, seed=1)]
NAMED_PAIR = {"gathered": gather_rows(*PAIR, ids=IDS)}
ANCHORS = [VIEWS[0], leaf(6, 2, 4, seed=1), leaf(6, 3, 4, seed=2), COOL]
CASES = {
    "InfoNCE, placed": ("info_nce", [*TO_CANDIDATES, COOL], PLACED),
    "InfoNCE, ids": ("info_nce", [*TO_CANDIDATES, COOL], NAMED),
    "InfoNCE, placed, ids": ("info_nce", [*TO_CANDIDATES, COOL], PLACED | NAMED),
    "InfoNCE, one of two ids": ("info_nce", [*TO_CANDIDATES, COOL], PLACED | {"candidate_ids": PAIRS_OF_IDS}),
    "InfoNCE, margin": ("info_nce", [*TO_CANDIDATES, COOL], PLACED | NAMED | {"margin": -0.2}),
    "InfoNCE, little temperature, margin": ("info_nce", [*TO_CANDIDATES, scalar(0.01)], {"margin": -0.5}),
    "soft labels": ("soft_labels", [VIEWS[0], leaf(6, 3, 4, seed=1), SCORES, COOL, 2.0], {}),
    "symmetric, ids": ("symmetric_info_nce", [*PAIR, COOL], NAMED_PAIR),
    "MAC, placed, ids": ("mac", [*TO_CANDIDATES, MODALITY, COOL, HOT], PLACED | NAMED),
    "several positives, masked": ("multi_positive", [*ANCHORS, POSITIVES, NEGATIVES], {}),
    "several positives, ids": ("multi_positive", ANCHORS, {"gathered": gather_rows(VIEWS[0], ids=IDS)}),
} | {
    f"GCL {flags}, {given.keys()}": ("gcl", [*VIEWS, COOL, *flags], {"gathered": gather_rows(*VIEWS, **given)})
    for flags in itertools.product([True, False], repeat=3)
    for given in ({}, {"ids": IDS}, {"present": PRESENT}, {"ids": IDS, "present": PRESENT})
}
PLAIN = {
    "info_nce": lambda module, a, b, c, t: module.info_nce(a, torch.cat([b, c]), t),
    "symmetric": lambda module, a, b, c, t: module.symmetric_info_nce(a, torch.cat([b, c])[::2], t),
    "mac": lambda module, a, b, c, t: module.mac(a, torch.cat([b, c]), torch.arange(2 * len(b)) % 3, t, t * 0.8),
    "multi_positive": lambda module, a, b, c, t: module.multi_positive(a, b[:, None], c[:, None], t),
    "gcl": lambda module, a, b, c, t: module.gcl(a, b, c, t),
}
"""Each loss, or its naive form, of three views and a temperature."""


@pytest.mark.parametrize("case", CASES)
def test_equals_the_loop(case):
    name, inputs, given = CASES[case]
    found, expected = (getattr(module, name)(*inputs, **given) for module in (losses, naive))
    assert_same(found, expected, [x for x in inputs if isinstance(x, torch.Tensor) and x.requires_grad])


@pytest.mark.parametrize("flags", itertools.product([True, False], repeat=3))
@pytest.mark.parametrize("weights", [None, [1, 1, 0.5, 2]])
def test_gcl_of_four_views_equals_the_loop(weights, flags):
    inputs, present = [*(leaf(6, 4, seed=seed) for seed in range(4)), COOL], PRESENT[:, [0, 1, 2, 1]].bool()
    views = dict(zip("abcd", inputs, strict=False))
    for given in ({}, {"ids": IDS}, {"present": present}, {"ids": IDS, "present": present}):
        gathered = gather_rows(*views.values(), **given)
        found, expected = (
            module.gcl_views(views, COOL, *flags, weights=weights, gathered=gathered) for module in (losses, naive)
        )
        assert_same(found, expected, inputs)


@pytest.mark.parametrize("given", [{}, {"ids": IDS}, {"present": PRESENT.bool()}])
def test_the_mean_of_gcl_over_devices_is_the_loss_of_all_rows(given):
    """Each device has some of the rows, and the columns of all."""
    whole = gather_rows(*VIEWS, **given)
    parts = [torch.arange(6)[rows] for rows in (slice(0, 3), slice(3, 6))]
    found = [losses.gcl(*(view[own] for view in VIEWS), COOL, gathered=whole._replace(positions=own)) for own in parts]
    assert_same(sum(found) / 2, losses.gcl(*VIEWS, COOL, gathered=whole), [*VIEWS, COOL])


@pytest.mark.parametrize("name", PLAIN)
def test_any_shape_and_any_blocks(name, monkeypatch):
    random = torch.Generator().manual_seed(0)
    for block, kept, whole, count in itertools.product((1, 2, 5), (0, 2**28), (1, 1024), (1, 2, 7, 19)):
        for constant, value in (("BLOCK_SIZE", block), ("KEPT_BYTES", kept), ("WHOLE_ROWS", whole)):
            monkeypatch.setattr(kernel, constant, value)
        temperature = scalar(0.002 + torch.rand((), generator=random).item())
        inputs = [*triple(count), temperature]
        found, expected = (PLAIN[name](module, *inputs) for module in (losses, naive))
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
        grads = (torch.autograd.grad(loss, inputs, retain_graph=True, allow_unused=True) for loss in (found, expected))
        for grad, right in zip(*grads, strict=True):
            assert (grad is None) == (right is None)
            assert right is None or (grad - right).abs().max() <= 1e-9 * max(1, right.abs().max())
        again = [torch.autograd.grad(found, inputs, retain_graph=True, allow_unused=True) for _ in range(2)]
        assert all(one is other or torch.equal(one, other) for one, other in zip(*again, strict=True))


@pytest.mark.parametrize("name", PLAIN)
def test_precision(name):
    loss, reference = (partial(PLAIN[name], module) for module in (losses, naive))
    for temperature in (0.05, 0.0127, 0.002):
        assert_near(loss, reference, [*triple(12, 16, torch.float32), scalar(temperature, torch.float32)], 2e-4)
    views = triple(12, 16, torch.bfloat16)
    assert_near(lambda *x: loss(*x, 0.05), lambda *x: reference(*x, 0.05), views, 1e-2)
    inputs = [*triple(32, 16, torch.float32), scalar(0.05, torch.float32)]
    plain = loss(*inputs)
    with torch.autocast("cpu", torch.bfloat16):
        assert (inputs[0] @ inputs[1].T).dtype == torch.bfloat16
        assert_same(loss(*inputs), plain, inputs, 1e-5)


def test_float32_when_the_negatives_of_one_row_alone_are_far_or_one_temperature_is_small():
    base = torch.nn.functional.normalize(leaf(8, 32), dim=1).detach()
    for candidates in (-base, torch.cat([base[:1], base[:1], -base[2:]]), base[:1] + 0.03 * base):
        inputs = [base.float().requires_grad_(), candidates.float().requires_grad_(), scalar(0.004, torch.float32)]
        assert_near(losses.symmetric_info_nce, naive.symmetric_info_nce, inputs, 2e-4)
    for temperatures in ((0.2, 0.004), (0.004, 0.2)):
        inputs = [*triple(12, 16, torch.float32)[:2], *(scalar(each, torch.float32) for each in temperatures)]
        loss, reference = (
            lambda a, b, *t, mac=module.mac: mac(a, b, torch.arange(12) % 3, *t) for module in (losses, naive)
        )
        assert_near(loss, reference, inputs, 2e-4)


def test_strided_vectors_and_gradients_to_one_input_alone():
    for name, loss in PLAIN.items():
        inputs = [*(leaf(8, 6, seed=seed).detach().T[:, ::2].requires_grad_() for seed in range(3)), scalar(0.2)]
        expected = torch.autograd.grad(PLAIN[name](naive, *inputs), inputs)
        for place, right in enumerate(expected):
            alone = [x if index == place else x.detach() for index, x in enumerate(inputs)]
            (grad,) = torch.autograd.grad(loss(losses, *alone), alone[place])
            torch.testing.assert_close(grad, right, rtol=1e-9, atol=1e-9)


def test_equal_embeddings_give_the_log_of_the_count():
    one = torch.ones(5, 3, dtype=torch.float64)
    three, none = one[:, None].expand(5, 3, 3), torch.zeros(5, dtype=torch.long)
    found = {
        losses.info_nce(one, one[:1].repeat(8, 1), 0.07): 8,
        losses.symmetric_info_nce(one, one, 0.07): 5,
        losses.mac(one, one, none, 0.07, 0.02): 5,
        losses.multi_positive(one, three[:, :2], three, 0.07): (2 + 3 + 4) / 2,
        losses.gcl(one, one, one, 0.07): 14,
        losses.gcl(one, one, one, 0.07, False): 15,
        losses.gcl(one, one, one, 0.07, True, True): 10,
        losses.gcl(one, one, one, 0.07, True, False, True): 13,
    }
    for loss, count in found.items():
        assert loss.item() == pytest.approx(math.log(count), abs=1e-12)


def test_without_negatives_loss_and_gradients_are_zero():
    alone, twins, same = triple(1), triple(4), torch.zeros(4, dtype=torch.long)
    anchors, positives, none, pair = twins[0], twins[1][:, None], leaf(4, 0, 4), twins[:2]
    for views, loss in (
        (alone[:2], info_nce(*alone[:2], 0.1)),
        (alone[:2], losses.mac(*alone[:2], torch.tensor([0]), 0.1, 0.05)),
        (alone, losses.gcl(*alone, 0.2, exclude_other_positive=True)),
        (pair, info_nce(*pair, 0.1, candidate_ids=same)),
        (pair, losses.symmetric_info_nce(*pair, 0.1, gathered=gather_rows(*pair, ids=same))),
        (pair, losses.multi_positive(anchors, positives, none, 0.3, gathered=gather_rows(anchors, ids=same))),
        (pair, losses.multi_positive(anchors, positives, none, 0.3, torch.zeros(4, 1))),
    ):
        assert loss.item() == pytest.approx(0, abs=1e-12)
        for grad in torch.autograd.grad(loss, views, allow_unused=True):
            assert grad is None or grad.abs().max() < 1e-12


def test_what_is_masked_may_hold_anything():
    anchors, positives, negatives, _ = ANCHORS
    clean = losses.multi_positive(anchors, positives, negatives, 0.3, POSITIVES, NEGATIVES)
    dirty = [x.detach().clone() for x in (anchors, positives, negatives)]
    dirty[1][~POSITIVES.bool()], dirty[2][~NEGATIVES.bool()] = float("nan"), 0.0
    dirty = [x.requires_grad_() for x in dirty]
    loss = losses.multi_positive(*dirty, 0.3, POSITIVES, NEGATIVES)
    assert loss == clean and all(grad.isfinite().all() for grad in torch.autograd.grad(loss, dirty))
    views = triple()
    clean = losses.gcl(*views, 0.3, gathered=gather_rows(*views, present=PRESENT))
    for view, exists in zip(views, PRESENT.T.bool(), strict=True):
        view.data[~exists] = float("nan")
    loss = losses.gcl(*views, 0.3, gathered=gather_rows(*views, present=PRESENT.bool()))
    assert loss == clean
    for grad, exists in zip(torch.autograd.grad(loss, views), PRESENT.T.bool(), strict=True):
        assert grad.isfinite().all() and not grad[~exists].any() and grad[exists].any()


def test_modules_pass_everything_on_and_train_their_temperature():
    views, flags, present = VIEWS, (False, True, True), PRESENT.bool()
    whole = naive.gcl(*views, 0.2, *flags, gathered=gather_rows(*views, ids=IDS, present=present))
    for module, count, given, expected in (
        (GclLoss(0.2), 3, {}, naive.gcl(*views, 0.2)),
        (GclLoss(0.2, True, *flags), 3, {"ids": IDS, "present": present}, whole),
        (ContrastiveLoss(0.2), 2, {"ids": IDS}, naive.symmetric_info_nce(*PAIR, COOL, **NAMED_PAIR)),
    ):
        terms = module(*views[:count], **given)
        name = next(iter(terms))
        assert [*terms] == [name, "temperature", *(["masked_negatives"] if given else [])]
        assert name == ("gcl_loss" if count == 3 else "contrastive_loss")
        assert terms[name].item() == pytest.approx(expected.item(), abs=1e-6)
        assert terms["temperature"].item() == pytest.approx(0.2) and not terms["temperature"].requires_grad
        assert not given or terms["masked_negatives"].item() == pytest.approx(4 / 6)  # two ids show twice
        terms[name].backward()
        assert module.temperature.log_value.grad.abs() > 1e-3


@pytest.mark.parametrize(
    ("name", "block", "count"), [("info_nce", 8, 120), ("multi_positive", 8, 120), ("gcl", 8, 120), ("gcl", 256, 352)]
)
def test_memory_is_bounded_and_the_scores_of_small_batches_are_computed_once(name, block, count, monkeypatch):
    """Half of a symmetric matrix is computed, in 8 strips or more; beyond a limit, again in the backward pass."""
    monkeypatch.setattr(kernel, "BLOCK_SIZE", block)
    rows, columns = {"info_nce": (count, 2 * count), "gcl": (3 * count, 3 * count)}.get(name, (count, count))
    share = 1 if name == "info_nce" else 0.5 * (1 + min(block, rows // 8) / rows)  # squares on the diagonal are whole
    for limit, times in ((kernel.KEPT_BYTES, 1), (0, 2)):
        monkeypatch.setattr(kernel, "KEPT_BYTES", limit)
        with FlopCounterMode(display=False) as flops, Largest() as largest:
            PLAIN[name](losses, *triple(count, 16), 0.2).backward()
        found = flops.get_total_flops() / (2 * rows * columns * 16)  # without those of addmm_
        assert found == pytest.approx(times * share, rel=0.01)
        assert block > 8 or largest.elements <= 3 * count * 16


E3 = torch.eye(3)
ZERO = E3 * torch.tensor([1.0, 0.0, 1.0])[:, None]
OWN = E3[:, None]


@pytest.mark.parametrize(
    ("loss", "arguments", "given", "message"),
    [
        ("info_nce", (E3, E3[:2], 0.1), {}, "3 queries but only 2 columns"),
        ("info_nce", (E3[:0], E3, 0.1), {}, r"queries must be \(N, D\) with N > 0, got shape \(0, 3\)"),
        ("info_nce", (ZERO, E3, 0.1), {}, r"queries\[1\] has norm 0.0; expected a finite vector"),
        ("info_nce", (E3, E3 * float("inf"), 0.1), {}, r"candidates\[0\] has norm nan"),
        ("info_nce", (E3, E3, 0.1), {"candidate_ids": IDS}, r"ids of queries has shape \(6,\), expected \(3,\)"),
        ("info_nce", (E3, E3, 0.1), {"positive_indices": IDS[:3]}, r"positions lie in \[4, 7\] of 3 columns"),
        ("symmetric_info_nce", (E3, E3[:2], 0.1), {}, r"b has shape \(2, 3\), expected \(3, 3\)"),
        ("mac", (E3, E3, IDS, 0.1, 0.1), {}, r"candidate_modality has shape \(6,\), expected \(3,\)"),
        ("mac", (E3, E3, IDS[:3], 0.1, 0.0), {}, "hard_temperature must be a positive number, got 0.0"),
        ("multi_positive", (E3, E3, OWN, 0.1), {}, r"positives has shape \(3, 3\), expected \(3, \*, 3\)"),
        ("multi_positive", (E3, ZERO[:, None], OWN, 0.1), {}, r"positives\[\(1, 0\)\] has norm 0.0"),
        ("multi_positive", (E3, OWN, OWN, 0.1, E3), {}, r"mask of positives has shape \(3, 3\), expected \(3, 1\)"),
        ("gcl", (E3, E3, ZERO, 0.1), {}, r"fused\[1\] has norm 0.0"),
        ("gcl", (E3, E3, E3, 0.1), {"present": E3[:2]}, r"present has shape \(2, 3\), expected \(3, 3\)"),
        ("gcl", (E3, E3, E3, 0.1), {"present": E3}, "no row has two of image, text and fused"),
        ("gcl", (E3, E3, E3, 0.1), {"ids": IDS}, r"ids has shape \(6,\), expected \(3,\)"),
        ("mac_hard_temperature", (0.05, 0.2, 1.5), {}, r"progress=1.5 must lie in \[0, 1\]"),
        ("mac_hard_temperature", (0.05, 0.2, 0.5, None, 0.0), {}, r"hold_after=0.0 must lie in \(0, 1\]"),
        ("mac_hard_temperature", (0.05, 9.0, 1.0, 3), {}, "rounded to 3 decimals must be a positive number, got 0.0"),
        *(
            (name, (E3, E3, t), {}, f"temperature must be a positive number, got {t}")
            for name in ("info_nce", "symmetric_info_nce")
            for t in (0.0, -0.1, float("nan"))
        ),
        ("info_nce", (E3, E3, torch.ones(2)), {}, r"temperature must be one number, got a tensor of shape \(2,\)"),
        ("gcl", (E3, E3, E3, 1e-3), {}, r"scale \(1 / temperature\) 1000 is outside \(0, 650\]"),
    ],
)
def test_bad_input_is_named(loss, arguments, given, message):
    if loss == "gcl" and given:
        given = {"gathered": gather_rows(*arguments[:3], **given)}
    with pytest.raises(ValueError, match=message):
        getattr(losses, loss)(*arguments, **given)


@pytest.mark.parametrize(("start", "end"), [(5.0, 1.0), (1e-4, 0.01)])
def test_a_learned_temperature_is_clamped_and_can_come_back(start, end):
    temperature = Temperature(learn=True)
    temperature.log_value.data.fill_(math.log(start))
    value = temperature()
    assert value.item() == pytest.approx(end)
    value.backward()
    assert temperature.log_value.grad.item() == pytest.approx(end)


def test_temperature_refuses():
    for value in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match=f"temperature must be positive, got {value}"):
            Temperature(value)
    with pytest.raises(ValueError, match=r"a learned temperature starts within \[0.01, 1.0\], got 2.0"):
        Temperature(2.0, True)


def test_a_view_that_is_missing_is_named():
    with pytest.raises(ValueError, match="GclLoss takes 'fused', which the batch lacks"):
        GclLoss(0.2)(image=E3, text=E3)
