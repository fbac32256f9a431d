"""`conjoin evaluate`, on a model with random weights."""

import json
import re

import datasets
import mini_mbeir
import pytest
from PIL import Image

from conjoin.cli.main import main, read_command
from conjoin.data.emoji import sample
from conjoin.evaluation import Results
from conjoin.evaluation.tasks import TASKS
from tiny_emoji import few_emoji, first_concepts


@pytest.fixture(scope="module")
def model(exports):
    return str(exports("score_fusion")[0])


@pytest.fixture(scope="module")
def mini(tmp_path_factory):
    """A miniature made by the command out of the first concepts of each split."""
    folder = tmp_path_factory.mktemp("mini") / "mbeir"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mini_mbeir, "load_emoji", few_emoji(40, tmp_path_factory.mktemp("emoji")))
        mini_mbeir.make_mini_mbeir(folder, train_queries=3, val_queries=3, test_queries=6)
    return str(folder)


def test_mbeir(model, mini, tmp_path, capsys):
    out = tmp_path / "out"
    cells = ["visualnews_task0", "oven_task8", "infoseek_task8"]
    command = ["evaluate", model, "--benchmark", "mbeir", "--data", mini, "--out", str(out), "--cells", *cells]
    assert main(command) == 0
    captured = capsys.readouterr()
    assert "average, global pools, published (3 cells)" in captured.out and "average, multi" in captured.out
    assert str(out / "results.json") in captured.out and str(out / "report.html") in captured.out
    results = json.loads((out / "results.json").read_text())
    assert [row["name"] for row in results["scores"]] == [
        f"{pool}/{cell}" for pool in ("local", "global") for cell in cells
    ]
    assert results["model"]["name"] == model and results["dataset"]["data"] == mini
    assert (out / "report.html").is_file() and (out / "runs/global/oven_task8.txt").is_file()
    assert main([*command, "--quiet", "--pools", "global", "--hubness-penalty", "0.2"]) == 0
    assert "local" not in capsys.readouterr().out


def test_pairs(model, tmp_path, capsys):
    lines = []
    for number, colour in enumerate(("red", "green", "blue")):
        Image.new("RGB", (20, 20), colour).save(tmp_path / f"{colour}.png")
        lines += [f"{number}a,{colour}.png,{colour}", f"{number}b,{colour}.png,a {colour} thing"]
    path = tmp_path / "captions.csv"
    path.write_text("\n".join(["key,photo,words", *lines]))
    out = tmp_path / "out"
    command = ["evaluate", model, "--benchmark", "pairs", "--data", str(path), "--out", str(out), "--quiet"]
    assert main([*command, "--columns", "image=photo", "text=words"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"text → image, R@5 \(6 queries\) +100\.0", printed) and "image → text, " in printed
    results = json.loads((out / "results.json").read_text())
    which = {"data": str(path), "split": "train", "columns": ["image=photo", "text=words"]}
    assert (results["title"], results["dataset"]) == ("Image-text pairs", which)
    assert "MRR@10" in (out / "report.html").read_text()
    held_out = tmp_path / "test.csv"
    held_out.write_text("\n".join(["key,photo,words", *lines[:2]]))
    command[command.index(str(path))] = str(held_out)
    columns = ["--columns", "image=photo", "text=words"]
    assert main([*command, *columns, "--gallery", str(path)]) == 0
    assert "Scores of wrong answers" in capsys.readouterr().out
    results = Results.load(out / "results.json")
    assert (results.scores[0].queries, results.scores[0].candidates) == (2, 3)


def test_pairs_and_triplets_fetch_no_urls(model, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CONJOIN_ALLOW_URLS", "")
    row = {"image": "http://127.0.0.1:9/a.png", "text": "a"}
    roles = {f"{role}_{part}": row[part] for role in ("query", "positive", "negative") for part in row}
    (tmp_path / "pairs.jsonl").write_text(json.dumps(row))
    (tmp_path / "triplets.jsonl").write_text(json.dumps(roles))
    for name, data in (("pairs", tmp_path / "pairs.jsonl"), ("symmetric", tmp_path / "triplets.jsonl")):
        command = ["evaluate", model, "--benchmark", name, "--data", str(data), "--out", str(tmp_path / name)]
        assert main([*command, "--quiet"]) == 2
        assert "pass --allow-urls" in capsys.readouterr().err


def test_emoji(model, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sample, "emoji_concepts", first_concepts(24))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    out = tmp_path / "out"
    words = ["--benchmark", "emoji", "--split", "validation", "--out", str(out), "--quiet", "--language", "de"]
    assert main(["evaluate", model, *words]) == 0
    printed = capsys.readouterr().out
    assert "local image+text → text" in printed and "emoji triplets" in printed
    results = Results.load(out / "results.json")
    assert results.dataset["split"] == "validation" and results.dataset["language"] == "de"
    assert len(results.scores) == 25 and results.scores[0].candidates == 24


def test_a_benchmark_has_options_of_its_own(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "2000")
    words = "--language de --quiet --benchmark=emoji --split validation model --threads 3 --out x".split()
    options = read_command(["evaluate", *words])[1]
    assert (options.source, options.benchmark, options.quiet, options.threads) == ("model", "emoji", True, 3)
    assert (options.language, options.split) == ("de", "validation")
    for words, has in (("--help", False), ("--benchmark mbeir --help", True)):
        with pytest.raises(SystemExit):
            main(["evaluate", *words.split()])
        text = capsys.readouterr().out
        assert all(f"{name} (" in text for name in TASKS) and ("--cells" in text and "--data DATA" in text) == has


def test_bad_options_of_a_benchmark_are_one_line(model, mini, tmp_path, capsys):
    def error(name, *words):
        assert main(["evaluate", model, "--benchmark", name, "--out", str(tmp_path / "out"), "--quiet", *words]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    assert error("emoji", "--data", mini).startswith(f"conjoin: unrecognized arguments: --data {mini}; see")
    assert error("mbeir").startswith("conjoin: the following arguments are required: --data")
    assert str(tmp_path / "none") in error("mbeir", "--data", str(tmp_path / "none"))
    assert "no benchmark 'mbier'; expected one of emoji, mbeir" in error("mbier")
    assert error("mbeir", "--data", mini, "--cels=a").endswith("arguments: --cels=a; did you mean --cells?")
