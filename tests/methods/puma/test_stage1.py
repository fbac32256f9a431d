"""Stage 1 of PUMA: the terms and their weights, the teachers, their states on disk."""

import copy

import pytest
import torch
from tiny_puma import Instructed, make_student, make_trainer, sentences

from conjoin.data import RetrievalCollator
from conjoin.losses import info_nce, self_distillation
from conjoin.methods.puma import PumaStage1Config, cache_teacher_states, teacher_states
from conjoin.methods.puma.stage1 import PumaStage1Objective
from conjoin.methods.puma.teachers import FullTeacher, SharedTeacher, make_teacher
from conjoin.models.mllm_retriever import MllmRetrieverModel

KEEP = 2


@pytest.fixture(scope="module")
def folder(mllm_checkpoints):
    return mllm_checkpoints("qwen2_vl")[0]


@pytest.fixture(scope="module")
def teacher(folder):
    return MllmRetrieverModel.from_mllm(folder)


def make_config(**arguments):
    return PumaStage1Config(output_dir="unused", report_to="none", use_cpu=True, **arguments)


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava", "internvl"])
def test_the_shared_teacher_of_an_untrained_student_is_the_full_one(name, mllm_checkpoints):
    folder, _ = mllm_checkpoints(name)
    full = MllmRetrieverModel.from_mllm(folder)
    model, processor = make_student(folder, 3 if name == "qwen3_vl" else KEEP, lora=False)
    batch = RetrievalCollator(processor)([Instructed(4, negatives=0)[i] for i in range(4)])
    for part in ("queries", "positives"):
        expected = FullTeacher(full)(model, batch[part])
        found = SharedTeacher(full, model.config.keep_layers)(model, batch[part])
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-5)
        assert (found[0] - found[1]).abs().max() > 1e-2
        torch.testing.assert_close(found[0], model(**batch[part]).pooler_output)  # and no hook is left behind


def test_no_gradient_flows_into_the_deep_layers_or_through_them(folder, teacher):
    model, processor = make_student(folder)
    student, taught = SharedTeacher(teacher, KEEP)(model, processor(["a b", "c"]))
    assert student.requires_grad
    assert not taught.requires_grad
    student.sum().backward()
    assert all(parameter.grad is None for parameter in teacher.parameters())
    assert any(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("kind", ["mse", "squared_norm", "cosine", "kl"])
@pytest.mark.parametrize("mode", ["full", "shared"])
def test_the_terms_are_weighted_info_nce_and_distillation(folder, teacher, kind, mode):
    model, processor = make_student(folder)
    config = make_config(temperature=0.1, kind=kind, schedule="dynamic", distill_scale=0.05, teacher=mode)
    objective = PumaStage1Objective(model, config, make_teacher(mode, teacher, model)).eval()
    objective.progress = 0.25
    batch = RetrievalCollator(processor)([sentences(5)[i] for i in range(5)])
    with torch.no_grad():
        terms = objective(**batch)
        states = {part: model(**batch[part]).pooler_output for part in ("queries", "positives", "negatives")}
        candidates = torch.cat([states["positives"], states["negatives"]])
        if mode == "full":
            taught = [teacher(**batch[part]).pooler_output for part in ("queries", "positives")]
        else:
            deep = copy.deepcopy(model)  # the student's layers, then the dropped ones
            deep.text_model.layers.extend(copy.deepcopy(teacher.text_model.layers[KEEP:]))
            deep.text_model.config = teacher.text_model.config
            taught = [deep(**batch[part]).pooler_output for part in ("queries", "positives")]
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
        config = make_config(schedule=schedule)
        for progress, weights in zip((0.0, 0.5, 1.0), expected, strict=True):
            assert config.weights(progress) == pytest.approx(weights)


@pytest.mark.parametrize("mode", ["full", "shared"])
def test_the_teacher_stays_and_the_weights_are_logged(folder, teacher, tmp_path, mode):
    model, processor = make_student(folder)
    trainer = make_trainer(
        "puma_stage1", model, processor, tmp_path, sentences(12), teacher=teacher,
        mode=mode, gradient_cache_chunk_size=3, activation_checkpointing=True, schedule="dynamic",
    )  # fmt: skip
    taught = {name: parameter.detach().clone() for name, parameter in teacher.named_parameters()}
    trainer.train()
    assert all(torch.equal(value, taught[name]) for name, value in teacher.named_parameters())
    assert not any("teacher" in name for name in trainer.model.state_dict())
    log = [entry for entry in trainer.state.log_history if "distillation_loss" in entry]
    assert [entry["contrastive_weight"] for entry in log] == pytest.approx([0.5, 0.7])


def test_the_cache_of_states_knows_what_it_is_of(folder, teacher, tmp_path, monkeypatch):
    monkeypatch.setattr(teacher_states, "SHARD_SIZE", 4)
    _, processor = make_student(folder)
    model = copy.deepcopy(teacher)

    def make(rows, source=model):
        return cache_teacher_states(source, processor, rows, tmp_path, show_progress=False)

    whole = make(sentences(10))
    with torch.no_grad():
        expected = teacher(**processor([sentences(10)[9]["query"]])).pooler_output[0]
    torch.testing.assert_close(whole[9]["queries"], expected, rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="it was made with data "):
        make(sentences(9))
    with torch.no_grad():
        model.norm.weight.add_(1)
    with pytest.raises(ValueError, match="it was made with teacher "):
        make(sentences(10))


def test_states_of_other_rows_are_refused(folder, teacher, tmp_path):
    model, processor = make_student(folder)
    states = cache_teacher_states(teacher, processor, sentences(8), tmp_path / "states", show_progress=False)
    evaluated = sentences(4)  # rows without states
    make_trainer("puma_stage1", model, processor, tmp_path, sentences(8), evaluated, teacher=states).evaluate()
    rows = sentences(8).select(range(7, -1, -1))
    with pytest.raises(ValueError, match="its query, instruction or positive differs"):
        make_trainer("puma_stage1", model, processor, tmp_path, rows, teacher=states).train()


def test_arguments_and_teachers_are_checked(folder, teacher, tmp_path):
    for arguments, message in (
        ({"distill_weight": -0.1}, "must not be negative"),
        ({"contrastive_weight": 0.0, "distill_weight": 0.0}, "nor both weights zero"),
        ({"schedule": "up"}, r"schedule='up'; expected one of \('fixed', 'dynamic', 'reverse'\)"),
        ({"kind": "l1"}, "kind='l1'; expected one of"),
        ({"teacher": "other"}, "teacher='other'; expected one of"),
    ):
        with pytest.raises(ValueError, match=message):
            make_config(**arguments)
    model, processor = make_student(folder)
    with pytest.raises(ValueError, match=r"distill_weight=0\.1 needs a teacher"):
        make_trainer("puma_stage1", model, processor, tmp_path, sentences(8))
    with pytest.raises(ValueError, match="it has 2 layers of width 32, the student 2 of width 32"):
        make_trainer("puma_stage1", model, processor, tmp_path, sentences(8), teacher=make_student(folder)[0])
    plain = make_trainer("puma_stage1", model, processor, tmp_path, sentences(8), distill_weight=0.0)
    plain.train()
    assert "distillation_loss" not in plain.state.log_history[0]
