import pytest
import torch
from PIL import Image
from transformers import BatchFeature

from conjoin.data import ItemCollator
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
    assert ItemCollator(Processor())(rows)["present"].tolist() == [[True, True], [True, False], [False, True]]
    renamed = [{"target_image": row.get("image"), "edit": row.get("text")} for row in rows[:2]]
    collate = ItemCollator(Processor(), columns=("target_image", "edit"))
    assert collate(renamed)["present"].tolist() == [[True, True], [True, False]]
    assert ItemCollator(Processor(), columns=("image", None))(rows[:2])["present"].tolist() == [[True, False]] * 2
    assert ItemCollator(Processor(), columns=(None, "text"))([rows[2]])["present"].tolist() == [[False, True]]


@pytest.mark.parametrize(
    ("row", "columns", "message"),
    [
        ({"id": "q7", "text": " "}, ("image", "text"), r"item 'q7'.*text is empty"),
        (
            {"id": "q7", "image": None},
            ("image", "text"),
            r"row with id 'q7': neither 'image' nor 'text'; its columns are",
        ),
        ({"id": "q7", "text": "a"}, ("image", None), r"row with id 'q7': neither 'image'; its columns are id, text"),
        ({"text": ""}, ("image", "text"), r"item '1'.*text is empty"),
    ],
)
def test_errors_carry_the_row_id(row, columns, message):
    fine = {"id": "fine", "text": "a", "image": Image.new("RGB", (4, 4))}
    with pytest.raises(ValueError, match=message):
        ItemCollator(Processor(), columns=columns)([fine, row])


def test_nothing_to_collate():
    with pytest.raises(ValueError, match="empty batch"):
        ItemCollator(Processor())([])
    with pytest.raises(ValueError, match=r"columns is \(None, None\)"):
        ItemCollator(Processor(), columns=(None, None))
