"""Training on cached tower features is training on the towers; what was precomputed is not computed again."""

import numpy as np
import pytest
import torch
from PIL import Image as PilImage

from conjoin import JointEncoderModel
from conjoin.hub.build import image_text_processor, score_fusion_model
from conjoin.trainers import CachedFeatures, collate_features, precompute
from tiny_training import hit_rates, make_encoder, make_rows, make_trainer, without_dropout

VIEWS = ("image", "text", "fused")


def frozen(checkpoints):
    model, processor = make_encoder(checkpoints)
    processor.input_type = "cat"
    without_dropout(model)
    model.vision_model.requires_grad_(False)
    model.text_model.requires_grad_(False)
    return model, processor


def two_texts(count=5):
    return [dict(row) | {"alternative_text": "z z z" if i == 1 else None} for i, row in enumerate(make_rows(count))]


@pytest.fixture
def cache(tiny_checkpoints, tmp_path):
    model, processor = frozen(tiny_checkpoints)
    return lambda rows, folder="features", **options: CachedFeatures(
        model, processor, rows, tmp_path / folder, **options
    )


@pytest.mark.parametrize("several", [False, True])
def test_cached_features_give_the_vectors_of_the_towers(tiny_checkpoints, cache, several):
    (model, processor), rows = frozen(tiny_checkpoints), two_texts()
    shown = [[row["image"], rows[0]["image"].rotate(90)] if several else row["image"] for row in rows]
    marks = " <image> and <image>" if several else ""
    given = [row | {"image": image, "text": row["text"] + marks} for row, image in zip(rows, shown, strict=True)]
    cached = cache(given, first_only=True, copies=2)
    batch = collate_features([cached[i] for i in range(5)])["pairs"]
    with torch.no_grad():
        items = [
            {"image": image, "text": row["text"] + " and" * several} for row, image in zip(rows, shown, strict=True)
        ]
        live = model.eval()(**processor(items), views=VIEWS)
        assert (model(**batch, views=VIEWS).embeddings - live.embeddings).abs().max() < 1e-6
    images = cached.images["image_features"]
    assert images.shape[1] == 2 and not torch.equal(images[:, 0], images[:, 1])


def test_every_copy_and_both_texts_are_drawn(cache):
    cached, first = cache(two_texts(), copies=3), cache(two_texts(), copies=3, first_only=True)

    def draws(rows, index):
        seen = set()
        for rows.epoch in range(60):
            row = rows[index]
            assert all(torch.equal(row[name], again) for name, again in rows[index].items())
            seen.add((row["image_features"].sum().item(), row["attention_mask"].sum().item()))
        return len(seen)

    assert [draws(cached, 0), draws(cached, 1), draws(first, 1)] == [3, 6, 1]  # row 1 has a second text


def test_training_and_evaluation_on_features_are_those_on_frozen_towers(tiny_checkpoints, tmp_path):
    rows = make_rows(8, groups=6).map(
        lambda row, i: {"text": "the same" if i in (2, 3) else row["text"]}, with_indices=True
    )
    found = []
    for copies in (0, 1):
        features = {"feature_copies": copies, "features_dir": str(tmp_path / "features")}
        trainer = make_trainer("gcl", *frozen(tiny_checkpoints), tmp_path, rows, rows, optim="sgd", **features)
        trainer.train()
        found.append((dict(trainer.model.named_parameters()), hit_rates(trainer)))
    (weights, metrics), (cached_weights, cached_metrics) = found
    assert cached_metrics == pytest.approx(metrics)
    for name, weight in weights.items():
        assert torch.allclose(weight, cached_weights[name], atol=1e-6), name


def test_pictures_in_files_are_augmented_as_those_in_memory(cache, tmp_path):
    rows = [dict(row) for row in make_rows(3)]
    in_files = [row | {"image": {"path": str(tmp_path / f"{row['id']}.png"), "bytes": None}} for row in rows]
    for row, in_file in zip(rows, in_files, strict=True):
        row["image"].save(in_file["image"]["path"])
    memory, files = (cache(of, name, copies=2).images["image_features"] for of, name in ((rows, "a"), (in_files, "b")))
    assert torch.equal(memory, files) and not torch.equal(memory[:, 0], memory[:, 1])


