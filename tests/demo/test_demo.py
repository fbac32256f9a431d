"""`conjoin demo` on a few concepts and steps: every part of it runs and what it leaves behind is whole."""

import json
import re
from pathlib import Path

import datasets
import pytest

from conjoin.cli.main import main
from conjoin.data.emoji import sample
from tiny_emoji import first_concepts


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    cache = tmp_path_factory.mktemp("emoji")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sample, "emoji_concepts", first_concepts(24))
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
        yield cache


def demo(few, out, *more):
    short = {"max_steps": 2, "warmup_steps": 1, "per_device_train_batch_size": 16, "logging_steps": 1, "eval_steps": 1}
    arguments = [word for name, value in short.items() for word in (f"--{name}", str(value))]
    features = ["--features_dir", str(few / "features")]
    assert main(["demo", "--out", str(out), *arguments, *features, *more]) == 0
    return json.loads((out / "results.json").read_text()), (out / "report.html").read_text()


@pytest.mark.slow
def test_demo(few, tmp_path, capsys):
    results, report = demo(few, tmp_path / "demo", "--bf16", "false", "--joint-encoder")
    assert len(results["scores"]) >= 18 and len(results["examples"]) == 9
    assert results["config"]["steps"] == 2 and results["seed"] == 0
    assert [len(curve["series"]) for curve in results["curves"]] == [1, 2]
    assert results["title"] in report
    compared = results["tables"][-1]
    assert compared["columns"] == ["", "this model", "frozen towers", "both adapters", "joint encoder"]
    assert [row[1] for row in compared["rows"]] == [figure["metric"] for figure in results["headline"]]
    trained, towers, _, joint = (tuple(row[k]["value"] for row in compared["rows"]) for k in range(1, 5))
    assert len({trained, towers, joint}) == 3 and trained[-1] == towers[-1]  # the text side is the tower's own
    printed = capsys.readouterr().out
    (model,) = set(re.findall(r'SentenceTransformer\("(.+?)"', printed))
    assert (Path(model) / "model.safetensors").is_file() and "trust_remote_code=True" in printed
    assert compared["title"] in printed and "both adapters" in printed
    assert printed.count(compared["title"]) == 1
    tables = printed[printed.index(results["tables"][0]["title"]) : printed.index("The model,")]
    assert max(map(len, tables.splitlines())) <= 100


@pytest.mark.slow
def test_a_joint_encoder_is_compared_only_if_asked_for(few, tmp_path):
    results, _ = demo(few, tmp_path / "demo")
    compared = results["tables"][-1]
    assert compared["columns"] == ["", "this model", "frozen towers", "both adapters"]
    assert "joint encoder" not in compared["note"]


def test_files_that_no_demo_wrote_stay(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("conjoin.demo.sample.train", None)
    picture = tmp_path / "gallery" / "2024" / "holiday.jpg"
    picture.parent.mkdir(parents=True)
    picture.touch()
    assert main(["demo", "--out", str(tmp_path)]) == 2
    assert re.search("it has '(2024|holiday.jpg)'", capsys.readouterr().err) and picture.exists()
