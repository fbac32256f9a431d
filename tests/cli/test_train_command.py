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

from conjoin import RetrievalConfig, RetrievalTrainer
from conjoin.cli.main import main
from conjoin.storage import locked
from tiny_training import write_pairs, write_recipe


@pytest.fixture
def recipe(tiny_checkpoints, tmp_path):
    """A recipe over 16 pictures with captions; an epoch is four batches of four."""
    write_pairs(tmp_path / "pairs", 16)
    adapters = {"use_peft": True, "lora_r": 2, "lora_target_modules": ["(vision|text)_model.*"]}
    adapters["lora_modules_to_save"] = ["vision_adapter", "text_adapter", "vl_encoder"]
    settings = {"per_device_train_batch_size": 4, "num_train_epochs": 1, "learning_rate": 1e-2, "logging_steps": 1}
    settings |= {"save_steps": 1, "save_total_limit": 9, "report_to": "none"}
    return write_recipe(tmp_path, tiny_checkpoints, "gcl", tmp_path / "pairs", **adapters, **settings)


def record(folder):
    return json.loads((folder / "recipe.json").read_text())


def weights(folder):
    return load_file(folder / "model.safetensors")


def test_a_recipe_becomes_a_model_that_loads_and_resumes(recipe, tmp_path, capsys):
    out = tmp_path / "out"
    words = ['--model_init_kwargs={"hidden_size": 24, "num_attention_heads": 2}', "--max_steps=3"]
    words += ["--prompts", '{"query": "find"}']
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
    assert (first["trainer"], first["lora_r"], first["max_steps"], first["temperature"]) == ("gcl", 2, 3, 0.07)
    assert [entry["step"] for entry in first["log"] if "loss" in entry] == [1, 2, 3]

    before = weights(out)
    for lost in (
        "checkpoint-2",
        "checkpoint-3",
        "model.safetensors",
    ):  # stopped after the first step; then while saving
        (out / lost).rename(tmp_path / lost)
        if lost != "checkpoint-2":
            assert main(["train", str(recipe), "--resume", *words]) == 0
            losses = [[entry["loss"] for entry in one["log"] if "loss" in entry] for one in (first, record(out))]
            assert losses[0] == losses[1] and all(torch.equal(weights(out)[name], before[name]) for name in before)
            assert not (out / "checkpoint-4").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--lr", "1"], "unknown key 'lr'; `conjoin train RECIPE --keys` lists them"),
        (["--max_step=4"], "unknown key 'max_step'; did you mean 'max_steps'?"),
        (["zzz"], "what is 'zzz'?"),
        (["--learning_rate"], "--learning_rate: expected one argument"),
        (["--max_steps=many"], "--max_steps: invalid int value: 'many'"),
        (["--vision_model_name_or_path=runs/absent/model"], "cannot load the model 'runs/absent/model': there is no"),
        (["--text_model_name_or_path", "null"], "name a model by model_name_or_path, or joint_encoder"),
        (["--dataset_name=absent.csv"], "absent.csv"),
        (["--eval_strategy=epoch"], "you didn't pass an `eval_dataset`"),
        (["--load_in_4bit", "--use_peft=false"], "load_in_4bit freezes the layers that it stores in 4 bits"),
        (["--freeze", "adapter"], "freeze: JointEncoderModel has no part 'adapter'; its parts are"),
        (["--resume", "--overwrite"], "--resume and --overwrite exclude each other"),
        (["--resume"], "no checkpoint to resume from in"),
    ],
)
def test_a_bad_recipe_or_flag_is_one_line(recipe, capsys, words, message):
    assert main(["train", str(recipe), *words]) == 2
    error = capsys.readouterr().err
    assert message in error.splitlines()[-1] and error.splitlines()[-1].startswith("conjoin: ")
    assert "Traceback" not in error


