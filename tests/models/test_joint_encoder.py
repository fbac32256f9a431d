from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModel, BertConfig, BertModel, Dinov2Model

from conjoin import JointEncoderConfig, JointEncoderModel, from_backbones
from conjoin.hub.build import towers_model

VIEWS = ("image", "text", "fused")
NAME = "joint dinov2 + bert"
SMALL = {"hidden_size": 8, "num_attention_heads": 2}


@pytest.fixture
def folders(tiny_checkpoints):
    return tiny_checkpoints["dinov2"], tiny_checkpoints["bert"]


def close(a, b):
    return (a - b).abs().max().item() <= 1e-5


# which tokens enter the vision-language encoder


@torch.no_grad()
def test_a_weight_adds_its_logarithm_to_the_attention_logits(built, pairs):
    """Eq. 2: a key of weight zero is as if it were not there, two keys of weight one half count as one."""
    model, processor = built("joint siglip")  # without balance of modalities
    features = model.run_vision_tower(processor(pairs)["pixel_values"])
    weights = torch.ones(4, 4)
    weights[:, [1, 3]] = 0
    plain = model(image_features=features).embeddings
    kept = model(image_features=features[:, [0, 1, 3]]).embeddings
    assert close(model(image_features=features, image_weights=weights).embeddings, kept) and not close(kept, plain)
    twice = torch.cat([features, features[:, 1:]], dim=1)
    assert close(model(image_features=twice, image_weights=torch.full((4, 8), 0.5)).embeddings, plain)


@torch.no_grad()
def test_the_readout_sum_adds_the_unit_views_of_each_item(built, pairs, monkeypatch):
    model, processor = built(NAME)
    items = [pairs[0], pairs[1]["image"], pairs[2]["text"]]
    image, text, fused = model(**processor(pairs), views=VIEWS).embeddings.chunk(3)
    plain = model(**processor(items)).embeddings
    monkeypatch.setattr(model.config, "readout", "sum")
    assert close(model(**processor(pairs)).embeddings, F.normalize(image + text, dim=1)) and not close(image, text)
    assert torch.equal(model(**processor(pairs), views=("fused",)).embeddings, fused)  # what training asks for
    mixed = model(**processor(items)).embeddings
    assert close(mixed[1:], plain[1:]) and not close(mixed[0], plain[0])  # one modality: the same by every readout
    assert all(close(model(**processor([item])).embeddings[0], row) for item, row in zip(items, mixed, strict=True))
    with pytest.raises(ValueError, match="output_attentions need a single view"):
        model(**processor(pairs), output_attentions=True)


def test_a_masked_modality_leaves_no_trace_and_nothing_leaves_cls_alone(built, pairs):
    model, processor = built(NAME)
    batch = processor(pairs)
    nothing = {"image_weights": torch.zeros(4, 4), "text_weights": torch.zeros(batch["input_ids"].shape)}
    for kind, other in (("image", "text"), ("text", "image")):
        masked = model(**batch, **{f"{kind}_weights": nothing[f"{kind}_weights"]}).embeddings
        assert close(masked, model(**batch, views=[other]).embeddings)
    output = model.train()(**batch, **nothing)
    assert output.embeddings.isfinite().all() and close(output.embeddings, output.embeddings[:1].expand(4, -1))
    output.pooler_output.sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


@torch.no_grad()
def test_tokens_come_with_their_masks(built, items):
    model, processor = built(NAME)
    batch = processor(items)
    output = model(**batch, output_tokens=True)
    assert output.image_features.shape == output.image_tokens.shape == (6, 1 + 4, 24)
    assert output.text_features.shape == output.text_tokens.shape == (6, 1 + batch["input_ids"].shape[1], 24)
    assert output.image_token_mask.sum(1).tolist() == [0, 4, 4, 0, 4, 4]
    assert output.text_token_mask.sum(1).tolist()[:3] == [7, 0, 1]  # a r ##e ##d b ##o ##x, without CLS and SEP
    assert output.image_features[0].eq(0).all() and output.text_features[1].eq(0).all()
    assert close(output.image_tokens, model.vision_adapter(output.image_features))
    special = F.pad(batch["special_tokens_mask"], (1, 0), value=1).bool()[..., None]  # is not read
    changed = model(**batch, text_features=output.text_features.masked_fill(special, 7.0)).embeddings
    assert close(changed, output.embeddings)


