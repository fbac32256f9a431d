"""`conjoin explain` from the command line."""

import json
import re

import pytest

from conjoin.cli.main import main
from tiny_training import write_pairs


@pytest.fixture
def arguments(own_export, tmp_path):
    write_pairs(tmp_path / "data", 4)
    image = ["--image", str(tmp_path / "data/row1.png"), "--text", "a red dog", "--device", "cpu"]
    return ["explain", str(own_export[0]), *image, "--out", str(tmp_path / "out")]


def page(tmp_path):
    return (tmp_path / "out/explanation.html").read_text()


def test_draws_scores_and_segments(arguments, tmp_path, capsys):
    assert main(arguments) == 0
    assert "explanation.html" in capsys.readouterr().out
    assert "segments" in page(tmp_path)
    assert "masked" not in page(tmp_path)


def test_thresholds_given_draw_samples(arguments, tmp_path):
    assert main([*arguments, "--image-threshold", "-2", "--text-threshold", "-2"]) == 0
    text = page(tmp_path)  # everything is shared
    assert "positive: intersection of one masked" in text
    assert "negative: both intersections masked" in text
    assert "difference of image masked" not in text


def test_thresholds_are_fitted_to_pairs(arguments, tmp_path, capsys):
    assert main([*arguments, "--data", str(tmp_path / "data"), "--text-threshold", "0.123"]) == 0
    assert re.search(r"Threshold of the image: -?0\.\d{4}", page(tmp_path))
    assert "Threshold of the text: 0.1230" in page(tmp_path)
    assert main([*arguments, "--data", str(tmp_path / "data"), "--pairs", "-3"]) == 2
    assert "--pairs must be at least 2, got -3" in capsys.readouterr().err


def test_several_images_are_one_picture(arguments, tmp_path):
    several = [*arguments, "--image", str(tmp_path / "data/row2.png"), "--text", "a <image> red <image> dog"]
    rows = [{"images": ["data/row1.png", "data/row2.png"], "text": "<image> a <image>"}] * 2
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main([*several, "--data", str(tmp_path / "rows.jsonl")]) == 0
    assert "Threshold of the image" in page(tmp_path) and "&lt;image" not in page(tmp_path)
