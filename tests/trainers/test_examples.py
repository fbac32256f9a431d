"""The scripts in `examples/`, as a user starts them, on models and rows of toy size."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from conjoin.hub import load_model
from conjoin.trainers import recipe_folder
from tiny_embedders import save_embedder
from tiny_merit import write_merit
from tiny_training import small_run, write_pairs

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
pytestmark = pytest.mark.slow


def start(script, *words, ranks=1):
    """Run a script; on several ranks by `accelerate launch` on the CPU."""
    launch = [sys.executable]
    if ranks > 1:
        config = recipe_folder() / "accelerate/two_cpu.yaml"
        launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    command = [*launch, str(ROOT / "examples" / script), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture
def rows(tmp_path, pictures):
    """A folder with what the scripts read: pairs, sentences and queries."""
    write_pairs(tmp_path / "pairs", 16)
    sentences = [{"sent0": f"a man runs {n}", "sent1": f"a person moves {n}"} for n in range(8)]
    queries = []
    for number in range(8):
        pictures[number % 4].resize((16 + number, 16)).save(tmp_path / f"{number}.png")
        positive = {"image": f"{number}.png"}
        queries.append({"query": f"box {number}", "positive": positive, "negatives": [f"no {number}"]})
    for name, lines in (("nli", sentences), ("queries", queries)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_merit(tmp_path / "merit")
    return tmp_path


def recipe(folder, name, **values):
    """A recipe of toy size."""
    values = {"use_cpu": True, "per_device_train_batch_size": 4, "max_steps": 1, "save_strategy": "no"} | values
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(values | {"output_dir": str(folder / name)}))
    return folder / f"{name}.yaml"


def joint(checkpoints, **values):
    """The keys of a tiny joint encoder."""
    towers = {"vision_model_name_or_path": checkpoints["dinov2"], "text_model_name_or_path": checkpoints["bert"]}
    config = {"hidden_size": 16, "num_attention_heads": 2}
    return {"model_type": "joint_encoder", "model_init_kwargs": config, "freeze_towers": True, **towers, **values}


def test_train_gcl_on_two_ranks(rows, tiny_checkpoints):
    path = recipe(rows, "gcl", trainer="gcl", dataset_name=str(rows / "pairs"), **joint(tiny_checkpoints))
    start("train_gcl.py", "--config", path, "--max_steps", 2, ranks=2)
    record = json.loads((rows / "gcl/recipe.json").read_text())
    assert (record["ran"]["world_size"], record["ran"]["effective_batch"], record["max_steps"]) == (2, 8, 2)
    assert load_model(rows / "gcl")[0].config.hidden_size == 16


def test_train_solar(rows, tiny_checkpoints):
    path = recipe(rows, "solar", trainer="solar_stage1", dataset_name=str(rows / "pairs"), **joint(tiny_checkpoints))
    start("train_solar.py", "--config", path)
    for stage in ("solar", "solar/stage2"):
        assert load_model(rows / stage)[0].config.hidden_size == 16


def test_train_puma_on_two_ranks(rows, mllm_checkpoints):
    mllm = {"model_name_or_path": mllm_checkpoints("qwen2_vl")[0], "model_init_kwargs": {"keep_layers": 2}}
    data = {"dataset_name": str(rows / "nli.jsonl"), "dataset_format": "queries"}
    queries = [{"query": f"q {n}", "positive": f"p {n}", "target_modality": "text"} for n in range(8)]
    (rows / "tuning.jsonl").write_text("".join(json.dumps(line) + "\n" for line in queries))
    first = recipe(rows, "one", trainer="puma_stage1", **mllm, **data)
    second = recipe(
        rows, "two", trainer="puma_stage2", dataset_name=str(rows / "tuning.jsonl"), dataset_format="queries"
    )
    start("train_puma.py", first, second, "--stage2", "--temperature", "0.2", ranks=2)
    logs = [json.loads((rows / name / "recipe.json").read_text()) for name in ("one", "two")]
    assert [log["temperature"] for log in logs] == [0.05, 0.2] and logs[1]["model_name_or_path"] == str(rows / "one")
    assert [load_model(rows / name)[0].config.keep_layers for name in ("one", "two")] == [2, 2]


def test_train_coral(rows, mllm_checkpoints):
    words = ["--config", recipe_folder() / "coral/sample.yaml", "--dataset_name", rows / "merit"]
    words += ["--model_name_or_path", mllm_checkpoints("qwen2_vl")[0], "--model_init_kwargs", '{"keep_layers": 2}']
    start("train_coral.py", *words, *small_run(rows / "out", max_steps=1, per_device_train_batch_size=2))
    log = json.loads((rows / "out/recipe.json").read_text())["log"]
    assert {"reg_vision_own", "reg_vision_other", "contrastive_loss"} <= log[0].keys()


def test_train_embedder_and_compress(rows):
    save_embedder(rows / "source", "qwen2_vl")
    words = [
        "--config",
        recipe_folder() / "finetune/qwen3_vl_embedding.yaml",
        "--dataset_name",
        rows / "queries.jsonl",
    ]
    words += ["--model_name_or_path", rows / "source"]
    words += ["--min_pixels", 64, "--max_pixels", 576]
    words += ["--hard_negatives", 1, *small_run(rows / "out", gradient_cache_chunk_size=2)]
    start("train_embedder.py", *words)
    assert (rows / "out/adapter/adapter_config.json").is_file()
    sizes = ["--layers", 2, "--steps", 2, "--batch_size", 4, "--held_out", 4, "--lora_rank", 2]
    printed = start(
        "compress.py", "--model", rows / "out", "--data", rows / "pairs", "--out", rows / "small", *sizes, ranks=2
    )
    assert load_model(rows / "small/layers-2")[0].config.keep_layers == 2 and "report.html" in printed


def test_index_and_search(rows, tiny_checkpoints):
    words = ["--model", tiny_checkpoints["clip"], "--data", rows / "pairs", "--out", rows / "collection", "--k", 3]
    printed = start(
        "index_and_search.py", *words, "--queries", "a text", rows / "pairs/row5.png", "--where", "id != 'row4.png'"
    )
    lines = printed.splitlines()
    assert lines[:5:4] == ["a text", str(rows / "pairs/row5.png")] and lines[5].split() == ["1.000", "row5.png"]
    assert len(lines) == 8 and "row4.png" not in printed


def test_examples_are_short():
    assert len(EXAMPLES) == 8
    for path in EXAMPLES:
        assert len(path.read_text().splitlines()) <= 60, path
