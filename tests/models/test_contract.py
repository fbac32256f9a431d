"""What every model promises: any item in, one comparable vector out."""

import copy

import pytest
import torch
import torch.nn.functional as F
from tiny_models import MODELS, ONE_OF_EACH
from transformers import AutoConfig, AutoModel, AutoProcessor
from transformers.utils import output_capturing

every_model = pytest.mark.parametrize("name", MODELS)
each_architecture = pytest.mark.parametrize("name", ONE_OF_EACH)
with_mllms = pytest.mark.parametrize("name", [*ONE_OF_EACH, "qwen2_5_vl", "qwen3_vl", "internvl"])
UNREAD = ("post_layernorm", "vision_model.head.", "vision_model.layernorm", "logit_")
"""Parameters of the towers' own pooling, which not every model reads."""


def embed(model, processor, items, **kwargs):
    with torch.no_grad():
        return model(**processor(items), **kwargs).embeddings


def pair_loss(model, batch):
    output = model(**batch, views=("image", "text", "fused"))
    image, text, fused = F.normalize(output.pooler_output.float(), dim=-1).chunk(3)
    target = torch.arange(len(image))
    return sum(F.cross_entropy(a @ b.T / 0.1, target) for a, b in ((image, text), (text, fused), (fused, image)))


@every_model
def test_embeds_any_mix_of_items_alike(name, built, items):
    model, processor = built(name)
    together = embed(model, processor, items)
    assert together.shape == (len(items), model.config.hidden_size)
    assert together.dtype == torch.float32
    torch.testing.assert_close(together.norm(dim=1), torch.ones(len(items)))
    assert (together @ together.T - torch.eye(len(items))).max() < 1 - 1e-4  # they are different vectors
    alone = torch.cat([embed(model, processor, [item]) for item in items])
    assert (together - alone).abs().max() <= 1e-5
    for kind in (0, 1, 2):  # texts, images, pairs
        rows = [kind, kind + 3]
        assert (together[rows] - embed(model, processor, [items[row] for row in rows])).abs().max() <= 1e-5


@every_model
def test_views_equal_separate_forwards(name, built, pairs):
    model, processor = built(name)
    stacked = embed(model, processor, pairs, views=("text", "fused", "image"))
    separate = [
        embed(model, processor, [pair["text"] for pair in pairs]),
        embed(model, processor, pairs, views=("fused",)),
    ]
    separate.append(embed(model, processor, [pair["image"] for pair in pairs]))
    assert (stacked - torch.cat(separate)).abs().max() <= 1e-5


@every_model
def test_rows_may_be_cut_so_that_a_chunk_lacks_a_modality(name, built, pairs):
    model, processor = built(name)
    batch = processor([pairs[0]["text"], pairs[1]["text"], pairs[0], pairs[1]["image"], pairs[0]["image"]])
    with torch.no_grad():
        whole = model(**batch).embeddings
    for start in (0, 3):
        chunk = model.train()(**{key: value[start : start + 2] for key, value in batch.items()})
        chunk.pooler_output.sum().backward()
        assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
        with torch.no_grad():
            cut = model.eval()(**{key: value[start : start + 2] for key, value in batch.items()}).embeddings
        assert (cut - whole[start : start + 2]).abs().max() <= 1e-5


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
    expected = embed(model, processor, items)
    again = AutoProcessor.from_pretrained(tmp_path, trust_remote_code=True)
    for loaded in (type(model).from_pretrained(tmp_path), AutoModel.from_pretrained(tmp_path)):
        assert type(loaded) is type(model)
        assert torch.equal(embed(loaded, again, items), expected)
    assert isinstance(AutoConfig.from_pretrained(tmp_path), type(model.config))
    assert {key for key, parameter in loaded.named_parameters()} == {key for key, _ in model.named_parameters()}


@each_architecture
def test_missing_weights_are_initialised(name, built, pairs, tmp_path):
    """Models are built without memory first: what a checkpoint lacks must not come back as garbage."""
    model, processor = built(name)
    own = {key for key in model.state_dict() if not key.startswith(("vision_model.", "text_model.", "backbone."))}
    kept = {key: value for key, value in model.state_dict().items() if key not in own}
    assert own
    model.save_pretrained(tmp_path, state_dict=kept)
    loaded = type(model).from_pretrained(tmp_path)
    for key in own:
        value = loaded.state_dict()[key]
        assert value.isfinite().all() and value.abs().max() < 10, key
    assert embed(loaded, processor, pairs).isfinite().all()


@each_architecture
def test_cached_features_equal_the_towers(name, built, pairs):
    model, processor = built(name)
    batch = dict(processor(pairs))
    expected = model(**batch).embeddings
    batch["image_features"] = model.run_vision_tower(batch.pop("pixel_values"))
    if not name.startswith("token"):
        batch["text_features"] = model.run_text_tower(batch.pop("input_ids"), batch["attention_mask"])
    assert torch.equal(model(**batch).embeddings, expected)