@torch.no_grad()
@pytest.mark.parametrize("name", ["joint clip", "joint siglip", "joint dinov2 + xlm-roberta"])
def test_global_tokens_are_the_towers_own(name, built, pairs):
    model, processor = built(name)
    batch = processor(pairs)
    output = model(**batch, output_tokens=True)
    vision = model.vision_model(pixel_values=batch["pixel_values"])
    mask = None if "siglip" in name else batch["attention_mask"]
    text = model.text_model(input_ids=batch["input_ids"], attention_mask=mask)
    assert torch.equal(output.image_features[:, 0], vision.pooler_output)
    expected = text.last_hidden_state[:, 0] if "roberta" in name else text.pooler_output
    assert torch.equal(output.text_features[:, 0], expected)
    assert torch.equal(output.image_features[:, 1:], vision.last_hidden_state[:, -4:])


@torch.no_grad()
def test_attention_implementations(folders, built, items, tmp_path):
    """E_VL weighs its keys, which flash attention cannot; a tower has its own implementation."""
    model, processor = built(NAME)
    batch = processor(items)
    fused = model(**batch).embeddings
    model.set_attn_implementation("eager")
    assert (model(**batch).embeddings - fused).abs().max() <= 1e-5
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="attn_implementation='flash_attention_2': E_VL adds a bias to its keys"):
        JointEncoderModel.from_pretrained(tmp_path, attn_implementation="flash_attention_2")
    loaded = JointEncoderModel.from_pretrained(tmp_path, attn_implementation={"": "sdpa", "vision_config": "eager"})
    of_towers = [each.config._attn_implementation for each in (loaded, loaded.vision_model, loaded.text_model)]
    assert of_towers == ["sdpa", "eager", "sdpa"]
    assert (loaded(**batch).embeddings - fused).abs().max() <= 1e-5


# the vision tower's layer


@torch.no_grad()
@pytest.mark.parametrize(("layer", "depth"), [(-2, 2), (1, 1), (-1, 3)])
def test_vision_hidden_layer(layer, depth, folders, built, pairs):
    model = towers_model(JointEncoderModel, *folders, vision_hidden_layer=layer, **SMALL).eval()
    pixels = built(NAME)[1](pairs)["pixel_values"]
    full = Dinov2Model.from_pretrained(folders[0]).eval()
    assert torch.equal(model.run_vision_tower(pixels), full(pixels, output_hidden_states=True).hidden_states[layer])
    blocks = {key.split(".")[2] for key in model.vision_model.state_dict() if ".layer." in key or ".layers." in key}
    assert len(blocks) == depth and model.config.vision_config.num_hidden_layers == 3
    with pytest.raises(ValueError, match=r"vision_hidden_layer=-4 is outside a tower of 3 layers; expected 1..3"):
        towers_model(JointEncoderModel, *folders, vision_hidden_layer=-4, **SMALL)


# token dropout


