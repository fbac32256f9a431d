"""Rows and queries of several images on the command line, with a model that takes one."""

import itertools
import json

import pytest
from PIL import Image

from conjoin.cli.main import main
from tiny_commands import write_rows

COLOURS = ("red", "green", "blue", "yellow")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with pictures, a table of single images and one of several."""
    folder = tmp_path_factory.mktemp("place")
    for colour in COLOURS:
        Image.new("RGB", (8, 8), colour).save(folder / f"{colour}.png")
    single = [{"id": colour, "image": f"{colour}.png", "text": colour} for colour in COLOURS]
    several = [
        {"id": f"{first}-{second}", "images": [f"{first}.png", f"{second}.png"], "text": "a <image> b <image>"}
        for first, second in itertools.pairwise(COLOURS)
    ]
    for name, rows in (("single", single), ("several", several)):
        write_rows(folder / f"{name}.jsonl", rows)
    return folder


def conjoin(*words):
    return main([str(word) for word in words])


def test_an_interleaved_query_finds_its_row(model, place, capsys):
    words = ("--input", "cat", "--out", place / "cat", "--quiet", "--device", "cpu", "--no-bf16")
    assert conjoin("encode", model, place / "several.jsonl", *words) == 0
    query = ("--image", place / "green.png", "--image", place / "blue.png", "--text", "a <image> b <image>")
    capsys.readouterr()
    assert conjoin("search", place / "cat", *query, "-k", 2) == 0  # reads the input type from the collection
    header, first, _ = capsys.readouterr().out.splitlines()
    assert header.split() == ["rank", "score", "id", "text", "image"]
    assert first.split()[2] == "green-blue"
    assert first.endswith(f"{place / 'green.png'}, {place / 'blue.png'}")  # all its images
    assert conjoin("search", place / "cat", *query, "-k", 1, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["query"]["image"] == [str(place / "green.png"), str(place / "blue.png")]
    assert found["results"][0]["id"] == "green-blue"
    for words, message in (
        (("--input", "avg"), "several images under input type cat, these queries"),
        (("--text", "like <image>"), "1 placeholders <image> in the text, but 2 images"),
    ):
        assert conjoin("search", place / "cat", *query, *words) == 2
        assert message in capsys.readouterr().err


def test_queries_of_several_images_against_single_images(model, place, capsys):
    words = ("--only", "image", "--out", place / "single", "--quiet", "--device", "cpu", "--no-bf16")
    assert conjoin("encode", model, place / "single.jsonl", *words) == 0
    query = ("--image", place / "red.png", "--image", place / "red.png")
    assert conjoin("search", place / "single", *query, "--input", "seq") == 2
    assert "2 images, but this model takes one image per item; choose input type cat" in capsys.readouterr().err
    assert conjoin("search", place / "single", *query, "-k", 1) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[1:3] == ["1.0000", "red"]


def test_a_benchmark_of_several_images(model, place, tmp_path):
    rows = [json.loads(line) for line in (place / "several.jsonl").read_text().splitlines()]
    rows = [row | {"text": row["id"].replace("-", " and ")} for row in rows]
    table = write_rows(place / "pairs.jsonl", rows)
    words = ("evaluate", model, "--benchmark", "pairs", "--data", table, "--quiet", "--device", "cpu")
    assert conjoin(*words, "--out", tmp_path / "cat", "--input", "cat") == 0
    results = json.loads((tmp_path / "cat/results.json").read_text())
    assert results["config"]["input"] == "cat"
    shown = [example["query"] for example in results["examples"] if example["title"].startswith("image → text")]
    assert [len(item["images"]) for item in shown] == [2] * 3
    assert (tmp_path / "cat/report.html").read_text().count('class="face several"') >= 3
