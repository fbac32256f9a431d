"""Training on cached tower features is training on the towers."""

import shutil

import pytest
import torch
from PIL import Image as PilImage

from conjoin.data import ImageAugmentation
from conjoin.training import (
    CachedFeatures,
    FeatureArguments,
    build_model,
    build_trainer,
    cache_features,
    collate_features,
    features,
    load_recipe,
)
from conjoin.training.config import RetrievalConfig
from tiny_training import make_encoder, make_rows, make_trainer, move_to_second_machine, without_dropout, write_pairs


@pytest.fixture(autouse=True)
def small_shards(monkeypatch):
    monkeypatch.setattr(features, "_BATCHES_PER_SHARD", 1)


def _cache(checkpoints, folder, **kwargs):
    model, processor = make_encoder(checkpoints)
    rows = [dict(row) | {"alternative_text": "z z z" if i == 1 else None} for i, row in enumerate(make_rows(5))]
    return model, processor, rows, cache_features(model, processor, rows, folder, **{"batch_size": 2} | kwargs)


def test_cached_features_give_the_vectors_of_the_towers(tiny_checkpoints, tmp_path):
    model, processor, rows, folder = _cache(tiny_checkpoints, tmp_path)
    model.eval()
    cached = CachedFeatures(folder, first_only=True)
    batch = collate_features([cached[i] for i in range(5)])["pairs"]
    views = ("image", "text", "fused")
    with torch.no_grad():
        live = model(**processor([{"image": r["image"], "text": r["text"]} for r in rows]), views=views).embeddings
        assert (model(**batch, views=views).embeddings - live).abs().max() < 1e-6


def test_every_copy_and_both_texts_are_drawn(tiny_checkpoints, tmp_path):
    *_, folder = _cache(tiny_checkpoints, tmp_path, copies=(None, _noise, _noise))
    cached = CachedFeatures(folder)
    assert cached.images.column("image_features").shape[:2] == (5, 3)

    def draws(index):
        seen = set()
        for cached.epoch in range(60):
            row = cached[index]
            assert all(torch.equal(row[name], again) for name, again in cached[index].items())
            seen.add((row["image_features"].sum().item(), row["attention_mask"].sum().item()))
        return seen

    assert [len(draws(index)) for index in range(2)] == [3, 6]  # row 1 has a second text
    cached.first_only = True
    assert len(draws(1)) == 1


def test_training_on_a_cache_is_training_on_frozen_towers(tiny_checkpoints, tmp_path):
    weights = []
    for cached in (False, True):
        model, processor = make_encoder(tiny_checkpoints)
        without_dropout(model)
        for tower in (model.vision_model, model.text_model):
            tower.requires_grad_(False)
        rows = make_rows(8)
        if cached:
            rows = CachedFeatures(cache_features(model, processor, rows, tmp_path / "cache"))
        trainer = make_trainer("gcl", model, processor, tmp_path, rows, optim="sgd")
        trainer.data_collator = collate_features if cached else trainer.data_collator
        trainer.train()
        weights.append(dict(trainer.model.named_parameters()))
    for name, weight in weights[0].items():
        assert torch.allclose(weight, weights[1][name], atol=1e-6), name


def test_pictures_in_files_are_augmented_as_those_in_memory(tiny_checkpoints, tmp_path):
    model, processor = make_encoder(tiny_checkpoints)
    rows = [dict(row) for row in make_rows(3)]
    for row in rows:
        row["image"].save(tmp_path / f"{row['id']}.png")
    in_files = [row | {"image": {"path": str(tmp_path / f"{row['id']}.png"), "bytes": None}} for row in rows]
    features = [
        CachedFeatures(
            cache_features(model, processor, given, tmp_path / name, copies=(None, ImageAugmentation(0)))
        ).images.column("image_features")
        for name, given in (("memory", rows), ("files", in_files))
    ]
    assert torch.equal(*features)
    assert not torch.equal(features[0][:, 0], features[0][:, 1])


def test_a_bad_image_names_its_row(tiny_checkpoints, tmp_path):
    model, processor = make_encoder(tiny_checkpoints)
    rows = [dict(row) for row in make_rows(5)]
    (tmp_path / "broken.png").write_bytes(b"no picture")
    rows[3]["image"] = str(tmp_path / "broken.png")
    with pytest.raises(ValueError, match="'row3'"):
        cache_features(model, processor, rows, tmp_path, batch_size=2)


