import pytest
import torch
from PIL import Image
from transformers import BatchFeature

from conjoin.data import PairCollator
from conjoin.processing.item_inputs import parse_items


class Processor:
    """Notes which modalities the items have."""

    def __call__(self, items, *, ids=None):
        parsed = parse_items(items, ids)
        present = [[bool(item.images), bool(item.texts)] for item in parsed]
        return BatchFeature({"present": torch.tensor(present)})


@pytest.fixture
def rows():
    image = Image.new("RGB", (4, 4))
    return [
        {"id": "a", "image": image, "text": "x"},
        {"id": "b", "image": image, "text": None},
        {"id": "c", "text": "y"},
    ]


def test_rows_become_items(rows):
    batch = PairCollator(Processor())(rows)
    assert batch["pairs"]["present"].tolist() == [[True, True], [True, False], [False, True]]
    assert len(set(batch["ids"].tolist())) == 3


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"id": "q7", "text": " "}, r"item 'q7'.*text is empty"),
        ({"id": "q7", "image": None}, "item 'q7': the item has neither text nor image"),
    ],
)
def test_errors_carry_the_row_id(row, message):
    fine = {"id": "fine", "text": "a", "image": Image.new("RGB", (4, 4))}
    with pytest.raises(ValueError, match=message):
        PairCollator(Processor())([fine, row])
