"""`conjoin train`: from a recipe to a folder that loads, on one process and on two."""

import json
import os
import sys

import pytest
import torch
from PIL import Image
from transformers import AutoModel, AutoProcessor

from conjoin.cli.main import main
from conjoin.training import RetrievalConfig


@pytest.fixture
def recipe(tiny_checkpoints, tmp_path):
    """A recipe over 16 pictures with captions; an epoch is four batches of four."""
    pairs = tmp_path / "pairs"
    pairs.mkdir()
    for number in range(16):
        Image.new("RGB", (16, 16), (15 * number, 250 - 9 * number, 90 * number % 256)).save(pairs / f"{number}.png")
        (pairs / f"{number}.txt").write_text(f"{number} boxes")
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"""
method: gcl
model:
  vision: {tiny_checkpoints["dinov2"]}
  text: {tiny_checkpoints["bert"]}
  config: {{hidden_size: 16, num_attention_heads: 2}}
  lora: {{r: 2}}
data: {{source: {pairs}}}
training:
  output_dir: {tmp_path / "out"}
  per_device_train_batch_size: 4
  num_train_epochs: 1
  learning_rate: 1e-2
  save_strategy: steps
  save_steps: 1
  save_total_limit: 9
  logging_steps: 1
  use_cpu: true
  disable_tqdm: true
"""
    )
    return path


def record(folder):
    return json.loads((folder / "recipe.json").read_text())


def test_a_recipe_becomes_a_model_that_loads_and_resumes(recipe, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["train", str(recipe), "--model.config.hidden_size", "24", "--training.max_steps=3"]) == 0
    assert f'SentenceTransformer("{out}", trust_remote_code=True)' in capsys.readouterr().out
    assert {"modules.json", "sentence_bert_config.json", "model.safetensors"} <= set(os.listdir(out))
    model = AutoModel.from_pretrained(out, trust_remote_code=True).eval()
    processor = AutoProcessor.from_pretrained(out, trust_remote_code=True)
    assert model(**processor(["3 boxes", Image.new("RGB", (9, 9))])).embeddings.shape == (2, 24)
    assert not any("lora" in name for name in model.state_dict())
    first = record(out)
    assert first.keys() == {"method", "model", "data", "training", "log"}
    assert (first["method"], first["model"]["lora"]["r"], first["training"]["max_steps"]) == ("gcl", 2, 3)
    assert [entry["step"] for entry in first["log"] if "loss" in entry] == [1, 2, 3]

    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for step in (2, 3):  # as if it had been stopped after the first step
        folder = out / f"checkpoint-{step}"
        folder.rename(tmp_path / folder.name)
    assert main(["train", str(recipe), "--resume", "--model.config.hidden_size=24", "--training.max_steps=3"]) == 0
    assert [entry["loss"] for entry in record(out)["log"] if "loss" in entry] == [
        entry["loss"] for entry in first["log"] if "loss" in entry
    ]
    for name, tensor in AutoModel.from_pretrained(out, trust_remote_code=True).state_dict().items():
        assert torch.equal(tensor, before[name]), name


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--training.lerning_rate", "1"], "unknown key 'lerning_rate'; did you mean 'learning_rate'?"),
        (["--training.learning_rate"], "--training.learning_rate needs a value"),
        (["--model.architecture=clap"], "unknown architecture 'clap'; expected one of"),
        (["--model.vision=null"], "name both towers (vision, text) or a checkpoint"),
        (["--data.source=absent.csv"], "absent.csv"),
        (["--data.streaming=maybe"], "data: streaming is 'maybe'; expected bool"),
        (["--training.max_steps=many"], "training: max_steps is 'many'; expected int"),
        (["--training.temperature=true"], "training: temperature is True; expected float"),
        (["--data.split=null"], "data: split is None; expected str"),
        (["--training.per_device_train_batch_size=64"], "a batch of 64 rows"),
        (["--resume"], "no checkpoint to resume from in"),
    ],
)
def test_a_mistake_is_one_line(recipe, capsys, words, message):
    assert main(["train", str(recipe), *words]) == 2
    error = capsys.readouterr().err
    assert message in error.splitlines()[-1] and error.splitlines()[-1].startswith("conjoin: ")
    assert "Traceback" not in error


def test_accelerate_launch_trains_on_two_processes(recipe, tmp_path, launch):
    printed = launch("train", recipe, "--training.save_strategy=no")
    steps = [entry["step"] for entry in record(tmp_path / "out")["log"] if "loss" in entry]
    assert steps == [1, 2]  # 16 rows in batches of 2 x 4
    assert printed.count("Saved to") == 1


def test_a_log_is_lines_without_a_terminal(recipe, tmp_path, monkeypatch, capsys):
    recipe.write_text(recipe.read_text().replace("  disable_tqdm: true\n", ""))
    assert main(["train", str(recipe), "--training.max_steps=2", "--training.save_strategy=no"]) == 0
    printed = capsys.readouterr()
    assert "%|" not in printed.err and "\r" not in printed.err and printed.out.count("'loss'") == 2
    arguments = {"output_dir": str(tmp_path / "other"), "use_cpu": True}
    assert RetrievalConfig(**arguments).disable_tqdm is True
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert RetrievalConfig(**arguments).disable_tqdm is False
