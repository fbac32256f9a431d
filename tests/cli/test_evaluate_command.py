"""`conjoin data make-mini-mbeir` and `conjoin evaluate`, on a model with random weights."""

import json

import datasets
import pytest
from PIL import Image

from conjoin.cli.main import main
from conjoin.data import EmojiSample, mini_mbeir
from conjoin.hub import export
from conjoin.models.score_fusion import ScoreFusionModel
from conjoin.processing import ImageTextProcessor


@pytest.fixture(scope="module")
def model(tiny_checkpoints, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    clip = tiny_checkpoints["clip"]
    export(ScoreFusionModel.from_clip(clip), ImageTextProcessor.from_backbones(clip, clip), folder)
    return str(folder)


@pytest.fixture(scope="module")
def mini(tmp_path_factory):
    """A miniature made by the command out of the first concepts of each split."""
    cache = tmp_path_factory.mktemp("emoji")

    def load_some(split, styles, skin_tones, cache_dir=None):
        builder = EmojiSample(config_name="en", styles=styles, skin_tones=skin_tones, limit=40, cache_dir=str(cache))
        builder.download_and_prepare()
        return builder.as_dataset(split=split)

    folder = tmp_path_factory.mktemp("mini") / "mbeir"
    datasets.disable_progress_bars()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mini_mbeir, "load_emoji", load_some)
        limits = ["--train-queries", "3", "--val-queries", "3", "--test-queries", "6"]
        assert main(["data", "make-mini-mbeir", str(folder), *limits]) == 0
    datasets.enable_progress_bars()
    return str(folder)


def test_mbeir(model, mini, tmp_path, capsys):
    out = tmp_path / "out"
    cells = ["visualnews_task0", "oven_task8", "infoseek_task8"]
    command = ["evaluate", model, "--benchmark", "mbeir", "--data", mini, "--out", str(out), "--cells", *cells]
    assert main(command) == 0
    captured = capsys.readouterr()
    assert "Single-modal" in captured.out and "Multi-modal average" in captured.out and "results.json" in captured.out
    assert "cells" in captured.err  # the progress bar
    results = json.loads((out / "results.json").read_text())
    assert [table["title"] for table in results["tables"]] == ["M-BEIR, local pools", "M-BEIR, global pools"]
    assert [row[0] for row in results["tables"][0]["rows"]][:3] == cells
    assert results["model"]["name"] == model and results["dataset"]["folder"] == mini
    assert (out / "report.html").is_file() and (out / "runs/global/oven_task8.txt").is_file()
    assert main([*command, "--quiet", "--pools", "global", "--hubness-penalty", "0.2"]) == 0
    captured = capsys.readouterr()
    assert "cells" not in captured.err and "local" not in captured.out


def test_symmetric(model, tmp_path, capsys):
    rows = []
    for number, colour in enumerate(("red", "green", "blue")):
        Image.new("RGB", (16, 16), colour).save(tmp_path / f"{colour}.png")
        item = {"query_image": f"{colour}.png", "query_text": colour, "positive_text": f"a {colour}"}
        item |= {"positive_image": f"{colour}.png", "negative_image": None, "negative_text": f"no {colour}"}
        rows.append(item | ({"variant_text": colour, "variant_image": None} if number else {}))
    path = tmp_path / "triplets.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    out = tmp_path / "out"
    command = ["evaluate", model, "--benchmark", "symmetric", "--data", str(path), "--out", str(out), "--quiet"]
    assert main(command) == 0
    assert "3 triplets, 8 candidates each" in capsys.readouterr().out
    (found,) = json.loads((out / "results.json").read_text())["symmetric"]
    assert found["triplets"] == 3 and 0 <= found["metrics"]["precision"]["value"] <= 1
    distractors = tmp_path / "more.csv"
    distractors.write_text("image,text\nred.png,other\ngreen.png,another\n")
    for more in (["--instruction", "find it"], ["--streaming"]):
        assert main([*command, "--distractors", str(distractors), *more]) == 0
        assert "3 triplets, 10 candidates each" in capsys.readouterr().out


def test_mistakes_are_one_line(model, mini, tmp_path, capsys):
    command = ["evaluate", model, "--benchmark", "mbeir", "--out", str(tmp_path / "out"), "--quiet"]
    assert main(command) == 2
    assert capsys.readouterr().err == "conjoin: --benchmark mbeir needs --data\n"
    assert main([*command, "--data", str(tmp_path / "none")]) == 2
    assert "no such file or folder" in capsys.readouterr().err
    assert main([*command, "--data", mini, "--cells", "coco"]) == 2
    assert "unknown M-BEIR cell 'coco'" in capsys.readouterr().err
    assert main(["data", "make-mini-mbeir", mini]) == 2
    assert "exists and is not this miniature" in capsys.readouterr().err