def test_an_interrupted_cache_resumes_to_the_same_bytes(tiny_checkpoints, tmp_path, monkeypatch):
    _cache(tiny_checkpoints, tmp_path / "whole", key={"data": "a"}, copies=(None, ImageAugmentation(7)))
    _cache(tiny_checkpoints, tmp_path / "part", key={"data": "b"})
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        compute = features._image_features
        patch.setattr(features, "_image_features", lambda *given: 1 / 0 if "row4" in given[3] else compute(*given))
        _cache(tiny_checkpoints, tmp_path / "part", key={"data": "a"}, copies=(None, ImageAugmentation(7)))
    computed = []
    monkeypatch.setattr(features, "_image_features", lambda *given: computed.append(given[3]) or compute(*given))
    _cache(tiny_checkpoints, tmp_path / "part", key={"data": "a"}, copies=(None, ImageAugmentation(7)))
    assert computed == [["row4"]] * 2
    assert _files(tmp_path / "part") == _files(tmp_path / "whole")


def _files(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_cache_is_reused_until_its_key_changes(tiny_checkpoints, tmp_path):
    *_, folder = _cache(tiny_checkpoints, tmp_path, key={"data": "a"})
    before, written = _files(folder), (folder / "images/cache.json").stat().st_mtime_ns
    _cache(tiny_checkpoints, tmp_path, key={"data": "a"})
    assert (folder / "images/cache.json").stat().st_mtime_ns == written
    _cache(tiny_checkpoints, tmp_path, key={"data": "b"})
    assert (folder / "images/cache.json").stat().st_mtime_ns > written and _files(folder).keys() == before.keys()
    _cache(tiny_checkpoints, tmp_path)
    assert CachedFeatures(folder).images.key == {}


def test_images_and_texts_of_two_caches_are_no_cache(tiny_checkpoints, tmp_path):
    for name in ("a", "b"):
        _cache(tiny_checkpoints, tmp_path / name, key={"data": name})
    shutil.rmtree(tmp_path / "a/texts")
    shutil.move(tmp_path / "b/texts", tmp_path / "a/texts")
    with pytest.raises(ValueError, match="is unfinished: its texts are of another key; run `conjoin train` again"):
        CachedFeatures(tmp_path / "a")


@pytest.mark.parametrize("damaged", ["images/shard-00001.safetensors", "texts/SHA256SUMS"])
def test_a_damaged_part_is_refused_and_made_again(tiny_checkpoints, tmp_path, damaged):
    *_, folder = _cache(tiny_checkpoints, tmp_path, key={"data": "a"})
    before, path = _files(folder), folder / damaged
    path.write_bytes(before[damaged][:-9])
    with pytest.raises(ValueError, match=rf"{path.name}.*run `conjoin train` again"):
        CachedFeatures(folder)
    _cache(tiny_checkpoints, tmp_path, key={"data": "a"})
    assert _files(folder) == before


def test_workers_that_would_never_hear_of_another_epoch_are_refused(tiny_checkpoints, tmp_path):
    model, processor, _, folder = _cache(tiny_checkpoints, tmp_path / "cache")
    workers = {"dataloader_num_workers": 1, "dataloader_persistent_workers": True}
    trainer = make_trainer("gcl", model, processor, tmp_path, CachedFeatures(folder), **workers)
    with pytest.raises(ValueError, match="resampled in every epoch; remove dataloader_persistent_workers"):
        trainer.train()


def _noise(image):
    return PilImage.effect_noise(image.size, 100).convert("RGB")


@pytest.fixture
def recipe(tiny_checkpoints, tmp_path):
    captions = tmp_path / "pairs"
    write_pairs(captions, 7)
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
    recipe = load_recipe(path, {key.replace("__", "."): value for key, value in overrides.items()})
    torch.manual_seed(0)
    return build_trainer(recipe, *build_model(recipe.model))


def test_evaluation_on_a_cache_is_evaluation_on_the_rows(recipe, tmp_path):
    for row in range(4):
        (tmp_path / f"pairs/row{row}.txt").write_text("the same text")
    (tmp_path / "group.csv").write_text(
        "file_name,text,shown\n" + "".join(f"pairs/row{row}.png,text {row},{row // 4}\n" for row in range(7))
    )
    for source, column in ((str(tmp_path / "pairs"), "null"), (str(tmp_path / "group.csv"), "shown")):
        data = {"data__source": source, "data__eval_source": source, "data__group_column": column}
        found = [_trainer(recipe, **data, **features).evaluate() for features in ({}, {"features": "null"})]
        assert found[0] == pytest.approx(found[1])
        hit_rates = [value for name, value in found[0].items() if name.endswith("hit_rate@5")]
        assert min(hit_rates) > 4 / 7 - 1e-6  # four rows answer for each other, and only three could beat them


def test_features_of_a_tower_in_training_are_refused(recipe):
    with pytest.raises(ValueError, match="vision_model is being trained"):
        _trainer(recipe, model__freeze_towers="false")


def test_parts_that_are_not_trained_stay_as_they_are(recipe):
    trainer = _trainer(recipe, model__freeze="[text_adapter]")
    before = {name: value.clone() for name, value in trainer.encoder.state_dict().items()}
    trainer.train()
    after = trainer.encoder.state_dict()
    moved = {name.split(".")[0] for name, value in before.items() if not torch.equal(value, after[name])}
    assert moved == {"vision_adapter", "vl_encoder"}
    with pytest.raises(ValueError, match=r"model.freeze: JointEncoderModel has no part 'adapter'; .*'text_adapter'"):
        _trainer(recipe, model__freeze="[adapter]")


def test_features_of_a_stream_are_refused(recipe):
    with pytest.raises(ValueError, match="a stream cannot be cached"):
        _trainer(recipe, data__streaming="true")


def test_a_changed_text_or_image_of_any_row_is_noticed(recipe, tmp_path):
    def features():
        made = _trainer(recipe).train_dataset
        return {"images": made.images.column("image_features") + 0, "texts": made.texts.column("text_features") + 0}

    before = features()
    assert all(torch.equal(before[name], tensor) for name, tensor in features().items())
    (tmp_path / "pairs/row6.txt").write_text("quite another text")
    changed = features()
    assert before["texts"].shape != changed["texts"].shape
    assert torch.equal(before["images"], changed["images"])
    PilImage.new("RGB", (16, 16), "white").save(tmp_path / "pairs/row6.png")
    moved = (features()["images"] - before["images"]).abs().amax(dim=(1, 2, 3))
    assert moved.nonzero().flatten().tolist() == [6]


def test_a_batch_larger_than_the_data_is_lowered(recipe, caplog):
    trainer = _trainer(recipe, training__per_device_train_batch_size="64")
    assert trainer.args.train_batch_size == 7 and len(trainer.get_train_dataloader()) == 1
    assert "per_device_train_batch_size lowered from 64 to 7: there are 7 rows" in caplog.text


def test_one_row_is_no_batch(recipe, tmp_path):
    (tmp_path / "one").mkdir()
    for suffix in ("png", "txt"):
        (tmp_path / f"one/row.{suffix}").write_bytes((tmp_path / f"pairs/row0.{suffix}").read_bytes())
    with pytest.raises(ValueError, match="1 rows of training data are too few"):
        _trainer(recipe, data__source=str(tmp_path / "one"))


@pytest.mark.parametrize("faster", [False, True])
def test_the_chosen_precision_is_stored_and_recorded(recipe, faster, monkeypatch):
    monkeypatch.setattr("conjoin.devices._is_bf16_faster", lambda kind: faster)
    types = []
    for value in ("auto", str(not faster).lower()):  # the second cache replaces the first
        trainer = _trainer(recipe, features__bf16=value)
        types.append(trainer.train_dataset.images[0]["image_features"].dtype)
    assert types == ([torch.bfloat16, torch.float32] if faster else [torch.float32, torch.bfloat16])


def test_a_second_machine_waits_for_the_features_of_the_first(tiny_checkpoints, tmp_path, monkeypatch):
    model, processor = make_encoder(tiny_checkpoints)
    training = RetrievalConfig(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    arguments = FeatureArguments(folder=str(tmp_path / "features"), copies=1)
    for tower in ("vision_model", "text_model"):
        model.get_submodule(tower).requires_grad_(False)
    features.cache_run_features(arguments, model, processor, make_rows(4), None, training)  # of the first machine
    events = move_to_second_machine(training, monkeypatch)
    is_complete = features.FeatureCache.is_complete
    monkeypatch.setattr(features.FeatureCache, "is_complete", lambda *of: events.append("open") or is_complete(*of))
    features.cache_run_features(arguments, model, processor, make_rows(4), None, training)
    assert events == ["wait", "open", "open"]