def test_the_towers_run_again_only_for_other_rows(cache, monkeypatch):
    rows, calls = [dict(row) for row in make_rows(4)], []

    def features():
        calls.clear()
        found = cache(rows)
        return found.images["image_features"], len(calls)

    run = JointEncoderModel.run_vision_tower
    monkeypatch.setattr(
        JointEncoderModel, "run_vision_tower", lambda *given: calls.append(len(given[1])) or run(*given)
    )
    before, count = features()
    again, count_again = features()
    assert torch.equal(before, again) and count_again < count
    rows[3]["image"] = PilImage.new("RGB", (16, 16), "white")
    moved = (features()[0] - before).abs().amax(dim=(1, 2, 3))
    assert moved.nonzero().flatten().tolist() == [3]


def test_features_of_several_evaluation_sets_and_of_no_training_rows(tiny_checkpoints, tmp_path):
    settings = {"feature_copies": 1, "features_dir": str(tmp_path / "features")}
    rows = make_rows(5)
    for given in (rows, {"all": rows, "some": rows.select(range(2))}):
        trainer = make_trainer("gcl", *frozen(tiny_checkpoints), tmp_path, None, given, **settings)
        metrics = trainer.evaluate()
        names = ["eval"] if given is rows else ["eval_all", "eval_some"]
        assert all(f"{name}_mean_hit_rate@1" in metrics for name in names)


@pytest.mark.parametrize(("bf16", "dtype"), [("true", torch.bfloat16), ("false", torch.float32)])
def test_the_precision_of_the_run_is_that_of_its_features(tiny_checkpoints, tmp_path, bf16, dtype):
    settings = {"feature_copies": 1, "features_dir": str(tmp_path), "bf16": bf16}
    trainer = make_trainer("gcl", *frozen(tiny_checkpoints), tmp_path, make_rows(4), **settings)
    assert trainer.train_dataset[0]["image_features"].dtype == dtype


def test_what_cannot_be_cached_is_refused(tiny_checkpoints, tmp_path):
    clip, rows = tiny_checkpoints["clip"], make_rows(5)
    (tmp_path / "broken.png").write_bytes(b"no picture")
    broken = [dict(row) | {"image": str(tmp_path / "broken.png")} for row in rows]
    workers = {"dataloader_num_workers": 1, "dataloader_persistent_workers": True}
    of_clip = (score_fusion_model(clip), image_text_processor(clip, clip))
    cases = [
        (make_encoder(tiny_checkpoints), rows, {}, "vision_model is trained; set freeze_towers, or feature_copies"),
        (frozen(tiny_checkpoints), rows.to_iterable_dataset(), {}, "of a stream are not kept; set dataset_streaming"),
        (of_clip, rows, {}, "only the towers of a joint encoder, got ScoreFusionModel"),
        (frozen(tiny_checkpoints), rows, workers, "of these rows; remove dataloader_persistent_workers"),
        (frozen(tiny_checkpoints), broken, {}, "'row0'"),
    ]
    for model, given, arguments, message in cases:
        arguments = {"feature_copies": 1, "features_dir": str(tmp_path / "features")} | arguments
        with pytest.raises(ValueError, match=message):
            make_trainer("gcl", *model, tmp_path, given, **arguments).train()


def test_precomputed_rows_are_kept_by_key(tmp_path):
    computed = []

    def run(key="a", fails_at=None):
        def compute(rows):
            assert fails_at not in rows, "stopped"
            computed.extend(rows)
            return {"square": np.square([[row, row + 1] for row in rows]).astype(np.float32)}

        computed.clear()
        return precompute(range(10), compute, tmp_path, key={"key": key}, batch_size=2)

    with pytest.raises(AssertionError, match="stopped"):
        run(fails_at=7)
    found = run()  # nothing is kept of what was stopped
    assert computed == list(range(10)) and torch.equal(found[9]["square"], torch.tensor([81.0, 100.0]))
    assert torch.equal(run()["square"][:], found["square"][:]) and not computed
    assert len(run("b")) == len(computed) == 10
