"""`conjoin train`: from a recipe to a folder that loads, on one process and on two."""

import json
import multiprocessing
import os
import signal
import sys

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoModel, AutoProcessor

from conjoin.cli.main import main
from conjoin.training import RetrievalConfig, RetrievalTrainer, recipe_folder
from tiny_training import write_pairs


@pytest.fixture
def recipe(tiny_checkpoints, tmp_path):
    """A recipe over 16 pictures with captions; an epoch is four batches of four."""
    pairs = tmp_path / "pairs"
    write_pairs(pairs, 16)
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
    words = ["--model.config.hidden_size", "24", "--training.max_steps=3", "--model.prompts.query", "find"]
    assert main(["train", str(recipe), *words]) == 0
    assert f'SentenceTransformer("{out}", trust_remote_code=True)' in capsys.readouterr().out
    assert {"modules.json", "sentence_bert_config.json", "model.safetensors"} <= set(os.listdir(out))
    settings = json.loads((out / "config_sentence_transformers.json").read_text())
    assert settings["prompts"] == {"query": "find", "document": ""}
    assert not (out / "checkpoint-3/modules.json").exists(), "a checkpoint is not a model"
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
        (["--training.lr", "1"], "unknown key 'lr'; did you mean 'learning_rate'?"),
        (["--lr", "1"], "unknown key 'lr'; did you mean 'training.learning_rate'?"),
        (["--training.batch_size=4"], "did you mean 'per_device_train_batch_size'?"),
        (["--training.epochs=4"], "did you mean 'num_train_epochs'?"),
        (["--training.zzz=4"], "unknown key 'zzz'; none of the 1"),
        (["--model.vision=runs/absent/model"], "model.vision: cannot load the model 'runs/absent/model': there is no"),
        (["--training.learning_rate"], "--training.learning_rate needs a value"),
        (["--model.architecture=clap"], "unknown architecture 'clap'; expected one of"),
        (["--model.vision=null"], "name both towers (vision, text) or a checkpoint"),
        (["--data.source=absent.csv"], "absent.csv"),
        (["--data.streaming=maybe"], "data: streaming is 'maybe'; expected bool"),
        (["--training.max_steps=many"], "training: max_steps is 'many'; expected int"),
        (["--training.temperature=true"], "training: temperature is True; expected float"),
        (["--data.split=null"], "data: split is None; expected str"),
        (["--data.eval_split=validation"], "name one of its splits by --data.eval_split"),
        (["--training.eval_strategy=epoch"], "there are no evaluation rows: name them by --data.eval_split"),
        (["--resume"], "no checkpoint to resume from in"),
    ],
)
def test_a_mistake_is_one_line(recipe, capsys, words, message):
    assert main(["train", str(recipe), *words]) == 2
    error = capsys.readouterr().err
    assert message in error.splitlines()[-1] and error.splitlines()[-1].startswith("conjoin: ")
    assert "Traceback" not in error


def test_a_missing_recipe_lists_those_there_are(tmp_path, capsys):
    wanted = os.path.relpath(recipe_folder() / "gcl/sampel.yaml")
    assert main(["train", wanted]) == 2
    said = capsys.readouterr().err
    assert f"did you mean {wanted.replace('sampel', 'sample')!r}?" in said and "clip_base.yaml" in said
    assert "accelerate" not in said


def weights(folder):
    return load_file(folder / "model.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize(("number", "step"), [(signal.SIGINT, 3), (signal.SIGTERM, 2)])
def test_a_signal_saves_a_checkpoint_that_resumes(recipe, tmp_path, capsys, monkeypatch, number, step):
    """Within an epoch (step 3 of 4), with evaluation and no checkpoints of its own; step 2 ends an epoch."""
    words = ["train", str(recipe), "--training.save_strategy=no", "--model.lora=null"]
    words += [
        "--training.eval_strategy=epoch",
        "--data.eval_split=train",
        f"--training.per_device_train_batch_size={4 if step == 3 else 8}",
    ]
    words += ["--training.max_steps=5", f"--training.dataloader_num_workers={int(number == signal.SIGINT)}"]
    assert main([*words, f"--training.output_dir={tmp_path / 'whole'}"]) == 0
    plain, steps = RetrievalTrainer.training_step, []

    def interrupted(self, *arguments):
        steps.append(1)
        if len(steps) == step:
            for process in (*multiprocessing.active_children(), multiprocessing.current_process()):
                os.kill(process.pid, signal.SIGINT if process.name != "MainProcess" else number)  # as from a terminal
        return plain(self, *arguments)

    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as patch:
        patch.setattr(RetrievalTrainer, "training_step", interrupted)
        assert main(words) == 130
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers
    out = tmp_path / "out"
    said = capsys.readouterr().err.splitlines()[-1]
    assert f"stopped after step {step} of 5; checkpoint-{step} in {str(out)!r} is complete" in said
    assert "--resume" in said and [path.name for path in out.glob("[!.]*")] == [f"checkpoint-{step}"]

    assert main(words) == 2
    assert f"holds checkpoint-{step} of an unfinished run" in capsys.readouterr().err
    assert main([*words, "--resume"]) == 0
    whole, resumed = weights(tmp_path / "whole"), weights(out)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    folders = (tmp_path / "whole", out)
    logs = [[entry for entry in record(folder)["log"] if "train_loss" not in entry] for folder in folders]
    assert logs[0] == logs[1]


def test_a_run_resumed_from_its_last_step_takes_no_further_one(recipe, tmp_path):
    """As after a kill while the model was saved; the last step is within an epoch."""
    words, out = ["train", str(recipe), "--training.max_steps=3", "--model.lora=null"], tmp_path / "out"
    assert main(words) == 0
    before = weights(out)
    (out / "model.safetensors").unlink()
    assert main([*words, "--resume"]) == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(out).items())
    assert not (out / "checkpoint-4").exists()


def test_a_second_ctrl_c_stops_at_once(recipe, tmp_path, capsys, monkeypatch):
    def interrupted(self, *arguments):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(RetrievalTrainer, "training_step", interrupted)
    assert main(["train", str(recipe)]) == 130
    assert list((tmp_path / "out").glob("[!.]*")) == []


def test_a_finished_model_is_replaced_only_if_asked(recipe, tmp_path, capsys):
    words, out = ["train", str(recipe), "--training.max_steps=1"], tmp_path / "out"
    assert main(words) == 0
    before = weights(out)
    assert main([*words, "--training.seed=1"]) == 2
    assert "holds a model (config.json); choose another training.output_dir" in capsys.readouterr().err
    assert main([*words, "--overwrite", "--data.source=absent.csv"]) == 2  # nothing is removed before training starts
    assert (out / "checkpoint-1").exists() and weights(out).keys() == before.keys()
    assert main([*words, "--overwrite", "--training.seed=1", "--training.save_strategy=no"]) == 0
    assert not (out / "checkpoint-1").exists()
    assert any(not torch.equal(tensor, before[name]) for name, tensor in weights(out).items())


def test_a_recipe_in_a_model_folder_has_no_paths_of_the_machine(recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["train", str(recipe), "--training.max_steps=1", "--training.save_strategy=no"]) == 0
    found = record(tmp_path / "out")
    assert (found["data"]["source"], found["training"]["output_dir"]) == ("pairs", "out")
    assert str(tmp_path) not in (tmp_path / "out/recipe.json").read_text()


@pytest.mark.slow
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
