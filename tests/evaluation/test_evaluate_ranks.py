"""Launched processes share the rows of an evaluation, and one of them writes the results of one process."""

import json

import pytest
from PIL import Image

from conjoin.cli.main import main as conjoin
from conjoin.evaluation import benchmark
from conjoin.retrieval import encode
from two_ranks import run_two_ranks

pytestmark = pytest.mark.slow


def main(words):
    encode.BATCHES_AT_ONCE, benchmark._ROWS_AT_ONCE = 1, 3  # the last share of a view is empty
    assert conjoin(words) == 0


def test_two_processes_are_one(exports, tmp_path, monkeypatch):
    rows = []
    for number in range(8):
        Image.new("RGB", (20, 20), (20 * number, 200 - 20 * number, 90)).save(tmp_path / f"{number}.png")
        rows.append({"id": f"n{number}", "image": f"{number}.png", "text": f"thing {number * 7}"})
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = [
        "evaluate",
        str(exports("score_fusion")[0]),
        "--benchmark",
        "pairs",
        "--data",
        str(tmp_path / "pairs.jsonl"),
    ]
    words += ["--batch-size", "2", "--device", "cpu", "--quiet", "--out"]
    monkeypatch.setattr(encode, "BATCHES_AT_ONCE", 1)
    assert conjoin([*words, str(tmp_path / "one")]) == 0
    (tmp_path / "logs").mkdir()
    run_two_ranks("test_evaluate_ranks", tmp_path / "logs", [*words, str(tmp_path / "two")])
    one, two = (json.loads((tmp_path / out / "results.json").read_text()) for out in ("one", "two"))
    assert one.pop("created") and two.pop("created") and one == two
    assert "Baselines" in (tmp_path / "logs/0.log").read_text() and not (tmp_path / "logs/1.log").read_text()
