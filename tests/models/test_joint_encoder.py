from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModel, BertConfig, BertModel, Dinov2Model

from conjoin.models.joint_encoder import JointEncoderConfig, JointEncoderModel
from conjoin.models.joint_encoder.modeling_joint_encoder import VIEWS, VLEncoder, drop_tokens

NAME = "joint dinov2 + bert"
SMALL = {"hidden_size": 8, "num_attention_heads": 2}


@pytest.fixture
def folders(tiny_checkpoints):
    return tiny_checkpoints["dinov2"], tiny_checkpoints["bert"]


def close(a, b):
    return (a - b).abs().max().item() <= 1e-5


# which tokens enter the vision-language encoder


@torch.no_grad()
def test_a_key_of_weight_zero_is_as_if_it_were_not_there():
    torch.manual_seed(0)
    encoder = VLEncoder(JointEncoderConfig(**SMALL)).eval()
    tokens = torch.randn(3, 6, 8)
    weights = torch.ones(3, 6)
    weights[:, [1, 4]] = 0
    kept = tokens[:, [0, 2, 3, 5]]
    assert close(encoder(tokens, weights), encoder(kept, torch.ones(3, 4)))
    weights[:, [1, 4]] = 0.5
    assert not close(encoder(tokens, weights), encoder(kept, torch.ones(3, 4)))


@torch.no_grad()
def test_a_weight_adds_its_logarithm_to_the_attention_logits():
    """Eq. 2: two keys of weight one half count as much as one."""
    torch.manual_seed(0)
    encoder = VLEncoder(JointEncoderConfig(**SMALL)).eval()
    tokens = torch.randn(2, 3, 8)
    twice = torch.cat([tokens, tokens], dim=1)
    assert close(encoder(twice, torch.full((2, 6), 0.5)), encoder(tokens, torch.ones(2, 3)))


@torch.no_grad()
@pytest.mark.parametrize("kind", ["image", "text"])
def test_masked_tokens_leave_no_trace(kind, built, pairs):
    model, processor = built(NAME)
    batch = processor(pairs)
    size = {"image": (len(pairs), 4), "text": batch["input_ids"].shape}[kind]
    other = {"image": "text", "text": "image"}[kind]
    embedded = model(**batch, **{f"{kind}_weights": torch.zeros(size)}).embeddings
    assert close(embedded, model(**batch, views=[other]).embeddings)


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
    with pytest.raises(ValueError, match="need views, not readout='sum'"):
        model(**processor(pairs), output_attentions=True)


@torch.no_grad()
def test_masking_everything_leaves_cls_alone(built, pairs):
    model, processor = built(NAME)
    batch = processor(pairs)
    nothing = {"image_weights": torch.zeros(4, 4), "text_weights": torch.zeros(batch["input_ids"].shape)}
    embedded = model(**batch, **nothing).embeddings
    assert embedded.isfinite().all()
    assert close(embedded, embedded[:1].expand(4, -1))
    model.train()
    with torch.enable_grad():
        model(**batch, **nothing).pooler_output.sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


@torch.no_grad()
def test_special_tokens_are_not_local_tokens(built):
    model, processor = built(NAME)
    batch = processor(["a red box", "x"])
    output = model(**batch, output_tokens=True)
    assert output.text_token_mask.sum(1).tolist() == [7, 1]  # a r ##e ##d b ##o ##x
    assert output.text_tokens.shape == (2, 1 + 9, 24) and output.text_features.shape == (2, 1 + 9, 24)
    changed = model(**batch, text_features=output.text_features.masked_fill(_special(batch), 7.0)).embeddings
    assert close(changed, output.embeddings)
    assert output.image_tokens is None


def _special(batch):
    return torch.nn.functional.pad(batch["special_tokens_mask"], (1, 0), value=1).bool()[..., None]


@torch.no_grad()
def test_tokens_come_with_their_masks(built, items):
    model, processor = built(NAME)
    output = model(**processor(items), output_tokens=True)
    assert output.image_features.shape == output.image_tokens.shape == (6, 1 + 4, 24)
    assert output.image_token_mask.any(1).tolist() == [False, True, True, False, True, True]
    assert output.text_token_mask.any(1).tolist() == [True, False, True, True, False, True]
    assert output.image_features[0].eq(0).all() and output.text_features[1].eq(0).all()
    assert close(output.image_tokens, model.vision_adapter(output.image_features))


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


# the vision tower's layer


