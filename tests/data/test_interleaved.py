"""Rows with several images and texts between them, from a table to the items that a model takes."""

import json

import pytest
from datasets import Dataset
from PIL import Image

from conjoin.data import PairCollator, RetrievalCollator, load_pairs
from conjoin.data.row_images import interleave, map_images, plain_text, row_item
from conjoin.processing import parse_item

COLOURS = {"red": (255, 0, 0), "blue": (0, 0, 255), "lime": (0, 255, 0)}
TEXT = "like <image> a chair, in the colour of <image>\nbut new"


@pytest.fixture
def folder(tmp_path):
    for name in COLOURS:
        Image.new("RGB", (2, 2), name).save(tmp_path / f"{name}.png")
    return tmp_path


def parts_of(item):
    names = {colour: name for name, colour in COLOURS.items()}
    return [part if isinstance(part, str) else names[part.getpixel((0, 0))] for part in parse_item(item).parts]


INTERLEAVED = ["like", "red", "a chair, in the colour of", "blue", "but new"]


def test_placeholders_become_images(folder):
    red, blue, _ = (Image.new("RGB", (2, 2), name) for name in COLOURS)
    assert parts_of(interleave(TEXT, [red, blue])) == INTERLEAVED
    assert parts_of(interleave("<image><image> x", [red, blue])) == ["red", "blue", "x"]
    assert parts_of(interleave("<image>", [{"path": str(folder / "blue.png"), "bytes": None}])) == ["blue"]
    assert parts_of(row_item({"image": [red, blue], "text": "both"})) == ["red", "blue", "both"]
    one = {"image": red, "text": "the <image> tag"}  # a caption of one image is what it is
    assert row_item(one) == one and plain_text(red, one["text"]) == one["text"]
    assert plain_text([red, blue], TEXT) == "like a chair, in the colour of but new"
    assert map_images(len, ["a", "bc"]) == [1, 2] and map_images(len, "abc") == 3


def write(folder, kind, rows):
    file = folder / f"table.{kind}"
    if kind == "jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif kind == "parquet":
        Dataset.from_list(rows).to_parquet(file)
    else:
        Dataset.from_list([row | {"images": json.dumps(row["images"])} for row in rows]).to_csv(file, index=False)
    return file


ROWS = [
    {"id": "a", "images": ["lime.png"], "text": "one"},
    {"id": "b", "images": ["red.png", "blue.png"], "text": TEXT},
    {"id": "c", "images": ["red.png", "lime.png"], "text": "both"},
]
ITEMS = [["lime", "one"], INTERLEAVED, ["red", "lime", "both"]]


class Parser:
    def __call__(self, items, ids=None, **kwargs):
        return {"items": [parts_of(item) for item in items]}


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("kind", ["jsonl", "parquet", "csv"])
def test_tables_hold_interleaved_rows(folder, kind, streaming):
    pairs = load_pairs(write(folder, kind, ROWS), streaming=streaming)
    assert PairCollator(Parser())(list(pairs))["pairs"]["items"] == ITEMS


def test_a_csv_of_paths_and_lists(folder):
    (folder / "table.csv").write_text('image\nlime.png\n"[""red.png"", ""blue.png""]"\n[1].png\n')
    Image.new("RGB", (2, 2), "lime").save(folder / "[1].png")
    rows = list(load_pairs(folder / "table.csv", only="image"))
    assert PairCollator(Parser())(rows)["pairs"]["items"] == [["lime"], ["red", "blue"], ["lime"]]


BAD = {
    "more images": (
        {"images": ["red.png", "blue.png", "lime.png"]},
        "2 placeholders <image> in the text, but 3 images",
    ),
    "fewer images": ({"images": ["red.png"]}, "2 placeholders <image> in the text, but 1 images"),
    "missing file": ({"images": ["red.png", "none.png"]}, "none.png': no such file"),
    "empty list": ({"images": []}, "the image is missing"),
}


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("kind", ["jsonl", "csv"])
@pytest.mark.parametrize(("change", "message"), BAD.values(), ids=list(BAD))
def test_a_bad_row_is_named(folder, change, message, kind, streaming):
    rows = [*ROWS[:1], ROWS[1] | change, *ROWS[2:]]
    with pytest.raises((ValueError, FileNotFoundError), match=rf"row 1 \(id 'b'\).*{message}"):
        list(load_pairs(write(folder, kind, rows), streaming=streaming, only="both"))
    kept = list(load_pairs(write(folder, kind, rows), streaming=streaming, only="both", on_error="skip"))
    assert [row["problem"] is None for row in kept] == [True, False, True]


def test_queries_may_be_interleaved():
    red, blue = (Image.new("RGB", (2, 2), name) for name in ("red", "blue"))
    chat = [{"role": "user", "content": [{"type": "image", "image": red}, {"type": "text", "text": "new"}]}]
    rows = [{"query": {"image": [red, blue], "text": TEXT}, "positive": "photo.png", "negatives": [chat[0], "x"]}]
    rows += [{"query": chat, "positive": {"image": [red, blue], "text": None}}]
    batch = RetrievalCollator(Parser())(rows)
    assert batch["queries"]["items"] == [INTERLEAVED, ["red", "new"]]
    assert batch["positives"]["items"] == [["photo.png"], ["red", "blue"]]
    assert batch["negatives"]["items"] == [["red", "new"], ["x"]]
    rows[0]["query"]["text"] = "<image>"
    with pytest.raises(ValueError, match="item '0': 1 placeholders"):
        RetrievalCollator(Parser())(rows)
