"""What a notebook shows of an encoder, a collection, hits and results; their data frames; and comparisons."""

import json

import numpy as np
import pandas as pd
import pytest
from PIL import Image

import conjoin
from conjoin import encode_collection, search_items
from conjoin.data.row_images import ALLOW_ROOTS
from conjoin.evaluation import Results, Score, bootstrap_ci, evaluate_collection, score_ranks
from tiny_encoder import tiny_encoder

EVIL = "red <b>apple</b>"


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shop")
    Image.new("RGB", (8, 8), "navy").save(folder / "navy.png")
    rows = [
        {"id": "a", "text": EVIL, "image": str(folder / "navy.png"), "metadata": {"price": 2.5, "rank": "first"}},
        {"id": "b", "text": "blue chair"},
        {"id": "c", "text": "green table"},
    ]
    encoder = tiny_encoder()
    collection = encode_collection(rows, encoder, folder / "shop")
    queries = [{"query": "blue chair", "ids": "b"}, {"query": "table", "ids": "c"}, {"query": "red", "ids": "a"}]
    (folder / "queries.jsonl").write_text("".join(json.dumps(row) + "\n" for row in queries))
    return folder, encoder, collection, evaluate_collection(collection, folder / "queries.jsonl", encoder)


def test_objects_say_what_they_are(shop, monkeypatch):
    folder, encoder, collection, results = shop
    hits = search_items(collection, encoder, ["apple", "chair"], 3)
    for shown, text, html in (
        (encoder, "device='cpu'", "<td>cpu</td>"),
        (collection, "rows=3", "red &lt;b&gt;apple"),
        (hits, "Hit(id='b'", "red &lt;b&gt;apple"),
        (results, "95 % CI", "iframe srcdoc="),
    ):
        assert text in repr(shown) and html in shown._repr_html_() and "<b>" not in shown._repr_html_()
    for shown in (hits, collection):
        assert "data:image/jpeg" not in shown._repr_html_() and "navy.png" in shown._repr_html_()  # not allowed
    monkeypatch.setenv(ALLOW_ROOTS, str(folder))
    assert hits._repr_html_().count("data:image/jpeg") == 2 and "data:image/jpeg" in collection._repr_html_()


def test_data_frames(shop):
    _, encoder, collection, results = shop
    rows = collection.to_pandas()
    assert rows["id"].tolist() == collection.ids and {"text", "image", "price", "rank"} == {*rows.columns} - {"id"}
    hits = search_items(collection, encoder, ["apple", "chair"], 2)
    frame = hits.to_pandas()
    assert [*frame.columns[:4]] == ["query", "rank", "id", "score"] and frame["rank"].tolist() == [1, 2, 1, 2]
    assert frame["id"].tolist() == [hit.id for found in hits for hit in found]
    assert search_items(collection, encoder, ["x"], 2, where="id = 'z'").to_pandas().columns.tolist() == [
        "query", "rank", "id", "score",
    ]  # fmt: skip
    ranks = results.to_pandas()
    for score in results.scores:
        own = ranks[ranks["score"] == score.name]
        assert (own["rank"] <= 1).mean() == score.metrics["hit_rate@1"].value
    assert ranks["query"].tolist()[0] == "0: blue chair"


def test_two_evaluations_are_compared_by_query(tmp_path):
    def results(name, ranks, wins):
        made = Results(name, "", 0)
        made.add_ranks("cell", [*ranks], np.array([*ranks.values()]), 20, np.array(wins))
        metrics = score_ranks([*ranks.values()], 1, 30, (1, 10), 10, wins=np.array(wins))
        made.scores = [Score("cell", len(ranks), 30, metrics)]
        return made

    first = results("first", {"a": 1, "b": 2, "c": 21}, [1, 1, 0])
    second = results("second", {"c": 1, "b": 1, "a": 1}, [1, 0, 1])  # in another order
    assert first.save(tmp_path / "first").name == "report.html"
    found = conjoin.compare(tmp_path / "first/results.json", second).set_index("metric")
    assert found.loc["hit_rate@1", ["n", "a", "b"]].tolist() == [3, pytest.approx(1 / 3), 1]
    for metric, differences in (
        ("hit_rate@1", [0, -1, -1]),
        ("mrr@10", [0, -0.5, -1]),
        ("precision", [0, 1, -1]),
        ("mean_recall", [0, -1 / 3, -1]),
    ):
        row = found.loc[metric]
        assert row["difference"] == pytest.approx(np.mean(differences))
        assert (row["low"], row["high"]) == pytest.approx(bootstrap_ci(differences))
    assert pd.isna(first.to_pandas()["rank"][2])
    with pytest.raises(ValueError, match="'cell' has other queries"):
        conjoin.compare(first, results("third", {"a": 1, "b": 1, "d": 1}, [1, 1, 1]))
    with pytest.raises(ValueError, match="share no score"):
        conjoin.compare(first, Results("empty", "", 0))
