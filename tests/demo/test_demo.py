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
from conjoin.demo import solar as solar_demo


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


@pytest.mark.slow
def test_demo(few, tmp_path, capsys):
    results, report = demo(few, tmp_path / "demo", "--no-bf16")
    assert len(results["combinations"]) == 18 and len(results["examples"]) == 9
    assert results["config"]["steps"] == 2 and results["seed"] == 0
    assert [len(curve["series"]) for curve in results["curves"]] == [1, 2]
    assert results["title"] in report
    (compared,) = results["tables"]
    assert compared["columns"] == ["", "this model", "frozen towers", "both adapters", "joint encoder"]
    assert [row[1] for row in compared["rows"]] == [figure["metric"] for figure in results["headline"]]
    trained, towers, _, joint = (tuple(row[k]["value"] for row in compared["rows"]) for k in range(1, 5))
    assert len({trained, towers, joint}) == 3 and trained[-1] == towers[-1]  # the text side is the tower's own
    printed = capsys.readouterr().out
    (model,) = set(re.findall(r'SentenceTransformer\("(.+?)"', printed))
    assert (Path(model) / "model.safetensors").is_file() and "trust_remote_code=True" in printed
    assert compared["title"] in printed and "both adapters" in printed
    tables = printed[printed.index("Local:") : printed.index("The model,")]
    assert max(map(len, tables.splitlines())) <= 100


@pytest.mark.parametrize(
    ("place", "recipe"),
    [("gallery", []), ("mined/embeddings", ["--recipe", "solar"]), ("mined/miners", ["--recipe", "solar"])],
)
def test_files_that_no_demo_wrote_stay(place, recipe, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("conjoin.training.train", None)
    monkeypatch.setattr(solar_demo, "make_scenes", None)
    picture = tmp_path / place / "2024" / "holiday.jpg"
    picture.parent.mkdir(parents=True)
    picture.touch()
    assert main(["demo", "--out", str(tmp_path), *recipe]) == 2
    assert re.search("it has '(2024|holiday.jpg)'", capsys.readouterr().err) and picture.exists()


@pytest.mark.slow
def test_solar(few, tmp_path, capsys, monkeypatch):
    # two steps of stage 1 leave the scores at chance, where stage 2 stops
    monkeypatch.setattr("conjoin.methods.solar.stage2.SolarStage2Objective._check_scores", lambda self, *scores: {})
    monkeypatch.setattr(solar_demo, "SCENES", {"objects": 8, "train": 20, "triplets": 6, "distractors": 4})
    out = tmp_path / "demo"
    results, report = demo(few, out, "--recipe", "solar", "--training.per_device_train_batch_size", "6")
    runs = ["towers, score fusion"]
    for run in ("GCL", "SOLAR stage 1", "SOLAR stage 2"):
        runs += [f"{run}, fused", f"{run}, score fusion"]
        assert results["config"][run]["steps"] == 2
    known, unseen, differences, masks = results["tables"]
    for table in (known, unseen):
        assert [row[0] for row in table["rows"]] == runs
        assert "among 21 items" in table["note"]  # three of each triplet without the query, and the distractors
        assert [row[-1] is None for row in table["rows"]] == [True] + [False] * 6
    pairs = [(row[0], row[1]) for row in differences["rows"]]
    assert len(set(pairs)) == 6 and ("SOLAR stage 1, fused − GCL, fused", "known objects") in pairs
    assert all(
        re.fullmatch(r"[+-]\d+\.\d \[-?\d+\.\d, -?\d+\.\d\]", cell) for row in differences["rows"] for cell in row[2:]
    )
    assert all(re.fullmatch(r"\d+ / \d+", row[column]) for row in masks["rows"] for column in (3, 5))
    assert len(masks["rows"]) == 8 and len(results["headline"]) == 3
    assert 2 <= len(results["figures"]) <= 8 and report.count("<figure") >= len(results["figures"])
    for example in results["examples"]:  # two runs search for each query that one finds and the other does not
        assert (example["rank"] <= 5) == example["title"].endswith("SOLAR stage 1, score fusion")
    printed = capsys.readouterr().out
    assert max(map(len, printed[printed.index("Symmetric") : printed.index("The model,")].splitlines())) <= 110
    for folder in ("baseline", "stage1", "stage2"):
        assert (out / folder / "model.safetensors").is_file()
    assert (out / "mined" / "negatives.parquet").is_file()
    negatives, usage = json.loads((out / "stage2" / "recipe.json").read_text()), results["usage"]
    assert negatives["training"]["mined_per_anchor"] == 2 and str(out / "stage1") in usage
