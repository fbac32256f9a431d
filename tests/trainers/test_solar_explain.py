"""What `explain` draws is what the model scores, patch by patch and word by word."""

import dataclasses
import re

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModel

from conjoin import explain_pair
from conjoin.losses import qda_threshold
from conjoin.trainers.solar_explain import (
    fit_thresholds,
    heat_map,
    masked_picture,
    relative,
    render_explanation,
    segment_map,
    warmth,
)
from tiny_training import make_encoder


def encoder(checkpoints, vision="dinov2", text="bert"):
    model, processor = make_encoder(checkpoints, vision, text, hidden_size=24, vl_init="normal")
    return model.eval(), processor


def unit_tokens(model, processor, items):
    with torch.no_grad():
        output = model(**processor(items), views=("image", "text"), output_tokens=True)
    tokens = (output.image_tokens, output.text_tokens)
    return *(part / part.norm(dim=-1, keepdim=True) for part in tokens), output


@pytest.fixture(scope="module")
def explained(tiny_checkpoints, pictures):
    return explain_pair(*encoder(tiny_checkpoints), pictures[1], "a red dog")


@pytest.mark.parametrize(
    "names", [("clip", "clip"), ("dinov2", "bert"), ("siglip", "siglip"), ("vit", "xlm_roberta")], ids=str
)
def test_scores_are_the_cosines_of_global_and_local_tokens(tiny_checkpoints, pictures, names):
    model, processor = encoder(tiny_checkpoints, *names)
    found = explain_pair(model, processor, pictures[1], " Ab <c> 1 ")
    (image,), (text,), output = unit_tokens(model, processor, [{"image": pictures[1], "text": "Ab <c> 1"}])
    assert torch.allclose(found.image_scores, image[1:] @ text[0], atol=1e-6)
    assert torch.allclose(found.text_scores, (text[1:] @ image[0])[output.text_token_mask[0]], atol=1e-6)
    assert found.grid == (2, 2)
    assert found.similarity == pytest.approx(float(output.embeddings[0] @ output.embeddings[1]))
    letters = "".join(word.lower() for word in found.words if word.lower() in "ab<c>1")
    assert "".join(dict.fromkeys(letters)) == "ab<c>1"  # a word mark may stand for the letter behind it
    special = explain_pair(model, processor, pictures[1], f"a {processor.tokenizer.all_special_tokens[0]} b")
    assert (special.words[0], special.words[-1]) == ("a", "b")  # a special token in a text is a word
    for each in (found, special):
        assert len(each.words) == len(each.text_scores)


def test_the_picture_is_what_the_model_sees(tiny_checkpoints, explained, pictures):
    seen = encoder(tiny_checkpoints)[1].image_processor(images=[pictures[1]], return_tensors="np", do_normalize=False)
    levels = np.round(255 * seen["pixel_values"][0].transpose(1, 2, 0))
    assert np.abs(levels - np.asarray(explained.picture, dtype=float)).max() <= 1


def test_thresholds_are_fitted_to_the_scores_of_matching_and_other_pairs(tiny_checkpoints, pictures):
    model, processor = encoder(tiny_checkpoints)
    texts = ["a", "b c d", "e f", "1 2 3 4 5"]
    pairs = [{"image": image, "text": text} for image, text in zip(pictures, texts, strict=True)]
    images, texts, output = unit_tokens(model, processor, pairs)
    found = fit_thresholds(model, processor, pairs)
    for name, whole, local, mask in (
        ("image", texts, images, output.image_token_mask), ("text", images, texts, output.text_token_mask),
    ):  # fmt: skip
        scores = torch.einsum("id,jtd->ijt", whole[:, 0], local[:, 1:])
        matching = torch.eye(4, dtype=torch.bool)[..., None] & mask
        moments = [
            f(scores[kind])
            for kind in (matching, mask & ~matching)
            for f in (torch.mean, lambda x: x.std(correction=0))
        ]
        assert found[name] == pytest.approx(qda_threshold(*moments).threshold.item(), abs=1e-4)
    for wrong, message in (
        (pairs[:1], "1 pairs have no scores"),
        ([*pairs, {"text": "alone"}], r"image tokens: \[4\]"),
    ):
        with pytest.raises(ValueError, match=message):
            fit_thresholds(model, processor, wrong)
    with pytest.raises(ValueError, match="only a joint encoder has local scores, got BertModel"):
        explain_pair(AutoModel.from_pretrained(tiny_checkpoints["bert"]), None, pictures[0], "a")


def test_the_page_is_complete_and_loads_nothing(explained, tmp_path):
    low, high = (scores.median().item() for scores in (explained.image_scores, explained.text_scores))
    text = render_explanation(explained, tmp_path / "out", image_threshold=low, text_threshold=high).read_text()
    assert re.search(r"\d segments", text)
    assert text.count("<img") == 8  # image, heat, above the threshold, segments, four samples
    assert (text.count("positive: "), text.count("negative: ")) == (3, 9)  # a picture, its caption and a line of each
    assert "default-src 'none'" in text
    assert not re.search(r"<script|(src|href)=\"(?!data:)", text)
    assert f"{explained.similarity:.3f}" in text
    for word, score in zip(explained.words, explained.text_scores, strict=True):
        assert f"{word} <small>{score:.2f}</small>" in text
        assert score > high or f"<s>{word}</s>" in text  # left out
    evil = dataclasses.replace(explained, words=["</small><script>alert(1)</script>"] * len(explained.words))
    text = render_explanation(evil, tmp_path).read_text()
    assert text.count("<img") == 3  # without thresholds: image, heat, segments
    assert text.count("&lt;script&gt;") == len(evil.words) and "<script" not in text and "above" not in text


def test_colours_run_from_cold_to_warm():
    assert relative([3.0, 1.0, 2.0]).tolist() == [1.0, 0.0, 0.5]
    assert relative([2.0, 2.0]).tolist() == [0.5, 0.5]
    cold, warm = warmth(0.0), warmth(1.0)
    assert cold[2] > cold[0] and warm[0] > warm[2]
    assert max(warmth(0.5)) - min(warmth(0.5)) < 10


def test_each_patch_is_painted_where_it_is():
    """Two rows, three columns; the picture is enlarged by a whole factor, so patches stay sharp."""
    black = Image.new("RGB", (30, 20))
    drawn = {
        "heat": heat_map(black, [0, 0, 0, 0, 0, 1], (2, 3)),
        "masked": masked_picture(black, [1, 1, 1, 1, 1, 0], (2, 3)),
        "segment": segment_map(black, [0, 0, 0, 0, 0, 1], (2, 3)),
    }
    for name, image in drawn.items():
        assert image.size == (420, 280), name
        pixels = np.asarray(image, dtype=int)
        other = np.abs(pixels - pixels[0, 0]).sum(2) > 0
        expected = np.zeros((280, 420), dtype=bool)
        expected[140:, 280:] = True
        assert (other == expected).all(), name
    assert drawn["masked"].getpixel((0, 0)) == (0, 0, 0)
    assert drawn["masked"].getpixel((419, 279)) == (128, 128, 128)
