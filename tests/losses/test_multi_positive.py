"""The loss with several positives and constructed negatives (SOLAR Eq. 5)."""

import math

import naive_losses
import pytest
import torch
from naive_losses import assert_same, embeddings, learned

from conjoin.losses import info_nce, multi_positive

POSITIVES = torch.tensor([[1, 1], [0, 1], [1, 0], [0, 0], [1, 1]]).bool()
NEGATIVES = torch.tensor([[1, 1, 0], [0, 0, 0], [1, 0, 1], [1, 1, 1], [0, 1, 1]]).bool()


@pytest.mark.parametrize("ids", [None, torch.tensor([3, 5, 3, 5, 1])])
@pytest.mark.parametrize("negative_mask", [None, NEGATIVES])
@pytest.mark.parametrize("positive_mask", [None, POSITIVES])
def test_equals_the_naive_loss(positive_mask, negative_mask, ids):
    inputs = *embeddings((5, 4), (5, 2, 4), (5, 3, 4)), learned(0.2)
    found = multi_positive(*inputs, positive_mask, negative_mask, gathered_ids=ids)
    expected = naive_losses.multi_positive(*inputs, positive_mask, negative_mask, ids)
    assert_same(found, expected, inputs)


@pytest.mark.parametrize("filler", [0.0, float("nan"), float("inf")])
def test_masked_vectors_may_hold_anything(filler):
    anchors, positives, negatives = embeddings((5, 4), (5, 2, 4), (5, 3, 4))
    inputs = anchors, positives, negatives, learned(0.2)
    filled = (
        anchors,
        positives.detach().masked_fill(~POSITIVES[..., None], filler).requires_grad_(),
        negatives.detach().masked_fill(~NEGATIVES[..., None], filler).requires_grad_(),
        inputs[3],
    )
    found, expected = (multi_positive(*x, POSITIVES, NEGATIVES) for x in (filled, inputs))
    assert found.item() == expected.item()
    mine, theirs = torch.autograd.grad(found, filled), torch.autograd.grad(expected, inputs)
    for grad, reference in zip(mine, theirs, strict=True):
        assert reference.any()
        torch.testing.assert_close(grad, reference)
    assert not mine[1][~POSITIVES].any() and not mine[2][~NEGATIVES].any()


def test_an_anchor_without_positives_is_still_a_negative_of_the_others():
    inputs = embeddings((5, 4), (5, 2, 4), (5, 3, 4))
    loss = multi_positive(*inputs, 0.2, POSITIVES, NEGATIVES)
    assert torch.autograd.grad(loss, inputs[0])[0][3].abs().min() > 0


@pytest.mark.parametrize("mask", [torch.zeros(5, 2, dtype=torch.bool), None])
def test_no_positive_at_all_costs_nothing(mask):
    anchors, positives, negatives = embeddings((5, 4), (5, 2 if mask is not None else 0, 4), (5, 3, 4))
    inputs = anchors, positives, negatives, learned(0.2)
    loss = multi_positive(*inputs, mask)
    assert loss.item() == 0
    for grad in torch.autograd.grad(loss, inputs):
        assert not grad.any()


def test_one_positive_and_no_negatives_is_info_nce_against_the_anchors():
    anchors, positives = embeddings((5, 4), (5, 1, 4))
    found = multi_positive(anchors, positives, anchors.new_zeros(5, 0, 4), 0.2)
    rows = [torch.cat([positives[i], anchors[[j for j in range(5) if j != i]]]) for i in range(5)]
    expected = sum(info_nce(anchors[i : i + 1], rows[i], 0.2) for i in range(5)) / 5
    assert_same(found, expected, (anchors, positives))


def test_equal_embeddings_cost_the_log_of_the_ratio():
    ones = torch.ones(5, 6, 4)
    loss = multi_positive(ones[:, 0], ones[:, :2], ones[:, :3], 0.07)
    assert loss.item() == pytest.approx(math.log((2 + 3 + 4) / 2), abs=1e-6)
    loss = multi_positive(ones[:, 0], ones[:, :2], ones[:, :3], 0.07, POSITIVES, NEGATIVES)
    counts = [(2, 2), (1, 0), (1, 2), (2, 2)]
    assert loss.item() == pytest.approx(sum(math.log((p + n + 4) / p) for p, n in counts) / 4, abs=1e-6)


def test_one_anchor_alone_has_its_own_negatives_only():
    inputs = *embeddings((1, 4), (1, 2, 4), (1, 3, 4)), learned(0.2)
    assert_same(multi_positive(*inputs), naive_losses.multi_positive(*inputs), inputs)


def test_local_anchors_against_gathered_ones_average_to_the_full_batch():
    anchors, positives, negatives = inputs = embeddings((5, 4), (5, 2, 4), (5, 3, 4))
    inputs.append(learned(0.2))
    ids = torch.tensor([3, 5, 3, 5, 1])
    # Five shares of one row each: in the fourth no anchor has a positive.
    parts = [
        multi_positive(
            anchors[rows],
            positives[rows],
            negatives[rows],
            inputs[3],
            POSITIVES[rows],
            NEGATIVES[rows],
            gathered_anchors=anchors,
            gathered_valid=POSITIVES.any(1),
            gathered_ids=ids,
            positions=rows,
        )
        for rows in torch.arange(5).split(1)
    ]
    assert parts[3].item() == 0
    whole = multi_positive(*inputs, POSITIVES, NEGATIVES, gathered_ids=ids)
    assert_same(sum(parts) / 5, whole, inputs)


@pytest.mark.parametrize(
    ("shapes", "masks", "message"),
    [
        (((5, 4), (5, 4), (5, 3, 4)), (None, None), r"positives has shape \(5, 4\), expected \(5, \*, 4\)"),
        (((5, 4), (4, 2, 4), (5, 3, 4)), (None, None), r"positives has shape \(4, 2, 4\), expected \(5, \*, 4\)"),
        (((5, 4), (5, 2, 4), (5, 3, 6)), (None, None), r"negatives has shape \(5, 3, 6\), expected \(5, \*, 4\)"),
        (((5, 4), (5, 2, 4), (5, 3, 4)), (NEGATIVES, None), r"positive_mask has shape \(5, 3\), expected \(5, 2\)"),
        (((5, 4), (5, 2, 4), (5, 3, 4)), (None, POSITIVES), r"negative_mask has shape \(5, 2\), expected \(5, 3\)"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(shapes, masks, message):
    with pytest.raises(ValueError, match=message):
        multi_positive(*embeddings(*shapes), 0.2, *masks)


def test_a_valid_zero_vector_is_refused():
    anchors, positives, negatives = (x.detach() for x in embeddings((5, 4), (5, 2, 4), (5, 3, 4)))
    positives[2, 1] = 0
    with pytest.raises(ValueError, match=r"positives\[\(2, 1\)\] has norm 0.0"):
        multi_positive(anchors, positives, negatives, 0.2)
    assert multi_positive(anchors, positives, negatives, 0.2, POSITIVES).item() > 0
