"""The scripts of `experiments/` run at toy size, and their records give the numbers that the log reports."""

import importlib
import json
import sys
from pathlib import Path

import datasets
import pytest
import torch

from conjoin.cli.main import main as conjoin
from conjoin.data import load_triplets
from conjoin.data.emoji import sample
from tiny_emoji import first_concepts

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parent
RECORDS = FOLDER / "results"
SCRIPTS = sorted(path.stem for path in FOLDER.glob("[!t]*.py") if "def main()" in path.read_text(encoding="utf-8"))


@pytest.fixture
def run(monkeypatch, capsys):
    """Calls `main` of a script with arguments, in this process: another one would import the libraries again."""
    threads = torch.get_num_threads()
    monkeypatch.syspath_prepend(FOLDER)

    def call(script, *arguments):
        monkeypatch.setattr(sys, "argv", [script, *map(str, arguments)])
        capsys.readouterr()
        importlib.import_module(script).main()
        return capsys.readouterr().out

    yield call
    torch.set_num_threads(threads)


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_script_says_how_it_is_called(run, script, capsys):
    with pytest.raises(SystemExit) as end:
        run(script, "--help")
    assert end.value.code == 0 and f"usage: {script}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("script", "arguments", "rows"),
    [
        (
            "demo",
            ("--out", RECORDS / "demo.json"),
            [
                "| text → image, R@10 | 1.6 [0.5, 2.8] | 50.4 [45.7, 55.2] | 47.8 [43.1, 52.5] | 43.5 [39.0, 48.0] |",
                "| 72.5 [65.9, 79.3] | +2.3 [-2.3, +6.9] | +14.5 [+9.2, +20.3] |",
            ],
        ),
        (
            "coral",
            ("--out", RECORDS / "coral_30_layers_paper.json", "--compare", RECORDS / "coral_30_layers_paper.json"),
            ["+ both, full | 3 | 0.4 [-2.2, 3.0] | 2.0 [-3.5, 7.5] | 1.7 [-1.9, 5.4] | 1.4 [-1.0, 4.0] |"],
        ),
        (
            "solar",
            ("--out", RECORDS / "solar_scenes_union.json", "--compare", "GCL", "stage 1", "--seeds", *range(5)),
            [
                "| known | Avg | 77.2 | 45.1 | 32.0 [28.8, 35.3] | above 0 |",
                "| unseen | Avg | 28.6 | 24.3 | 4.3 [1.0, 7.4] |",
            ],
        ),
        (
            "coral_conditions",
            ("--only", "nothing new"),
            ["| contrastive | 3 | 31.9 [28.5, 35.3] |", "| contrastive | 3 | 4.5 [1.3, 7.6] | 0.2 [-3.8, 4.3] |"],
        ),
    ],
)
def test_headline_rows_follow_from_the_records(run, script, arguments, rows):
    printed = run(script, *arguments)
    assert all(row in printed for row in rows), printed


SCENES = ["--objects", 12, "--train", 40, "--distractors", 10, "--triplets", 12]


def test_scenes_are_made_and_a_model_is_evaluated_on_them(run, tmp_path):
    scenes = tmp_path / "scenes"
    assert str(scenes) in run("scenes", scenes, *SCENES)
    triplets = load_triplets(scenes / "test_unseen.jsonl")
    assert len(triplets) == len(load_triplets(scenes / "test_unseen_same_union.jsonl")) == 12
    command = [
        "evaluate",
        "sample",
        "--benchmark",
        "symmetric",
        "--data",
        str(scenes / "test_unseen.jsonl"),
        "--quiet",
    ]
    assert (
        conjoin([*command, "--distractors", str(scenes / "distractors.parquet"), "--out", str(tmp_path / "out")]) == 0
    )
    (scores,) = json.loads((tmp_path / "out" / "results.json").read_text())["scores"]
    assert scores["candidates"] == 3 * 12 - 1 + 10


ROWS = ["towers", "GCL", "Mixed, own miner only", "stage 2, AUROC 0.7"]


