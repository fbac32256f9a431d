"""What `explain` draws is what the model scores, patch by patch and word by word."""

import dataclasses
import json
import re

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModel

from conjoin.losses import alignment_terms
from conjoin.trainers.solar_explain import (
    distribution_curves,
    explain_pair,
    heat_map,
    last_thresholds,
    masked_picture,
    read_log,
    relative,
    render_explanation,
    score_histogram,
    score_populations,
    segment_map,
    strip,
    threshold_course,
    warmth,
)
from tiny_training import make_encoder

PAIRS = [("clip", "clip"), ("dinov2", "bert"), ("siglip", "siglip"), ("vit", "xlm_roberta")]


def encoder(checkpoints, vision="dinov2", text="bert"):
    model, processor = make_encoder(checkpoints, vision, text, hidden_size=24, vl_init="normal")
    return model.eval(), processor


@pytest.fixture(scope="module")
def explained(tiny_checkpoints, pictures):
    return explain_pair(*encoder(tiny_checkpoints), pictures[1], "a red dog")


@pytest.mark.parametrize("names", PAIRS, ids=str)
def test_scores_are_the_cosines_of_global_and_local_tokens(tiny_checkpoints, pictures, names):
    model, processor = encoder(tiny_checkpoints, *names)
    found = explain_pair(model, processor, pictures[1], " Ab <c> 1 ")
    with torch.no_grad():
        batch = processor([{"image": pictures[1], "text": "Ab <c> 1"}])
        output = model(**batch, views=("image", "text"), output_tokens=True)
    image, text = (
        tokens[0] / tokens[0].norm(dim=1, keepdim=True) for tokens in (output.image_tokens, output.text_tokens)
    )
    local = output.text_token_mask[0]
    assert torch.allclose(found.image_scores, image[1:] @ text[0], atol=1e-6)
    assert torch.allclose(found.text_scores, (text[1:] @ image[0])[local], atol=1e-6)
    assert found.grid == (2, 2)
    assert found.similarity == pytest.approx(float(output.embeddings[0] @ output.embeddings[1]))
    assert len(found.words) == len(found.text_scores)
    letters = "".join(word.lower() for word in found.words if word.lower() in "ab<c>1")
    assert "".join(dict.fromkeys(letters)) == "ab<c>1"  # a word mark may stand for the letter behind it


@pytest.mark.parametrize("names", PAIRS, ids=str)
def test_special_tokens_in_a_text_are_words(tiny_checkpoints, pictures, names):
    model, processor = encoder(tiny_checkpoints, *names)
    found = explain_pair(model, processor, pictures[1], f"a {processor.tokenizer.all_special_tokens[0]} b")
    assert len(found.words) == len(found.text_scores)
    assert (found.words[0], found.words[-1]) == ("a", "b")


def test_the_picture_is_what_the_model_sees(tiny_checkpoints, explained, pictures):
    seen = encoder(tiny_checkpoints)[1].image_processor(images=[pictures[1]], return_tensors="np", do_normalize=False)
    levels = np.round(255 * seen["pixel_values"][0].transpose(1, 2, 0))
    assert np.abs(levels - np.asarray(explained.picture, dtype=float)).max() <= 1


def test_score_populations_are_those_of_the_alignment_loss(tiny_checkpoints, pictures):
    model, processor = encoder(tiny_checkpoints)
    texts = ["a", "b c d", "e f", "1 2 3 4 5"]
    pairs = [{"image": image, "text": text} for image, text in zip(pictures, texts, strict=True)]
    found = score_populations(model, processor, pairs)
    with torch.no_grad():
        output = model(**processor(pairs), output_tokens=True)
    image, text = output.image_tokens, output.text_tokens
    masks = output.image_token_mask, output.text_token_mask
    terms = alignment_terms(text[:, 0], image[:, 1:], masks[0], image[:, 0], text[:, 1:], masks[1])
    for name, scores in (("image", terms.image), ("text", terms.text)):
        for values, statistics in zip(found[name], (scores.positive, scores.negative), strict=True):
            assert len(values) == statistics.n
            assert torch.allclose(values.mean(), statistics.mean, atol=1e-6)
            assert torch.allclose(values.std(correction=0), statistics.std, atol=1e-5)
    with pytest.raises(ValueError, match="1 pairs have no scores between different pairs"):
        score_populations(model, processor, pairs[:1])
    with pytest.raises(ValueError, match="every item must have an image and a text"):
        score_populations(model, processor, [*pairs, {"text": "alone"}])


def test_other_models_are_refused(tiny_checkpoints, pictures):
    with pytest.raises(ValueError, match="only a joint encoder has local scores, got BertModel"):
        explain_pair(AutoModel.from_pretrained(tiny_checkpoints["bert"]), None, pictures[0], "a")


def test_the_page_is_complete_and_loads_nothing(explained, tmp_path):
    low, high = (scores.median().item() for scores in (explained.image_scores, explained.text_scores))
    curve = score_histogram([0.3, 0.5], [0.1, 0.2], 0.25)
    page = render_explanation(explained, tmp_path / "out", image_threshold=low, text_threshold=high, curves=[curve])
    text = page.read_text()
    assert re.search(r"\d segments", text)
    assert text.count("<img") == 8  # image, heat, above the threshold, segments, four samples
    assert (text.count("positive: "), text.count("negative: ")) == (3, 9)  # a picture, its caption and a line of each
    assert text.count("<svg") == 1
    assert "default-src 'none'" in text
    assert not re.search(r"<script|(src|href)=\"(?!data:)", text)
    assert f"{explained.similarity:.3f}" in text
    for word, score in zip(explained.words, explained.text_scores, strict=True):
        assert f"{word} <small>{score:.2f}</small>" in text
        assert score > high or f"<s>{word}</s>" in text  # left out
    picture = Image.open(tmp_path / "out/explanation.png")
    assert picture.width > 8 * 280


