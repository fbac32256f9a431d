"""PUMA: the terms of both stages, the teachers and their cached states."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F

from conjoin import PumaStage1Config, PumaStage2Config
from conjoin.data import RetrievalCollator
from conjoin.data.training_rows import QueryRows
from conjoin.hub.build import mllm_model
from conjoin.losses import info_nce, self_distillation
from conjoin.models.shortcuts import use_shortcuts
from conjoin.trainers import puma
from tiny_puma import Instructed, make_student, make_trainer, sentences

KEEP = 2
TAUGHT = ("queries", "positives")


@pytest.fixture(scope="module")
def folder(mllm_checkpoints):
    return mllm_checkpoints("qwen2_vl")[0]


@pytest.fixture(scope="module")
def teacher(folder):
    return mllm_model(folder)


def terms_of(trainer, batch, progress=0.0):
    trainer.model.eval()
    trainer.state.max_steps, trainer.state.global_step = 100, round(100 * progress)
    with torch.no_grad():
        return trainer.model(**batch)


def first_loss(trainer):
    trainer.train()
    return trainer.state.log_history[0]["distillation_loss"]


# Stage 1


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava", "internvl"])
def test_the_shared_teacher_of_an_untrained_student_is_the_full_one(name, mllm_checkpoints, tmp_path):
    folder, _ = mllm_checkpoints(name)
    model, processor = make_student(folder, 3 if name == "qwen3_vl" else KEEP, lora=False)
    batch = RetrievalCollator(processor)([Instructed(4, negatives=0)[i] for i in range(4)])
    found = {}
    for mode in ("full", "shared"):
        whole = mllm_model(folder)
        arguments = {"teacher": whole, "mode": mode}
        trainer = make_trainer("puma_stage1", model, processor, tmp_path, sentences(8), **arguments)
        with torch.no_grad():
            found[mode] = trainer.embed(model.eval(), batch)
    torch.testing.assert_close(found["shared"], found["full"], rtol=0, atol=1e-5)
    for part in TAUGHT:
        assert (found["full"][part] - found["full"][f"teacher_{part}"]).abs().max() > 1e-2
        plain = model(**batch[part]).pooler_output  # no hook is left behind
        torch.testing.assert_close(found["shared"][part], plain)


@pytest.mark.parametrize("kind", ["mse", "squared_norm", "cosine", "kl"])
@pytest.mark.parametrize("mode", ["full", "shared"])
def test_the_terms_are_weighted_info_nce_and_distillation(folder, teacher, kind, mode, tmp_path):
    model, processor = make_student(folder)
    settings = {"temperature": 0.1, "kind": kind, "schedule": "dynamic", "distill_scale": 0.05, "mode": mode}
    trainer = make_trainer("puma_stage1", model, processor, tmp_path, sentences(8), teacher=teacher, **settings)
    batch = RetrievalCollator(processor)([sentences(5)[i] for i in range(5)])
    terms = terms_of(trainer, batch, 0.25)
    with torch.no_grad():
        states = {part: model(**batch[part]).pooler_output for part in (*TAUGHT, "negatives")}
        candidates = torch.cat([states["positives"], states["negatives"]])
        deep = teacher
        if mode == "shared":
            deep = copy.deepcopy(model)  # the student's layers, then the dropped ones
            deep.text_model.layers.extend(copy.deepcopy(teacher.text_model.layers[KEEP:]))
            deep.text_model.config = teacher.text_model.config
            use_shortcuts(deep, enabled=False)
        taught = [deep(**batch[part]).pooler_output for part in TAUGHT]
    distance = self_distillation(states["queries"], taught[0], states["positives"], taught[1], kind, temperature=0.1)
    contrastive = info_nce(states["queries"], candidates, 0.1)
    torch.testing.assert_close(terms["contrastive_loss"], 0.6 * contrastive, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(terms["distillation_loss"], 0.4 * 0.05 * distance, rtol=1e-4, atol=1e-6)
    assert terms["contrastive_weight"] == pytest.approx(0.6)
    assert terms["distill_weight"] == pytest.approx(0.4)


def test_the_weights_follow_their_schedule():
    courses = {
        "fixed": [(0.9, 0.1)] * 3,
        "dynamic": [(0.5, 0.5), (0.7, 0.3), (0.9, 0.1)],
        "reverse": [(0.5, 0.5), (0.3, 0.7), (0.1, 0.9)],
    }
    for schedule, expected in courses.items():
        config = PumaStage1Config("unused", use_cpu=True, schedule=schedule)
        for progress, weights in zip((0.0, 0.5, 1.0), expected, strict=True):
            assert config.weights(progress) == pytest.approx(weights)


@pytest.mark.parametrize("mode", ["full", "shared"])
def test_the_teacher_stays_and_gets_no_gradient(folder, teacher, tmp_path, mode):
    model, processor = make_student(folder)
    arguments = {"gradient_cache_chunk_size": 3, "activation_checkpointing": True, "schedule": "dynamic"}
    trainer = make_trainer(
        "puma_stage1", model, processor, tmp_path, sentences(12), teacher=teacher, mode=mode, **arguments
    )
    taught = {name: parameter.detach().clone() for name, parameter in teacher.named_parameters()}
    trainer.train()
    assert all(torch.equal(value, taught[name]) and value.grad is None for name, value in teacher.named_parameters())
    assert not any("teacher" in name for name in trainer.model.state_dict())
    log = [entry for entry in trainer.state.log_history if "distillation_loss" in entry]
    assert [entry["contrastive_weight"] for entry in log] == pytest.approx([0.5, 0.7])


def test_cached_states_are_those_of_the_teacher_and_computed_once(folder, tmp_path, monkeypatch):
    def trainer(rows=None, student=None, **arguments):
        model, processor = student or make_student(folder)
        arguments = {"teacher_model_name_or_path": folder} | arguments
        rows = sentences(8) if rows is None else rows
        return make_trainer("puma_stage1", model, processor, tmp_path, rows, sentences(4), **arguments)

    cache = {"teacher_cache": str(tmp_path / "states")}
    live, cached = trainer(), trainer(**cache)
    assert cached.teacher is None
    expected = first_loss(live)
    assert first_loss(cached) == pytest.approx(expected, rel=1e-4)
    cached.evaluate()  # rows without states

    loads = []
    load = puma.mllm_model
    monkeypatch.setattr(puma, "mllm_model", lambda *a, **k: loads.append(a) or load(*a, **k))
    students = [make_student(folder) for _ in range(5)]
    loads.clear()
    assert first_loss(trainer(student=students[0], **cache)) == pytest.approx(expected, rel=1e-4)
    assert not loads
    changed = [sentences(8).select(range(7, -1, -1)), sentences(8).map(lambda row: {"query": row["query"] + "!"})]
    for rows, student in zip(changed, students[1:], strict=False):  # other rows, or another order
        trainer(rows, student, **cache)
    students[3][1].max_text_length = 3  # another processor
    trainer(student=students[3], **cache)
    assert len(loads) == 3
    other = load(folder)
    with torch.no_grad():
        other.norm.weight.add_(1)
    assert first_loss(trainer(student=students[4], teacher=other, **cache)) != pytest.approx(expected, rel=1e-2)


def test_what_cannot_be_trained_is_refused(folder, teacher, tmp_path):
    for config_class, arguments, message in (
        (PumaStage1Config, {"distill_weight": -0.1}, "must not be negative"),
        (PumaStage1Config, {"contrastive_weight": 0.0, "distill_weight": 0.0}, "nor both weights zero"),
        (PumaStage1Config, {"schedule": "up"}, r"schedule='up'; expected one of \('fixed', 'dynamic', 'reverse'\)"),
        (PumaStage1Config, {"kind": "l1"}, "kind='l1'; expected one of"),
        (PumaStage1Config, {"teacher": "other"}, "teacher='other'; expected one of"),
        (PumaStage1Config, {"teacher": "shared", "teacher_cache": "x"}, "teacher='shared' changes with the student"),
        (PumaStage2Config, {"decay": -1.0}, "decay=-1.0 must not be negative"),
        (PumaStage2Config, {"temperature": 0.0}, "temperature must be a positive number, got 0.0"),
        (PumaStage2Config, {"temperature": 0.0001, "round_to": 2}, "rounded to 2 decimals"),
    ):
        with pytest.raises(ValueError, match=message):
            config_class(str(tmp_path), use_cpu=True, **arguments)
    model, processor = make_student(folder)
    model.save_pretrained(pruned := tmp_path / "pruned")
    processor.save_pretrained(pruned)
    cache = {"teacher": teacher, "teacher_cache": str(tmp_path)}
    unnamed = sentences(8).remove_columns("target_modality")
    for stage, rows, arguments, message in (
        (1, sentences(8), {}, r"distill_weight=0\.1 needs a teacher: set teacher_model_name_or_path"),
        (1, sentences(8), {"teacher_model_name_or_path": "absent/folder/x"}, "absent"),
        (1, sentences(8), {"teacher_model_name_or_path": str(pruned)}, "mllm_retriever"),
        (1, sentences(8), {"teacher": model}, "it has 2 layers of width 32, the student 2 of width 32"),
        (1, Instructed(8), cache, "Instructed may have images, or draw its candidates: remove teacher_cache"),
        (2, unnamed, {}, "rows with 'target_modality'"),
        (2, sentences(8), {"one_dataset_per_batch": True}, "needs rows with a 'dataset' column"),
    ):
        with pytest.raises((ValueError, OSError), match=message):
            make_trainer(f"puma_stage{stage}", model, processor, tmp_path, rows, **arguments).train()
    plain = make_trainer("puma_stage1", model, processor, tmp_path, sentences(8), distill_weight=0.0)
    plain.train()
    assert "distillation_loss" not in plain.state.log_history[0]


# Stage 2


@pytest.mark.parametrize(("decay", "reverse"), [(0.5, False), (0.5, True), (0.0, False)])
def test_the_loss_is_a_loop_over_queries(folder, tmp_path, decay, reverse):
    """Without decay both temperatures are one: InfoNCE. Reversed, other modalities get the decayed one."""
    model, processor = make_student(folder)
    settings = {"temperature": 0.1, "decay": decay, "reverse": reverse}
    trainer = make_trainer("puma_stage2", model, processor, tmp_path, Instructed(8), **settings)
    rows = QueryRows(Instructed(6))
    batch = RetrievalCollator(processor)([rows[i] for i in range(6)])
    terms = terms_of(trainer, batch, 0.4)
    with torch.no_grad():
        parts = [F.normalize(model(**batch[part]).pooler_output, dim=1) for part in (*TAUGHT, "negatives")]
    modality = batch["candidate_modality"]
    hard = 0.1 * math.exp(-decay * 0.4)
    same, other = (0.1, hard) if reverse else (hard, 0.1)
    candidates = torch.cat(parts[1:])
    rows = []
    for i, query in enumerate(parts[0]):
        temperatures = torch.where(modality == modality[i], same, other)
        rows.append(F.cross_entropy((candidates @ query / temperatures)[None], torch.tensor([i])))
    torch.testing.assert_close(terms["mac_loss"], torch.stack(rows).mean(), rtol=1e-5, atol=1e-6)
    assert terms["hard_temperature"] == pytest.approx(same)
    assert terms["temperature"] == pytest.approx(other)
    assert 0 < terms["same_modality_rate"] < 1
