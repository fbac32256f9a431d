"""The trainers work on the MLLM retriever as on any other model."""

import pytest
import torch
from transformers import AutoModel

from conjoin.models.mllm_retriever import MllmRetrieverModel
from conjoin.processing import MllmRetrieverProcessor
from conjoin.training import LoraArguments, add_lora
from conjoin.training.lora import merge_lora
from tiny_training import make_rows, make_trainer


@pytest.mark.parametrize(("method", "chunk", "workers"), [("contrastive", 0, 0), ("gcl", 2, 2)])
def test_two_steps_of_lora_on_the_language_model(method, chunk, workers, mllm_checkpoints, tmp_path):
    folder, _ = mllm_checkpoints("qwen2_vl")
    model = MllmRetrieverModel.from_mllm(folder, 2, train_ret_token=True)
    processor = MllmRetrieverProcessor.from_mllm(folder)
    model.vision_model.requires_grad_(False)
    model.norm.requires_grad_(False)
    add_lora(model, LoraArguments(r=2, alpha=4, towers=("text_model",)))
    rows = make_rows(8)
    trainer = make_trainer(
        method,
        model,
        processor,
        tmp_path,
        rows,
        rows,
        gradient_cache_chunk_size=chunk,
        activation_checkpointing=True,
        dataloader_num_workers=workers,
    )
    before = {name: parameter.detach().clone() for name, parameter in trainer.encoder.named_parameters()}
    trainer.train()
    after = dict(trainer.encoder.named_parameters())
    moved = {name for name, value in before.items() if not torch.equal(value, after[name])}
    assert moved == {name for name in before if "lora_" in name} | {"ret_embedding"}
    assert 0 <= trainer.evaluate()["eval_text_to_image_hit_rate@5"] <= 1
    trainer.save_model()
    loaded = AutoModel.from_pretrained(tmp_path)
    batch = processor([{"image": row["image"], "text": row["text"]} for row in rows])
    with torch.no_grad():
        expected = trainer.encoder.eval()(**batch).embeddings
        torch.testing.assert_close(loaded(**batch).embeddings, expected, rtol=0, atol=1e-5)


@pytest.mark.filterwarnings("error:Already found a `peft_config`")
def test_merged_adapters_leave_nothing_behind(mllm_checkpoints):
    model = MllmRetrieverModel.from_mllm(mllm_checkpoints("qwen2_vl")[0], 2)
    assert merge_lora(model) is model
    arguments = LoraArguments(r=2, towers=("text_model",))
    merged = merge_lora(add_lora(model, arguments))
    assert [name for name, module in merged.named_modules() if hasattr(module, "peft_config")] == []
    assert hasattr(model.text_model, "peft_config")  # the one that still has them
    add_lora(merged, arguments)
    assert merged.state_dict().keys() == model.state_dict().keys()
