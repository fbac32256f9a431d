"""A run that is resumed from a checkpoint is the uninterrupted one, to the bit, with dropout, in every method."""

import pytest
import torch
from peft import LoraConfig

import tiny_coral
import tiny_puma
import tiny_solar
from conjoin.models.mllm_retriever import MllmRetrieverModel
from tiny_training import make_encoder, make_rows, make_trainer


def gcl(checkpoints, mllm, folder, rows=14, freeze=(), **arguments):
    model, processor = make_encoder(checkpoints, token_dropout=0.5)
    for name in freeze:
        model.get_submodule(name).requires_grad_(False)
    return make_trainer("gcl", model, processor, folder, make_rows(rows), lr_scheduler_type="cosine", **arguments)


def gcl_lora(checkpoints, mllm, folder, **arguments):
    adapters = LoraConfig(r=2, lora_alpha=4, lora_dropout=0.1, target_modules=r"(vision|text)_model\..*")
    return gcl(checkpoints, mllm, folder, peft_config=adapters, **arguments)


def gcl_on_features(checkpoints, mllm, folder, **arguments):
    arguments |= {"feature_copies": 4, "features_dir": str(folder.parent / "features")}
    return gcl(checkpoints, mllm, folder, 12, ("vision_model", "text_model"), **arguments)


def solar_stage1(checkpoints, mllm, folder, **arguments):
    model, processor = tiny_solar.frozen_encoder(checkpoints, attention_dropout=0.3)
    return tiny_solar.stage1(folder, model, processor, tiny_solar.texts(14), **arguments)


def puma_stage1(checkpoints, mllm, folder, **arguments):
    model, processor = tiny_puma.make_student(mllm, lora_dropout=0.1)
    arguments |= {"teacher": MllmRetrieverModel.from_mllm(mllm), "schedule": "dynamic"}
    return tiny_puma.make_trainer("puma_stage1", model, processor, folder, tiny_puma.sentences(14), **arguments)


def puma_stage2(checkpoints, mllm, folder, **arguments):
    model, processor = tiny_puma.make_student(mllm, lora_dropout=0.1)
    return tiny_puma.make_trainer("puma_stage2", model, processor, folder, tiny_puma.Instructed(14), **arguments)


def coral(checkpoints, mllm, folder, **arguments):
    model, processor = tiny_coral.make_model(mllm, lora_dropout=0.1)
    arguments |= {"decoder_dropout": 0.1}
    return tiny_coral.make_trainer(model, processor, folder, tiny_coral.Products(14), **arguments)


@pytest.mark.parametrize(
    "make",
    [gcl, gcl_lora, gcl_on_features, solar_stage1, puma_stage1, puma_stage2, coral],
    ids=lambda make: make.__name__,
)
def test_a_resumed_run_is_the_uninterrupted_one(make, tiny_checkpoints, mllm_checkpoints, tmp_path):
    def trainer(name):
        torch.manual_seed(5 if name == "resumed" else 0)
        settings = {"max_steps": 6, "save_strategy": "steps", "save_steps": 1, "save_total_limit": 9}
        return make(tiny_checkpoints, mllm_checkpoints("qwen2_vl")[0], tmp_path / name, **settings)

    whole = trainer("whole")
    whole.train()
    assert whole.state.epoch > 1
    for step in (3, 5):  # within the first epoch or at its end, and within the second
        resumed = trainer("resumed")
        resumed.train(resume_from_checkpoint=str(tmp_path / f"whole/checkpoint-{step}"))
        assert resumed.state.global_step == 6
        for (name, a), (_, b) in zip(whole.model.named_parameters(), resumed.model.named_parameters(), strict=True):
            assert torch.equal(a, b), (step, name)
        losses = [[entry["loss"] for entry in t.state.log_history if "loss" in entry] for t in (whole, resumed)]
        assert losses[0][-(6 - step) :] == losses[1][-(6 - step) :]
