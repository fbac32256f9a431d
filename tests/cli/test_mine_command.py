import json

import pytest
from PIL import Image
from test_retrieval_commands import save_model

from conjoin.cli.main import main
from conjoin.retrieval import load_mined

COLOURS = ("red", "green", "blue", "yellow", "black", "white")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    directory = tmp_path_factory.mktemp("data")
    with (directory / "metadata.csv").open("w") as table:
        table.write("file_name,text,id\n")
        for colour in COLOURS:
            Image.new("RGB", (20, 20), colour).save(directory / f"{colour}.png")
            table.write(f"{colour}.png,a {colour} square,{colour}\n")
    return directory


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    save_model(directory, 0)
    return directory


def test_mine(model, data, tmp_path, capsys):
    out = tmp_path / "mined"
    yaml = tmp_path / "metrics.yaml"
    described = {"texts": {"model": str(model), "query": "text", "candidate": "text", "duplicate_above": 1.1}}
    yaml.write_text(json.dumps({"metrics": described}))
    arguments = ["mine", str(data), "--out", str(out), "--metrics", str(yaml), "--device", "cpu", "--quiet", "-k", "2"]
    arguments += ["--metric", "pairs", str(model), "fused", "fused", "--duplicate-above", "1.1"]
    assert main([*arguments, "--estimate"]) == 0
    printed = capsys.readouterr().out
    assert "search texts: 6 rows, about" in printed and "search pairs: 6 rows" in printed and "in all about" in printed
    assert not out.exists()
    assert main(arguments) == 0
    assert f"hard negatives of 6 rows in {out / 'negatives.parquet'}" in capsys.readouterr().out
    mined = load_mined(out)
    assert list(mined) == list(COLOURS)
    for colour, negatives in mined.items():
        assert 2 <= len(negatives) <= 4 and colour not in negatives
        metrics = {finding.metric for found in mined.findings(colour).values() for finding in found}
        assert metrics == {"texts", "pairs"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("metrics: [", "metrics.yaml' is not YAML"),
        ("miners: {}", "metrics.yaml': expected one key, metrics, got {'miners': {}}"),
        ("metrics: {a: {model: m}}", "metric 'a': expected the keys model, query, candidate"),
    ],
)
def test_a_bad_file_of_metrics(data, tmp_path, capsys, content, message):
    (tmp_path / "metrics.yaml").write_text(content)
    assert main(["mine", str(data), "--out", str(tmp_path / "out"), "--metrics", str(tmp_path / "metrics.yaml")]) == 2
    assert message in capsys.readouterr().err


def test_no_metric_at_all(data, tmp_path, capsys):
    assert main(["mine", str(data), "--out", str(tmp_path / "out")]) == 2
    assert "nothing to mine by: pass --metric" in capsys.readouterr().err


def test_help_is_worth_reading(capsys):
    with pytest.raises(SystemExit):
        main(["mine", "--help"])
    text = capsys.readouterr().out
    assert "example: conjoin mine " in text and "(default:" in text


@pytest.mark.parametrize(
    ("query", "candidate", "corpus", "anchors"),
    [("image", "image", "images", None), ("text", "text", "texts", None), ("text", "image", "images", "texts")],
)
def test_rows_need_only_what_the_metrics_look_at(model, data, tmp_path, query, candidate, corpus, anchors):
    sources = {"images": tmp_path / "images.csv", "texts": tmp_path / "texts.csv"}
    sources["images"].write_text("id,image\n" + "".join(f"{colour},{data}/{colour}.png\n" for colour in COLOURS))
    sources["texts"].write_text("id,text\n" + "".join(f"{colour},a {colour} square\n" for colour in COLOURS))
    arguments = ["mine", str(sources[corpus]), "--out", str(tmp_path / "out"), "--device", "cpu", "--quiet"]
    arguments += [] if anchors is None else ["--anchors", str(sources[anchors])]
    metric = ["--duplicate-above", "1.1", "--metric", "one", str(model), query, candidate]
    assert main([*arguments, *metric, "-k", "2"]) == 0
    assert all(len(negatives) == 2 for negatives in load_mined(tmp_path / "out").values())


def test_a_part_that_a_metric_looks_at_must_be_there(model, data, tmp_path, capsys):
    (tmp_path / "images.csv").write_text(f"id,image\nred,{data}/red.png\n")
    metrics = ["--metric", "one", str(model), "image", "image", "--metric", "two", str(model), "text", "text"]
    assert main(["mine", str(tmp_path / "images.csv"), "--out", str(tmp_path / "out"), *metrics]) == 2
    assert "found no text column among 'id', 'image'" in capsys.readouterr().err
