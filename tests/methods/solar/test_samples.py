"""What is masked in the constructed samples, how often, and what cannot be built."""

import pytest
import torch

from conjoin.losses import multi_positive
from conjoin.methods.solar.masking import ROLES, construct_samples, mask_pixels

IMAGE_SCORES = torch.tensor([0.9, 0.9, 0.7, 0.1, 0.2, 0.5])
SEGMENTS = torch.tensor([0, 0, 3, 1, 1, 2])  # means 0.9, 0.15, 0.5 (the threshold: neither) and 0.7
TEXT_SCORES = torch.tensor([9.0, 0.8, 0.6, 0.3, 0.9, 0.4, 9.0])
TEXT_MASK = torch.tensor([0, 1, 1, 1, 1, 0, 0]).bool()
IMAGE_IN, IMAGE_OUT = torch.tensor([1, 1, 1, 0, 0, 0]).bool(), torch.tensor([0, 0, 0, 1, 1, 0]).bool()
TEXT_IN, TEXT_OUT = torch.tensor([0, 1, 1, 0, 1, 0, 0]).bool(), torch.tensor([0, 0, 0, 1, 0, 0, 0]).bool()


def construct(count=400, seed=0, image_scores=IMAGE_SCORES, text_scores=TEXT_SCORES, segments=SEGMENTS, **masks):
    image_mask = masks.get("image_mask", torch.ones(6).bool()).expand(count, -1)
    text_mask = masks.get("text_mask", TEXT_MASK).expand(count, -1)
    return construct_samples(
        image_scores.expand(count, -1),
        image_mask,
        0.5,
        text_scores.expand(count, -1),
        text_mask,
        torch.tensor(0.5),
        None if segments is None else segments.expand(count, -1),
        torch.Generator().manual_seed(seed),
    )


def dropped(samples):
    """`{role: (dropped patches, dropped tokens)}`."""
    return {
        role: (image == 0, text == 0)
        for role, image, text in zip(ROLES, samples.image_weights, samples.text_weights, strict=True)
    }


def test_each_role_masks_its_kind_only():
    samples = construct()
    assert samples.valid.all() and samples.valid.shape == (4, 400)
    assert samples.image_weights.shape == (4, 400, 6) and samples.text_weights.shape == (4, 400, 7)
    assert set(samples.image_weights.unique().tolist()) == {0.0, 1.0}
    roles = dropped(samples)
    image, text = roles["positive"]
    assert (image.any(1) ^ text.any(1)).all()  # one modality, never none
    assert 0.4 < image.any(1).float().mean() < 0.6
    assert not image[:, ~IMAGE_IN].any() and not text[:, ~TEXT_IN].any()
    image, text = roles["image_difference"]
    assert image[:, IMAGE_OUT].all() and not image[:, ~IMAGE_OUT].any() and not text.any()
    image, text = roles["text_difference"]
    assert text[:, TEXT_OUT].all() and not text[:, ~TEXT_OUT].any() and not image.any()
    image, text = roles["intersection"]
    assert image.any(1).all() and text.any(1).all()
    assert not image[:, ~IMAGE_IN].any() and not text[:, ~TEXT_IN].any()


def test_segments_go_whole():
    image, _ = dropped(construct())["intersection"]
    assert torch.equal(image[:, 0], image[:, 1])
    kinds = {tuple(row) for row in image.long()[:, [0, 2]].tolist()}
    assert kinds == {(0, 1), (1, 0), (1, 1)}  # one or several, at least one
    single, _ = dropped(construct(segments=None))["intersection"]
    assert not torch.equal(single[:, 0], single[:, 1])


def test_the_share_dropped_spans_the_full_range():
    """With a probability from U(0, 1), every number of dropped tokens is equally likely, and none counts as one."""
    scores, mask = torch.ones(9), torch.ones(9).bool()
    _, text = dropped(construct(20_000, text_scores=scores, text_mask=mask))["intersection"]
    shares = text.sum(1).bincount(minlength=10) / 20_000
    expected = torch.tensor([0, 0.2, *[0.1] * 8])
    assert (shares - expected).abs().max() < 0.01
    assert (text.float().mean(0) - text.float().mean()).abs().max() < 0.015  # no token is favoured


