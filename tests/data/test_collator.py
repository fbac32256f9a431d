import base64
import io
import math

import pytest
import torch
from PIL import Image
from transformers import BatchFeature

from conjoin.data import PairCollator
from conjoin.data.training_rows import positives_of
from conjoin.processing import parse_items


class Processor:
    """Notes which modalities the items have."""

    def __call__(self, items, *, ids=None):
        parsed = parse_items(items, ids)
        present = [[bool(item.images), bool(item.texts)] for item in parsed]
        return BatchFeature({"present": torch.tensor(present)})


def test_rows_become_items():
    image = Image.new("RGB", (4, 4))
    image.save(file := io.BytesIO(), "PNG")
    rows = [
        {"id": "a", "image": image, "text": "x"},
        {"id": "b", "image": base64.b64encode(file.getvalue()).decode(), "text": None},
        {"id": "c", "text": "y"},
    ]
    batch = PairCollator(Processor())(rows)
    assert batch["pairs"]["present"].tolist() == [[True, True], [True, False], [False, True]]
    assert len(set(batch["ids"].tolist())) == 3
    with pytest.raises(ValueError, match="row with id 'q7': neither 'image' nor 'text'; its columns are"):
        PairCollator(Processor())([*rows, {"id": "q7", "image": None}])


def test_no_value_is_no_group():
    """Rows whose group is NaN, as pandas writes an empty cell, are not all of one group."""
    rows = [
        {"text": "a", "id": n, "group": group} for n, group in enumerate([math.nan, 1.0, math.nan, "N/A", "1", ""])
    ]
    ids = PairCollator(lambda items, ids: {})(rows)["ids"].tolist()
    assert len({*ids}) == 5 and ids[1] == ids[4]
    assert positives_of([{"positive_id": each["group"]} for each in rows]) == [0, "1", 2, 3, "1", 5]
