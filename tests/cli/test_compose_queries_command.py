"""`conjoin data compose-queries`, from a CSV file to training rows."""

import json

import pytest

from conjoin.cli.main import main
from conjoin.data import MeritTraining, load_pairs
from conjoin.retrieval import encode_collection
from tiny_catalogue import products, write_catalogue
from tiny_encoder import tiny_encoder

SMALL = ("--queries", "30", "--test-queries", "5", "--test-share", "0.3", "--max-positive-share", "0.3", "--quiet")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_catalogue(tmp_path_factory.mktemp("shop"))


@pytest.fixture(scope="module")
def collection(path):
    rows = load_pairs(path, only="image")
    return encode_collection(rows, tiny_encoder(batch_size=64), path.parent / "collection").uri


def compose(path, out, *options):
    return main(["data", "compose-queries", str(path), "--out", str(out), *SMALL, *map(str, options)])


def test_from_a_table_to_training_rows(path, tmp_path, capsys):
    out = tmp_path / "shop"
    options = ("--columns", "group=family", "--languages", "th", "vi", "--conditions", "2=1", "--seed", "3")
    assert compose(path, out, *options) == 0
    assert f"queries and products in {out}" in capsys.readouterr().out
    assert len(MeritTraining(out)) == 30
    rows = [json.loads(line) for line in (out / "queries-train.json").read_text(encoding="utf-8").splitlines()]
    assert {row["language"] for row in rows} == {"th", "vi"}
    assert {len(row["query"]) for row in rows} == {2}
    assert compose(path, out, *options) == 2
    assert "shop' exists; remove it or choose another folder" in capsys.readouterr().err


def test_a_collection_ranks_positives(path, collection, tmp_path):
    plain, ranked = tmp_path / "plain", tmp_path / "ranked"
    options = ("--samplers", "conventional=1", "--columns", "group=family")
    assert compose(path, plain, *options) == 0
    assert compose(path, ranked, "--collection", collection, *options) == 0
    rows, others = ([json.loads(line) for line in (out / "queries-train.json").read_text().splitlines()]
                    for out in (plain, ranked))  # fmt: skip
    assert [row["query"] for row in rows] == [row["query"] for row in others]
    assert [sorted(row["pos_candidate"]) for row in rows] == [sorted(row["pos_candidate"]) for row in others]
    assert [row["pos_candidate"] for row in rows] != [row["pos_candidate"] for row in others]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--filters non_omission --visual colour", "--visual colour: no such attribute; there are family, color"),
        ("--samplers cold_start=1", "the sampler cold_start needs a vision-language model"),
        ("--samplers uniform=1", "expected some of conventional"),
        ("--samplers conventional", "argument --samplers: invalid name_equals_number value: 'conventional'"),
        ("--queries 0", "--queries must be at least 1, got 0"),
    ],
)
def test_bad_options_are_one_line_and_write_nothing(path, tmp_path, capsys, options, message):
    assert compose(path, tmp_path / "out", *options.split()) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_collection_of_other_products_is_refused(collection, tmp_path, capsys):
    other = write_catalogue(tmp_path, [row | {"sku": f"x{row['sku']}"} for row in products(30)])
    assert compose(other, tmp_path / "out", "--collection", collection) == 2
    assert "the collection has no row 'x1000'" in capsys.readouterr().err


def test_titles_filter(path, tmp_path, capsys):
    assert compose(path, tmp_path / "out", "--filters", "vision_centric", "--visual", "color", "style") == 0
    assert compose(path, tmp_path / "none", "--filters", "non_omission", "--visual", "color") == 2
    assert "rejected by a judge (" in capsys.readouterr().err, "no title says a material"
    rows = [json.loads(line) for line in (tmp_path / "out" / "queries-train.json").read_text().splitlines()]
    assert {name for row in rows for condition in row["query"].values() for name in condition} >= {"color", "shape"}
