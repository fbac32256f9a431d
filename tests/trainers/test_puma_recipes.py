"""The recipes of PUMA, on tiny models."""

import json
import re
from pathlib import Path

import pytest

from conjoin.trainers import load_recipe
from tiny_commands import variants

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "training_args/puma"
SMALL = {"max_steps": 2, "per_device_train_batch_size": 4, "gradient_cache_chunk_size": 2, "warmup_steps": 0,
         "dataloader_num_workers": 0, "logging_steps": 1, "use_cpu": "true", "report_to": "none"}  # fmt: skip


def write_recipe(folder, mllm):
    """The recipe of stage 1, small, in a file of the folder."""
    lines = [f"a man runs {i},a person moves {i},nobody is {chr(97 + i)}" for i in range(12)]
    (folder / "nli.csv").write_text("\n".join(["sent0,sent1,hard_neg", *lines]))
    changes = {"model_name_or_path": mllm, "model_init_kwargs": '{"keep_layers": 2}', "min_pixels": 64,
               "max_pixels": 576, "global_batch_size": "null", "dataset_name": folder / "nli.csv",
               "teacher_cache": folder / "states", "output_dir": folder / "1"} | SMALL  # fmt: skip
    kept = [line for line in (RECIPES / "stage1_qwen2_vl_7b.yaml").read_text().splitlines()
            if line.partition(":")[0] not in changes]  # fmt: skip
    (folder / "1.yaml").write_text("\n".join(kept + [f"{key}: {value}" for key, value in changes.items()]))
    return folder / "1.yaml"


def log_of(folder):
    return json.loads((folder / "recipe.json").read_text())["log"]


@pytest.mark.slow
def test_two_processes_share_the_cached_states(mllm_checkpoints, tmp_path, launch):
    launch("train", write_recipe(tmp_path, mllm_checkpoints("qwen2_vl")[0]), "--per_device_train_batch_size", 3)
    assert sum("distillation_loss" in entry for entry in log_of(tmp_path / "1")) == 2
    assert len([*(tmp_path / "states").glob("*.arrow")]) == 1


def test_variants_of_stage_2_start_from_variants_of_stage_1():
    """The commands in both headers; those of Tables 3, 4, 5 and 12 are there."""
    runs = {}
    for stage in (1, 2):
        path = RECIPES / f"stage{stage}_qwen2_vl_7b.yaml"
        runs[stage] = [load_recipe(path, words) for words in ([], *(command[3:] for command in variants(path)))]
    folders = {run.training.output_dir: run.training for run in runs[1]}
    assert {"fixed", "dynamic", "reverse"} == {run.training.schedule for run in runs[1]}
    found = {
        (bool(folders[run.model.model_name_or_path].distill_weight), run.training.decay, run.training.reverse,
         run.training.per_device_train_batch_size)
        for run in runs[2]
    }  # fmt: skip
    table_3 = {(distilled, decay, False, 600) for distilled in (True, False) for decay in (0.2, 0)}
    table_5 = {(True, 0, False, 360), (True, 0.2, True, 360), (True, 0.2, False, 360)}
    assert found == table_3 | table_5 | {(True, 0.5, False, 600), (True, 0.7, False, 600)}


def test_the_table_of_ablations_names_switches_and_values_that_exist():
    text = (ROOT / "docs/methods.md").read_text(encoding="utf-8")
    table = text.split("\n### Ablations of PUMA")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)`(?:, `(\w+)`)?(?: \(stage (\d)\))? \| (.+?) \|", table, re.MULTILINE)
    assert len(rows) == 6
    for first, second, stage, values in rows:
        path = RECIPES / f"stage{stage or 2}_qwen2_vl_7b.yaml"
        assert {first, second} - {""} <= vars(load_recipe(path).training).keys()
        for value in re.findall(r"`(\w+)`", values):
            assert vars(load_recipe(path, [f"--{first}", value]).training)[first] == value
