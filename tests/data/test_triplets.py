import json

import pytest

from conjoin.data import TRIPLET_FEATURES, load_triplets


def write(folder, rows):
    path = folder / "triplets.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


@pytest.fixture
def row():
    return {
        "id": "a",
        "query_image": "red.png",
        "query_text": "a red square",
        "positive_image": "green.png",
        "positive_text": "a square",
        "negative_image": "blue.png",
        "negative_text": None,
    }


def test_load_triplets(image_folder, row):
    with_variant = row | {"id": 7, "variant_text": "no picture", "variant_image": None, "query_image": None}
    triplets = load_triplets(write(image_folder, [row, with_variant]))
    assert triplets.features == TRIPLET_FEATURES
    assert triplets[0]["query_image"] == {"bytes": None, "path": str(image_folder / "red.png")}
    assert triplets[0]["negative_text"] is None and triplets[0]["variant_text"] is None
    assert triplets[1]["id"] == "7" and triplets[1]["variant_text"] == "no picture"


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"query_image": "rad.png"}, FileNotFoundError, r"row 1 \(id 'b'\), query: image '.*rad.png': no such"),
        ({"negative_image": None}, ValueError, r"row 1 \(id 'b'\): expected one positive and one negative"),
        ({"positive_text": " "}, ValueError, r"row 1 \(id 'b'\), positive: text is empty"),
        ({"query_text": 5}, ValueError, r"row 1 \(id 'b'\), query: text must be a string, got int 5"),
        ({"variant_image": ["red.png"] * 2}, ValueError, "row 1 .*: variant has several images; expected one"),
        ({"id": "a"}, ValueError, "row 1: the id 'a' occurs twice"),
    ],
)
def test_bad_triplets(image_folder, row, change, error, message):
    with pytest.raises(error, match=message):
        load_triplets(write(image_folder, [row, row | {"id": "b"} | change]))


def test_missing_triplet_column(image_folder, row):
    row["positiv_text"] = row.pop("positive_text")
    with pytest.raises(ValueError, match=r"no column 'positive_text'; .*did you mean 'positiv_text'"):
        load_triplets(write(image_folder, [row]))


def test_a_key_may_be_left_out_where_others_have_it(image_folder, row):
    short = {key: value for key, value in row.items() if key not in ("query_image", "negative_text")} | {"id": 2}
    triplets = load_triplets(write(image_folder, [row, short]))
    assert triplets[1]["query_image"] is None and triplets[1]["query_text"] == "a red square"


def test_triplets_in_a_table(image_folder, row):
    path = image_folder / "triplets.csv"
    row["negative_text"] = "blue"
    path.write_text(",".join(row) + "\n" + ",".join(row.values()) + "\n")
    assert load_triplets(path)[0]["negative_text"] == "blue"
    row |= {"negative_image": "", "kind": "", "id": ""}
    path.write_text(",".join(row) + "\n" + ",".join(row.values()) + "\n")
    with pytest.raises(ValueError, match="row 0: the id is missing"):
        load_triplets(path)
    row["id"] = "0"
    path.write_text(",".join(row) + "\n" + ",".join(row.values()) + "\n")
    triplet = load_triplets(path)[0]
    assert (triplet["id"], triplet["negative_image"], triplet["kind"]) == ("0", None, None)
    path.write_text(path.read_text().replace("red.png", "rad.png"))
    with pytest.raises(FileNotFoundError, match=r"row 0 \(id '0'\), query: image '.*rad.png': no such file"):
        load_triplets(path)
