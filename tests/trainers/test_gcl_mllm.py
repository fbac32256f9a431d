"""GCL on an MLLM, by its recipe."""

import json

import torch
from safetensors.torch import load_file

from conjoin.cli.main import main
from conjoin.losses import gcl
from conjoin.models.mllm_retriever import MllmRetrieverModel
from conjoin.processing import MllmRetrieverProcessor
from conjoin.trainers.recipe import recipe_folder
from tiny_training import make_rows, small_run, write_pairs


def test_the_recipe_runs_on_a_small_mllm(mllm_checkpoints, tmp_path):
    folder, _ = mllm_checkpoints("qwen2_vl")
    write_pairs(tmp_path / "pairs", 8)
    words = [f"--model_name_or_path={folder}", '--model_init_kwargs={"keep_layers": 2}', "--lora_dropout=0"]
    words += [f"--dataset_name={tmp_path / 'pairs'}", "--min_pixels=64", "--max_pixels=576"]
    words += small_run(tmp_path / "out", per_device_train_batch_size=8, gradient_cache_chunk_size=3)
    assert main(["train", str(recipe_folder() / "gcl/qwen2_vl_2b.yaml"), *words]) == 0
    log = json.loads((tmp_path / "out/recipe.json").read_text())["log"]
    rows = [{"image": row["image"], "text": row["text"]} for row in make_rows(8)]
    processor, model = MllmRetrieverProcessor.from_mllm(folder), MllmRetrieverModel.from_mllm(folder, 2)
    with torch.no_grad():  # each view is what the model makes of that part alone
        items = ([row["image"] for row in rows], [row["text"] for row in rows], rows)
        states = [model(**processor(view)).embeddings for view in items]
        torch.testing.assert_close(log[0]["gcl_loss"], gcl(*states, 0.05).item(), rtol=1e-4, atol=1e-4)
    before, after = model.state_dict(), load_file(tmp_path / "out/model.safetensors")
    moved = {name for name, value in after.items() if not torch.equal(value, before[name])}
    assert moved == {name for name in after if "language_model.layers." in name and "_proj.weight" in name}