def test_words_and_names_are_escaped(explained, tmp_path):
    evil = "</small><script>alert(1)</script>"
    words = [evil] * len(explained.words)
    curve = score_histogram([0.3, 0.5], [0.1, 0.2], 0.25, evil)
    text = render_explanation(
        dataclasses.replace(explained, words=words), tmp_path, text_threshold=0.0, curves=[curve]
    ).read_text()
    assert text.count("&lt;script&gt;") > len(words) and "<script" not in text


def test_without_thresholds_only_scores_are_shown(explained, tmp_path):
    text = render_explanation(explained, tmp_path).read_text()
    assert text.count("<img") == 3  # image, heat, segments
    assert "above" not in text
    assert "<svg" not in text


def test_colours_run_from_cold_to_warm():
    assert relative([3.0, 1.0, 2.0]).tolist() == [1.0, 0.0, 0.5]
    assert relative([2.0, 2.0]).tolist() == [0.5, 0.5]
    cold, warm = warmth(0.0), warmth(1.0)
    assert cold[2] > cold[0]
    assert warm[0] > warm[2]
    assert max(warmth(0.5)) - min(warmth(0.5)) < 10


def test_each_patch_is_painted_where_it_is():
    """Two rows, three columns; the picture is enlarged by a whole factor, so patches stay sharp."""
    black = Image.new("RGB", (30, 20))
    drawn = {
        "heat": heat_map(black, [0, 0, 0, 0, 0, 1], (2, 3)),
        "masked": masked_picture(black, [1, 1, 1, 1, 1, 0], (2, 3)),
        "segment": segment_map(black, [0, 0, 0, 0, 0, 1], (2, 3)),
        "pale": heat_map(black, [1, 1, 1, 1, 1, 0], (2, 3), threshold=0.5),
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
    assert min(drawn["pale"].getpixel((419, 279))) > 190


def test_long_lines_of_words_are_wrapped():
    words = [(f"word{number}", (200, 200, 200) if number % 2 else None) for number in range(40)]
    panel = ("a caption longer than the picture", Image.new("RGB", (60, 40)))
    short, long = strip([panel], [("line", words[:2])]), strip([panel], [("line", words)])
    assert short.width == long.width > 100
    assert long.height > short.height + 200


# Charts


def entry(step, threshold=0.2):
    moments = {"positive_mean": 0.4, "positive_std": 0.1, "negative_mean": 0.0, "negative_std": 0.05}
    numbers = {f"{modality}_{name}": value for modality in ("image", "text") for name, value in moments.items()}
    return {"step": step, "loss": 1.0, "image_threshold": threshold, "text_threshold": -threshold} | numbers


LOG = [{"step": 0, "eval_loss": 2.0}, *(entry(step, step / 10) for step in range(1, 6)), {"train_runtime": 3.0}]


def test_a_histogram_is_a_density_with_the_threshold_upright():
    random = np.random.default_rng(0)
    curve = score_histogram(random.normal(0.5, 0.1, 5000), random.normal(0.0, 0.1, 5000), 0.25, "title", bins=30)
    assert list(curve.series) == ["S⁺", "S⁻", "τ = 0.250"]
    for name, mean in (("S⁺", 0.5), ("S⁻", 0.0)):
        x, y = np.array(curve.series[name]).T
        assert len(x) == 30
        assert np.sum(y) * (x[1] - x[0]) == pytest.approx(1.0)
        assert x[y.argmax()] == pytest.approx(mean, abs=0.1)
    assert [point[0] for point in curve.series["τ = 0.250"]] == [0.25, 0.25]
    assert len(score_histogram([0.5], [0.5]).series) == 2


def test_the_course_and_snapshots_of_a_log():
    course = threshold_course(LOG)
    assert course.series["τ"] == [[step, step / 10] for step in range(1, 6)]
    curves = distribution_curves(LOG, snapshots=3)
    steps = [curve.title.rpartition(" ")[2] for curve in curves if "step" in curve.title]
    assert steps == ["1", "3", "5"] * 2
    assert len(distribution_curves(LOG[1:2])) == 4
    for name, mean, std in (("S⁺", 0.4, 0.1), ("S⁻", 0.0, 0.05)):  # the Gaussians have the logged moments
        x, y = np.array(curves[-1].series[name]).T
        weight = y * (x[1] - x[0])
        assert weight.sum() == pytest.approx(1, abs=1e-3)
        assert (weight * x).sum() == pytest.approx(mean, abs=1e-3)
        assert np.sqrt((weight * (x - mean) ** 2).sum()) == pytest.approx(std, abs=1e-3)
    assert "τ = -0.500" in curves[-1].series
    assert last_thresholds(LOG) == {"image": 0.5, "text": -0.5}
    with pytest.raises(ValueError, match="none of 1 log entries has scores of the image"):
        threshold_course([{"step": 1, "loss": 2.0}])


def test_logs_are_read_from_all_that_write_them(tmp_path):
    for name, content in {"recipe.json": {"log": LOG}, "trainer_state.json": {"log_history": LOG}}.items():
        (tmp_path / name).write_text(json.dumps(content))
        assert read_log(tmp_path / name) == LOG
    for text in ("{", "{}", "[]"):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(ValueError, match=r"bad.json: expected JSON with a list of log entries"):
            read_log(tmp_path / "bad.json")
