"""What the MLLM retriever computes, on tiny models of every architecture."""

import copy

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModel, AutoProcessor, BertConfig, Qwen3VLTextModel

from conjoin.losses import GclLoss
from conjoin.models.mllm_retriever import MllmRetrieverConfig, MllmRetrieverModel
from conjoin.processing import MllmRetrieverProcessor
from conjoin.training import cached_backward
from conjoin.training.gradient_cache import split_rows
from conjoin.training.objective import Objective, total_loss
from tiny_mllms import DEPTH, MLLMS

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


@every_mllm
def test_embeds_any_mix_of_items_alike_on_either_side_of_padding(name, retriever, messages):
    model, processor = retriever(name, KEEP)
    together = embed(model, processor(messages))
    assert together.shape == (len(messages), model.config.hidden_size) and together.dtype == torch.float32
    torch.testing.assert_close(together.norm(dim=1), torch.ones(len(messages)))
    assert (together @ together.T - torch.eye(len(messages))).max() < 1 - 1e-3  # they are different vectors
    alone = torch.cat([embed(model, processor([item])) for item in messages])
    assert (together - alone).abs().max() <= 1e-5
    processor.tokenizer.padding_side = "left"
    left = processor(messages)
    assert (left["attention_mask"][:, 0] == 0).any()
    assert (together - embed(model, left)).abs().max() <= 1e-5


@every_mllm
def test_views_equal_separate_forwards(name, retriever, pairs):
    model, processor = retriever(name, KEEP)
    stacked = embed(model, processor(pairs), views=("text", "fused", "image"))
    texts, images = ([pair[key] for pair in pairs] for key in ("text", "image"))
    separate = torch.cat([embed(model, processor(items)) for items in (texts, pairs, images)])
    assert (stacked - separate).abs().max() <= 1e-5
    image_first = [{"image": image, "text": text} for image, text in zip(images, texts, strict=True)]
    stacked = embed(model, processor(image_first, instruction="Find it."), views=("text", "image"))
    separate = torch.cat([embed(model, processor(items, instruction="Find it.")) for items in (texts, images)])
    assert (stacked - separate).abs().max() <= 1e-5


@every_mllm
def test_rows_can_be_cut_anywhere(name, retriever, messages):
    """Dimension 0 of every input is the items, so that gradient caching and data parallelism can split it."""
    model, processor = retriever(name, KEEP)
    batch = dict(processor(messages))
    expected = embed(model, batch)
    chunks = torch.cat([embed(model, chunk.inputs["pairs"]) for chunk in split_rows({"pairs": batch}, 1)])
    assert (chunks - expected).abs().max() <= 1e-5
    for view in ("image", "text"):  # rows that lack the view stand for themselves
        stacked = embed(model, batch, views=(view,))
        split = torch.cat(
            [embed(model, chunk.inputs["pairs"], views=(view,)) for chunk in split_rows({"pairs": batch}, 2)]
        )
        assert (stacked - split).abs().max() <= 1e-5


@pytest.mark.parametrize("name", ["qwen3_vl", "llava"])
def test_gcl_and_the_gradient_cache(name, retriever, messages, pairs):
    model, processor = retriever(name, KEEP)
    objective = Objective(model.double().train(), GclLoss(), ("image", "text", "fused"))
    batch = {"pairs": dict(processor([*pairs, messages[0], messages[1]]))}
    total_loss(objective(**batch)).backward()
    plain = {key: p.grad.clone() for key, p in objective.named_parameters() if p.grad is not None}
    assert any("layers.0" in key for key in plain) and any("vis" in key for key in plain)
    for limits in ({"chunk_size": 2}, {"chunk_size": 2, "chunk_tokens": 60}):
        objective.zero_grad()
        cached_backward(objective, dict(batch), backward=lambda loss: loss.backward(), **limits)
        for key, gradient in plain.items():
            torch.testing.assert_close(dict(objective.named_parameters())[key].grad, gradient, rtol=1e-9, atol=1e-12)


@every_mllm
def test_saves_small_and_reloads(name, retriever, mllm_checkpoints, messages, tmp_path):
    model, processor = retriever(name, keep_layers=2)
    model.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    again = AutoProcessor.from_pretrained(tmp_path, trust_remote_code=True)
    expected, weights = embed(model, processor(messages)), model.state_dict()
    for loaded in (MllmRetrieverModel.from_pretrained(tmp_path), AutoModel.from_pretrained(tmp_path)):
        assert loaded.state_dict().keys() == weights.keys()
        assert all(torch.equal(value, weights[key]) for key, value in loaded.state_dict().items())
        assert (embed(loaded, again(messages)) - expected).abs().max() <= 1e-6  # where weights lie rounds products
    config = AutoConfig.from_pretrained(tmp_path)
    assert (config.keep_layers, config.get_text_config().num_hidden_layers) == (2, 2)
    assert loaded.num_parameters() < 0.75 * mllm_checkpoints(name)[1].num_parameters()


