"""Run by `test_second_device.py`: a step of each method, each model, exact search, readouts and explanations."""

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device

import tiny_solar
from conjoin.evaluation.layers import readout_attention, readout_states
from conjoin.hub.build import image_text_processor, mllm_model, mllm_processor
from conjoin.retrieval import ItemEncoder, exact_search
from conjoin.trainers.gradient_cache import cached_backward
from conjoin.trainers.solar_explain import explain_pair, fit_thresholds
from models.tiny_models import MODELS
from second_device import move, second_device
from tiny_mllms import MLLMS
from tiny_trainers import TRAINERS, make_any

ANALYSES = (readout_attention, readout_states)


def test_it_refuses_what_a_gpu_refuses():
    with second_device() as device:
        there = torch.ones(3, 2, device=device)
        assert (there @ torch.tensor([1.0, 2.0], device=device)).cpu().tolist() == [3.0, 3.0, 3.0]
        assert (there * torch.tensor(2.0)).sum().item() == 12.0  # a scalar
        assert there[torch.tensor([0, 2])].device == there.device  # an index
        for wrong in (lambda: there + torch.ones(2), lambda: torch.ones(3)[there[:, 0].long()], there.numpy):
            with pytest.raises((RuntimeError, TypeError)):
                wrong()


def on_both(run, *modules):
    """Return `run(device)` on the CPU, and on the second device after the modules were moved there."""
    here = run(torch.device("cpu"))
    with second_device() as device:
        for module in modules:
            move(module)
        return here, run(device)


def mllm(mllm_checkpoints, name, layers=None):
    folder = mllm_checkpoints(name)[0]
    return mllm_model(folder, layers).eval(), mllm_processor(folder)


@pytest.mark.parametrize("name", TRAINERS)
def test_a_training_step(name, tiny_checkpoints, mllm_checkpoints, tmp_path):
    """The terms of one step with the gradient cache, which runs all that a plain step runs, and the gradients."""
    trainer = make_any(name, tiny_checkpoints, mllm_checkpoints("qwen2_vl")[0], tmp_path)
    batch = trainer._loss_inputs(next(iter(trainer.get_train_dataloader())))
    teacher = getattr(trainer, "teacher", None)  # not a submodule

    def step(device):
        trainer.model.zero_grad()
        torch.manual_seed(0)
        terms = cached_backward(trainer.model, send_to_device(dict(batch), device), 2, lambda loss: loss.backward())
        gradients = {name: p.grad.cpu() for name, p in trainer.model.named_parameters() if p.grad is not None}
        return {name: float(term.detach()) for name, term in terms.items()}, gradients

    modules = [each for each in (trainer.model, teacher) if isinstance(each, torch.nn.Module)]
    (here, expected), (there, found) = on_both(step, *modules)
    assert there == pytest.approx(here, rel=1e-3, abs=1e-5) and found.keys() == expected.keys() and len(found) > 1
    for parameter, gradient in expected.items():  # attention has another kernel there
        assert (found[parameter] - gradient).norm() < 1e-3 * gradient.norm() + 1e-5


@pytest.mark.parametrize("name", [*MODELS, *MLLMS])
def test_encoding(name, monkeypatch, tiny_checkpoints, mllm_checkpoints, pictures):
    if name in MODELS:
        build, vision, text, config = MODELS[name]
        folders = tiny_checkpoints[vision], tiny_checkpoints[text]
        model, processor = build(*folders, **config), image_text_processor(*folders)
    else:
        model, processor = mllm(mllm_checkpoints, name, 3)
    monkeypatch.setattr(torch, "inference_mode", torch.no_grad)  # the device knows no other
    items = ["a red box", pictures[0], {"text": "x", "image": pictures[1]}, "7 more words"]
    here, there = on_both(lambda device: ItemEncoder(model, processor, device=device).encode(items), model)
    np.testing.assert_allclose(there, here, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"among": np.arange(3, 200, 2)}])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_exact_search(dtype, options):
    vectors, queries = np.random.default_rng(0).standard_normal((2, 300, 24)).astype(np.float32)
    vectors, queries = (part / np.linalg.norm(part, axis=1, keepdims=True) for part in (vectors, queries))
    for given in (vectors.astype(dtype), np.array_split(vectors.astype(dtype), 4)):
        here, there = on_both(
            lambda device, given=given: exact_search(queries[:40], given, 7, device=device, **options)
        )
        for one, other in zip(here, there, strict=True):
            np.testing.assert_array_equal(one, other)


def test_readouts_and_explanations(tiny_checkpoints, mllm_checkpoints, pictures):
    model, processor = tiny_solar.frozen_encoder(tiny_checkpoints)
    pairs = [{"image": picture, "text": text} for picture, text in zip(pictures, ("red", "big dog"), strict=False)]
    deep, reader = mllm(mllm_checkpoints, "qwen2_vl")
    readout = model.config.readout

    def run(device):
        model.config.readout = readout
        scores = explain_pair(model, processor, pairs[0]["image"], "a red dog").image_scores
        taus = torch.tensor([*fit_thresholds(model, processor, pairs).values()])
        model.config.readout = "sum"
        vectors = model(**send_to_device(dict(processor(pairs)), device)).embeddings
        return torch.as_tensor(scores), taus, vectors, *(read(deep, reader, pairs) for read in ANALYSES)

    for here, there in zip(*on_both(run, model.eval(), deep), strict=True):
        torch.testing.assert_close(there.cpu(), here, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("name", ["SOLAR 1", "Coral"])
def test_training_and_evaluation(name, monkeypatch, tiny_checkpoints, mllm_checkpoints, tmp_path):
    trainers = [make_any(name, tiny_checkpoints, mllm_checkpoints("qwen2_vl")[0], tmp_path) for _ in range(2)]

    def run(device):
        trainer = trainers.pop()
        trainer.eval_dataset = trainer.train_dataset
        if not trainers:
            move(trainer.model)
            monkeypatch.setattr(type(trainer.args), "device", device)
            monkeypatch.setattr(Accelerator, "device", device)
        trainer.train()
        metrics = {name: value for name, value in trainer.evaluate().items() if "hit_rate" in name}
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], metrics

    (losses, metrics), found = on_both(run)
    assert found[0] == pytest.approx(losses, rel=1e-3) and len(losses) == 2
    assert found[1] == pytest.approx(metrics, rel=1e-2) and metrics
