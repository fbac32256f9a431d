import json

import datasets
import numpy as np
import pytest

from conjoin.cli.evaluate import parse
from conjoin.data.mmeb import find_subsets
from conjoin.evaluation.tasks.mmeb import evaluate_mmeb
from tiny_encoder import tiny_encoder

MODALITIES = {"image+text → text": "Seen", "text → several": "Read"}


@pytest.fixture
def folder(tmp_path, pictures):
    """A subset as JSON lines with images, and one as Parquet of texts."""
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


def test_precision_equals_a_naive_loop(folder):
    encoder = tiny_encoder()
    results = evaluate_mmeb(encoder, folder)
    expected = []
    for line in (folder / "Seen.jsonl").read_text().splitlines():
        row = json.loads(line)
        text = row["qry_text"].replace("<|image_1|>", "").strip()
        query = encoder.encode([{"text": text, "image": str(folder / row["qry_img_path"])}])[0].astype(np.float64)
        scores = [float(vector.astype(np.float64) @ query) for vector in encoder.encode(row["tgt_text"])]
        expected.append(scores[0] > max(scores[1:]) + 1e-6)
    rows = {name: (queries, metric) for name, queries, metric in results.tables[0].rows}
    assert rows["Seen"][0] == 4 and rows["Seen"][1].value == np.mean(expected)
    assert rows["Seen"][1].chance == 0.25 and rows["Read"][1].chance == 0.5
    assert rows["Read"][1].value >= 0.5  # the second query is its target
    assert results.headline[0].metric.value == pytest.approx(np.mean([metric.value for _, metric in rows.values()]))
    by_modality = {name: (subsets, metric.value) for name, subsets, _, metric in results.tables[1].rows}
    assert by_modality == {name: (1, rows[subset][1].value) for name, subset in MODALITIES.items()}


def test_a_tie_is_a_failure(folder):
    (folder / "Seen.jsonl").unlink()
    row = {"qry_text": "x", "qry_img_path": "", "tgt_text": ["ab", "ba"], "tgt_img_path": ["", ""]}  # the same bytes
    (folder / "Tie.jsonl").write_text(json.dumps(row) + "\n")
    assert evaluate_mmeb(tiny_encoder(), folder, subsets=["Tie"]).headline[0].metric.value == 0
    row |= {"qry_text": "ab", "tgt_text": ["ab", "zz", "ab"], "tgt_img_path": [""] * 3}  # the right one twice
    (folder / "Tie.jsonl").write_text(json.dumps(row) + "\n")
    assert evaluate_mmeb(tiny_encoder(), folder, subsets=["Tie"]).headline[0].metric.value == 1


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"tgt_text": ["a"], "tgt_img_path": [""]}, ValueError, "row 0: expected two different targets or more"),
        ({"tgt_text": ["a", "a"], "tgt_img_path": ["", ""]}, ValueError, "expected two different targets"),
        ({"tgt_text": ["a", "b"]}, ValueError, "must be lists of one length"),
        ({"qry_img_path": "absent.png"}, FileNotFoundError, r"row 0: no image '.*absent\.png'"),
        ({"qry_text": "<|image_1|>", "qry_img_path": ""}, ValueError, "neither text nor image"),
        ({"tgt_text": None}, ValueError, "must be lists of one length"),
    ],
)
def test_a_malformed_row_is_named(folder, change, error, message):
    row = json.loads((folder / "Seen.jsonl").read_text().splitlines()[0])
    (folder / "Seen.jsonl").write_text(json.dumps(row | change) + "\n")
    with pytest.raises(error, match=message):
        evaluate_mmeb(tiny_encoder(), folder, subsets=["Seen"])


def test_subsets_are_found_and_mistakes_named(folder, tmp_path):
    assert list(find_subsets(folder)) == ["Read", "Seen"]
    with pytest.raises(ValueError, match=r"no subset 'Sen' in .*; there are \['Read', 'Seen'\]"):
        find_subsets(folder, ["Sen"])
    with pytest.raises(FileNotFoundError, match="no folder"):
        find_subsets(folder / "absent")
    (folder / "Read.jsonl").write_text("{}")
    with pytest.raises(ValueError, match="the subset 'Read' has several files"):
        find_subsets(folder)
    (folder / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="has no subset"):
        find_subsets(folder / "empty")


def test_the_command_knows_it():
    words = ["model", "--benchmark", "mmeb", "--data", "d", "--out", "o", "--subsets", "A", "B", "--images", "i"]
    args, benchmark = parse(words)
    assert (benchmark.name, args.subsets, args.images) == ("mmeb", ["A", "B"], "i")
