"""The recipes of Coral on tiny models and a tiny MERIT: what is trained, where the language head comes from."""

import json
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from tiny_coral import Products
from transformers import AutoModel, AutoProcessor

from conjoin.cli.main import main
from conjoin.methods.coral.language_head import load_language_head, prepare_coral
from conjoin.training import build_model, build_trainer, load_recipe
from tiny_merit import write_merit
from tiny_mmeb import write_mmeb
from tiny_training import small_run

RECIPES = Path(__file__).parents[3] / "training_args/coral"


@pytest.fixture
def words(tmp_path):
    """Overrides that make a recipe small."""
    write_merit(tmp_path / "merit")
    small = small_run(tmp_path / "out", per_device_train_batch_size=2, gradient_cache_chunk_size=1)
    return [*small, f"--data.source={tmp_path / 'merit'}"]


def overrides(words, folder, **more):
    """The words as `load_recipe` takes them, for an MLLM in a folder."""
    found = dict(word.removeprefix("--").split("=", 1) for word in words) | {"model.mllm": str(folder)}
    return found | {name.replace("__", "."): value for name, value in more.items()}


@pytest.mark.parametrize(
    ("name", "family", "more"),
    [
        ("qwen2_5_vl_3b", "qwen2_5_vl", {"model__min_pixels": "64", "model__max_pixels": "576"}),
        ("internvl3_1b", "internvl", {"training__reconstruct": "[vision]"}),
    ],
)
def test_recipes_of_the_paper_train_all_but_the_vision_tower(name, family, more, mllm_checkpoints, words):
    recipe = load_recipe(RECIPES / f"{name}.yaml", overrides(words, mllm_checkpoints(family)[0], **more))
    torch.manual_seed(0)
    trainer = build_trainer(recipe, *build_model(recipe.model))
    before = {key: value.clone() for key, value in trainer.model.state_dict().items()}
    trainer.train()
    losses = {key for key in trainer.state.log_history[0] if key.endswith("_loss")}
    assert "contrastive_loss" in losses
    assert len(losses) == (3 if "vision" in recipe.training.reconstruct[-1] else 5)
    moved = {key for key, value in trainer.model.state_dict().items() if not torch.equal(value, before[key])}
    assert {key for key in before if "language_model.layers." in key and "_proj.weight" in key} < moved
    assert any(key.startswith("decoders.") for key in moved)
    assert not any("visual" in key or "vision_tower" in key for key in moved)


def test_the_recipe_of_the_public_tasks(mllm_checkpoints, words, tmp_path):
    """Rows whose positives are a picture, a text with a picture, and in chunks of one."""
    write_mmeb(tmp_path / "mmeb")
    more = {"data.source": str(tmp_path / "mmeb"), "data.datasets": "[CIRR, VisDial]"}
    more |= {"model.min_pixels": "64", "model.max_pixels": "576"}
    settings = overrides(words, mllm_checkpoints("qwen2_vl")[0]) | more
    recipe = load_recipe(RECIPES / "qwen2_vl_2b_mmeb.yaml", settings)
    trainer = build_trainer(recipe, *build_model(recipe.model))
    trainer.train()
    log = trainer.state.log_history[0]
    losses = [log[key] for key in log if key.endswith("_loss")]
    assert len(losses) == 5 and all(0 < loss < 100 for loss in losses)


def test_the_sample_recipe_gives_a_model_that_loads(mllm_checkpoints, words, tmp_path):
    folder = mllm_checkpoints("qwen2_vl")[0]
    more = ["--model.config.keep_layers=2", "--model.input_type=cat", f"--model.mllm={folder}"]
    assert main(["train", str(RECIPES / "sample.yaml"), *more, *words]) == 0
    log = json.loads((tmp_path / "out/recipe.json").read_text())["log"]
    assert len([key for key in log[0] if key.endswith("_loss")]) == 5
    assert not any("decoder" in key for key in load_file(tmp_path / "out/model.safetensors"))
    model = AutoModel.from_pretrained(tmp_path / "out", trust_remote_code=True)
    processor = AutoProcessor.from_pretrained(tmp_path / "out", trust_remote_code=True)
    assert (model.config.keep_layers, processor.input_type) == (2, "cat")
    query = Products(1)[0]["query"]
    assert model(**processor([query, "a text", Image.new("RGB", (9, 9))])).embeddings.isfinite().all()


def test_the_head_is_that_of_an_untied_whole_model_only(mllm_checkpoints, words):
    folder, full = mllm_checkpoints("qwen2_vl")

    def head(**more):
        sizes = {"model__min_pixels": "64", "model__max_pixels": "576", "training__output_dir": "runs/x"}
        recipe = load_recipe(RECIPES / "qwen2_5_vl_3b.yaml", overrides(words, folder, **(sizes | more)))
        return build_trainer(recipe, *build_model(recipe.model)).objective._head[0]

    assert torch.equal(head(), full.lm_head.weight)
    assert head(model__config__keep_layers="3") is None
    assert head(training__reconstruct="[vision]") is None

    class Run:
        recipe = load_recipe(RECIPES / "sample.yaml", {"model.mllm": "null"})

    assert prepare_coral(Run()) == {}  # a checkpoint whose MLLM is not named


@pytest.mark.parametrize("shards", [True, False])
def test_the_config_says_whether_the_head_is_tied(shards, mllm_checkpoints, tmp_path):
    folder, mllm = mllm_checkpoints("qwen2_vl")
    weights = mllm.state_dict()
    head = weights.pop("lm_head.weight")
    index = tmp_path / "model.safetensors.index.json"

    def write(tensors, tied, tied_text=None):
        config = json.loads((Path(folder) / "config.json").read_text())
        for level, value in ((config, tied), (config["text_config"], tied if tied_text is None else tied_text)):
            level.pop("tie_word_embeddings", None)
            level |= {} if value == "unsaid" else {"tie_word_embeddings": value}
        (tmp_path / "config.json").write_text(json.dumps(config))
        save_file(tensors, tmp_path / "model.safetensors")
        if shards:
            index.write_text(json.dumps({"weight_map": dict.fromkeys(tensors, "model.safetensors")}))

    write(weights | {"lm_head.weight": head}, tied=False)
    assert torch.equal(load_language_head(tmp_path), head)
    write(weights | {"lm_head.weight": head}, tied=True)  # a stale copy
    assert load_language_head(tmp_path) is None
    write(weights | {"lm_head.weight": head}, tied="unsaid", tied_text=False)  # as InternVL is converted
    assert torch.equal(load_language_head(tmp_path), head)
    write(weights, tied="unsaid", tied_text=True)
    assert load_language_head(tmp_path) is None
    write(weights | {"lm_head.weight": head}, tied=False, tied_text=True)
    assert torch.equal(load_language_head(tmp_path), head)
    write(weights, tied=False)
    with pytest.raises(ValueError, match=r"tie_word_embeddings=false, but no file has 'lm_head.weight'"):
        load_language_head(tmp_path)
