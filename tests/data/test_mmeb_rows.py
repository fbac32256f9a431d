"""Training rows of MMEB: what an item holds, which candidates are equal, and what is refused."""

import json

import datasets
import pytest

from conjoin.data import mmeb_training
from tiny_mmeb import write_mmeb


def write_changed(folder, number, change):
    """Write MMEB with a changed row of CIRR."""
    path = write_mmeb(folder)["CIRR"]
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[number] |= change
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_rows(tmp_path):
    write_mmeb(tmp_path)
    rows = mmeb_training(tmp_path, hard_negatives=1)
    assert rows.sources == ["CIRR"] * 3 + ["VisDial"] * 3
    composed, dialogue = rows[0], rows[3]
    assert composed["id"] == "0" and composed["dataset"] == "CIRR"
    assert composed["query"] == {"text": "Find it: with a hat", "image": str(tmp_path / "images/0.png")}
    assert composed["positive"] == {"text": "It is", "image": str(tmp_path / "images/1.png")}
    assert (composed["target_modality"], composed["negative_modalities"]) == ("image,text", ["text"])
    assert composed["negatives"] == [{"text": "no hat"}]
    assert dialogue["query"] == {"text": "Q: is it red?"} and dialogue["target_modality"] == "image"
    assert dialogue["negatives"] == dialogue["negative_ids"] == []
    assert rows.positives[0] == rows.positives[3 - 1] != rows.positives[1]  # equal content, one candidate
    assert [rows[index]["positive_id"] for index in range(6)] == [each for (each,) in rows.positives]
    assert len(mmeb_training(tmp_path, datasets=["VisDial"])) == 3 and rows[0]["negatives"]
    assert not mmeb_training(tmp_path)[0]["negatives"]


@pytest.mark.parametrize(("text", "image", "modality"), [
    ("<|image_1|>\nRepresent the given image.\n", "images/1.png", "image"),
    ("<|image_1|>\nRepresent the given cropped image of the object", "images/1.png", "image"),
    ("<|image_1|>\nRepresent the given Wikipedia image with related text information: A dime.\n",
     "images/1.png", "image,text"),
    ("Represent the given image.", "", "text"),
])  # fmt: skip
def test_the_modality_leaves_out_an_instruction_of_the_published_rows(text, image, modality, tmp_path):
    """The text stays in the item, as in the published evaluation."""
    write_changed(tmp_path, 0, {"pos_text": text, "pos_image_path": image})
    row = mmeb_training(tmp_path)[0]
    assert row["target_modality"] == modality and row["positive"]["text"] == text.removeprefix("<|image_1|>").strip()


@pytest.mark.parametrize(("change", "message"), [
    ({"pos_text": "", "pos_image_path": ""}, "CIRR, row 1 .*: 0 items in 'pos_text' or .*; expected 1 positive"),
    ({"pos_text": 7}, r"CIRR, row 1 \(id '1'\), positive: text must be a string, got int 7"),
    ({"qry_image_path": "../secret.png"}, "leaves the folder"),
])  # fmt: skip
def test_a_bad_row_is_named(tmp_path, change, message):
    write_changed(tmp_path, 1, change)
    with pytest.raises(ValueError, match=message):
        mmeb_training(tmp_path)


def test_refusals(tmp_path):
    write_mmeb(tmp_path)
    with pytest.raises(ValueError, match=r"no subset 'WebQA' .*; there are \['CIRR', 'VisDial'\]"):
        mmeb_training(tmp_path, datasets=["WebQA"])
    with pytest.raises(FileNotFoundError, match=r"has no subset: expected NAME/diverse_instruction-\*\.parquet"):
        mmeb_training(tmp_path, split="diverse_instruction")
    datasets.Dataset.from_dict({"qry": ["a"]}).to_parquet(str(tmp_path / "VisDial/original-00000-of-00001.parquet"))
    with pytest.raises(ValueError, match="no column 'qry_image_path'; the columns are 'qry'"):
        mmeb_training(tmp_path)