@pytest.mark.parametrize("trained", [True, False])
def test_what_is_trained_of_the_tokens_survives_loading(retriever, tmp_path, trained):
    model, _ = retriever("qwen2_vl", KEEP, train_ret_token=trained)
    model.save_pretrained(tmp_path)
    loaded, _ = MllmRetrieverModel.from_pretrained(tmp_path, output_loading_info=True)
    for found in (model, loaded, AutoModel.from_pretrained(tmp_path)):
        assert found.ret_embedding.requires_grad is trained
        assert found.get_input_embeddings().weight.requires_grad is not trained
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


def test_one_position_before_the_token_is_what_other_prompts_end_in(retriever):
    model, processor = retriever("qwen2_vl", KEEP, readout="before_token")
    batch = processor(["a red box"])
    cut = {key: value[:, :-1] for key, value in batch.items()}
    before = embed(model, batch)
    model.config.readout = "last"
    assert (embed(model, cut) - before).abs().max() <= 1e-6


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
    def test_the_vocabulary_never_grows(self, mllm_checkpoints, tmp_path, retriever):
        from tiny_mllms import save_mllm

        model, _ = retriever("qwen2_vl", KEEP)
        assert model.config.ret_token_id == 262 and model.get_input_embeddings().num_embeddings == 300
        save_mllm("qwen2_vl", tmp_path, vocab_size=262)  # no spare row
        model = MllmRetrieverModel.from_mllm(str(tmp_path), KEEP)
        processor = MllmRetrieverProcessor.from_mllm(str(tmp_path))
        assert model.config.ret_token_id == 262 == model.get_input_embeddings().num_embeddings
        assert embed(model, processor(["a", "bc"])).isfinite().all()

    def test_it_starts_as_the_mean_or_as_what_was_trained(self, mllm_checkpoints, retriever, tmp_path):
        folder, full = mllm_checkpoints("llava")
        table = full.get_input_embeddings().weight
        model, _ = retriever("llava", KEEP)
        torch.testing.assert_close(model.ret_embedding, table[:259].mean(0))
        known = MllmRetrieverModel.from_mllm(folder, KEEP, ret_token="<image>")
        assert torch.equal(known.ret_embedding, table[258])

    def test_it_alone_is_trained_when_asked(self, retriever):
        model, processor = retriever("qwen2_vl", KEEP, train_ret_token=True)
        model.train()(**processor(["a red box"])).pooler_output.sum().backward()
        assert model.ret_embedding.grad.abs().max() > 0
        assert model.get_input_embeddings().weight.grad is None
        model, processor = retriever("qwen2_vl", KEEP)
        model.train()(**processor(["a red box"])).pooler_output.sum().backward()
        assert model.ret_embedding.grad is None and model.get_input_embeddings().weight.grad is not None

    def test_it_must_be_in_every_prompt(self, retriever, messages):
        model, processor = retriever("qwen2_vl", KEEP)
        batch = processor(["a", "b"])
        batch["input_ids"][1] = 5
        with pytest.raises(
            ValueError, match=r"no \[RET\] \(token id 262\) in the prompts of rows \[1\]: was the token"
        ):
            model(**batch)
        with pytest.raises(ValueError, match="readout='before_token' needs ret_token_id"):
            MllmRetrieverModel(MllmRetrieverConfig(model.config.backbone_config, readout="before_token"))

    def test_a_prompt_without_it_is_read_at_its_end(self, mllm_checkpoints):
        folder, _ = mllm_checkpoints("qwen2_vl")
        model = MllmRetrieverModel.from_mllm(folder, readout="last", ret_token_id=None)
        processor = MllmRetrieverProcessor.from_mllm(folder, ret_token=None)
        assert model.config.keep_layers == DEPTH
        assert embed(model, processor(["a", "bc"])).isfinite().all()


