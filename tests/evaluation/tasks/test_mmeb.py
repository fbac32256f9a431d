import json

import datasets
import numpy as np
import pytest

from conjoin.data.mmeb import find_subsets
from conjoin.evaluation import EvaluateOptions, evaluate
from tiny_encoder import tiny_encoder


def run(encoder, folder, tmp_path, **which):
    return evaluate(encoder, "mmeb", tmp_path / "out", EvaluateOptions(baselines=False), data=str(folder), **which)


@pytest.fixture
def folder(tmp_path, pictures):
    """A subset as JSON lines with images, and one as Parquet of texts."""
    tmp_path = tmp_path / "mmeb"
    tmp_path.mkdir()
    for number, picture in enumerate(pictures):
        picture.save(tmp_path / f"p{number}.png")
    words = ["alpha", "beta", "gamma", "delta"]
    seen = [
        {
            "qry_text": f"<|image_1|> Find what it is: {words[row]}",
            "qry_img_path": f"p{row}.png",
            "tgt_text": [words[row], *(word for word in words if word != words[row])],
            "tgt_img_path": ["", "", "", ""],
        }
        for row in range(4)
    ]
    (tmp_path / "Seen.jsonl").write_text("".join(json.dumps(row) + "\n" for row in seen))
    read = [
        {
            "qry_text": "alpha",
            "qry_img_path": "",
            "tgt_text": ["<|image_1|>\n", "beta"],
            "tgt_img_path": ["p1.png", ""],
        },
        {"qry_text": "beta", "qry_img_path": "", "tgt_text": ["beta", "alpha"], "tgt_img_path": ["", ""]},
    ]
    (tmp_path / "Read").mkdir()
    datasets.Dataset.from_list(read).to_parquet(str(tmp_path / "Read/test-00000-of-00001.parquet"))
    return tmp_path


def test_precision_equals_a_naive_loop(folder, tmp_path):
    encoder = tiny_encoder()
    results = run(encoder, folder, tmp_path)
    expected = []
    for line in (folder / "Seen.jsonl").read_text().splitlines():
        row = json.loads(line)
        text = row["qry_text"].replace("<|image_1|>", "").strip()
        query = encoder.encode([{"text": text, "image": str(folder / row["qry_img_path"])}])[0].astype(np.float64)
        scores = [float(vector.astype(np.float64) @ query) for vector in encoder.encode(row["tgt_text"])]
        expected.append(scores[0] > max(scores[1:]) + 1e-6)
    assert {score.name: score.queries for score in results.scores} == {"Seen": 4, "Read": 2}
    seen, read = (results.metrics(name)["hit_rate@1"] for name in ("Seen", "Read"))
    assert seen.value == np.mean(expected) and (seen.chance, read.chance) == (0.25, 0.5)
    assert read.value >= 0.5  # the second query is its target
    (headline,) = results.headline
    assert headline.label == "average, Scores, R@1"
    assert headline.metric.value == pytest.approx((seen.value + read.value) / 2)
    rows = [(row[0], row[1]) for row in results.tables[0].rows]
    assert rows == [("Seen", "image+text → text"), ("Read", "text → several"), ("average", ""), ("random order", "")]


def test_each_pair_of_modalities_has_an_average(folder, tmp_path):
    (folder / "Twice.jsonl").write_text((folder / "Seen.jsonl").read_text())
    (table,) = run(tiny_encoder(), folder, tmp_path).tables
    assert [row[0] for row in table.rows][:3] == ["Seen", "Twice", "average, image+text → text"]
    assert table.rows[2][-1].value == table.rows[0][-1].value == table.rows[1][-1].value


@pytest.mark.parametrize(
    ("query", "targets", "value"),
    [("x", ["ab", "ba"], 0), ("ab", ["ab", "zz", "ab"], 1)],  # the same bytes; the right one twice
)
def test_a_tie_is_a_failure(folder, tmp_path, query, targets, value):
    row = {"qry_text": query, "qry_img_path": "", "tgt_text": targets, "tgt_img_path": [""] * len(targets)}
    (folder / "Tie.jsonl").write_text(json.dumps(row) + "\n")
    assert run(tiny_encoder(), folder, tmp_path, subsets=["Tie"]).headline[0].metric.value == value


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"tgt_text": ["a"], "tgt_img_path": [""]}, ValueError, "row 0: expected two different targets or more"),
        ({"tgt_text": ["a", "a"], "tgt_img_path": ["", ""]}, ValueError, "expected two different targets"),
        ({"tgt_text": ["a", "b"]}, ValueError, "row 0: expected .* two lists of one length"),
        ({"qry_img_path": "absent.png"}, FileNotFoundError, r"row 0.*absent\.png': no such file"),
        ({"qry_text": "<|image_1|>", "qry_img_path": ""}, ValueError, "neither text nor image"),
        ({"tgt_text": None}, ValueError, "two lists of one length"),
    ],
)
def test_a_malformed_row_is_named(folder, tmp_path, change, error, message):
    row = json.loads((folder / "Seen.jsonl").read_text().splitlines()[0])
    (folder / "Seen.jsonl").write_text(json.dumps(row | change) + "\n")
    with pytest.raises(error, match=message):
        run(tiny_encoder(), folder, tmp_path, subsets=["Seen"])


def test_subsets_are_found_and_mistakes_named(folder):
    assert list(find_subsets(folder)) == ["Read", "Seen"]
    with pytest.raises(ValueError, match=r"no subset 'Sen' in .*; there are \['Read', 'Seen'\]"):
        find_subsets(folder, ["Sen"])
    with pytest.raises(FileNotFoundError, match="absent' has no subset"):
        find_subsets(folder / "absent")
    (folder / "Read.jsonl").write_text("{}")
    with pytest.raises(ValueError, match="the subset 'Read' has several files"):
        find_subsets(folder)
    (folder / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="has no subset"):
        find_subsets(folder / "empty")
