import json

import pytest

from conjoin.data import EDIT_FEATURES, TRIPLET_FEATURES, emoji_concepts, find_edits, load_triplets
from conjoin.data import edit_triplets as edit_triplets_function
from conjoin.data.triplets import symmetric_triplets


@pytest.fixture
def sample(small_sample, monkeypatch):
    import sys

    for module in ("conjoin.data.triplets", "conjoin.data.edit_triplets"):
        monkeypatch.setattr(sys.modules[module], "load_emoji", small_sample)
    return small_sample


def test_symmetric_triplets(sample):
    triplets = symmetric_triplets("test")
    assert triplets.features == TRIPLET_FEATURES
    rows = {row["id"]: row for row in sample("test")}
    assert len(triplets) == sum(row["alternative_text"] is not None for row in rows.values()) / 2 > 10
    names = {row["alternative_text"] or row["text"]: row for row in rows.values()}
    for triplet in triplets:
        concept = triplet["id"].split("/")[0]
        query, positive = rows[f"{concept}/twemoji"], rows[f"{concept}/openmoji"]
        assert (triplet["query_text"], triplet["positive_text"]) == (query["text"], positive["alternative_text"])
        assert names[triplet["negative_text"]]["concept"] != concept
        assert (
            triplet["query_image"]["bytes"] != triplet["positive_image"]["bytes"] != triplet["negative_image"]["bytes"]
        )
        assert triplet["variant_image"] is None and triplet["variant_text"] is None
    pool = {t[f"{role}_image"]["bytes"]: t[f"{role}_text"] for t in triplets for role in ("positive", "negative")}
    shown = {(t[f"{role}_image"]["bytes"], t[f"{role}_text"]) for t in triplets for role in ("positive", "negative")}
    assert len(shown) == len(pool)  # a drawing has one name: no second right answer in a pool
    flags = [row for row in triplets if row["query_text"].startswith("flag for")]
    assert flags and all(names[row["negative_text"]]["kind"] == "flag" for row in flags)


def test_triplets_are_the_same_every_time(sample):
    assert symmetric_triplets("test").to_list() == symmetric_triplets("test").to_list()


def test_styles_can_be_swapped(sample):
    forward, backward = (
        symmetric_triplets("test"),
        symmetric_triplets("test", query_style="openmoji", positive_style="twemoji"),
    )
    assert forward[0]["query_image"] == backward[0]["positive_image"]
    with pytest.raises(ValueError, match="query_style and positive_style are both 'openmoji'"):
        symmetric_triplets("test", query_style="openmoji")


def test_concepts_with_one_name_on_request(sample):
    triplets = symmetric_triplets("test", same_name=True)
    assert len(triplets) == 40
    assert any(row["query_text"] == row["positive_text"] for row in triplets)


def test_edits_by_name():
    concepts = {concept.text: concept for concept in emoji_concepts(skin_tones=True)}
    names = [
        "blue square",
        "red square",
        "flag for Peru",
        "flag for Cuba",
        "grinning face",
        "grinning face with sweat",
    ]
    names += ["man cook", "woman cook", "woman shrugging", "waving hand", "waving hand dark skin tone", "star"]
    edits = {(edit.reference.text, edit.target.text): edit.text for edit in find_edits(concepts[n] for n in names)}
    assert edits == {
        ("blue square", "red square"): "but red instead of blue",
        ("red square", "blue square"): "but blue instead of red",
        ("grinning face", "grinning face with sweat"): "but with sweat",
        ("grinning face with sweat", "grinning face"): "but without sweat",
        ("man cook", "woman cook"): "but woman instead of man",
        ("woman cook", "man cook"): "but man instead of woman",
        ("waving hand", "waving hand dark skin tone"): "but with dark skin tone",
    }


def test_edit_counts():
    concepts = emoji_concepts(skin_tones=True)
    for split, count in (("train", 4703), ("validation", 226), ("test", 610)):
        edits = find_edits(concept for concept in concepts if concept.split == split)
        assert len(edits) == count
        assert all(edit.reference.split == edit.target.split == split for edit in edits)


def test_edit_triplets(sample):
    triplets = edit_triplets_function("test", skin_tones=False)
    assert triplets.features == EDIT_FEATURES
    rows = {row["id"]: row for row in triplets}
    assert len(rows) == len(triplets) > 0
    for name, row in rows.items():
        reference, target, style = name.split("/")
        assert row["edit_text"].startswith("but ")
        back = rows[f"{target}/{reference}/{style}"]
        assert back["reference_image"] == row["target_image"] != row["reference_image"]


# triplets from a file


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
        ({"query_image": "rad.png"}, FileNotFoundError, r"line 2 \(id 'b'\), query_image, image '.*rad.png': no such"),
        ({"negative_image": None}, ValueError, r"line 2 \(id 'b'\): both negative_image and negative_text are"),
        ({"positive_text": " "}, ValueError, r"line 2 \(id 'b'\), positive_text: text is empty"),
        ({"query_text": 5}, ValueError, r"line 2 \(id 'b'\), query_text: text must be a string, got int 5"),
        ({"variant_image": ["a.png"]}, ValueError, r"line 2 \(id 'b'\), variant_image: expected a path or a URL, got"),
        ({"id": "a"}, ValueError, r"1 ids occur more than once: 'a' \(2 times\)"),
    ],
)
def test_bad_triplets(image_folder, row, change, error, message):
    with pytest.raises(error, match=message):
        load_triplets(write(image_folder, [row, row | {"id": "b"} | change]))


def test_missing_triplet_column(image_folder, row):
    row["positiv_text"] = row.pop("positive_text")
    with pytest.raises(ValueError, match=r"no column 'positive_text'; .*did you mean 'positiv_text'"):
        load_triplets(write(image_folder, [row]))


def test_missing_or_empty_triplet_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no such file: '.*none.jsonl'"):
        load_triplets(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(ValueError, match=r"empty.jsonl' is empty: it has no rows"):
        load_triplets(tmp_path / "empty.jsonl")


def test_a_broken_line_of_triplets(image_folder, row):
    path = write(image_folder, [row])
    path.write_text(path.read_text() + "\n{broken")
    with pytest.raises(ValueError, match=r"triplets.jsonl', line 2: not valid JSON"):
        load_triplets(path)


def test_a_key_may_be_left_out_where_others_have_it(image_folder, row):
    short = {key: value for key, value in row.items() if key not in ("query_image", "negative_text")} | {"id": 2}
    triplets = load_triplets(write(image_folder, [row, short]))
    assert triplets[1]["query_image"] is None and triplets[1]["query_text"] == "a red square"


def test_triplets_in_a_table(image_folder, row):
    path = image_folder / "triplets.csv"
    row["negative_text"] = "blue"
    path.write_text(",".join(row) + "\n" + ",".join(row.values()) + "\n")
    assert load_triplets(path)[0]["negative_text"] == "blue"
    path.write_text(path.read_text().replace("red.png", "rad.png"))
    with pytest.raises(FileNotFoundError, match=r"row 0 \(id 'a'\), query_image, image '.*rad.png': no such file"):
        load_triplets(path)