@every_mllm
@torch.no_grad()
def test_arguments_of_the_library(name, retriever, messages):
    model, processor = retriever(name, KEEP)
    batch = dict(processor(messages))
    expected = model(**batch)
    assert torch.equal(model(**batch, return_dict=False)[0], expected.embeddings)
    output = model(**batch, output_hidden_states=True, token_type_ids=torch.zeros_like(batch["input_ids"]))
    assert (output.embeddings - expected.embeddings).abs().max() <= 1e-5
    lengths = batch["attention_mask"].sum(1)
    assert [tuple(state.shape) for state in output.hidden_states] == [(5, lengths.max(), 32)] * (KEEP + 1)
    read = output.hidden_states[-1][torch.arange(5), lengths - 1]  # [RET] is the last token
    torch.testing.assert_close(model.norm(read), output.pooler_output)
    assert expected.hidden_states is None
    with pytest.raises(ValueError, match="output_hidden_states need a single view"):
        model(**batch, views=("image", "text"), output_hidden_states=True)


def test_the_vocabulary_can_grow(retriever, messages, tmp_path):
    model, processor = retriever("qwen2_vl", KEEP)
    assert model.config.get_text_config() is model.text_model.config
    expected = embed(model, processor(messages))
    assert model.resize_token_embeddings(310).num_embeddings == 310 == model.config.get_text_config().vocab_size
    assert torch.equal(embed(model, processor(messages)), expected)
    model.save_pretrained(tmp_path)
    assert (embed(MllmRetrieverModel.from_pretrained(tmp_path), processor(messages)) - expected).abs().max() <= 1e-6
    model.set_input_embeddings(torch.nn.Embedding(5, 32))
    assert model.text_model.get_input_embeddings().num_embeddings == 5


def test_missing_weights_are_initialised(retriever, tmp_path):
    model, _ = retriever("qwen2_vl", KEEP)
    kept = {key: value for key, value in model.state_dict().items() if key.startswith("backbone.")}
    model.save_pretrained(tmp_path, state_dict=kept)
    loaded = MllmRetrieverModel.from_pretrained(tmp_path)
    assert loaded.ret_embedding.abs().max() < 1 and torch.equal(loaded.norm.weight, torch.ones(32))


class TestErrors:
    @pytest.mark.parametrize("keep_layers", [0, -1, 5, 2.0, "2", True])
    def test_layers_that_are_not_there(self, keep_layers, retriever):
        with pytest.raises(ValueError, match=rf"keep_layers={keep_layers!r}; expected 1\.\.4 of 'llava'"):
            retriever("llava", keep_layers)
        with pytest.raises(ValueError, match=r"keep_layers=1; expected 2\.\.4 of 'qwen3_vl'"):  # deepstack reaches two
            retriever("qwen3_vl", 1)

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"readout": "max"}, r"readout='max'; expected one of \('token', 'before_token', 'last', 'mean'\)"),
            ({"position_mode": "2d"}, r"position_mode='2d'; expected one of \('mrope', '1d'\)"),
            ({"embedding_dim": 33}, "embedding_dim=33; expected 1..32, the backbone's width"),
            ({"embedding_dim": 8.0}, "embedding_dim=8.0; expected 1..32, the backbone's width"),
        ],
    )
    def test_fields_out_of_range(self, fields, message, retriever):
        with pytest.raises(ValueError, match=message):
            retriever("qwen2_vl", KEEP, **fields)

    def test_a_language_model_that_ignores_its_images(self, retriever, monkeypatch):
        """Renamed arguments would end in `**kwargs`."""
        monkeypatch.setattr(Qwen3VLTextModel, "forward", lambda self, inputs_embeds, position_ids, **kwargs: None)
        with pytest.raises(ValueError, match=r"no longer takes \['deepstack_visual_embeds', 'visual_pos_masks'\]"):
            retriever("qwen3_vl", KEEP)

    def test_another_architecture(self):
        with pytest.raises(ValueError, match=r"'bert' is not a supported MLLM; expected one of .*'qwen2_vl'"):
            MllmRetrieverConfig(BertConfig())

    def test_batches_that_do_not_fit(self, retriever, pairs):
        model, processor = retriever("qwen2_vl", KEEP)
        batch = processor(pairs)
        with pytest.raises(ValueError, match=r"the prompts hold \d+ image tokens, but there are no pixel_values"):
            model(input_ids=batch["input_ids"])
        with pytest.raises(ValueError, match="pixel_values need image_grids: the processor is for another model"):
            model(**{key: value for key, value in batch.items() if key != "image_grids"})
        batch["image_grids"] = batch["image_grids"][:, :, [0, 2, 1]]  # as many patches, but one image fewer
        batch["pixel_attention_mask"][0], batch["image_grids"][0] = False, 0
        with pytest.raises(ValueError, match=r"but the vision tower gives \d+: the processor is for another model"):
            model(**batch)
