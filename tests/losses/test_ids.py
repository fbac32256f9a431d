"""Ids and positions: which columns are positives and which are not negatives."""

import pytest
import torch
from naive_losses import triple

from conjoin.losses import ContrastiveLoss, GclLoss
from conjoin.losses.checks import check_positions, exclude_own, own_columns

COLUMNS = torch.arange(5)[:, None] * torch.ones(3)


def test_masked_negatives_are_counted():
    x = dict(zip(("image", "text", "fused"), triple(), strict=True))
    ids = torch.tensor([4, 9, 4, 4])  # three rows lose two negatives each
    assert ContrastiveLoss()(x["image"], x["text"], ids)["masked_negatives"].item() == 6 / 4
    assert GclLoss()(**x, ids=ids)["masked_negatives"].item() == 6 / 4


@pytest.mark.parametrize(
    ("positions", "ids", "expected"),
    [
        (None, None, [[0], [1]]),
        (torch.tensor([3, 0]), None, [[3], [0]]),
        (None, torch.tensor([7, 8, 7, 7, 9]), [[0, 2, 3], [1]]),
        (torch.tensor([4, 2]), torch.tensor([7, 8, 7, 7, 9]), [[4], [0, 2, 3]]),
    ],
)
def test_own_columns_and_those_of_their_id_are_excluded(positions, ids, expected):
    exclusion = exclude_own(COLUMNS, 2, positions, ids, "ids")
    block = torch.ones(2, 5)
    exclusion.clear(block, slice(0, 2), slice(0, 5))
    assert [(row == 0).nonzero().flatten().tolist() for row in block] == expected


def test_own_columns_stand_at_the_positions():
    assert torch.equal(own_columns(COLUMNS, 2, None), COLUMNS[:2])
    assert own_columns(COLUMNS, 5, None) is COLUMNS
    assert torch.equal(own_columns(COLUMNS, 2, torch.tensor([3, 0])), COLUMNS[[3, 0]])


def test_positions_must_be_those_of_columns():
    check_positions(2, COLUMNS, torch.tensor([0, 4]), "rows")
    with pytest.raises(ValueError, match=r"positions lie in \[-1, 2\], expected \[0, 4\]"):
        check_positions(2, COLUMNS, torch.tensor([-1, 2]), "rows")
    with pytest.raises(ValueError, match="6 rows but only 5 columns"):
        check_positions(6, COLUMNS, None, "rows")
    with pytest.raises(ValueError, match=r"ids has shape \(4,\), expected \(5,\)"):
        exclude_own(COLUMNS, 2, None, torch.arange(4), "ids")
