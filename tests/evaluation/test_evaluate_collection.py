"""A collection on a table of queries, by `conjoin evaluate` and from Python: vectors, words and both, and failures."""

import json

import pytest
from PIL import Image

from conjoin import encode_collection, search_items
from conjoin.cli.main import main
from conjoin.evaluation import evaluate_collection
from conjoin.retrieval import open_collection
from tiny_encoder import tiny_encoder

TEXTS = {"a 1": "red apple", "b": "blue chair", "c": "green table", "d": "apple pie", "e": "wooden chair"}


@pytest.fixture
def shop(tmp_path):
    for name in ("white", "navy"):
        Image.new("RGB", (8, 8), name).save(tmp_path / f"{name}.png")
    rows = [{"id": id_, "text": text} for id_, text in TEXTS.items()]
    rows += [{"id": name, "image": str(tmp_path / f"{name}.png")} for name in ("white", "navy")]
    encoder = tiny_encoder()
    encode_collection(rows, encoder, tmp_path / "shop")
    return open_collection(tmp_path / "shop"), encoder, tmp_path


def write(folder, *lines):
    (folder / "queries.csv").write_text("\n".join(lines))
    return folder / "queries.csv"


def test_each_ranking_is_measured_and_failures_are_listed(shop):
    collection, encoder, folder = shop
    lines = ["words,photo,sku", "apple,,a 1|d", "chair,,b; e", "table,,c", ",white.png,white", "apple,,b"]
    results = evaluate_collection(collection, write(folder, *lines), encoder, columns={"text": "words"})
    right = {"apple": {"a 1", "d", "b"}, "chair": {"b", "e"}, "table": {"c"}}  # two rows ask for apples
    assert [(score.name, score.queries, score.candidates) for score in results.scores] == [
        ("vectors", 4, 7), ("words", 3, 7), ("default", 4, 7),
    ]  # fmt: skip
    assert [*results.scores[0].metrics] == ["hit_rate@1", "hit_rate@10", "mrr@10"]
    for score in results.scores:
        items = [*right] if score.name == "words" else [*right, {"image": str(folder / "white.png")}]
        hits = search_items(collection, encoder, items, 1, ranking=score.name)
        expected = [
            bool({hit.id for hit in found} & right.get(item if isinstance(item, str) else "", {"white"}))
            for item, found in zip(items, hits, strict=True)
        ]
        metric = score.metrics["hit_rate@1"]
        assert metric.value == pytest.approx(sum(expected) / len(items)) and metric.low <= metric.value <= metric.high
    assert results.metrics("words")["hit_rate@1"].value == 1
    wrong = evaluate_collection(collection, write(folder, "query,ids", "table,a 1", "chair,b"), encoder)
    table = wrong.tables[-1]
    assert table.rows[0][:3] == ["table", "a 1 red apple", "c green table"] and table.rows[0][3] > 1
    assert table.note.startswith(f"{len(table.rows)} of 2 queries")


def test_the_command_takes_a_collection(own_export, tmp_path, capsys):
    rows = "\n".join(["id,title", *(f"{id_},{text}" for id_, text in TEXTS.items())])
    (tmp_path / "shop.csv").write_text(rows)
    source = ["encode", str(own_export[0]), str(tmp_path / "shop.csv"), "--only", "text", "--quiet"]
    assert main([*source, "--out", str(tmp_path / "c")]) == 0
    queries = str(write(tmp_path, "query,answer", "green table,c", "red apple,a 1", "pie,b"))
    capsys.readouterr()
    command = ["evaluate", str(tmp_path / "c"), queries]
    assert main([*command, "--columns", "id=answer"]) == 0
    printed = capsys.readouterr().out
    assert "R@1" in printed and "MRR@10" in printed and "95 % CI" in printed
    assert all(name in printed for name in ("vectors", "words", "default", "pie", "b blue chair", "d apple pie"))
    assert not (tmp_path / "out").exists()
    assert main([*command, "--out", str(tmp_path / "out")]) == 0
    assert json.loads((tmp_path / "out/results.json").read_text())["benchmark"] == "collection"
    assert (tmp_path / "out/report.html").is_file()


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        (["query,ids", "table,nothing"], "row 0 of the queries: the collection has no row of the id 'nothing'"),
        (["query,ids", "table,a 1|nothing"], "no row of the id 'a 1|nothing'"),
        (["query,ids", "table,"], "row 0 of the queries has no right id"),
        (["query,ids", "table,c", ",c"], "row 1 of the queries has no query"),
        (["query,wanted", "table,c"], "found no column of the right ids among query, wanted"),
        (["what,ids", "table,c"], "found no column of words or pictures among what, ids"),
    ],
)
def test_a_query_without_words_or_right_rows_is_named(shop, lines, problem):
    collection, encoder, folder = shop
    with pytest.raises(ValueError, match=problem.replace("|", "\\|")):
        evaluate_collection(collection, write(folder, *lines), encoder)


def test_what_is_missing_is_said(tmp_path, capsys):
    for words, problem in (
        (["runs/model"], "a model needs --benchmark NAME, a collection a table of queries"),
        ([str(tmp_path), "queries.csv"], str(tmp_path)),
        (["runs/model", "--benchmark", "emoji"], "required: --out"),
    ):
        assert main(["evaluate", *words]) == 2
        assert problem in capsys.readouterr().err
