"""What every model promises: any item in, one comparable vector out."""

import copy

import pytest
import torch
import torch.nn.functional as F
from tiny_models import MODELS, ONE_OF_EACH
from transformers import AutoConfig, AutoModel, AutoProcessor

from tiny_mllms import MLLMS

VIEWS = ("image", "text", "fused")
every_model = pytest.mark.parametrize("name", [*MODELS, *MLLMS])
each_architecture = pytest.mark.parametrize("name", [*ONE_OF_EACH, "qwen2_vl"])
each_with_mllms = pytest.mark.parametrize("name", [*ONE_OF_EACH, "qwen2_5_vl", "qwen3_vl", "internvl"])
UNREAD = ("post_layernorm", "vision_model.head.", "vision_model.layernorm", "logit_")
UNREAD += ("vision_tower.encoder.layers.1.",)
"""Parameters of the towers' own pooling, which not every model reads; the last layer of LLaVA's vision tower."""


def embed(model, processor, items, **kwargs):
    with torch.no_grad():
        return model(**processor(items), **kwargs).embeddings


def difference(one, other):
    return (one - other).abs().max()


def pair_loss(model, batch):
    image, text, fused = F.normalize(model(**batch, views=VIEWS).pooler_output.float(), dim=-1).chunk(3)
    target = torch.arange(len(image))
    return sum(F.cross_entropy(a @ b.T / 0.1, target) for a, b in ((image, text), (text, fused), (fused, image)))


@every_model
def test_embeds_any_mix_of_items_alike(name, built, items, messages):
    model, processor = built(name)
    items = messages if name in MLLMS else items
    together = embed(model, processor, items)
    assert together.shape == (len(items), model.config.hidden_size) and together.dtype == torch.float32
    torch.testing.assert_close(together.norm(dim=1), torch.ones(len(items)))
    assert (together @ together.T - torch.eye(len(items))).max() < 1 - 1e-4  # they are different vectors
    assert difference(together, torch.cat([embed(model, processor, [item]) for item in items])) <= 1e-5
    assert difference(together[::2], embed(model, processor, items[::2])) <= 1e-5
    if name in MLLMS:
        processor.tokenizer.padding_side = "left"
        assert (processor(items)["attention_mask"][:, 0] == 0).any()
        assert difference(together, embed(model, processor, items)) <= 1e-5


@every_model
def test_views_equal_separate_forwards(name, built, pairs):
    model, processor = built(name)
    texts, images = ([pair[key] for pair in pairs] for key in ("text", "image"))
    fused = embed(model, processor, pairs, views=("fused",))
    separate = torch.cat([embed(model, processor, texts), fused, embed(model, processor, images)])
    assert difference(embed(model, processor, pairs, views=("text", "fused", "image")), separate) <= 1e-5
    image_first = [{"image": image, "text": text} for image, text in zip(images, texts, strict=True)]
    expected = torch.cat([embed(model, processor, part) for part in (texts, images)])
    assert difference(embed(model, processor, image_first, views=("text", "image")), expected) <= 1e-5


@every_model
def test_rows_may_be_cut_so_that_a_chunk_lacks_a_modality(name, built, pairs):
    model, processor = built(name)
    batch = processor([pairs[0]["text"], pairs[1]["text"], pairs[0], pairs[1]["image"], pairs[0]["image"]])
    with torch.no_grad():
        whole = model(**batch).embeddings
    for start in (0, 3):
        cut = {key: value[start : start + 2] for key, value in batch.items()}
        model.train()(**cut).pooler_output.sum().backward()
        assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
        with torch.no_grad():
            assert difference(model.eval()(**cut).embeddings, whole[start : start + 2]) <= 1e-5


@every_model
def test_trains_and_reloads_bit_exactly(name, built, items, pairs, tmp_path):
    model, processor = built(name)
    for parameter in model.text_model.parameters():
        parameter.requires_grad_(False)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batch = processor(pairs)
    model.train()
    for _ in range(2):
        optimizer.zero_grad()
        pair_loss(model, batch).backward()
        optimizer.step()
    read = {key for key, parameter in model.named_parameters() if parameter.grad is not None}
    moved = {key for key, value in model.state_dict().items() if not torch.equal(value, before[key])}
    assert moved == read
    assert not any("text_model" in key for key in moved)
    trainable = {key for key, parameter in model.named_parameters() if parameter.requires_grad}
    assert not [key for key in trainable - read if not any(part in key for part in UNREAD)]

    model.eval().save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    expected, weights = embed(model, processor, items), model.state_dict()
    again = AutoProcessor.from_pretrained(tmp_path, trust_remote_code=True)
    for loaded in (type(model).from_pretrained(tmp_path), AutoModel.from_pretrained(tmp_path)):
        assert type(loaded) is type(model) and loaded.state_dict().keys() == weights.keys()
        assert all(torch.equal(value, weights[key]) for key, value in loaded.state_dict().items())
        close = 1e-6 if name in MLLMS else 0  # where the weights of an MLLM lie rounds its products
        assert difference(embed(loaded, again, items), expected) <= close
    assert AutoConfig.from_pretrained(tmp_path).to_dict().keys() == model.config.to_dict().keys()