def test_token_dropout_keeps_a_share_and_at_least_one_in_training(tiny_checkpoints, built, pairs):
    folders = tiny_checkpoints["vit"], tiny_checkpoints["clip"]
    model = towers_model(JointEncoderModel, *folders, token_dropout=0.7, **SMALL).train()
    batch = built("joint vit + clip")[1]([pairs[0], {**pairs[1], "text": "a"}] * 50)
    seen = set()
    for view in ("image", "text"):
        output = model(**batch, views=(view,), output_hidden_states=True, output_tokens=True)
        kept, tokens, exists = output.hidden_states[0][:, 1:], output[f"{view}_tokens"], output[f"{view}_token_mask"]
        assert kept.shape[1] == -(-3 * exists.shape[1] // 10)  # rounded up
        found = torch.cdist(kept, tokens[:, 1:], compute_mode="donot_use_mm_for_euclid_dist").argmin(2)
        assert torch.equal(kept, tokens[:, 1:].gather(1, found[..., None].expand(-1, -1, 8)))
        for row, real in zip(found, exists, strict=True):
            count = -(-3 * int(real.sum()) // 10)
            assert real[row[:count]].all() and len(set(row[:count].tolist())) == count >= 1
            seen.add((view, *sorted(row[:count].tolist())))
    assert len([each for each in seen if each[0] == "image"]) == 6  # any two of four patches
    states = model.eval()(**batch, views=("image",), output_hidden_states=True).hidden_states[0]
    assert states.shape[1] == 1 + 4


@torch.no_grad()
def test_the_untrained_fused_embedding_is_the_mean_of_both_views(folders, built, pairs):
    model = towers_model(JointEncoderModel, *folders, num_vl_layers=1, **SMALL).eval()
    torch.nn.init.zeros_(model.vl_encoder.cls_token)
    for part in ("q_proj", "k_proj"):
        torch.nn.init.zeros_(model.vl_encoder.layers[0].get_submodule(part).weight)
    batch = built(NAME)[1](pairs)
    state = F.layer_norm
    tokens = model(**batch, output_tokens=True)
    means = []
    for kind in ("image", "text"):
        exists = getattr(tokens, f"{kind}_token_mask")[..., None]
        normed = state(getattr(tokens, f"{kind}_tokens")[:, 1:], (8,)) * exists
        means.append(normed.sum(1) / exists.sum(1))
    fused = state((means[0] + means[1]) / 2, (8,))
    assert (model(**batch).pooler_output - fused).abs().max() < 1e-3
    assert towers_model(JointEncoderModel, *folders, vl_init="normal", **SMALL).vl_encoder.layers[0].fc2.weight.any()


@torch.no_grad()
def test_identity_adapters_are_exact(folders, built, pairs):
    width = Dinov2Model.from_pretrained(folders[0]).config.hidden_size
    same = towers_model(JointEncoderModel, *folders, hidden_size=width, num_attention_heads=2)
    output = same(**built(NAME)[1](pairs), output_tokens=True)
    assert close(output.image_tokens, output.image_features) and close(output.text_tokens, output.text_features)
    wider = towers_model(JointEncoderModel, *folders, hidden_size=2 * width, num_attention_heads=2)
    output = wider(**built(NAME)[1](pairs), output_tokens=True)
    inner = output.image_features @ output.image_features.mT
    assert (output.image_tokens @ output.image_tokens.mT - inner).abs().max() < 1e-3  # an orthogonal projection
    narrow = towers_model(JointEncoderModel, *folders, **SMALL)
    start, _, second = narrow.vision_adapter
    assert close(start.weight[:8] @ start.weight[:8].T, torch.eye(8)) and second.weight.shape == (8, 16)


# loading and errors


@pytest.mark.parametrize(("vision", "text"), [("dinov2", "bert"), ("clip", "clip"), ("siglip", "siglip")])
def test_towers_are_names_folders_or_loaded_models(vision, text, tiny_checkpoints):
    names = tiny_checkpoints[vision], tiny_checkpoints[text]
    loaded = [AutoModel.from_pretrained(name) for name in names]
    states = []
    for towers in (names, map(Path, names), loaded):
        torch.manual_seed(0)
        model = towers_model(JointEncoderModel, *towers, vision_hidden_layer=-2, **SMALL)
        states.append(model.state_dict())
    for state in states[1:]:
        assert state.keys() == states[0].keys() and all(torch.equal(state[key], states[0][key]) for key in state)
    for kind, source in zip(("vision_model", "text_model"), loaded, strict=True):
        weights = getattr(source, kind, source).state_dict()  # a two-tower model gives its tower
        assert all(torch.equal(value, weights[key]) for key, value in getattr(model, kind).state_dict().items())
    model.resize_token_embeddings(5)  # the source keeps its own configuration
    assert loaded[1].config.get_text_config().vocab_size != 5 == model.config.get_text_config().vocab_size


def test_the_mask_of_padding_is_the_callers_choice(tiny_checkpoints):
    bert, siglip = tiny_checkpoints["bert"], tiny_checkpoints["siglip"]
    for text, given, expected in ((bert, {}, False), (siglip, {}, True), (bert, {"text_attends_padding": True}, True)):
        config = towers_model(JointEncoderModel, tiny_checkpoints["dinov2"], text, **SMALL, **given).config
        assert config.text_attends_padding == expected


def test_unsuitable_towers_and_texts_without_masks(folders, built):
    build = partial(towers_model, JointEncoderModel)
    with pytest.raises(ValueError, match="has no vision tower: its BertConfig has no 'patch_size'"):
        build(folders[1], folders[1])
    with pytest.raises(ValueError, match="has no text tower: its Dinov2Config has no 'vocab_size'"):
        build(folders[0], folders[0])
    text = BertModel.from_pretrained(folders[1])
    text.config = BertConfig.from_pretrained(folders[1], num_hidden_layers=3)
    with pytest.raises(ValueError, match="BertModel lacks weights of BertModel"):
        build(folders[0], text, **SMALL)
    model, processor = built(NAME)
    with pytest.raises(ValueError, match="special_tokens_mask is missing"):
        model(input_ids=processor(["a red box"])["input_ids"])


@torch.no_grad()
def test_without_a_vision_language_encoder_the_pooled_towers_are_embedded(folders, built, pairs):
    """The adapters start as the identity, so texts and images have the towers' own vectors, and a pair their sum."""
    torch.manual_seed(0)
    width = 2 * AutoConfig.from_pretrained(folders[1]).hidden_size
    model = towers_model(JointEncoderModel, *folders, num_vl_layers=0, hidden_size=width, num_attention_heads=1).eval()
    batch = built(NAME)[1](pairs)
    image, text, fused = model(**batch, views=VIEWS).embeddings.chunk(3)
    states = model.run_text_tower(batch["input_ids"], batch["attention_mask"])
    local = [row[1:][special == 0].mean(0) for row, special in zip(states, batch["special_tokens_mask"], strict=True)]
    halves = [F.layer_norm(half, half.shape[1:]) for half in (states[:, 0], torch.stack(local))]
    assert close(text, F.normalize(torch.cat(halves, dim=1), dim=1))
    assert close(fused, F.normalize(image + text, dim=1)) and not close(image, text)
    assert close(model(**batch, text_weights=torch.zeros_like(batch["input_ids"])).embeddings, image)
    output = model(**batch, views=("image",), output_tokens=True)
    alone = torch.zeros(len(pairs), output.image_tokens.shape[1] - 1)
    alone[:, 2] = 1.0
    assert close(F.normalize(output.image_tokens[:, 0], dim=1), image)
    only = model(**batch, views=("image",), image_weights=alone).embeddings
    assert close(F.normalize(output.image_tokens[:, 3], dim=1), only) and not close(only, image)
    assert output.text_tokens.shape[1] == 1 + batch["input_ids"].shape[1]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"num_attention_heads": 5}, "num_attention_heads=5 must divide hidden_size=768"),
        ({"hidden_size": 0}, "must divide hidden_size=0"),
        ({"num_vl_layers": -1}, "num_vl_layers=-1; expected 0 or more"),
        ({"num_vl_layers": "3"}, r"Field 'num_vl_layers' expected int, got str \(value: '3'\)"),
        ({"balance_modalities": "false"}, "Field 'balance_modalities' expected bool, got str"),
        ({"layer_norm_eps": "1e-6"}, "Field 'layer_norm_eps' with value '1e-6' doesn't match any type"),
        ({"readout": "mean"}, r"Field 'readout' expected one of \('fused', 'sum'\), got mean"),
        ({"adapter_init": "zeros"}, r"Field 'adapter_init' expected one of \('identity', 'normal'\), got zeros"),
        ({"token_dropout": 1.0}, r"token_dropout=1.0 must lie in \[0, 1\)"),
        ({"num_vl_layer": 1}, "unknown field 'num_vl_layer' of the joint_encoder; did you mean 'num_vl_layers'?"),
        ({"x": 1}, "unknown field 'x' of the joint_encoder; expected some of adapter_init, attention_dropout"),
    ],
)
def test_impossible_configurations(wrong, message, folders):
    with pytest.raises(ValueError, match=message):
        from_backbones(*folders, **wrong)


def test_a_configuration_file_may_hold_more(folders, tmp_path):
    """The class reads any `config.json`; a value of a wrong type in it is an error."""
    settings = {"num_vl_layers": 1, "hidden_size": 24, "num_attention_heads": 2, "attention_dropout": 0}
    config = JointEncoderConfig(**settings, of_a_later_version=1)
    config.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert (loaded.of_a_later_version, loaded.num_vl_layers, loaded.intermediate_size) == (1, 1, 96)
    with pytest.raises(StrictDataclassError, match="expected one of"):
        loaded.readout = "mean"