def test_rows_of_solar_are_trained_measured_and_compared(run, tmp_path):
    steps = ["--stage1-steps", 2, "--stage2-steps", 1, "--batch-size", 8, "--stage2-batch-size", 4]
    sizes = [*SCENES, "--image-size", 28, "--width", 64, "--mined-per-miner", 2, "--threads", 1, "--no-bf16"]
    command = [*sizes, *steps, "--seeds", 0, "--time-of", "Mixed, own miner only", "--out", tmp_path]
    run("solar", *command, "--rows", *ROWS)
    content = json.loads((tmp_path / "results.json").read_text())
    found = {row["row"]: row for row in content["rows"]}
    assert set(found) >= {*ROWS} and not content["missing"]
    for row in found.values():
        for part in ("known", "unseen"):
            average = (row[part]["precision"]["value"] + row[part]["mean_recall"]["value"]) / 2
            assert row[part]["average"]["value"] == pytest.approx(average)
    assert "| known | Avg | " in run("solar", *command, "--compare", "GCL", "Mixed, own miner only")


def test_the_demo_of_solar(run, tmp_path, monkeypatch):
    monkeypatch.setattr(sample, "emoji_concepts", first_concepts(24))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "emoji")
    monkeypatch.syspath_prepend(FOLDER)
    # two steps of stage 1 leave the scores at chance, where stage 2 stops
    monkeypatch.setattr("conjoin.trainers.solar.separation", lambda scores: torch.ones(()))
    sizes = {"objects": 8, "train": 20, "triplets": 6, "distractors": 4}
    monkeypatch.setattr(importlib.import_module("solar_demo"), "SCENES", sizes)
    short = {"max_steps": 2, "warmup_steps": 1, "per_device_train_batch_size": 6, "logging_steps": 1}
    options = [word for name, value in short.items() for word in (f"--{name}", value)]
    run("solar_demo", "--out", tmp_path, *options, "--features_dir", tmp_path / "features", "--feature_copies", 1)
    results, report = json.loads((tmp_path / "results.json").read_text()), (tmp_path / "report.html").read_text()
    known, unseen, differences, masks = results["tables"]
    assert [len(table["rows"]) for table in (known, unseen, differences, masks)] == [7, 7, 6, 8]
    assert report.count("<article") == len(results["examples"]) and len(list((tmp_path / "pictures").iterdir())) >= 2


def test_the_map_of_vectors(run, tmp_path, load_first_emoji, monkeypatch):
    from mini_mbeir import make_mini_mbeir
    from PIL import Image

    monkeypatch.setattr("mini_mbeir.load_emoji", load_first_emoji)
    data = make_mini_mbeir(tmp_path / "mbeir", train_queries=1, val_queries=2, test_queries=6)
    run("vector_map", "sample", "--data", data, "--cells", "oven_task8", "mscoco_task0", "--out", tmp_path / "map.png")
    with Image.open(tmp_path / "map.png") as picture:
        assert len(picture.convert("RGB").getcolors(10**7)) > 3


def test_the_page_of_claims_is_made_from_its_data(run):
    assert run("claims", "--check") == ""
    claims = importlib.import_module("claims")
    row = {"claim": "x", "difference": -2.0, "interval": [-3.0, -1.0], "seeds": 3, "entry": "y"}
    assert claims.verdict(row) == "no"
    assert claims.verdict(row | {"settings": {"batch": [64, 32]}}) == "no"
    assert claims.verdict(row | {"settings": {"batch": [600, 24]}}) == "no test: batch 24, in the paper 600"
    assert claims.verdict(row | {"idle": "a head"}) == "no test: a head"
    assert claims.verdict(row | {"interval": [-3.0, 0.5]}) == claims.verdict(row | {"seeds": 2}) == "open"
    assert claims.verdict(row | {"difference": 2.0, "interval": [1.0, 3.0]}) == "yes"
    with pytest.raises(ValueError, match="does not hold"):
        claims.verdict(row | {"difference": 4.0})
