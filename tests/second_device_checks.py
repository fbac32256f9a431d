"""Run by `test_second_device.py`: a step of each method, each model, exact search, readouts and explanations."""

import copy

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device

import tiny_solar
from conjoin.models.mllm_retriever import MllmRetrieverModel
from conjoin.processing import ImageTextProcessor, MllmRetrieverProcessor
from conjoin.retrieval import ItemEncoder, exact_search
from conjoin.trainers.compress import readout_attention, readout_states
from conjoin.trainers.gradient_cache import cached_backward
from conjoin.trainers.solar_explain import explain_pair, fit_thresholds
from models.tiny_models import MODELS
from second_device import move, second_device
from tiny_mllms import MLLMS
from tiny_trainers import TRAINERS, make_any


def test_it_refuses_what_a_gpu_refuses():
    with second_device() as device:
        there = torch.ones(3, 2, device=device)
        assert (there @ torch.tensor([1.0, 2.0], device=device)).cpu().tolist() == [3.0, 3.0, 3.0]
        assert (there * torch.tensor(2.0)).sum().item() == 12.0  # a scalar
        assert there[torch.tensor([0, 2])].device == there.device  # an index
        for wrong in (lambda: there + torch.ones(2), lambda: torch.ones(3)[there[:, 0].long()], there.numpy):
            with pytest.raises((RuntimeError, TypeError)):
                wrong()


ANALYSES = (readout_attention, readout_states)


def step(objective, batch):
    """The terms of one step with the gradient cache, which runs all that a plain step runs, and the gradients."""
    for parameter in objective.parameters():
        parameter.grad = None
    torch.manual_seed(0)
    terms = cached_backward(objective, dict(batch), 2, lambda loss: loss.backward())
    gradients = {name: p.grad.cpu() for name, p in objective.named_parameters() if p.grad is not None}
    return {name: float(term.detach()) for name, term in terms.items()}, gradients


@pytest.mark.parametrize("name", TRAINERS)
def test_a_training_step(name, tiny_checkpoints, mllm_checkpoints, tmp_path):
    trainer = make_any(name, tiny_checkpoints, mllm_checkpoints("qwen2_vl")[0], tmp_path)
    batch = trainer._loss_inputs(next(iter(trainer.get_train_dataloader())))
    expected = step(trainer.model, batch)
    teacher = getattr(trainer, "teacher", None)
    with second_device() as device:
        if isinstance(teacher, torch.nn.Module):  # not a submodule
            move(teacher)
        found = step(move(trainer.model), send_to_device(batch, device))
    assert found[0] == pytest.approx(expected[0], rel=1e-3, abs=1e-5) and len(expected[1]) > 1
    assert found[1].keys() == expected[1].keys()
    for parameter, gradient in expected[1].items():  # attention has another kernel there
        assert (found[1][parameter] - gradient).norm() < 1e-3 * gradient.norm() + 1e-5


@pytest.mark.parametrize("name", [*MODELS, *MLLMS])
def test_encoding(name, monkeypatch, tiny_checkpoints, mllm_checkpoints, pictures):
    if name in MODELS:
        build, vision, text, config = MODELS[name]
        folders = tiny_checkpoints[vision], tiny_checkpoints[text]
        model, processor = build(*folders, **config), ImageTextProcessor.from_backbones(*folders)
    else:
        folder = mllm_checkpoints(name)[0]
        model, processor = MllmRetrieverModel.from_mllm(folder, 3), MllmRetrieverProcessor.from_mllm(folder)
    monkeypatch.setattr(torch, "inference_mode", torch.no_grad)  # the device knows no other
    items = ["a red box", pictures[0], {"text": "x", "image": pictures[1]}, "7 more words"]
    expected = ItemEncoder(model, processor).encode(items)
    with second_device() as device:
        found = ItemEncoder(move(model), processor, device=device).encode(items)
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_exact_search(dtype):
    vectors, queries = np.random.default_rng(0).standard_normal((2, 300, 24)).astype(np.float32)
    vectors, queries = (part / np.linalg.norm(part, axis=1, keepdims=True) for part in (vectors, queries))
    vectors = vectors.astype(dtype)
    for options in ({}, {"among": np.arange(3, 200, 2)}):
        expected = exact_search(queries[:40], vectors, 7, **options)
        with second_device() as device:
            for given in (vectors, np.array_split(vectors, 4)):
                found = exact_search(queries[:40], given, 7, device=device, **options)
                for one, other in zip(found, expected, strict=True):
                    np.testing.assert_array_equal(one, other)


def test_readouts_and_explanations(tiny_checkpoints, pictures):
    model, processor = tiny_solar.frozen_encoder(tiny_checkpoints)
    pairs = [{"image": picture, "text": text} for picture, text in zip(pictures, ("red", "big dog"), strict=False)]

    def found(model):
        scores = explain_pair(model, processor, pairs[0]["image"], "a red dog").image_scores
        taus = torch.tensor([*fit_thresholds(model, processor, pairs).values()])
        model.config.readout = "sum"
        vectors = model(**send_to_device(dict(processor(pairs)), model.device)).embeddings
        return [torch.as_tensor(scores), taus, vectors]

    expected = found(copy.deepcopy(model).eval())
    with second_device():
        for here, there in zip(expected, found(move(model.eval())), strict=True):
            torch.testing.assert_close(there.cpu(), here, atol=1e-5, rtol=1e-3)


def test_attention_and_states_by_depth(mllm_checkpoints, pictures):
    folder = mllm_checkpoints("qwen2_vl")[0]
    processor = MllmRetrieverProcessor.from_mllm(folder)
    items = [{"image": picture, "text": "x"} for picture in pictures[:2]]
    model = MllmRetrieverModel.from_mllm(folder).eval()
    expected = [read(model, processor, items) for read in ANALYSES]
    with second_device():
        move(model)
        for read, here in zip(ANALYSES, expected, strict=True):
            torch.testing.assert_close(read(model, processor, items).cpu(), here, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("name", ["SOLAR 1", "Coral"])
def test_training_and_evaluation(name, monkeypatch, tiny_checkpoints, mllm_checkpoints, tmp_path):
    def run(trainer):
        trainer.train()
        metrics = {name: value for name, value in trainer.evaluate().items() if "hit_rate" in name}
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], metrics

    trainers = [make_any(name, tiny_checkpoints, mllm_checkpoints("qwen2_vl")[0], tmp_path) for _ in range(2)]
    for trainer in trainers:
        trainer.eval_dataset = trainer.train_dataset
    losses, metrics = run(trainers[0])
    with second_device() as device:
        move(trainers[1].model)
        monkeypatch.setattr(type(trainers[1].args), "device", device)
        monkeypatch.setattr(Accelerator, "device", device)
        found = run(trainers[1])
    assert found[0] == pytest.approx(losses, rel=1e-3) and len(losses) == 2
    assert found[1] == pytest.approx(metrics, rel=1e-2) and metrics
