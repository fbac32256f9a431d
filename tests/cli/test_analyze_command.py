"""`conjoin analyze` from the command line."""

import json
import sys

import pytest

from conjoin.cli.main import main
from conjoin.hub import export
from conjoin.hub.build import mllm_model, mllm_processor
from tiny_training import write_pairs


@pytest.fixture
def data(tmp_path):
    write_pairs(tmp_path / "data", 4)
    return str(tmp_path / "data")


@pytest.mark.parametrize("kind", ["retriever", "mllm"])
def test_writes_a_report_of_both_kinds_of_models(kind, data, mllm_checkpoints, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)  # bars are for terminals
    source, _ = mllm_checkpoints("qwen2_vl")
    model = source
    if kind == "retriever":
        model = str(tmp_path / "model")
        export(mllm_model(source, 3), mllm_processor(source), model)
    out = tmp_path / "out"
    assert main(["analyze", model, data, "--out", str(out), "--device", "cpu", "--pairs", "3"]) == 0
    printed = capsys.readouterr()
    assert "report.html" in printed.out and "images: 100%" in printed.err and "texts: 100%" in printed.err
    found = json.loads((out / "results.json").read_text())
    assert [len(table["rows"]) for table in found["tables"]] == [3 if kind == "retriever" else 4] * 3
    assert found["dataset"] == {"pairs": 3, "pairs for attention": 3, "name": data, "split": "train"}
    assert "Content-Security-Policy" in (out / "report.html").read_text()


def test_bad_options_are_one_line(data, mllm_checkpoints, capsys):
    source, _ = mllm_checkpoints("qwen2_vl")
    assert main(["analyze", source, data, "--out", "never", "--pairs", "0"]) == 2
    assert capsys.readouterr().err == "conjoin: --pairs must be at least 1, got 0\n"
    assert main(["analyze", "absent/model/x", data, "--out", "never"]) == 2
    assert capsys.readouterr().err.startswith("conjoin: cannot load the model 'absent/model/x': ")
