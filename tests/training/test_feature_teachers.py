"""Teachers beside cached tower features see the picture and the text that the student sees."""

import pytest
import torch
from test_teachers import TEXTS, make_teachers, pair_rows
from tiny_training import SETTINGS, make_encoder, without_dropout
from transformers import AutoImageProcessor, AutoTokenizer

from conjoin.data import ImageAugmentation
from conjoin.training import (
    CachedFeatures,
    JointEncoderStage1Config,
    JointEncoderStage1Trainer,
    cache_features,
    collate_features,
)
from conjoin.training.feature_teachers import cache_teacher_features
from conjoin.training.teachers import TeacherCollator, Teachers, TextTeacher, VisionTeacher


def own_towers(model, checkpoints):
    """Teachers that are the student's own towers, so that they must say what the student's features say."""
    return Teachers(
        VisionTeacher(model.vision_model, AutoImageProcessor.from_pretrained(checkpoints["dinov2"])),
        TextTeacher(model.text_model, AutoTokenizer.from_pretrained(checkpoints["bert"])),
    )


def make_cache(checkpoints, folder, teachers=None, copies=3, key="", **settings):
    model, processor = make_encoder(checkpoints)
    without_dropout(model)
    rows = [row | {"alternative_text": "z y 1" if i == 1 else None} for i, row in enumerate(pair_rows())]
    settings = {"copies": copies, "batch_size": 4} | settings
    cache_features(model, processor, rows, folder, augment=ImageAugmentation(seed=5), key=key, **settings)
    teachers = teachers or own_towers(model, checkpoints)
    collator = TeacherCollator(processor, 8, teachers)
    cache_teacher_features(teachers, collator, rows, folder, augment=ImageAugmentation(seed=5), **settings)
    return model, processor, rows, teachers, collator


def test_the_teacher_sees_the_copy_and_the_text_of_the_student(tiny_checkpoints, tmp_path):
    model, _, rows, teachers, _ = make_cache(tiny_checkpoints, tmp_path)
    cached = CachedFeatures(tmp_path, teachers=True)
    seen = set()
    for cached.epoch in range(30):
        for index in range(len(rows)):
            row = cached[index]
            assert torch.allclose(row["teacher_image_tokens"], row["image_features"][1:], atol=1e-6)
            assert torch.allclose(row["teacher_image_global"], row["image_features"][0], atol=1e-6)
            tokens = row["attention_mask"].bool()
            assert torch.allclose(
                row["teacher_text_tokens"][: int(tokens.sum())], row["text_features"][1:][tokens], atol=1e-5
            )
            seen.add((index, row["image_features"].sum().item(), row["text_features"].sum().item()))
    assert len(seen) == 5 * 3 + 3 * 2
    batch = collate_features([cached[index] for index in range(6)])
    assert all(len(value) == 6 for value in batch.values())
    batch.pop("ids")
    inputs = {name: value for name, value in batch.items() if not name.startswith("teacher_")}
    output = model(**inputs, output_tokens=True)
    targets = teachers(batch, output)
    assert torch.equal(targets.text_mask, output.text_token_mask)  # one tokenizer: every token is known
    student = output.text_features[:, 1:][targets.text_mask]
    assert torch.allclose(targets.text_tokens[targets.text_mask], student, atol=1e-5)


def test_cached_teachers_say_what_live_ones_do(tiny_checkpoints, tmp_path):
    teachers = make_teachers(tiny_checkpoints, "vit", "xlm_roberta")
    model, _, rows, _, collator = make_cache(tiny_checkpoints, tmp_path, teachers, copies=1)
    cached = CachedFeatures(tmp_path, first_only=True, teachers=True)
    live, batch = collator(rows), collate_features([cached[index] for index in range(6)])
    outputs = []
    for each in (live, batch):
        inputs = {name: value for name, value in each.items() if not name.startswith("teacher_") and name != "ids"}
        outputs.append(teachers(each, model.eval()(**inputs, output_tokens=True)))
    for name, a, b in zip(outputs[0]._fields, *outputs, strict=True):
        length = min(a.shape[1], b.shape[1])
        assert torch.allclose(a[:, :length].float(), b[:, :length].float(), atol=1e-5), name


def test_stage_1_trains_on_them(tiny_checkpoints, tmp_path):
    teachers = make_teachers(tiny_checkpoints)
    model, processor, *_ = make_cache(tiny_checkpoints, tmp_path / "cache", teachers)
    config = JointEncoderStage1Config(output_dir=str(tmp_path), **SETTINGS | {"per_device_train_batch_size": 3})
    trainer = JointEncoderStage1Trainer(
        model, config, teachers, data_collator=collate_features,
        train_dataset=CachedFeatures(tmp_path / "cache", teachers=True), processing_class=processor,
    )  # fmt: skip
    trainer.train()
    assert [entry["ld_loss"] > 0 for entry in trainer.state.log_history if "ld_loss" in entry] == [True, True]


def test_teachers_go_when_the_features_change(tiny_checkpoints, tmp_path):
    model, processor, rows, teachers, collator = make_cache(tiny_checkpoints, tmp_path, key="a")
    assert not any(name.startswith("teacher_") for name in CachedFeatures(tmp_path)[0])
    cache_features(model, processor, rows, tmp_path, key="a", copies=3)
    CachedFeatures(tmp_path, teachers=True)
    cache_features(model, processor, rows, tmp_path, key="b", copies=3)
    with pytest.raises(FileNotFoundError):
        CachedFeatures(tmp_path, teachers=True)
    with pytest.raises(ValueError, match="are 3 copies of 6 rows, the teachers are to see 2 of 6"):
        cache_teacher_features(teachers, collator, rows, tmp_path, copies=2)
    with pytest.raises(FileNotFoundError, match="no cached features"):
        cache_teacher_features(teachers, collator, rows, tmp_path / "other")
    assert len(TEXTS) == len(rows)
