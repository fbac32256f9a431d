from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModel, CLIPModel, SiglipModel

from conjoin import ScoreFusionModel
from conjoin.hub.build import score_fusion_model


@pytest.fixture
def features(tiny_checkpoints, built, pairs):
    """CLIP's own projected features of the pairs, and the model inputs they come from."""
    clip = CLIPModel.from_pretrained(tiny_checkpoints["clip"]).eval()
    batch = built("score clip")[1](pairs)
    with torch.no_grad():
        image = clip.get_image_features(batch["pixel_values"]).pooler_output
        text = clip.get_text_features(batch["input_ids"], attention_mask=batch["attention_mask"]).pooler_output
    return image, text, batch


@torch.no_grad()
def test_fused_is_the_sum_of_the_raw_features(features, built):
    """UniIR adds what CLIP projects, un-normalised."""
    image, text, batch = features
    output = built("score clip")[0](**batch, views=("image", "text", "fused"))
    torch.testing.assert_close(output.pooler_output, torch.cat([image, text, image + text]))
    torch.testing.assert_close(output.embeddings, F.normalize(output.pooler_output, dim=-1))
    assert (image.norm(dim=1) / text.norm(dim=1) - 1).abs().min() > 0.01  # so that normalising would show


@torch.no_grad()
def test_normalised_and_weighted(features, tiny_checkpoints):
    image, text, batch = features
    config = {"normalize_inputs": True, "image_weight": 0.3, "text_weight": 2.0}
    model = score_fusion_model(tiny_checkpoints["clip"], **config).eval()
    expected = 0.3 * F.normalize(image, dim=-1) + 2.0 * F.normalize(text, dim=-1)
    torch.testing.assert_close(model(**batch).pooler_output, expected)
    for view, part in (("image", image), ("text", text)):  # a weight does not turn the vector of one modality
        torch.testing.assert_close(model(**batch, views=[view]).embeddings, F.normalize(part, dim=-1))


@torch.no_grad()
def test_a_missing_modality_adds_exactly_zero(features, built):
    image, text, batch = features
    model, _ = built("score clip")
    masks = {
        "image_mask": torch.tensor([True, True, False, False]),
        "text_mask": torch.tensor([True, False, True, False]),
    }
    batch["pixel_values"][2:] = torch.nan
    pooled = model(**batch | masks).pooler_output
    torch.testing.assert_close(pooled[:3], torch.stack([image[0] + text[0], image[1], text[2]]))
    assert not pooled[3].any()


@torch.no_grad()
def test_siglip_reads_padded_text_without_a_mask(tiny_checkpoints, built, pairs):
    siglip = SiglipModel.from_pretrained(tiny_checkpoints["siglip"]).eval()
    model, processor = built("score siglip")
    batch = processor(pairs)
    assert batch["input_ids"].shape[1] == 16 and not batch["attention_mask"].all()
    text = siglip.get_text_features(batch["input_ids"]).pooler_output
    image = siglip.get_image_features(batch["pixel_values"]).pooler_output
    torch.testing.assert_close(model(**batch).pooler_output, image + 0.5 * text)
    assert model.config.text_attends_padding and model.config.hidden_size == 24
    assert not built("score clip")[0].config.text_attends_padding


def test_logit_scale_is_kept_but_not_trained(tiny_checkpoints, built, tmp_path):
    model, _ = built("score siglip")
    model.save_pretrained(tmp_path)
    siglip = SiglipModel.from_pretrained(tiny_checkpoints["siglip"])
    loaded, _ = ScoreFusionModel.from_pretrained(tmp_path, output_loading_info=True)
    for found in (model, loaded, AutoModel.from_pretrained(tmp_path)):
        assert torch.equal(found.backbone.logit_scale, siglip.logit_scale)
        frozen = {name for name, parameter in found.named_parameters() if not parameter.requires_grad}
        assert frozen == {"backbone.logit_scale", "backbone.logit_bias"}


@torch.no_grad()
@pytest.mark.parametrize("share", [0.3, 0.7])
def test_runs_with_weights_on_disk(share, features, built, tmp_path):
    model, _ = built("score clip")
    model.save_pretrained(tmp_path)
    size = sum(tensor.nbytes for tensor in model.state_dict().values())
    options = {"device_map": "auto", "max_memory": {"cpu": int(share * size)}, "offload_folder": tmp_path}
    offloaded = ScoreFusionModel.from_pretrained(tmp_path, **options)
    assert set(offloaded.hf_device_map.values()) == {"cpu", "disk"}
    assert torch.equal(offloaded(**features[2]).embeddings, model(**features[2]).embeddings)


def test_states_of_both_towers(built, pairs):
    model, processor = built("score clip")
    batch = processor([pairs[0], pairs[1]["text"], pairs[2]["text"]])
    output = model(**batch, output_hidden_states=True)
    states = output.text_model_output.hidden_states, output.vision_model_output.hidden_states
    assert [len(found) for found in states] == [3, 4]
    assert [len(found[0]) for found in states] == [3, 1]  # one item has an image
    assert model(**batch).text_model_output is None


@torch.no_grad()
@pytest.mark.parametrize(("name", "kind"), [("clip", CLIPModel), ("siglip", SiglipModel)])
def test_from_a_name_a_folder_or_a_loaded_model(name, kind, tiny_checkpoints):
    loaded = kind.from_pretrained(tiny_checkpoints[name])
    for source in (tiny_checkpoints[name], Path(tiny_checkpoints[name]), loaded):
        model = score_fusion_model(source)
        weights = model.backbone.state_dict()
        assert all(torch.equal(value, weights[key]) for key, value in loaded.state_dict().items())
    assert model.vision_model is model.backbone.vision_model and model.text_model is model.backbone.text_model
    assert model.backbone is loaded and score_fusion_model(loaded.bfloat16()).dtype == torch.bfloat16


def test_one_tower_is_not_enough(tiny_checkpoints):
    message = "is a 'bert'; expected two towers such as CLIP or SigLIP"
    with pytest.raises(ValueError, match=message):
        score_fusion_model(tiny_checkpoints["bert"])


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan")])
def test_weights_are_positive(weight, tiny_checkpoints):
    with pytest.raises(ValueError, match=f"image_weight=1.0 and text_weight={weight} must be positive"):
        score_fusion_model(tiny_checkpoints["clip"], text_weight=weight)
