"""The generalized contrastive loss and its module."""

import itertools
import math

import naive_losses as naive
import pytest
import torch
from conjoin.ops import Gathered
from naive_losses import assert_same, scalar, triple

from conjoin.losses import PAIRS, GclLoss, gcl
from conjoin.losses.gcl_loss import GclOptions, GclRows, gcl_of_rows

FLAGS = list(itertools.product([True, False], repeat=3))
OPTIONS = GclOptions()


@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("with_ids", [False, True])
def test_equals_the_naive_loop(flags, with_ids):
    x, t = triple(), scalar(0.2)
    ids = torch.tensor([3, 8, 3, 1]) if with_ids else None
    loss = gcl_of_rows(GclRows(x, ids), t, GclOptions(*flags))
    assert_same(loss, naive.gcl(*x, t, *flags, ids=ids), [*x, t])


@pytest.mark.parametrize("flags", FLAGS)
def test_missing_modalities_are_left_out_whatever_they_hold(flags):
    present = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 1, 1], [1, 1, 0]], dtype=torch.bool)
    x, t = triple(), scalar(0.2)
    options = GclOptions(*flags)
    loss = gcl_of_rows(GclRows(x, present=present), t, options)
    assert_same(loss, naive.gcl(*x, t, *flags, present=present), [*x, t])
    with torch.no_grad():
        for matrix, exists in zip(x, present.T, strict=True):
            matrix[~exists] = float("nan")
    again = gcl_of_rows(GclRows(x, present=present), t, options)
    assert again.item() == loss.item()
    for gradient, exists in zip(torch.autograd.grad(again, x), present.T, strict=True):
        assert gradient.isfinite().all() and (gradient[~exists] == 0).all() and gradient[exists].abs().max() > 0


@pytest.mark.parametrize("left_out", PAIRS)
def test_a_term_can_be_removed(left_out):
    x, t = triple(), scalar(0.2)
    kept = tuple(pair for pair in PAIRS if pair != left_out)
    assert_same(gcl(*x, t, pairs=kept), naive.gcl(*x, t, True, False, False, pairs=kept), [*x, t])


@pytest.mark.parametrize(
    ("flags", "count"),
    [((True, False, False), 14), ((False, False, False), 15), ((True, True, False), 10), ((True, False, True), 13)],
)
def test_equal_embeddings_give_the_log_of_the_count(flags, count):
    same = torch.ones(5, 4, dtype=torch.float64)
    assert gcl(same, same, same, 0.07, *flags).item() == pytest.approx(math.log(count), abs=1e-12)


def test_gathered_columns_of_the_same_rows_change_nothing():
    x, t = triple(), scalar(0.2)
    loss = gcl_of_rows(GclRows(x), t, OPTIONS, Gathered(tuple(x), torch.arange(4)))
    assert_same(loss, gcl(*x, t), [*x, t])


def test_one_pair_contrasts_with_its_own_third_embedding():
    x, t = triple(count=1), scalar(0.2)
    assert_same(gcl(*x, t), naive.gcl(*x, t, True, False, False), [*x, t])
    assert gcl(*x, t, exclude_other_positive=True).item() == pytest.approx(0.0)


IDS = torch.tensor([4, 7, 4, 1, 9, 7])


def test_gcl_of_rows_that_all_show_the_same_keeps_each_pair_to_itself():
    x, t = triple(), scalar(0.2)
    loss = gcl_of_rows(GclRows(x, torch.zeros(4, dtype=torch.long)), t, OPTIONS)
    alone = sum(gcl(*(view[i : i + 1] for view in x), t) for i in range(4)) / 4
    assert_same(loss, alone, [*x, t])


@pytest.mark.parametrize("flags", [(True, False, False), (False, True, True)])
def test_gcl_over_shares_with_ids_and_missing_modalities(flags):
    x, t = triple(6, 4), scalar(0.2)
    present = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 1, 1], [0, 0, 0], [1, 1, 1], [1, 1, 0]]).bool()
    shares = [
        gcl_of_rows(
            GclRows([view[rows] for view in x], IDS[rows], present[rows]),
            t,
            GclOptions(*flags),
            Gathered(tuple(x), rows, IDS, present),
        )
        for rows in torch.arange(6).split(2)
    ]
    assert len({share.item() for share in shares}) == 3
    assert_same(sum(shares) / 3, naive.gcl(*x, t, *flags, present=present, ids=IDS), [*x, t])


def test_gathered_columns_and_what_is_missing_come_together():
    x = triple(4)
    with pytest.raises(ValueError, match="present beside present"):
        gcl_of_rows(GclRows(x, present=torch.ones(4, 3)), 0.1, OPTIONS, Gathered(tuple(x), torch.arange(4)))


def test_a_missing_modality_may_be_given_by_any_number():
    x = triple(4)
    present = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 1, 1], [1, 1, 0]])
    numbers, truths = (gcl_of_rows(GclRows(x, present=each), 0.1, OPTIONS) for each in (present, present.bool()))
    assert numbers.item() == truths.item() > 0


def test_gcl_loss_passes_its_flags_on():
    x = dict(zip(("image", "text", "fused"), triple(), strict=True))
    pairs = (("image", "text"), ("fused", "text"))
    terms = GclLoss(0.2, False, False, False, True, pairs)(**x)
    assert set(terms) == {"gcl_loss", "temperature"}
    expected = gcl(*x.values(), 0.2, False, False, True, pairs=pairs)
    assert terms["gcl_loss"].item() == pytest.approx(expected.item(), abs=1e-6)
    assert expected.item() != pytest.approx(gcl(*x.values(), 0.2).item(), abs=1e-3)


def test_gcl_loss_refuses_unknown_pairs():
    with pytest.raises(ValueError, match="expected some of"):
        GclLoss(pairs=(("image", "sound"),))


E3 = torch.eye(3)
ROWS = (E3, E3, E3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: gcl(E3, E3[:2], E3, 0.1), r"text has shape \(2, 3\), expected \(3, 3\)"),
        (lambda: gcl(E3, E3, E3 * 0, 0.1), r"fused\[0\] has norm 0.0"),
        (lambda: gcl(E3, E3, E3, 0.1, pairs=[("image", "image")]), "pairs=.*: expected some of"),
        (lambda: gcl(E3, E3, E3, 0.1, pairs=[]), "pairs=.*: expected some of"),
        (lambda: GclRows(ROWS, present=torch.ones(3, 2)), r"present has shape \(3, 2\), expected \(3, 3\)"),
        (
            lambda: gcl_of_rows(GclRows(ROWS, present=torch.eye(3)), 0.1, OPTIONS),
            "no row has both modalities of any pair",
        ),
        (lambda: GclRows(ROWS, torch.arange(2)), r"ids has shape \(2,\), expected \(3,\)"),
        (
            lambda: gcl_of_rows(GclRows(ROWS, torch.arange(3)), 0.1, OPTIONS, Gathered(ROWS, torch.arange(3))),
            "ids beside ids",
        ),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
