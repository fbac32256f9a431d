"""What the MLLM retriever computes, on tiny models of every architecture."""

import copy

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModel, Qwen3VLTextModel

from conjoin import MllmRetrieverConfig, MllmRetrieverModel
from conjoin.hub.build import mllm_model, mllm_processor
from tiny_mllms import DEPTH, MLLMS, save_mllm

KEEP = 3
every_mllm = pytest.mark.parametrize("name", MLLMS)


def embed(model, batch, **kwargs):
    with torch.no_grad():
        return model(**batch, **kwargs).embeddings


@every_mllm
def test_equals_the_full_model_at_that_layer(name, retriever, mllm_checkpoints, messages):
    """The stock forward on one stock prompt: its hidden state after layer k, normed, at [RET]."""
    model, processor = retriever(name, KEEP)
    full = copy.deepcopy(mllm_checkpoints(name)[1].model)
    for item in messages:
        batch = processor([item])
        ids = batch["input_ids"][batch["attention_mask"].bool()][None]
        inputs = {"input_ids": ids}
        if "pixel_values" in batch:
            inputs["pixel_values"] = batch["pixel_values"][0]
        if "image_grids" in batch:
            inputs["image_grid_thw"] = batch["image_grids"][0]
            inputs["mm_token_type_ids"] = (ids == full.config.image_token_id).int()
        with torch.no_grad():
            full.get_input_embeddings().weight[model.config.ret_token_id] = model.ret_embedding
            state = full(**inputs, output_hidden_states=True).hidden_states[KEEP][0, -1]
            expected = full.language_model.norm(state)
            pooled = model(**batch).pooler_output[0]
        assert ids[0, -1] == model.config.ret_token_id
        torch.testing.assert_close(pooled, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("trained", [True, False])
def test_what_is_trained_of_the_tokens_survives_loading(retriever, tmp_path, trained):
    model, processor = retriever("qwen2_vl", KEEP, train_ret_token=trained)
    model.save_pretrained(tmp_path)
    loaded, _ = MllmRetrieverModel.from_pretrained(tmp_path, output_loading_info=True)
    for found in (model, loaded, AutoModel.from_pretrained(tmp_path)):
        found.train()(**processor(["a red box"])).pooler_output.sum().backward()
        assert (found.ret_embedding.grad is None) is not trained
        assert (found.get_input_embeddings().weight.grad is None) is trained
        assert all(parameter.requires_grad for parameter in found.text_model.layers.parameters())


def test_readouts(retriever):
    model, processor = retriever("qwen2_vl", KEEP)
    batch = processor(["a red box", "7"])
    read = {}
    for readout in ("token", "before_token", "last"):
        model.config.readout = readout
        read[readout] = embed(model, batch)
    assert torch.equal(read["last"], read["token"])  # our prompts end in [RET]
    assert (read["before_token"] - read["token"]).abs().max() > 1e-2
    model.config.readout = "token"
    more = {key: F.pad(value, (0, 2), value=1) for key, value in batch.items()}
    more["input_ids"][1, : len(batch["input_ids"][1])] = batch["input_ids"][1]
    assert (embed(model, more)[0] - read["token"][0]).abs().max() <= 1e-5  # what follows [RET] is not seen
    model.config.readout = "last"
    assert (embed(model, more)[0] - read["token"][0]).abs().max() > 1e-2
    cut = {key: value[:1, : batch["attention_mask"][0].sum() - 1] for key, value in batch.items()}
    assert (embed(model, cut)[0] - read["before_token"][0]).abs().max() <= 1e-6  # what other prompts end in


def test_positions(retriever, pictures):
    """1-D positions are what the language model gives the same inputs without any; they matter for images only."""
    model, processor = retriever("qwen2_vl", KEEP)
    wide = processor([pictures[3], "text"])
    mrope = embed(model, wide)
    model.config.position_mode = "1d"
    plain = embed(model, wide)
    assert (plain[0] - mrope[0]).abs().max() > 1e-4 and torch.equal(plain[1], mrope[1])
    seen = {}
    model.text_model.register_forward_pre_hook(lambda _, args, kwargs: seen.update(kwargs), with_kwargs=True)
    embed(model, wide)
    assert "position_ids" not in seen and seen["use_cache"] is False and "attention_mask" not in seen


def test_matryoshka(retriever):
    model, processor = retriever("llava", KEEP, embedding_dim=8)
    output = model(**processor(["a red box", "7"]))
    assert output.embeddings.shape == (2, 8) == (2, model.config.hidden_size)
    assert output.pooler_output.shape == (2, 32)
    torch.testing.assert_close(output.embeddings, F.normalize(output.pooler_output[:, :8], dim=-1))


def test_only_the_readout_position_is_normed(retriever):
    model, processor = retriever("qwen2_vl", KEEP)
    shapes = []
    model.norm.register_forward_hook(lambda module, args, output: shapes.append(tuple(args[0].shape)))
    model(**processor(["a", "b", "c"]))
    assert shapes == [(3, 32)]


class TestRet:
    def test_the_vocabulary_never_grows(self, tmp_path, retriever):
        model, _ = retriever("qwen2_vl", KEEP)
        assert model.config.ret_token_id == 262 and model.get_input_embeddings().num_embeddings == 300
        save_mllm("qwen2_vl", tmp_path, vocab_size=262)  # no spare row
        model = mllm_model(str(tmp_path), KEEP)
        processor = mllm_processor(str(tmp_path))
        assert model.config.ret_token_id == 262 == model.get_input_embeddings().num_embeddings
        assert embed(model, processor(["a", "bc"])).isfinite().all()

    def test_it_starts_as_the_mean_or_as_what_was_trained(self, mllm_checkpoints, retriever):
        folder, full = mllm_checkpoints("llava")
        table = full.get_input_embeddings().weight
        model, _ = retriever("llava", KEEP)
        torch.testing.assert_close(model.ret_embedding, table[:259].mean(0))
        known = mllm_model(folder, KEEP, ret_token="<image>")
        assert torch.equal(known.ret_embedding, table[258])

    def test_it_must_be_in_every_prompt(self, retriever):
        model, processor = retriever("qwen2_vl", KEEP)
        batch = processor(["a", "b"])
        batch["input_ids"][1] = 5
        with pytest.raises(
            ValueError, match=r"no \[RET\] \(token id 262\) in the prompts of rows \[1\]: was the token"
        ):
            model(**batch)
        with pytest.raises(ValueError, match="readout='before_token' needs ret_token_id"):
            MllmRetrieverModel(MllmRetrieverConfig(readout="before_token"))

    def test_a_prompt_without_it_is_read_at_its_end(self, mllm_checkpoints):
        folder, _ = mllm_checkpoints("qwen2_vl")
        model = mllm_model(folder, readout="last", ret_token_id=None)
        processor = mllm_processor(folder, ret_token=None)
        assert model.config.keep_layers == DEPTH
        assert embed(model, processor(["a", "bc"])).isfinite().all()


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        *(("llava", {"keep_layers": keep}, f"keep_layers={keep!r} of a 'llava'; expected 1 to 4") for keep in (0, 5)),
        ("qwen3_vl", {"keep_layers": 1}, "keep_layers=1 of a 'qwen3_vl'; expected 2 to 4"),  # deepstack reaches two
        ("llava", {"keep_layers": "2"}, "Field 'keep_layers' with value '2' doesn't match any type in"),
        ("llava", {"readout": "max"}, r"Field 'readout' expected one of \('token', 'before_token', 'last', 'mean'\)"),
        ("llava", {"position_mode": "2d"}, r"Field 'position_mode' expected one of \('mrope', '1d'\), got 2d"),
        ("llava", {"embedding_dim": 33}, "embedding_dim=33; expected 1..32, the backbone's width"),
        ("llava", {"embedding_dim": 8.0}, "Field 'embedding_dim' with value 8.0 doesn't match any type in"),
        ("llava", {"read_out": "last"}, "unknown field 'read_out' of the mllm_retriever; did you mean 'readout'?"),
    ],
)
def test_fields_out_of_range(name, fields, message, retriever):
    with pytest.raises(ValueError, match=message):
        retriever(name, **fields)


