"""Several captions of an image, several images of a row."""

import json

import datasets
import numpy as np
import pytest
from PIL import Image

from conjoin.data import PairCollator, load_pairs, name_rows
from conjoin.data.pairs import join_pairs
from conjoin.processing import load_image

CAPTIONS = {"red": ["a red square", "a red box", "red"], "green": ["green"], "blue": ["a blue square", "blue"]}
PAIRS = [("red#0", "a red square"), ("red#1", "a red box"), ("red#2", "red"), ("green", "green")]
PAIRS += [("blue#0", "a blue square"), ("blue#1", "blue")]


def write(path, rows):
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


@pytest.fixture
def table(image_folder):
    """A row for each picture, with a list of captions."""
    rows = [{"id": name, "image": f"{name}.png", "captions": texts} for name, texts in CAPTIONS.items()]
    return write(image_folder / "pairs.jsonl", rows)


@pytest.fixture
def embedded():
    features = {
        "id": datasets.Value("string"),
        "image": datasets.Image(),
        "text": datasets.List(datasets.Value("string")),
    }
    rows = [{"id": name, "image": Image.new("RGB", (4, 4), name), "text": texts} for name, texts in CAPTIONS.items()]
    return datasets.Dataset.from_list(rows, features=datasets.Features(features))


def check(pairs):
    rows = list(pairs)
    assert [(row["id"], row["text"]) for row in rows] == PAIRS
    assert [row["group"] for row in rows] == ["red"] * 3 + ["green"] + ["blue"] * 2
    assert load_image(rows[1]["image"]).getpixel((0, 0)) == (255, 0, 0)
    assert load_image(rows[5]["image"]).getpixel((0, 0)) == (0, 0, 255)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_list_of_captions(table, embedded, streaming):
    check(load_pairs(table))
    rows = embedded.to_iterable_dataset() if streaming else embedded
    check(load_pairs(rows))
    texts = list(load_pairs(rows, only="text"))
    assert [(row["id"], row["text"]) for row in texts] == PAIRS and texts[2]["group"] == "red"
    assert [row["id"] for row in load_pairs(rows, only="image")] == ["red", "green", "blue"]


def test_several_rows_of_one_id_and_one_image(image_folder, embedded):
    rows = [{"id": name, "image": f"{name}.png", "text": text} for name, texts in CAPTIONS.items() for text in texts]
    table = write(image_folder / "rows.jsonl", rows)
    check(load_pairs(table))
    assert load_pairs(table, only="image")["id"][:] == ["red", "green", "blue"]
    assert load_pairs(table, only="text")["id"][:] == [name for name, _ in PAIRS]
    parts = [{"id": r["id"], "image": load_image(image_folder / r["image"]), "text": r["text"]} for r in rows]
    features = embedded.features | {"text": datasets.Value("string")}
    check(load_pairs(datasets.Dataset.from_list(parts, features=datasets.Features(features))))
    for number, (part, row) in enumerate(zip(parts, rows, strict=True)):
        part["image"] = {"bytes": (image_folder / row["image"]).read_bytes(), "path": f"{number}.png"}
    check(load_pairs(datasets.Dataset.from_list(parts)))
    rows[1]["image"] = "blue.png"
    with pytest.raises(ValueError, match=r"'red' occurs twice.*only several captions of one image may share an id"):
        load_pairs(write(image_folder / "rows.jsonl", rows))


def test_rows_of_one_image_file_are_one_group(image_folder):
    names = ["red", "blue", "red", "green"]
    table = write(image_folder / "rows.jsonl", [{"file_name": f"{name}.png", "text": name} for name in names])
    pairs = load_pairs(table)
    assert (pairs["id"][:], pairs["group"][:]) == (["0", "1", "2", "3"], ["0", "1", "0", "3"])
    write(table, [{"file_name": f"{name}.png", "text": "a"} for name in ("red", "blue", "green")])
    assert "group" not in load_pairs(table).column_names
    write(table, [{"file_name": name, "text": "a"} for name in ("red.png", "blue.png", "./red.png")])
    for only in (None, "image", "text"):
        assert load_pairs(table, only=only)["group"][:] == ["0", "1", "0"]


@pytest.mark.parametrize("only", [None, "text"])
def test_rows_of_one_image_file_of_a_dataset_of_images(image_folder, only):
    red, blue = ({"path": str(image_folder / f"{name}.png"), "bytes": None} for name in ("red", "blue"))
    embedded = red | {"bytes": (image_folder / "blue.png").read_bytes()}  # the name says nothing then
    for rows, kind in (
        ([red, blue, red, embedded], datasets.Image()),
        ([[red, red], [red], [red, red], [red, embedded]], datasets.List(datasets.Image())),
    ):
        structs = datasets.Dataset.from_dict({"image": rows, "text": ["a"] * 4})
        for stored in (structs, structs.cast_column("image", kind)):
            assert load_pairs(stored, only=only)["group"][:] == ["0", "1", "0", "3"]


def test_captions_of_one_image_are_no_negatives(table):
    collator = PairCollator(lambda items, ids: {})
    ids = collator(list(load_pairs(table)))["ids"].tolist()
    assert ids[0] == ids[1] == ids[2] != ids[3] and len(set(ids)) == 3


def test_a_row_without_a_group_is_not_of_the_group_that_its_id_names():
    names = name_rows([{"id": "0", "group": 1}, {"id": "1"}, {"id": "2", "group": 1}])
    assert names[0] == names[2] != names[1]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(("texts", "problem"), [([], "the text is missing"), ([" "], "the text is missing")])
def test_lists_of_captions_that_cannot_be_used(image_folder, streaming, texts, problem):
    rows = [{"image": "red.png", "text": ["a", "b"]}, {"image": "blue.png", "text": texts}]
    table = image_folder / "a.parquet"
    datasets.Dataset.from_list(rows).to_parquet(table)
    with pytest.raises(ValueError, match=rf"row 1 \(id '1'\): .*{problem}"):
        list(load_pairs(table, streaming=streaming, only="both"))
    kept = list(load_pairs(table, streaming=streaming, only="both", on_error="skip"))
    assert [row["id"] for row in kept] == ["0#0", "0#1", "1"] and problem in kept[2]["problem"]


def test_images_are_not_repeated_on_disk(tmp_path):
    """Rows are pointed to, so eight captions of an image need no more space than one."""
    count, captions = 20, 8
    stored = datasets.Dataset.from_dict({"image": [bytes([row]) * 10_000 for row in range(count)]})
    stored.save_to_disk(tmp_path / "data")
    images = datasets.load_from_disk(tmp_path / "data")
    owners = [row for row in range(count) for _ in range(captions)]
    names = [f"{row}-{number}" for number, row in enumerate(owners)]
    joined = join_pairs(images, np.array(owners), datasets.Dataset.from_dict({"id": names}))
    assert joined["id"][:] == names and [row["image"][0] for row in joined] == owners
    addresses = {chunk.buffers()[2].address for chunk in joined.data["image"].chunks}
    assert len(addresses) == 1


# several images of a row


def test_null_images_of_a_row():
    features = datasets.Features(
        {"image": datasets.List(datasets.Image(decode=False)), "text": datasets.Value("string")}
    )
    picture = {"bytes": b"x", "path": None}
    for images in ([None], [], None):
        rows = datasets.Dataset.from_list(
            [{"image": [picture, picture], "text": "a"}, {"image": images, "text": "b"}], features=features
        )
        with pytest.raises(ValueError, match=r"row 1 \(id '1'\): the image is missing"):
            load_pairs(rows, only="both")
