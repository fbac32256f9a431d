import json
import shutil

import pytest
from PIL import Image
from test_retrieval_commands import save_model

from conjoin.cli.main import main
from conjoin.retrieval import load_encoder, load_mined

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
    yaml = tmp_path / "miners.yaml"
    described = {"texts": {"model": str(model), "query": "text", "candidate": "text", "duplicate_above": 1.1}}
    yaml.write_text(json.dumps({"miners": described}))
    arguments = ["mine", str(data), "--out", str(out), "--miners", str(yaml), "--device", "cpu", "--quiet", "-k", "2"]
    arguments += ["--miner", "pairs", str(model), "fused", "fused", "--duplicate-above", "1.1"]
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
        metrics = {finding.miner for found in mined.findings(colour).values() for finding in found}
        assert metrics == {"texts", "pairs"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("miners: [", "miners.yaml: not valid YAML"),
        ("teachers: {}", "miners.yaml': expected one key, miners, got {'teachers': {}}"),
        ("metrics: {a: {model: m}}", "miners.yaml': the key metrics is now miners"),
        ("miners: {a: {model: m}}", "'a': expected the keys model, query, candidate"),
    ],
)
def test_a_bad_file_of_miners(data, tmp_path, capsys, content, message):
    (tmp_path / "miners.yaml").write_text(content)
    assert main(["mine", str(data), "--out", str(tmp_path / "out"), "--miners", str(tmp_path / "miners.yaml")]) == 2
    assert message in capsys.readouterr().err


def test_no_miner_at_all(data, tmp_path, capsys):
    assert main(["mine", str(data), "--out", str(tmp_path / "out")]) == 2
    assert "nothing to mine by: pass --miner" in capsys.readouterr().err


def test_a_run_without_estimate_loads_every_model_once(model, data, tmp_path, monkeypatch, capsys):
    loaded = []

    def load(path, **options):
        loaded.append(path)
        return load_encoder(path, **options)

    monkeypatch.setattr("conjoin.retrieval.load_encoder", load)
    arguments = ["mine", str(data), "--out", str(tmp_path / "out"), "--device", "cpu", "-k", "1"]
    assert main([*arguments, "--miner", "one", str(model), "text", "text", "--duplicate-above", "1.1"]) == 0
    assert loaded == [str(model)]
    assert "about" not in capsys.readouterr().out


def test_help_is_worth_reading(capsys):
    with pytest.raises(SystemExit):
        main(["mine", "--help"])
    text = capsys.readouterr().out
    assert "example: conjoin mine " in text and "(default:" in text


@pytest.mark.parametrize(
    ("query", "candidate", "corpus", "anchors"),
    [("image", "image", "images", None), ("text", "text", "texts", None), ("text", "image", "images", "texts")],
)
def test_rows_need_only_what_the_metrics_look_at(
    model, data, tmp_path, monkeypatch, query, candidate, corpus, anchors
):
    monkeypatch.setenv("CONJOIN_ROOTS", str(data))
    sources = {"images": tmp_path / "images.csv", "texts": tmp_path / "texts.csv"}
    sources["images"].write_text("id,image\n" + "".join(f"{colour},{data}/{colour}.png\n" for colour in COLOURS))
    sources["texts"].write_text("id,text\n" + "".join(f"{colour},a {colour} square\n" for colour in COLOURS))
    arguments = ["mine", str(sources[corpus]), "--out", str(tmp_path / "out"), "--device", "cpu", "--quiet"]
    arguments += [] if anchors is None else ["--anchors", str(sources[anchors])]
    metric = ["--duplicate-above", "1.1", "--miner", "one", str(model), query, candidate]
    assert main([*arguments, *metric, "-k", "2"]) == 0
    assert all(len(negatives) == 2 for negatives in load_mined(tmp_path / "out").values())


def test_rows_of_a_group_are_no_negatives(model, data, tmp_path, monkeypatch):
    monkeypatch.setenv("CONJOIN_ROOTS", str(data))
    lines = [f"{colour},{data}/{colour}.png,{number // 3}" for number, colour in enumerate(COLOURS)]
    (tmp_path / "a.csv").write_text("\n".join(["id,image,product", *lines]))
    arguments = [
        "mine",
        str(tmp_path / "a.csv"),
        "--out",
        str(tmp_path / "out"),
        "--device",
        "cpu",
        "--quiet",
        "-k",
        "5",
    ]
    arguments += ["--group-column", "product", "--duplicate-above", "1.1"]
    assert main([*arguments, "--miner", "one", str(model), "image", "image"]) == 0
    mined = load_mined(tmp_path / "out")
    assert {*mined["red"]} == {*mined["blue"]} == {*COLOURS[3:]} and {*mined["white"]} == {*COLOURS[:3]}


def test_a_part_that_a_metric_looks_at_must_be_there(model, data, tmp_path, capsys):
    (tmp_path / "images.csv").write_text(f"id,image\nred,{data}/red.png\n")
    metrics = ["--miner", "one", str(model), "image", "image", "--miner", "two", str(model), "text", "text"]
    assert main(["mine", str(tmp_path / "images.csv"), "--out", str(tmp_path / "out"), *metrics]) == 2
    assert "found no text column among 'id', 'image'" in capsys.readouterr().err


@pytest.mark.parametrize("change", ["column", "processor", "damaged"])
def test_a_finished_folder_of_other_rows_or_settings_is_refused(change, model, data, tmp_path, capsys):
    table, mine_by = tmp_path / "pairs.csv", shutil.copytree(model, tmp_path / "model")
    lines = [f"{data}/{colour}.png,a {colour} square,{colour}\n" for colour in COLOURS]
    table.write_text("image,text,other\n" + "".join(lines))
    out = tmp_path / "out"
    command = [
        "mine",
        str(table),
        "--out",
        str(out),
        "--device",
        "cpu",
        "--quiet",
        "-k",
        "1",
        "--duplicate-above",
        "2",
    ]
    command += ["--miner", "one", str(mine_by), "text", "text"]
    assert main([*command, "--text-column", "text"]) == 0
    before = (out / "negatives.parquet").read_bytes()
    if change == "processor":
        settings = json.loads((mine_by / "tokenizer_config.json").read_text())
        (mine_by / "tokenizer_config.json").write_text(json.dumps(settings | {"model_max_length": 3}))
    if change == "damaged":
        (sums,) = out.glob("embeddings/*/SHA256SUMS")
        sums.write_bytes(b"")
    capsys.readouterr()
    assert main([*command, "--text-column", "other" if change == "column" else "text"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    message = {"column": "it was made with corpus '", "processor": "was made with processor '"}
    assert message.get(change, "SHA256SUMS' is truncated or damaged") in error and str(out) in error
    assert (out / "negatives.parquet").read_bytes() == before