@pytest.mark.parametrize("name", ["joint dinov2 + bert", "token dinov2 + bert", "qwen2_vl"])
def test_missing_weights_are_initialised(name, built, pairs, tmp_path):
    """Models are built without memory first: what a checkpoint lacks must not come back as garbage."""
    model, processor = built(name)
    own = {key for key in model.state_dict() if not key.startswith(("vision_model.", "text_model.", "backbone."))}
    model.save_pretrained(tmp_path, state_dict={k: v for k, v in model.state_dict().items() if k not in own})
    loaded = type(model).from_pretrained(tmp_path)
    assert own and all(loaded.state_dict()[key].abs().max() < 10 for key in own)
    assert embed(loaded, processor, pairs).isfinite().all()


@each_with_mllms
def test_gradient_checkpointing_gives_the_same_gradients(name, built, pairs):
    model, processor = built(name)
    batch = processor(pairs)
    gradients = []
    for checkpointing in (False, True):
        copied = copy.deepcopy(model).train()
        if checkpointing:
            copied.gradient_checkpointing_enable()
        torch.manual_seed(0)
        pair_loss(copied, batch).backward()
        gradients.append({key: p.grad for key, p in copied.named_parameters() if p.grad is not None})
    assert sum(gradient.abs().sum() for gradient in gradients[0].values()) > 1
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)


@each_with_mllms
def test_bfloat16_is_close(name, built, items):
    model, processor = built(name)
    expected = embed(model, processor, items)
    halved = embed(model.to(torch.bfloat16), processor, items)
    assert halved.dtype == torch.float32 and (halved * expected).sum(1).min() > 0.995


@pytest.mark.parametrize("name", ONE_OF_EACH)
@pytest.mark.slow
def test_compiles(name, built, pairs):
    model, processor = built(name)
    compiled = torch.compile(model, backend="eager")
    assert difference(embed(compiled, processor, pairs), embed(model, processor, pairs)) <= 1e-6


@each_with_mllms
def test_no_empty_or_unknown_request(name, built, pairs):
    model, processor = built(name)
    texts, images = (processor([pair[key] for pair in pairs]) for key in ("text", "image"))
    for batch, views, message in (
        ({}, None, r"neither images \(pixel_values\) nor texts \(input_ids\)"),
        (texts, ["caption"], r"unknown view 'caption'; expected one of \('image', 'text', 'fused'\)"),
        (texts, ["text", "image"], "view 'image' was asked for, but no item of the batch has it"),
        (images, ["text"], "view 'text' was asked for"),
    ):
        with pytest.raises(ValueError, match=message):
            model(**batch, views=views)


# what libraries pass and call


@each_architecture
@torch.no_grad()
def test_arguments_of_the_library(name, built, pairs):
    model, processor = built(name)
    batch = dict(processor(pairs))
    output = model(**batch)
    assert all(torch.equal(*pair) for pair in zip(model(**batch, return_dict=False), output.to_tuple(), strict=True))
    with_types = model(**batch, token_type_ids=torch.zeros_like(batch["input_ids"]), return_dict=True)
    assert torch.equal(with_types.embeddings, output.embeddings)


@pytest.mark.parametrize("name", ["joint dinov2 + bert", "token dinov2 + bert", *MLLMS])
@torch.no_grad()
def test_states_and_attention_on_request(name, built, items):
    model, processor = built(name)
    model.set_attn_implementation("eager")
    batch = dict(processor(items))
    output = model(**batch, output_hidden_states=True, output_attentions=True)
    lengths = batch["attention_mask"].sum(1)
    tokens = int(lengths.max()) if name in MLLMS else 4 + batch["input_ids"].shape[1] + name.startswith("joint")
    layers, width = (3, 32) if name in MLLMS else (2, 24)
    assert len(output.hidden_states) == layers + 1
    assert output.hidden_states[0].shape == (len(items), tokens, width)
    assert len(output.attentions) == layers and output.attentions[0].shape[2:] == (tokens, tokens)
    torch.testing.assert_close(output.attentions[0].sum(-1), torch.ones(output.attentions[0].shape[:3]))
    last, norm = output.hidden_states[-1], {"joint": "vl_encoder.norm", "token": ""}.get(name.split()[0], "norm")
    read = last[torch.arange(len(items)), lengths - 1] if name in MLLMS else last[:, 0]  # [RET] is the last token
    torch.testing.assert_close(model.get_submodule(norm)(read) if norm else read, output.pooler_output)
    assert difference(output.embeddings, model(**batch).embeddings) <= 1e-5
    assert model(**batch).hidden_states is None
    with pytest.raises(ValueError, match=r"output_hidden_states need a single view, got \('image', 'text'\)"):
        model(**batch, views=("image", "text"), output_hidden_states=True)


@each_architecture
def test_the_vocabulary_can_grow(name, built, items, tmp_path):
    model, processor = built(name)
    expected = embed(model, processor, items)
    text_config = model.config.get_text_config()
    assert text_config is model.text_model.config
    size = text_config.vocab_size + 3
    grown = model.resize_token_embeddings(size)
    assert grown is model.get_input_embeddings() and grown.num_embeddings == size == text_config.vocab_size
    assert torch.equal(embed(model, processor, items), expected)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert loaded.get_input_embeddings().num_embeddings == size
    assert difference(embed(loaded, processor, items), expected) <= 1e-6
    model.set_input_embeddings(torch.nn.Embedding(5, 24))
    assert model.text_model.get_input_embeddings().num_embeddings == 5
