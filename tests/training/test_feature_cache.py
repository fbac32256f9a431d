"""Training on cached tower features is training on the towers."""

import pytest
import torch
from tiny_training import make_encoder, make_rows, make_trainer

from conjoin.training import CachedFeatures, cache_features, collate_features
from conjoin.training.recipes import load_recipe
from conjoin.training.run import build_trainer


def _cache(checkpoints, folder, **kwargs):
    model, processor = make_encoder(checkpoints)
    rows = [dict(row) | {"alternative_text": "z z z" if i == 1 else None} for i, row in enumerate(make_rows(5))]
    return model, processor, rows, cache_features(model, processor, rows, folder, batch_size=2, **kwargs)


def test_cached_features_give_the_vectors_of_the_towers(tiny_checkpoints, tmp_path):
    model, processor, rows, folder = _cache(tiny_checkpoints, tmp_path)
    model.eval()
    cached = CachedFeatures(folder, first_only=True)
    batch = collate_features([cached[i] for i in range(5)])
    batch.pop("ids")
    views = ("image", "text", "fused")
    with torch.no_grad():
        live = model(**processor([{"image": r["image"], "text": r["text"]} for r in rows]), views=views).embeddings
        assert (model(**batch, views=views).embeddings - live).abs().max() < 1e-6


def test_every_copy_and_both_texts_are_drawn(tiny_checkpoints, tmp_path):
    *_, folder = _cache(tiny_checkpoints, tmp_path, copies=3, augment=lambda image: image.rotate(90))
    cached = CachedFeatures(folder)
    assert cached.tensors["image_features"].shape[0] == 3
    torch.manual_seed(0)
    texts = {cached[1]["attention_mask"].sum().item() for _ in range(20)}
    assert len(texts) == 2
    assert len({cached[0]["attention_mask"].sum().item() for _ in range(10)}) == 1


def test_a_cache_is_reused_until_its_key_changes(tiny_checkpoints, tmp_path):
    *_, folder = _cache(tiny_checkpoints, tmp_path, key="a")
    written = (folder / "features.safetensors").stat().st_mtime_ns
    _cache(tiny_checkpoints, tmp_path, key="a")
    assert (folder / "features.safetensors").stat().st_mtime_ns == written
    _cache(tiny_checkpoints, tmp_path, key="b")
    assert (folder / "features.safetensors").stat().st_mtime_ns > written


def test_a_run_on_cached_features_resumes_exactly(tiny_checkpoints, tmp_path):
    def trainer(folder, **arguments):
        model, processor, _, cache = _cache(tiny_checkpoints, tmp_path / "cache", copies=2, key="k")
        settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 3, "per_device_train_batch_size": 2}
        trainer = make_trainer("gcl", model, processor, folder, CachedFeatures(cache), **settings | arguments)
        trainer.data_collator = collate_features
        return trainer

    whole, resumed = trainer(tmp_path / "whole"), trainer(tmp_path / "resumed")
    whole.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole/checkpoint-3"))
    for (name, a), (_, b) in zip(whole.model.named_parameters(), resumed.model.named_parameters(), strict=True):
        assert torch.equal(a, b), name


@pytest.fixture
def recipe(tiny_checkpoints, tmp_path):
    captions = tmp_path / "pairs"
    captions.mkdir()
    for row in make_rows(6):
        row["image"].save(captions / f"{row['id']}.png")
        (captions / f"{row['id']}.txt").write_text(row["text"])
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"""
method: contrastive
model:
  vision: {tiny_checkpoints["dinov2"]}
  text: {tiny_checkpoints["bert"]}
  freeze_towers: true
  config: {{hidden_size: 16, num_attention_heads: 2}}
data: {{source: {captions}}}
features: {{folder: {tmp_path / "features"}, copies: 1}}
training: {{output_dir: {tmp_path / "out"}, max_steps: 1, per_device_train_batch_size: 4, use_cpu: true}}
"""
    )
    return path


def _trainer(path, **overrides):
    from conjoin.training import build_model

    recipe = load_recipe(path, {key.replace("__", "."): value for key, value in overrides.items()})
    return build_trainer(recipe, *build_model(recipe.model))


def test_a_recipe_caches_and_trains(recipe):
    trainer = _trainer(recipe)
    assert isinstance(trainer.train_dataset, CachedFeatures)
    trainer.train()
    assert trainer.state.global_step == 1


def test_features_of_a_tower_in_training_are_refused(recipe):
    with pytest.raises(ValueError, match="vision_model is being trained"):
        _trainer(recipe, model__freeze_towers="false")


def test_a_batch_larger_than_the_data_is_refused(recipe):
    with pytest.raises(ValueError, match=r"a batch of 64 rows .* larger than the training data of 6"):
        _trainer(recipe, training__per_device_train_batch_size="64")