@pytest.mark.slow
@pytest.mark.parametrize(("number", "step"), [(signal.SIGINT, 3), (signal.SIGTERM, 2)])
def test_a_signal_saves_a_checkpoint_that_resumes(recipe, tmp_path, capsys, monkeypatch, number, step):
    """Within an epoch (of four steps), with evaluation and no checkpoints of its own."""
    words = ["train", str(recipe), "--save_strategy=no", "--use_peft=false", "--eval_strategy=epoch"]
    words += ["--dataset_test_split=train", "--per_device_train_batch_size=4"]
    words += ["--max_steps=5", f"--dataloader_num_workers={int(number == signal.SIGINT)}"]
    assert main([*words, f"--output_dir={tmp_path / 'whole'}"]) == 0
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
    assert f"holds checkpoint-{step}; choose another output_dir, go on with" in capsys.readouterr().err
    assert main([*words, "--resume"]) == 0
    whole, resumed = weights(tmp_path / "whole"), weights(out)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    folders = (tmp_path / "whole", out)
    timed = ("time", "per_second")
    logs = [
        [{name: value for name, value in entry.items() if not name.endswith(timed)} for entry in record(folder)["log"]]
        for folder in folders
    ]
    assert logs[0][:-1] == logs[1][:-1]  # the last has the mean loss of the process


def test_a_second_ctrl_c_stops_at_once(recipe, tmp_path, monkeypatch):
    def interrupted(self, *arguments):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(RetrievalTrainer, "training_step", interrupted)
    assert main(["train", str(recipe)]) == 130
    assert list((tmp_path / "out").glob("[!.]*")) == []


def test_a_folder_in_use_or_with_a_model_is_replaced_only_if_asked(recipe, tmp_path, capsys):
    words, out = ["train", str(recipe), "--max_steps=1"], tmp_path / "out"
    out.mkdir()
    with locked(out):
        assert main(words) == 2 and "another process is writing into" in capsys.readouterr().err
    (out / "export.0123456789abcdef.conjoin-tmp").mkdir()  # left by a kill
    assert main(words) == 0 and not list(out.glob("*.conjoin-tmp"))
    before = weights(out)
    assert main([*words, "--seed=1"]) == 2
    assert "holds checkpoint-1; choose another output_dir" in capsys.readouterr().err
    assert main([*words, "--overwrite", "--dataset_name=absent.csv"]) == 2  # nothing is removed before training starts
    assert (out / "checkpoint-1").exists() and weights(out).keys() == before.keys()
    assert main([*words, "--overwrite", "--seed=1", "--save_strategy=no"]) == 0
    assert not (out / "checkpoint-1").exists()
    assert any(not torch.equal(tensor, before[name]) for name, tensor in weights(out).items())


def test_a_checkpoint_resumed_with_its_own_steps_is_a_model(recipe, tmp_path):
    out, saved = tmp_path / "out", {}
    assert main(["train", str(recipe), "--max_steps=2"]) == 0
    for step in (1, 2):
        folder = tmp_path / f"step-{step}"
        words = [f"--resume={out / f'checkpoint-{step}'}", f"--max_steps={step}", f"--output_dir={folder}"]
        assert main(["train", str(recipe), *words]) == 0
        saved[step] = weights(folder)
    final = weights(out)
    assert final.keys() == saved[2].keys() == saved[1].keys()
    assert all(torch.equal(final[name], value) for name, value in saved[2].items())
    assert any(not torch.equal(final[name], value) for name, value in saved[1].items())


def test_a_log_is_lines_without_a_terminal(recipe, tmp_path, monkeypatch, capsys):
    recipe.write_text(recipe.read_text().replace("disable_tqdm: true\n", ""))
    assert main(["train", str(recipe), "--max_steps=2", "--save_strategy=no"]) == 0
    printed = capsys.readouterr()
    assert "%|" not in printed.err and "\r" not in printed.err and printed.out.count("'loss'") == 2
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert RetrievalConfig(str(tmp_path / "other")).disable_tqdm is False
