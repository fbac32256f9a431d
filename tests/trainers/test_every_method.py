"""What holds of every method: what moves, what is saved, and that a step of the gradient cache is the plain one."""

import pytest
import torch
from safetensors.torch import load_file

from conjoin.hub import load_model
from tiny_trainers import TRAINERS, make_any
from tiny_training import cached_step, plain_step

BY_CHUNK = "SOLAR"
"""Its thresholds are those of a chunk; `solar/test_stages.py` holds them fixed."""


@pytest.mark.parametrize("name", TRAINERS)
def test_a_run_moves_what_is_trained_and_saves_an_encoder_that_loads(
    name, tiny_checkpoints, mllm_checkpoints, tmp_path, pictures
):
    trainer = make_any(name, tiny_checkpoints, mllm_checkpoints("qwen2_vl")[0], tmp_path, rows=8)
    before = {key: parameter.detach().clone() for key, parameter in trainer.model.named_parameters()}
    trainable = {key for key, parameter in trainer.model.named_parameters() if parameter.requires_grad}
    trainer.train()
    moved = {key for key, parameter in trainer.model.named_parameters() if not torch.equal(before[key], parameter)}
    assert moved <= trainable
    # A constant added to every key changes no attention weight.
    assert [key for key in trainable - moved if not key.endswith(("k_proj.bias", "key.bias"))] == []
    for entry in trainer.state.log_history[:2]:
        assert entry["loss"] == pytest.approx(sum(v for k, v in entry.items() if k.endswith("_loss")), rel=1e-3)
    trainer.save_model(str(tmp_path / "model"))
    model, processor = load_model(tmp_path / "model")
    batch = processor(["a b", {"image": pictures[0], "text": "c"}])
    with torch.no_grad():
        expected = trainer.encoder.eval()(**batch).embeddings
        torch.testing.assert_close(model(**batch).embeddings, expected, rtol=0, atol=1e-5)
    saved = [load_file(tmp_path / "model/model.safetensors"), model.state_dict()]
    sizes = [sorted(weight.numel() for weight in weights.values()) for weights in saved]
    assert sizes[0] == sizes[1]  # no adapters, heads, decoders or teachers


@pytest.mark.parametrize("name", [name for name in TRAINERS if BY_CHUNK not in name])
def test_a_step_of_the_gradient_cache_is_the_plain_one(name, tiny_checkpoints, mllm_checkpoints, tmp_path):
    more = {"decoded_rows": 3} if "Coral" in name else {}
    trainer = make_any(name, tiny_checkpoints, mllm_checkpoints("qwen2_vl")[0], tmp_path, rows=6, **more)
    trainer.model.double().requires_grad_(True)
    if isinstance(teacher := getattr(trainer, "teacher", None), torch.nn.Module):  # not a submodule
        teacher.double()
    batch = trainer._loss_inputs(next(iter(trainer.get_train_dataloader())))
    _, expected = plain_step(trainer.model, batch)
    _, found = cached_step(trainer.model, batch, 3)
    assert max(gradient.abs().max() for gradient in expected.values()) > 1e-3
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", ["contrastive", "GCL"])
def test_a_learned_temperature_moves_at_its_own_rate(name, tiny_checkpoints, tmp_path):
    rates = {"learning_rate": 1e-5, "temperature_learning_rate": 0.05}
    trainer = make_any(name, tiny_checkpoints, None, tmp_path, rows=8, max_steps=2, logging_steps=1, **rates)
    trainer.train()
    first, second = (entry["temperature"] for entry in trainer.state.log_history[:2])
    assert first == pytest.approx(0.07) and abs(second - first) > 0.002