def test_a_language_model_that_ignores_its_images(retriever, monkeypatch):
    """Renamed arguments would end in `**kwargs`."""
    monkeypatch.setattr(Qwen3VLTextModel, "forward", lambda self, inputs_embeds, position_ids, **kwargs: None)
    with pytest.raises(ValueError, match=r"no longer takes \['deepstack_visual_embeds', 'visual_pos_masks'\]"):
        retriever("qwen3_vl", KEEP)


def test_batches_that_do_not_fit(retriever, pairs):
    model, processor = retriever("qwen2_vl", KEEP)
    batch = processor(pairs)
    cut = {key: value.clone() for key, value in batch.items()}
    cut["image_grids"] = batch["image_grids"][:, :, [0, 2, 1]]  # as many patches, but one image fewer
    cut["pixel_attention_mask"][0], cut["image_grids"][0] = False, 0
    for inputs, message in (
        (
            {"input_ids": batch["input_ids"]},
            r"hold \d+ image tokens, but the vision tower gives 0: the processor is for",
        ),
        (cut, r"the prompts hold \d+ image tokens, but the vision tower gives [1-9]\d*: the processor is for another"),
        (
            {k: v for k, v in batch.items() if k != "image_grids"},
            "pixel_values need image_grids: the processor is for",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            model(**inputs)