@pytest.mark.parametrize("missing", ["image", "text", "both"])
def test_without_an_intersection(missing):
    image_scores = IMAGE_SCORES if missing == "text" else IMAGE_SCORES - 0.6
    text_scores = TEXT_SCORES if missing == "image" else TEXT_SCORES - 0.5
    samples = construct(50, image_scores=image_scores, text_scores=text_scores)
    image, text = dropped(samples)["positive"]
    assert image.any(1).tolist() == [missing == "text"] * 50
    assert text.any(1).tolist() == [missing == "image"] * 50
    assert samples.valid[0].tolist() == [missing != "both"] * 50
    assert not samples.valid[3].any()
    assert not any(kind.any() for kind in dropped(samples)["intersection"])
    assert samples.valid[1:3].all()


def test_without_a_difference():
    samples = construct(5, image_scores=torch.ones(6), text_scores=torch.ones(7))
    assert samples.valid.tolist() == [[True] * 5, [False] * 5, [False] * 5, [True] * 5]
    assert samples.image_weights[1:3].all() and samples.text_weights[1:3].all()


def test_a_missing_modality_is_never_masked():
    nothing = torch.zeros(6).bool()
    samples = construct(5, image_mask=nothing, image_scores=torch.full((6,), float("nan")))
    assert samples.image_weights.all() and samples.valid.tolist() == [[True] * 5, [False] * 5, [True] * 5, [False] * 5]
    samples = construct(5, image_mask=nothing, text_mask=torch.zeros(7).bool())
    assert not samples.valid.any() and samples.text_weights.all()


def test_padding_does_not_enter_a_segments_mean():
    scores = torch.tensor([0.9, -50.0, 0.7, 0.1, 0.2, 0.5])
    mask = torch.tensor([1, 0, 1, 1, 1, 1]).bool()
    image, _ = dropped(construct(100, image_scores=scores, image_mask=mask))["intersection"]
    assert image[:, 0].any() and not image[:, 1].any()


def test_the_generator_decides():
    first, again, other = construct(seed=1), construct(seed=1), construct(seed=2)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first.text_weights, other.text_weights)


def test_valid_masks_the_contrastive_loss():
    samples = construct(4)
    samples.valid[0, 1] = samples.valid[2, 3] = False
    generator = torch.Generator().manual_seed(0)
    anchors, made = torch.randn(4, 8, generator=generator), torch.randn(4, 4, 8, generator=generator)
    made[0, 1], made[2, 3] = float("nan"), 0.0
    positives, negatives = made[:1].transpose(0, 1), made[1:].transpose(0, 1)
    assert multi_positive(anchors, positives, negatives, 0.1, samples.valid[:1].T, samples.valid[1:].T).isfinite()


def test_pixels_of_masked_patches_are_the_mean():
    pixels = torch.rand(2, 3, 7, 4) + 1  # a row of pixels is left over
    weights = torch.tensor([[1, 0, 1, 1, 0, 1], [1.0] * 6])
    masked = mask_pixels(pixels, weights, 2)
    assert masked[0, :, 0:2, 2:4].abs().max() == 0 and masked[0, :, 4:6, 0:2].abs().max() == 0
    assert (masked == 0).sum() == 2 * 3 * 4
    assert torch.equal(masked[1], pixels[1]) and torch.equal(masked[masked != 0], pixels[masked != 0])
    with pytest.raises(ValueError, match=r"image_weights has shape \(2, 5\), expected \(2, 6\)"):
        mask_pixels(pixels, weights[:, :5], 2)


def test_errors_name_what_is_wrong():
    ones = torch.ones
    with pytest.raises(ValueError, match=r"shapes \(2, 3\) and \(3, 3\)"):
        construct_samples(ones(2, 3), ones(2, 3), 0.5, ones(3, 3), ones(3, 3), 0.5)
    with pytest.raises(ValueError, match=r"text_mask has shape \(2, 4\), expected \(2, 3\)"):
        construct_samples(ones(2, 3), ones(2, 3), 0.5, ones(2, 3), ones(2, 4), 0.5)
    with pytest.raises(ValueError, match=r"segments has shape \(2, 4\), expected \(2, 3\)"):
        construct_samples(ones(2, 3), ones(2, 3), 0.5, ones(2, 3), ones(2, 3), 0.5, ones(2, 4).long())
