import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from tiny_solar import frozen_encoder

from conjoin.hub import export
from conjoin.methods.solar import fit_intersection, mask_intersection, set_readout
from conjoin.methods.solar.scores import mask_tokens, pair_tokens, score_windows
from conjoin.models.joint_encoder import JointEncoderConfig
from conjoin.retrieval import load_encoder

ITEMS = [
    {"image": Image.effect_noise((16, 16), 60 + 10 * place).convert("RGB"), "text": text}
    for place, text in enumerate(["a bus and a red owl", "a tree", "an owl in a big tree", "a red bus"])
]
MIXED = [ITEMS[0], ITEMS[1]["image"], ITEMS[2]["text"], ITEMS[3]]


@pytest.fixture
def solar(tiny_checkpoints):
    model, processor = frozen_encoder(tiny_checkpoints)
    return model.eval(), processor


def read(model, processor, readout):
    """The model, with another readout."""
    set_readout(model, readout, processor, ITEMS)
    return model


@torch.no_grad()
def test_masks_are_those_of_the_batch_and_the_same_for_an_item_alone(solar):
    model, processor = solar
    tokens = pair_tokens(model(**processor(ITEMS), views=(), output_tokens=True))
    masks = fit_intersection(model, tokens)
    together = mask_intersection(masks, model, tokens)
    scores = score_windows(model, tokens)
    for name, local, exists in zip(("image", "text"), scores, (tokens.image_mask, tokens.text_mask), strict=True):
        assert torch.equal(together[f"{name}_weights"], mask_tokens(local, exists, 0.0, name)[0])
        assert 0 < together[f"{name}_weights"].sum() < exists.sum()
    for place, item in enumerate(ITEMS):
        inputs = processor([item])
        alone = mask_intersection(masks, model, pair_tokens(model(**inputs, views=(), output_tokens=True)))
        width = alone["text_weights"].shape[1]
        assert torch.equal(alone["image_weights"][0], together["image_weights"][place])
        assert torch.equal(alone["text_weights"][0], together["text_weights"][place, :width])
        assert model(**inputs, **alone).embeddings.isfinite().all()


@torch.no_grad()
@pytest.mark.parametrize("readout", ["sum", "intersection"])
def test_readouts_add_the_views_of_an_item(solar, readout):
    model, processor = solar
    inputs = processor(ITEMS)
    image, text, fused = model(**inputs, views=("image", "text", "fused")).embeddings.chunk(3)
    model = read(model, processor, readout)
    expected = image + text
    if readout == "intersection":
        tokens = pair_tokens(model(**inputs, views=(), output_tokens=True))
        masks = mask_intersection(model.intersection, model, tokens)
        expected = expected + 0.25 * sum(model(**inputs, **masks, views=("image", "text")).embeddings.chunk(2))
    found = model(**inputs).embeddings
    assert torch.allclose(found, F.normalize(expected, dim=1), atol=1e-6)
    assert (found - fused).abs().max() > 1e-3
    assert torch.equal(model(**inputs, views=("fused",)).embeddings, fused)  # what training asks for


@torch.no_grad()
@pytest.mark.parametrize("readout", ["sum", "intersection"])
def test_readouts_do_not_depend_on_the_other_items(solar, readout):
    model, processor = solar
    plain = model(**processor(MIXED)).embeddings
    model = read(model, processor, readout)
    together = model(**processor(MIXED)).embeddings
    for place, item in enumerate(MIXED):
        assert torch.allclose(model(**processor([item])).embeddings[0], together[place], atol=1e-6)
    assert torch.allclose(together[1:3], plain[1:3], atol=1e-6)  # one modality: the same by every readout
    assert (together[0] - plain[0]).abs().max() > 1e-3


@torch.no_grad()
@pytest.mark.parametrize("readout", ["sum", "intersection"])
def test_readouts_are_saved_with_the_model(solar, readout, tmp_path):
    model, processor = solar
    fused = load_encoder(export(model, processor, tmp_path / "fused"))
    model = read(model, processor, readout)
    expected = model(**processor(MIXED)).embeddings
    folder = export(model, processor, tmp_path / "model")
    encoder = load_encoder(folder)
    assert torch.allclose(torch.from_numpy(encoder.encode(MIXED)), expected, atol=1e-5)
    assert encoder.fingerprint != fused.fingerprint


def test_a_readout_that_there_is_not_is_refused(solar):
    model, processor = solar
    with pytest.raises(ValueError, match=r"readout='mean'; expected one of \('fused', 'sum', 'intersection'\)"):
        JointEncoderConfig(readout="mean")
    with pytest.raises(ValueError, match=r"need views, not readout='sum'"):
        read(model, processor, "sum")(**processor(ITEMS), output_attentions=True)
    for options, message in (
        ({"readout": "mean"}, "readout='mean'; expected one of"),
        ({"readout": "intersection", "processor": processor}, "is fitted to pairs of image and text; got 0"),
        ({"readout": "intersection", "processor": processor, "pairs": ["a", "b"]}, "pair 0 is no image with a text"),
    ):
        with pytest.raises(ValueError, match=message):
            set_readout(model, **options)
    assert model.config.readout == "sum"
    with pytest.raises(ValueError, match="chosen for a joint encoder, not for BertModel"):
        set_readout(model.text_model, "sum")