@torch.no_grad()
@pytest.mark.parametrize(("layer", "depth"), [(-2, 2), (1, 1), (-1, 3)])
def test_vision_hidden_layer(layer, depth, tiny_checkpoints, folders, built, pairs):
    model = JointEncoderModel.from_backbones(*folders, vision_hidden_layer=layer, **SMALL).eval()
    pixels = built(NAME)[1](pairs)["pixel_values"]
    full = Dinov2Model.from_pretrained(tiny_checkpoints["dinov2"]).eval()
    expected = full(pixels, output_hidden_states=True).hidden_states[layer]
    assert torch.equal(model.run_vision_tower(pixels), expected)
    blocks = {key.split(".")[2] for key in model.vision_model.state_dict() if ".layer." in key or ".layers." in key}
    assert len(blocks) == depth and model.config.vision_config.num_hidden_layers == 3


def test_vision_hidden_layer_out_of_range(folders):
    with pytest.raises(ValueError, match=r"vision_hidden_layer=-4 is outside a tower of 3 layers; expected 1..3"):
        JointEncoderModel.from_backbones(*folders, vision_hidden_layer=-4, **SMALL)


# token dropout


def test_token_dropout_keeps_a_share_and_at_least_one():
    torch.manual_seed(0)
    tokens = torch.arange(1, 11.0).expand(200, 10)[..., None]
    weights = torch.zeros(200, 10)
    counts = torch.arange(200) % 11
    weights[torch.arange(10) < counts[:, None]] = 1.0
    kept, kept_weights = drop_tokens(tokens, weights, 0.7)
    assert kept_weights.sum(1).tolist() == [-(-3 * count // 10) for count in counts.tolist()]
    assert kept.shape[:2] == kept_weights.shape and kept.shape[1] <= 4
    survivors = kept[..., 0] * kept_weights
    assert (survivors <= counts[:, None]).all()  # only tokens that exist
    rows = survivors[counts == 10]
    assert all(len(set(row.tolist()) - {0.0}) == 3 for row in rows)
    assert len(set(rows.flatten().tolist()) - {0.0}) == 10


def test_token_dropout_only_acts_in_training(tiny_checkpoints, built, pairs):
    folders = tiny_checkpoints["vit"], tiny_checkpoints["clip"]
    model = JointEncoderModel.from_backbones(*folders, token_dropout=0.5, **SMALL).eval()
    batch = built("joint vit + clip")[1](pairs)
    assert torch.equal(model(**batch).embeddings, model(**batch).embeddings)
    model.train()
    assert not torch.equal(model(**batch).embeddings, model(**batch).embeddings)
    assert model(**batch).embeddings.isfinite().all()


@torch.no_grad()
def test_balanced_modalities_weigh_the_same_however_many_tokens_they_have(built, pairs):
    """Doubling every text token changes nothing; without balance it draws the embedding to the text."""
    model, processor = built(NAME)
    batch = processor(pairs)
    tokens = model(**batch, output_tokens=True)
    text = {"text_features": tokens.text_features, "special_tokens_mask": batch["special_tokens_mask"],
            "attention_mask": batch["attention_mask"]}  # fmt: skip
    doubled = {name: torch.cat([value, value[:, 1:] if name == "text_features" else value], 1)
               for name, value in text.items()}  # fmt: skip
    image = {"image_features": tokens.image_features}
    plain = model(**image, **text).embeddings
    changes = {}
    for balanced in (True, False):
        model.config.balance_modalities = balanced
        expected = model(**image, **text).embeddings
        changes[balanced] = (model(**image, **doubled).embeddings - expected).abs().max().item()
    model.config.balance_modalities = True
    assert close(plain, model(**image, **text).embeddings)
    assert changes[True] < changes[False] / 2  # CLS, one key among all, keeps its own weight


@torch.no_grad()
def test_the_untrained_fused_embedding_is_the_mean_of_both_views(folders, built, pairs):
    model = JointEncoderModel.from_backbones(*folders, num_vl_layers=1, **SMALL).eval()
    torch.nn.init.zeros_(model.vl_encoder.cls_token)
    for part in ("q_proj", "k_proj"):
        torch.nn.init.zeros_(model.vl_encoder.layers[0].get_submodule(part).weight)
    batch = built(NAME)[1](pairs)
    state = torch.nn.functional.layer_norm
    tokens = model(**batch, output_tokens=True)
    means = []
    for kind in ("image", "text"):
        exists = getattr(tokens, f"{kind}_token_mask")[..., None]
        normed = state(getattr(tokens, f"{kind}_tokens")[:, 1:], (8,)) * exists
        means.append(normed.sum(1) / exists.sum(1))
    fused = state((means[0] + means[1]) / 2, (8,))
    assert (model(**batch).pooler_output - fused).abs().max() < 1e-3
    assert JointEncoderModel.from_backbones(*folders, vl_init="normal", **SMALL).vl_encoder.layers[0].fc2.weight.any()


@torch.no_grad()
def test_identity_adapters_are_exact(folders, built, pairs):
    width = Dinov2Model.from_pretrained(folders[0]).config.hidden_size
    same = JointEncoderModel.from_backbones(*folders, hidden_size=width, num_attention_heads=2)
    output = same(**built(NAME)[1](pairs), output_tokens=True)
    assert close(output.image_tokens, output.image_features) and close(output.text_tokens, output.text_features)
    wider = JointEncoderModel.from_backbones(*folders, hidden_size=2 * width, num_attention_heads=2)
    output = wider(**built(NAME)[1](pairs), output_tokens=True)
    inner = output.image_features @ output.image_features.mT
    assert (output.image_tokens @ output.image_tokens.mT - inner).abs().max() < 1e-3  # an orthogonal projection
    narrow = JointEncoderModel.from_backbones(*folders, **SMALL)
    start, _, second = narrow.vision_adapter
    assert close(start.weight[:8] @ start.weight[:8].T, torch.eye(8)) and second.weight.shape == (8, 16)


# loading and errors


def test_loaded_towers_are_copied(tiny_checkpoints):
    vision = Dinov2Model.from_pretrained(tiny_checkpoints["dinov2"])
    text = BertModel.from_pretrained(tiny_checkpoints["bert"])
    model = JointEncoderModel.from_backbones(vision, text, vision_hidden_layer=-2, **SMALL)
    for ours, theirs in ((model.vision_model, vision), (model.text_model, text)):
        weights = theirs.state_dict()
        assert all(torch.equal(value, weights[key]) for key, value in ours.state_dict().items())
    with pytest.raises(ValueError, match="BertModel lacks weights of BertModel"):
        deeper = BertConfig.from_pretrained(tiny_checkpoints["bert"], num_hidden_layers=3)
        text.config = deeper
        JointEncoderModel.from_backbones(vision, text, **SMALL)


@pytest.mark.parametrize("name", ["clip", "siglip"])
def test_a_loaded_two_tower_model_gives_its_towers(name, tiny_checkpoints):
    folder = Path(tiny_checkpoints[name])
    loaded = AutoModel.from_pretrained(folder)
    weights = JointEncoderModel.from_backbones(loaded, loaded, vision_hidden_layer=-2, **SMALL).state_dict()
    expected = JointEncoderModel.from_backbones(folder, folder, vision_hidden_layer=-2, **SMALL).state_dict()
    towers = [key for key in expected if key.startswith(("vision_model", "text_model"))]
    assert weights.keys() == expected.keys()
    assert towers and all(torch.equal(weights[key], expected[key]) for key in towers)


def test_the_mask_of_padding_is_the_callers_choice(tiny_checkpoints):
    bert, siglip = tiny_checkpoints["bert"], tiny_checkpoints["siglip"]
    for text, given, expected in ((bert, {}, False), (siglip, {}, True), (bert, {"text_attends_padding": True}, True)):
        config = JointEncoderModel.from_backbones(tiny_checkpoints["dinov2"], text, **SMALL, **given).config
        assert config.text_attends_padding == expected


def test_no_such_tower(tiny_checkpoints):
    with pytest.raises(ValueError, match="has no vision tower: its BertConfig has no 'patch_size'"):
        JointEncoderModel.from_backbones(tiny_checkpoints["bert"], tiny_checkpoints["bert"])
    with pytest.raises(ValueError, match="has no text tower: its Dinov2Config has no 'vocab_size'"):
        JointEncoderModel.from_backbones(tiny_checkpoints["dinov2"], tiny_checkpoints["dinov2"])


def test_text_needs_its_special_tokens_mask(built):
    model, processor = built(NAME)
    batch = dict(processor(["a red box"]))
    del batch["special_tokens_mask"]
    with pytest.raises(ValueError, match="special_tokens_mask is missing"):
        model(**batch)


@torch.no_grad()
def test_without_a_vision_language_encoder_the_pooled_towers_are_embedded(folders, built, pairs):
    """The adapters start as the identity, so texts and images have the towers' own vectors, and a pair their sum."""
    torch.manual_seed(0)
    width = 2 * AutoConfig.from_pretrained(folders[1]).hidden_size
    model = JointEncoderModel.from_backbones(
        *folders, num_vl_layers=0, hidden_size=width, num_attention_heads=1
    ).eval()
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
        ({"readout": "mean"}, r"readout='mean'; expected one of \('fused', 'sum'\)"),
        ({"adapter_init": "zeros"}, 'adapter_init=\'zeros\'; expected "identity" or "normal"'),
        ({"vl_init": "zeros"}, 'vl_init=\'zeros\'; expected "mean_pooling" or "normal"'),
        ({"token_dropout": 1.0}, r"token_dropout=1.0 must lie in \[0, 1\)"),
    ],
)
def test_impossible_configurations(wrong, message):
    with pytest.raises(ValueError, match=message):
        JointEncoderConfig(**wrong)
