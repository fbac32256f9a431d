"""The benchmark scripts that need no data."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPTS = Path(__file__).parents[1] / "benchmarks"


def run(script, *arguments):
    subprocess.run([sys.executable, SCRIPTS / script, *map(str, arguments)], check=True, capture_output=True)


def test_every_step_and_encoder_is_timed(tmp_path):
    found = tmp_path / "found.json"
    options = ["--size", "tiny", "--rows", 2, "--encode-rows", 2, "--mllm-rows", 2, "--turns", 1, "--threads", 1]
    run("joint_encoder.py", *options, "--mllm", "--json", found)
    content = json.loads(found.read_text())
    assert [row["towers"] for row in content["steps"]] == ["2 + 0", "2 + 0", "2 + 2", "2 + 2", "2 + 2", "6 + 2"]
    assert [row["encode"] for row in content["encoding"]] == ["towers alone", "joint encoder", "Qwen2-VL"]
    assert all(row["ratio"] > 0 for row in content["steps"] + content["encoding"])


def test_composition_is_timed(tmp_path):
    found = tmp_path / "found.json"
    options = ["--products", 300, "--attributes", 6, "--queries", 20, "--width", 4, "--side", 8]
    run("compose_queries.py", *options, "--max-positive-share", 0.3, "--json", found)
    content = json.loads(found.read_text())
    assert content["queries"] == {"train": 20, "test": 2}
    assert content["compose_seconds"] > 0
