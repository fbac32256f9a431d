import json

import pyarrow.parquet as pq
import pytest

from conjoin.retrieval import load_mined
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


def test_a_bad_file_of_miners(data, tmp_path):
    (tmp_path / "miners.yaml").write_text("teachers: {}")
    with pytest.raises(ValueError, match=r"miners.yaml': expected one key, miners, got {'teachers': {}}"):
        mine(data, tmp_path / "out", "--miners", tmp_path / "miners.yaml")


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
    words = ("-k", 5, "--columns", "group=product", "--miner", "one", model, "image", "image")
    mine(tmp_path / "a.csv", tmp_path / "out", *words)
    mined = load_mined(tmp_path / "out")
    assert {*mined["red"]} == {*mined["blue"]} == {*COLOURS[3:6]} and {*mined["white"]} == {*COLOURS[:3]}


def test_a_part_that_a_miner_compares_must_be_there(model, data, tmp_path):
    (tmp_path / "images.csv").write_text(f"id,image\nred,{data}/red.png\n")
    miners = ["--miner", "one", model, "image", "image", "--miner", "two", model, "text", "text"]
    with pytest.raises(ValueError, match="found no text column among 'id', 'image'"):
        mine(tmp_path / "images.csv", tmp_path / "out", *miners)
