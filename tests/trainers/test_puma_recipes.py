"""The recipes of PUMA and the scripts of `examples/`, on tiny models."""

import json
import re
import runpy
from pathlib import Path

import mini_mbeir as mini_module
import pytest

from conjoin.hub import load_model
from conjoin.trainers import load_recipe
from tiny_commands import variants

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "training_args/puma"
SMALL = {"max_steps": 2, "per_device_train_batch_size": 4, "gradient_cache_chunk_size": 2, "warmup_steps": 0,
         "dataloader_num_workers": 0, "logging_steps": 1, "use_cpu": "true", "report_to": "none"}  # fmt: skip


@pytest.fixture
def script(monkeypatch):
    """`script(name, words)` runs an example."""

    def run(name, *words):
        monkeypatch.setattr("sys.argv", [name, *map(str, words)])
        runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")

    return run


def write_recipes(folder, family, mllm, mini, sample=False):
    """The recipes of both stages, small, in files of the folder."""
    lines = [f"a man runs {i},a person moves {i},nobody is {chr(97 + i)}" for i in range(12)]
    (folder / "nli.csv").write_text("\n".join(["sent0,sent1,hard_neg", *lines]))
    limits = (64, 576) if family == "qwen2_vl" else ("null", "null")
    own = {
        1: {"model_name_or_path": mllm, "model_init_kwargs": '{"keep_layers": 2}', "min_pixels": limits[0],
            "max_pixels": limits[1], "dataset_name": folder / "nli.csv", "teacher_cache": folder / "states"},
        2: {"dataset_name": mini},
    }  # fmt: skip
    for stage, values in own.items():
        recipe = (RECIPES / (f"sample_stage{stage}.yaml" if sample else f"stage{stage}_qwen2_vl_7b.yaml")).read_text()
        changes = values | SMALL | {"output_dir": folder / str(stage)}
        kept = [line for line in recipe.splitlines() if line.partition(":")[0] not in changes]
        (folder / f"{stage}.yaml").write_text("\n".join(kept + [f"{key}: {value}" for key, value in changes.items()]))
    return folder / "1.yaml", folder / "2.yaml"


def log_of(folder):
    return json.loads((folder / "recipe.json").read_text())["log"]


@pytest.mark.parametrize(("family", "sample"), [("qwen2_vl", False), ("llava", False), ("internvl", True)])
@pytest.mark.slow
def test_the_script_runs_both_recipes(family, sample, script, mllm_checkpoints, load_first_emoji, tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mini_module, "load_emoji", load_first_emoji)
        mini = mini_module.make_mini_mbeir(tmp_path / "mini", train_queries=6, val_queries=2, test_queries=2)
    script("train_puma.py", *write_recipes(tmp_path, family, mllm_checkpoints(family)[0], mini, sample))
    assert log_of(tmp_path / "1")[0]["distillation_loss"] > 0 and log_of(tmp_path / "2")[1]["mac_loss"] > 0
    assert any((tmp_path / "states").glob("*.arrow"))
    model, processor = load_model(tmp_path / "2")
    assert model.config.keep_layers == 2 and processor.max_text_length == (None if sample else 480)


@pytest.mark.slow
def test_two_processes_share_the_cached_states(mllm_checkpoints, tmp_path, launch):
    recipe, _ = write_recipes(tmp_path, "qwen2_vl", mllm_checkpoints("qwen2_vl")[0], "unused")
    launch("train", recipe, "--per_device_train_batch_size", 3)
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
    table_3 = {(distilled, decay, False, 150) for distilled in (True, False) for decay in (0.2, 0)}
    table_5 = {(True, 0, False, 90), (True, 0.2, True, 90), (True, 0.2, False, 90)}
    assert found == table_3 | table_5 | {(True, 0.5, False, 150), (True, 0.7, False, 150)}


def test_the_table_of_ablations_names_switches_and_values_that_exist():
    text = (ROOT / "docs/recipes.md").read_text(encoding="utf-8")
    table = text.split("\n## PUMA")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)`(?:, `(\w+)`)?(?: \(stage (\d)\))? \| (.+?) \|", table, re.MULTILINE)
    assert len(rows) == 9
    for first, second, stage, values in rows:
        path = RECIPES / f"stage{stage or 2}_qwen2_vl_7b.yaml"
        assert {first, second} - {""} <= vars(load_recipe(path).training).keys()
        for value in re.findall(r"`(\w+)`", values):
            assert vars(load_recipe(path, [f"--{first}", value]).training)[first] == value
