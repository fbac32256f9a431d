import json

import datasets
import numpy as np
import pytest

from conjoin.data.mmeb import find_subsets
from conjoin.evaluation import EvaluateOptions, evaluate
from tiny_encoder import tiny_encoder


def run(encoder, folder, tmp_path, **which):
    return evaluate(encoder, "mmeb", tmp_path / "out", EvaluateOptions(baselines=False), data=str(folder), **which)


def row(query, query_image, targets, images=None):
    columns = {"qry_text": query, "qry_img_path": query_image, "tgt_text": targets}
    return columns | {"tgt_img_path": images or [""] * len(targets)}


def write(path, *rows):
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))


@pytest.fixture
def folder(tmp_path, pictures):
    """A subset as JSON lines with images, and one as Parquet of texts."""
    folder = tmp_path / "mmeb"
    (folder / "Read").mkdir(parents=True)
    for number, picture in enumerate(pictures):
        picture.save(folder / f"p{number}.png")
    words = ["alpha", "beta", "gamma", "delta"]
    asked = [(f"<|image_1|> Find what it is: {word}", f"p{n}.png") for n, word in enumerate(words)]
    others = [[word, *(other for other in words if other != word)] for word in words]
    write(folder / "Seen.jsonl", *(row(*query, targets) for query, targets in zip(asked, others, strict=True)))
    read = [row("alpha", "", ["<|image_1|>\n", "beta"], ["p1.png", ""]), row("beta", "", ["beta", "alpha"])]
    datasets.Dataset.from_list(read).to_parquet(str(folder / "Read/test-00000-of-00001.parquet"))
    return folder


def test_precision_equals_a_naive_loop(folder, tmp_path):
    encoder = tiny_encoder()
    results = run(encoder, folder, tmp_path)
    expected = []
    for line in (folder / "Seen.jsonl").read_text().splitlines():
        seen = json.loads(line)
        text = seen["qry_text"].replace("<|image_1|>", "").strip()
        query = encoder.encode([{"text": text, "image": str(folder / seen["qry_img_path"])}])[0].astype(np.float64)
        scores = [float(vector.astype(np.float64) @ query) for vector in encoder.encode(seen["tgt_text"])]
        expected.append(scores[0] > max(scores[1:]) + 1e-6)
    assert {score.name: score.queries for score in results.scores} == {"Seen": 4, "Read": 2}
    seen, read = (results.metrics(name)["hit_rate@1"] for name in ("Seen", "Read"))
    assert seen.value == np.mean(expected) and (seen.chance, read.chance) == (0.25, 0.5)
    assert read.value >= 0.5  # the second query is its target
    (headline,) = results.headline
    assert headline.label == "average, Scores, R@1"
    assert headline.metric.value == pytest.approx((seen.value + read.value) / 2)
    rows = [tuple(each[:2]) for each in results.tables[0].rows]
    assert rows == [("Seen", "image+text → text"), ("Read", "text → several"), ("average", ""), ("random order", "")]


def test_each_pair_of_modalities_has_an_average(folder, tmp_path):
    (folder / "Twice.jsonl").write_text((folder / "Seen.jsonl").read_text())
    table, *_ = run(tiny_encoder(), folder, tmp_path).tables
    assert [each[0] for each in table.rows][:3] == ["Seen", "Twice", "average, image+text → text"]
    assert table.rows[2][-1].value == table.rows[0][-1].value == table.rows[1][-1].value


@pytest.mark.parametrize(
    ("query", "targets", "value"),
    [("x", ["ab", "ba"], 0), ("ab", ["ab", "zz", "ab"], 1)],  # the same bytes; the right one twice
)
def test_a_tie_is_a_failure(folder, tmp_path, query, targets, value):
    write(folder / "Tie.jsonl", row(query, "", targets))
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
    first = json.loads((folder / "Seen.jsonl").read_text().splitlines()[0])
    write(folder / "Seen.jsonl", first | change)
    with pytest.raises(error, match=message):
        run(tiny_encoder(), folder, tmp_path, subsets=["Seen"])


def test_subsets_are_found_and_bad_rows_named(folder):
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