@with_mllms
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
    assert gradients[0].keys() == gradients[1].keys()
    assert sum(gradient.abs().sum() for gradient in gradients[0].values()) > 1
    for key, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][key], gradient, rtol=1e-4, atol=1e-6)


@with_mllms
def test_bfloat16_is_close(name, built, items):
    model, processor = built(name)
    expected = embed(model, processor, items)
    halved = embed(model.to(torch.bfloat16), processor, items)
    assert halved.dtype == torch.float32
    assert (halved * expected).sum(1).min() > 0.995


@each_architecture
@pytest.mark.slow
def test_compiles(name, built, pairs):
    model, processor = built(name)
    batch = dict(processor(pairs))
    with torch.no_grad():
        torch.testing.assert_close(
            torch.compile(model, backend="eager")(**batch).embeddings, model(**batch).embeddings, rtol=0, atol=1e-6
        )


@with_mllms
def test_no_empty_or_unknown_request(name, built, pairs):
    model, processor = built(name)
    texts = processor([pair["text"] for pair in pairs])
    with pytest.raises(ValueError, match=r"neither images \(pixel_values\) nor texts \(input_ids\)"):
        model()
    with pytest.raises(ValueError, match=r"unknown view 'caption'; expected one of \('image', 'text', 'fused'\)"):
        model(**texts, views=["caption"])
    with pytest.raises(ValueError, match="view 'image' was asked for, but no item of the batch has it"):
        model(**texts, views=["text", "image"])
    with pytest.raises(ValueError, match="view 'text' was asked for"):
        model(**processor([pair["image"] for pair in pairs]), views=["text"])


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


@pytest.mark.parametrize(("name", "layers"), [("joint dinov2 + bert", 2), ("token dinov2 + bert", 2)])
def test_states_and_attention_on_request(name, layers, built, items):
    model, processor = built(name)
    model.set_attn_implementation("eager")
    batch = dict(processor(items))
    output = model(**batch, output_hidden_states=True, output_attentions=True)
    tokens = 4 + batch["input_ids"].shape[1] + name.startswith("joint")  # patches, words and E_VL's own CLS
    assert len(output.hidden_states) == layers + 1 and len(output.attentions) == layers
    assert output.hidden_states[0].shape == (len(items), tokens, 24)
    assert output.attentions[0].shape == (len(items), 2, tokens, tokens)
    torch.testing.assert_close(output.attentions[0].sum(-1), torch.ones(len(items), 2, tokens))
    state = output.hidden_states[-1][:, 0]
    torch.testing.assert_close(model.vl_encoder.norm(state) if "joint" in name else state, output.pooler_output)
    assert (output.embeddings - model(**batch).embeddings).abs().max() <= 1e-5
    if hasattr(output_capturing, "selected_hidden_states"):  # earlier versions count from the first layer's output
        first, *others = model(**batch, output_hidden_states=[0]).hidden_states
        assert torch.equal(first, output.hidden_states[0]) and all(state is None for state in others)
    with pytest.raises(ValueError, match=r"output_hidden_states need a single view, got \('image', 'text'\)"):
        model(**batch, views=("image", "text"), output_hidden_states=True)


@pytest.mark.parametrize("name", ["joint dinov2 + bert", "token dinov2 + bert"])
@torch.no_grad()
def test_token_embeddings_in_place_of_ids(name, built, items):
    model, processor = built(name)
    batch = dict(processor(items))
    expected = model(**batch).embeddings
    batch["inputs_embeds"] = model.text_model.get_input_embeddings()(batch.pop("input_ids"))
    if "token" not in name:  # a text encoder gets its word embeddings
        assert batch["inputs_embeds"].shape[-1] == model.config.text_config.hidden_size
    torch.testing.assert_close(model(**batch).embeddings, expected)


@each_architecture
def test_the_vocabulary_can_grow(name, built, items, tmp_path):
    model, processor = built(name)
    expected = embed(model, processor, items)
    size = model.config.get_text_config().vocab_size
    grown = model.resize_token_embeddings(size + 3)
    assert grown is model.get_input_embeddings() and grown.num_embeddings == size + 3
    assert torch.equal(embed(model, processor, items), expected)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert loaded.get_input_embeddings().num_embeddings == size + 3
    assert torch.equal(embed(loaded, processor, items), expected)
    model.set_input_embeddings(torch.nn.Embedding(5, 24))
    assert model.text_model.get_input_embeddings().num_embeddings == 5


@each_architecture
def test_sub_configurations_are_shared_with_the_towers_only(name, built, tiny_checkpoints):
    model, _ = built(name)
    assert model.config.get_text_config() is model.text_model.config
    source = AutoModel.from_pretrained(tiny_checkpoints["siglip" if "score" in name else "bert"])
    if "score" in name:
        model = type(model).from_clip(source)
    else:
        ids = {"cls_token_id": 2, "sep_token_id": 3} if "token" in name else {"hidden_size": 24}
        model = type(model).from_backbones(tiny_checkpoints["dinov2"], source, **ids)
    model.resize_token_embeddings(5)
    assert source.config.get_text_config().vocab_size != 5 == model.config.get_text_config().vocab_size
