"""`conjoin demo` on a few concepts and steps: every part of it runs and what it leaves behind is whole."""

import functools
import json
import re
from pathlib import Path

import datasets
import pytest

from conjoin.cli.main import main
from conjoin.data import EmojiSample
from conjoin.data.emoji import sample


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    cache = tmp_path_factory.mktemp("emoji")
    datasets.disable_progress_bars()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sample, "EmojiSample", functools.partial(EmojiSample, limit=24, cache_dir=str(cache)))
        yield cache
    datasets.enable_progress_bars()


def demo(few, out, *more):
    short = {"max_steps": 2, "warmup_steps": 1, "per_device_train_batch_size": 16, "logging_steps": 1, "eval_steps": 1}
    arguments = [word for name, value in short.items() for word in (f"--training.{name}", str(value))]
    features = ["--features.folder", str(few / "features"), "--features.copies", "1"]
    assert main(["demo", "--out", str(out), *arguments, *features, *more]) == 0
    return json.loads((out / "results.json").read_text()), (out / "report.html").read_text()


def test_demo(few, tmp_path, capsys):
    results, report = demo(few, tmp_path / "demo")
    assert len(results["combinations"]) == 18 and len(results["examples"]) == 9
    assert results["config"]["steps"] == 2 and results["seed"] == 0
    assert [len(curve["series"]) for curve in results["curves"]] == [1, 2]
    assert results["title"] in report
    (heads,) = results["tables"]
    assert heads["columns"] == ["", "two small heads", "this model"]
    assert [row[2] for row in heads["rows"]] == [figure["metric"] for figure in results["headline"]]
    printed = capsys.readouterr().out
    (model,) = set(re.findall(r'SentenceTransformer\("(.+?)"', printed))
    assert (Path(model) / "model.safetensors").is_file() and "trust_remote_code=True" in printed
    assert heads["title"] in printed and "two small heads" in printed
    tables = printed[printed.index("Local:") : printed.index("The model,")]
    assert max(map(len, tables.splitlines())) <= 100


def test_solar(few, tmp_path, capsys, monkeypatch):
    # two steps of stage 1 leave the scores at chance, where stage 2 stops
    monkeypatch.setattr("conjoin.methods.solar.stage2.SolarStage2Objective._check_scores", lambda self, *scores: {})
    results, report = demo(few, tmp_path / "demo", "--recipe", "solar")
    assert [found["name"] for found in results["symmetric"]] == ["after stage 1", "after stage 2"]
    assert len(results["figures"]) == 4 and report.count("<figure") > 4
    assert sum("threshold" in curve["title"] for curve in results["curves"]) == 2
    for folder in ("stage1", "mined", "model", "index", "gallery"):
        assert any((tmp_path / "demo" / folder).iterdir())
    assert "Mining hard negatives" in capsys.readouterr().out
