"""Every method: what moves and is saved, a step of the gradient cache is the plain one, a resumed run the whole."""

import re

import pytest
import torch
from safetensors.torch import load_file

from conjoin.hub import load_model
from tiny_trainers import TRAINERS, make_any
from tiny_training import cached_step, plain_step

BY_CHUNK = "SOLAR"
"""Its thresholds are those of a chunk; `test_solar.py` holds them fixed."""
RESUMED = {
    "GCL, LoRA": {}, "SOLAR 1": {}, "SOLAR 1, ITC only": {"feature_copies": 4}, "PUMA 1": {"schedule": "dynamic"},
    "PUMA 2": {}, "Coral": {"decoder_dropout": 0.1},
}  # fmt: skip
"""Methods with random choices or dropout, and further settings."""


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
    arguments = {"rows": 8, "max_steps": 2, "logging_steps": 1, "learning_rate": 1e-5}
    trainer = make_any(name, tiny_checkpoints, None, tmp_path, **arguments)
    trainer.train()
    first, second = (entry["temperature"] for entry in trainer.state.log_history[:2])
    assert first == pytest.approx(0.07) and abs(second / first - 1) == pytest.approx(1e-3, rel=0.5)


@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_run_is_the_uninterrupted_one(name, tiny_checkpoints, mllm_checkpoints, tmp_path):
    """To the bit, with random choices or dropout."""

    def trainer(folder):
        torch.manual_seed(5 if folder == "resumed" else 0)
        settings = {"max_steps": 6, "save_strategy": "steps", "save_steps": 1, "save_total_limit": 9, "rows": 14}
        settings |= {"lr_scheduler_type": "cosine", "features_dir": str(tmp_path / "features")} | RESUMED[name]
        mllm = mllm_checkpoints("qwen2_vl")[0]
        return make_any(name, tiny_checkpoints, mllm, tmp_path / folder, dropout=True, **settings)

    whole = trainer("whole")
    whole.train()
    assert whole.state.epoch > 1
    for step in (3, 5):  # at the end of the first epoch, and within the second
        resumed = trainer("resumed")
        resumed.train(resume_from_checkpoint=str(tmp_path / f"whole/checkpoint-{step}"))
        assert resumed.state.global_step == 6
        for (key, a), (_, b) in zip(whole.model.named_parameters(), resumed.model.named_parameters(), strict=True):
            assert torch.equal(a, b), (step, key)
        losses = [[entry["loss"] for entry in t.state.log_history if "loss" in entry] for t in (whole, resumed)]
        assert losses[0][-(6 - step) :] == losses[1][-(6 - step) :]


@pytest.mark.parametrize("chunk_size", [0, 2])
@pytest.mark.parametrize(
    ("name", "arguments", "idle"),
    [
        ("PUMA 1", {"distill_scale": 1e-9}, "distillation_loss has .* raise distill_weight"),
        ("PUMA 1", {}, None),
        ("SOLAR 1", {"ld_weight": 1e-9}, "ld_loss has .* raise ld_weight"),
        ("SOLAR 1", {"margin": -3.0}, "gla_loss has 0 % .* raise gla_weight"),
        ("SOLAR 1", {"gd_weight": 0.0}, None),
        ("Coral", {"decoder_learning_rate": 1e-9}, "reg_language_own is not below reg_language_other at the end"),
    ],
)
def test_a_term_that_does_not_train_is_said(
    name, arguments, idle, chunk_size, tiny_checkpoints, mllm_checkpoints, tmp_path, caplog
):
    mllm = mllm_checkpoints("qwen2_vl")[0]
    settings = {"rows": 8, "gradient_cache_chunk_size": chunk_size} | arguments
    trainer = make_any(name, tiny_checkpoints, mllm, tmp_path, **settings)
    trainer.train()
    first, last = trainer.state.log_history[:2]
    for entry in (first, last):
        shares = [value for key, value in entry.items() if key.endswith("_share")]
        assert len(shares) >= 2 and sum(shares) == pytest.approx(1, abs=1e-4)
    said = [record.getMessage() for record in caplog.records if "raise" in record.getMessage()]
    assert any(re.search(idle, line) for line in said) if idle else said == []


def test_shares_of_terms_on_tokens_are_those_of_the_plain_step(tiny_checkpoints, tmp_path):
    """With one chunk, in which the statistics are those of the batch."""
    shares = []
    for chunk_size in (0, 4):
        settings = {"rows": 8, "gradient_cache_chunk_size": chunk_size}
        trainer = make_any("SOLAR 1", tiny_checkpoints, None, tmp_path, **settings)
        trainer.train()
        log = trainer.state.log_history[0]
        shares.append({name: log[f"{name}_share"] for name in ("itc", "gla", "ld", "gd")})
    assert min(shares[0].values()) > 0 and shares[1] == pytest.approx(shares[0], rel=1e-4)
