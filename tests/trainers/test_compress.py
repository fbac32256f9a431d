"""Compression of an embedder by its own states."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from sentence_transformers import SentenceTransformer

from conjoin import CompressOptions, compress
from conjoin.cli.main import main
from conjoin.hub import load_embedder, load_model
from conjoin.push import model_upload
from conjoin.trainers.compress import DistillationRows
from tiny_embedders import drop_video, save_embedder


@pytest.fixture(autouse=True)
def without_video(monkeypatch):
    drop_video(monkeypatch)


@pytest.fixture(scope="module")
def embedder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("embedder")
    save_embedder(folder, "qwen2_vl", prompts={"query": "Find it."})
    return folder


def colours(count):
    for number in range(count):
        colour = (number * 20 % 256, number * 67 % 256, number * 111 % 256)
        yield {"image": Image.new("RGB", (16, 16 + 4 * (number % 3)), colour), "text": f"box {number}, {colour}"}


@pytest.mark.slow
def test_distillation_brings_the_copy_to_the_whole(embedder, tmp_path):
    model, processor = load_embedder(embedder)
    options = CompressOptions([3], steps=60, batch_size=8, learning_rate=1e-2, held_out=12, device="cpu")
    results = compress(model, processor, list(colours(60)), tmp_path, options)
    cells = {row[0]: row[1:] for row in results.tables[1].rows}
    whole, before, after = (cells[name][:3] for name in ("4, whole", "3, untrained", "3, trained"))
    assert whole == pytest.approx([1, 1, 1], abs=1e-4)
    assert min(np.subtract(after, before)) > 0 and np.mean(np.subtract(1, after)) < 0.7 * np.mean(
        np.subtract(1, before)
    )
    small = load_model(tmp_path / "layers-3")[0]
    assert small.config.keep_layers == 3
    frozen = {name: value for name, value in small.state_dict().items() if ".layers." not in name}
    whole_weights = load_embedder(embedder)[0].state_dict()
    changed = [name for name, value in frozen.items() if not torch.equal(value, whole_weights[name])]
    assert not changed
    costs = {row[0]: row[1:] for row in results.tables[2].rows}
    assert costs["3, trained"][0] < costs["4, whole"][0] and costs["3, trained"][1] < costs["4, whole"][1]
    assert {name for curve in results.curves for name in curve.series} >= {"trained", "untrained", "GFLOP per pair"}


def test_from_the_command_line(embedder, tmp_path, capsys):
    table = []
    for number, pair in enumerate(colours(16)):
        pair["image"].save(tmp_path / f"{number}.png")
        table.append({"image": f"{number}.png", "text": pair["text"]})
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in table))
    out = tmp_path / "out"
    words = ["--layers", "1", "2", "--data", str(tmp_path / "pairs.jsonl"), "--steps", "2"]
    words += "--share 0.5 --held-out 4 --batch-size 4 --device cpu --lora-rank 2 --chunk-size 2".split()
    assert main(["compress", str(embedder), *words, "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "Agreement with the whole model" in printed and "At 50 % of the whole model's R@1" in printed
    found = json.loads((out / "results.json").read_text())
    assert [row[0] for row in found["tables"][0]["rows"]] == [
        "4, whole", "1, untrained", "1, trained", "2, untrained", "2, trained",
    ]  # fmt: skip
    assert "<svg" in (out / "report.html").read_text()
    for kept in (1, 2):
        folder = out / f"layers-{kept}"
        assert json.loads((folder / "config.json").read_text())["text_config"]["num_hidden_layers"] == kept
        assert SentenceTransformer(str(folder), device="cpu").prompts["query"] == "Find it."
        card = model_upload(folder, "me/half").card
        assert "| dimensions | 32 |" in card and "Method `compress`" in card and "| max_steps | 2 |" in card
    assert main(["compress", str(embedder), *words, "--layers", "4", "--out", str(tmp_path / "no")]) == 2
    assert "expected fewer than the model's 4" in capsys.readouterr().err
    assert main(["compress", str(embedder), *words, "--preset", "gme", "--out", str(tmp_path / "no")]) == 2
    assert "preset='gme'; expected one of ['gme_qwen2_vl'" in capsys.readouterr().err
    data = [str(embedder), str(tmp_path / "pairs.jsonl"), "--pairs", "4", "--device", "cpu", "--share", "0.01"]
    assert main(["analyze", *data, "--out", str(tmp_path / "layers")]) == 0
    assert "At 1 % of the whole model's R@1, mean of both directions: " in capsys.readouterr().out
    for command in (["analyze", *data], ["compress", str(embedder), *words]):
        assert main([*command, "--share", "0", "--out", str(tmp_path / "no")]) == 2
        assert "share=0.0; expected more than 0 and at most 1" in capsys.readouterr().err


def test_rows_distil_every_kind_of_item():
    rows = DistillationRows(list(colours(2)), 2, "Find it.")
    kinds = {(tuple(sorted(row["query"])), tuple(sorted(row["positive"])), row["instruction"]) for row in rows}
    text, image, both = ("text",), ("image",), ("image", "text")
    assert kinds == {(text, both, "Find it."), (image, text, None), (both, image, "Find it.")}
    assert len(rows) == 6 and [row["positive_id"] for row in rows] == ["0"] * 3 + ["1"] * 3
