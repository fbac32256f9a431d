import json
import shutil

import pyarrow.parquet as pq
import pytest

from conjoin.retrieval import load_encoder, load_mined
from tiny_commands import COLOURS, conjoin


def mine(data, out, *words):
    conjoin("mine", data, "--out", out, "--device", "cpu", "--quiet", "--duplicate-above", "1.1", *words)


def test_mine(model, data, tmp_path, capsys):
    out = tmp_path / "mined"
    yaml = tmp_path / "miners.yaml"
    described = {"texts": {"model": str(model), "query": "text", "candidate": "text", "duplicate_above": 1.1}}
    yaml.write_text(json.dumps({"miners": described}))
    words = ("--miners", yaml, "-k", 2, "--miner", "pairs", model, "fused", "fused")
    mine(data, out, *words)
    assert f"hard negatives of 7 rows in {out / 'negatives.parquet'}" in capsys.readouterr().out
    mined = load_mined(out)
    assert list(mined) == list(COLOURS)
    for colour, negatives in mined.items():
        assert 2 <= len(negatives) <= 4 and colour not in negatives
    found_by = pq.read_table(out / "negatives.parquet")["found_by"].to_pylist()
    for row in found_by:
        assert {finding["miner"] for found in row for finding in found} == {"texts", "pairs"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("miners: [", "miners.yaml: not valid YAML"),
        ("teachers: {}", "miners.yaml': expected one key, miners, got {'teachers': {}}"),
        ("miners: {a: {model: m}}", "'a': expected {model, query, candidate"),
    ],
)
def test_a_bad_file_of_miners(data, tmp_path, content, message):
    (tmp_path / "miners.yaml").write_text(content)
    with pytest.raises(ValueError, match=message):
        mine(data, tmp_path / "out", "--miners", tmp_path / "miners.yaml")
    with pytest.raises(ValueError, match="nothing to mine by: pass --miner"):
        mine(data, tmp_path / "out")


def test_a_run_loads_every_model_once(model, data, tmp_path, monkeypatch):
    loaded = []

    def load(path, **options):
        loaded.append(path)
        return load_encoder(path, **options)

    monkeypatch.setattr("conjoin.retrieval.load_encoder", load)
    mine(data, tmp_path / "out", "-k", 1, "--miner", "one", model, "text", "text")
    assert loaded == [str(model)]


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
    words = [] if anchors is None else ["--anchors", sources[anchors]]
    mine(sources[corpus], tmp_path / "out", *words, "--miner", "one", model, query, candidate, "-k", 2)
    assert all(len(negatives) == 2 for negatives in load_mined(tmp_path / "out").values())


def test_rows_of_a_group_are_no_negatives(model, data, tmp_path, monkeypatch):
    monkeypatch.setenv("CONJOIN_ROOTS", str(data))
    lines = [f"{colour},{data}/{colour}.png,{number // 3}" for number, colour in enumerate(COLOURS[:6])]
    (tmp_path / "a.csv").write_text("\n".join(["id,image,product", *lines]))
    words = ("-k", 5, "--group-column", "product", "--miner", "one", model, "image", "image")
    mine(tmp_path / "a.csv", tmp_path / "out", *words)
    mined = load_mined(tmp_path / "out")
    assert {*mined["red"]} == {*mined["blue"]} == {*COLOURS[3:6]} and {*mined["white"]} == {*COLOURS[:3]}


def test_a_part_that_a_miner_compares_must_be_there(model, data, tmp_path):
    (tmp_path / "images.csv").write_text(f"id,image\nred,{data}/red.png\n")
    miners = ["--miner", "one", model, "image", "image", "--miner", "two", model, "text", "text"]
    with pytest.raises(ValueError, match="found no text column among 'id', 'image'"):
        mine(tmp_path / "images.csv", tmp_path / "out", *miners)


@pytest.mark.parametrize("change", ["column", "processor", "damaged"])
def test_a_finished_folder_of_other_rows_or_settings_is_refused(change, model, data, tmp_path):
    table, mine_by = (
        tmp_path / "pairs.csv",
        shutil.copytree(model, tmp_path / "model", ignore=shutil.ignore_patterns("SHA256SUMS")),
    )
    lines = [f"{data}/{colour}.png,a {colour} square,{colour}\n" for colour in COLOURS]
    table.write_text("image,text,other\n" + "".join(lines))
    out = tmp_path / "out"
    words = (table, out, "-k", 1, "--miner", "one", mine_by, "text", "text", "--text-column")
    mine(*words, "text")
    before = (out / "negatives.parquet").read_bytes()
    if change == "processor":
        settings = json.loads((mine_by / "tokenizer_config.json").read_text())
        (mine_by / "tokenizer_config.json").write_text(json.dumps(settings | {"model_max_length": 3}))
    if change == "damaged":
        (sums,) = out.glob("embeddings/*/SHA256SUMS")
        sums.write_bytes(b"")
    message = {"column": "it was made with corpus '", "processor": "was made with processor '"}
    with pytest.raises(ValueError, match=message.get(change, "SHA256SUMS' is truncated or damaged")) as caught:
        mine(*words, "other" if change == "column" else "text")
    assert str(out) in str(caught.value)
    assert (out / "negatives.parquet").read_bytes() == before
