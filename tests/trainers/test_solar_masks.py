"""Scores, masks, segments and constructed samples: their closed forms, naive loops, and what holds of every input."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from scipy.cluster.hierarchy import fcluster, linkage

from conjoin.losses import LocalScores, ScoreStatistics
from conjoin.trainers import solar_masks
from conjoin.trainers.solar_masks import (
    ROLES,
    PairTokens,
    construct_samples,
    evolutionary_mask,
    mask_pixels,
    mask_schedule,
    segment_patches,
    separation,
    window_scores,
)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_rho_goes_from_one_to_zero(schedule):
    values = [mask_schedule(step / 100, schedule) for step in range(101)]
    assert values[0] == 1 and values[25] == pytest.approx(0.5)
    assert all(first >= second for first, second in pairwise(values))
    assert values[49] > 0 and values[50:] == [0.0] * 51
    assert mask_schedule(0.0, schedule, 0.0) == 0  # hard from the start
    assert mask_schedule(0.5, schedule, 1.0) == pytest.approx(0.5) and mask_schedule(1.0, schedule, 1.0) == 0
    late = [mask_schedule(progress, schedule, 0.5, 0.3) for progress in (0.0, 0.3, 0.4, 0.5, 1.0)]
    assert late == pytest.approx([1.0, 1.0, 0.5, 0.0, 0.0])


def test_the_mask_lies_between_ones_and_hard():
    scores = torch.tensor([[0.1, 0.3, 0.2], [0.5, -1.0, 0.21]])
    hard = [[0.0, 1.0, 0.0], [1.0, 0.0, 1.0]]
    exists = torch.ones(2, 3, dtype=torch.bool)
    assert evolutionary_mask(scores, exists, 0.2, 0.0).tolist() == hard
    assert evolutionary_mask(scores, exists, torch.tensor(0.2), 1.0).tolist() == [[1.0] * 3] * 2
    torch.testing.assert_close(evolutionary_mask(scores, exists, 0.2, 0.25), 0.25 + 0.75 * torch.tensor(hard))


def test_a_row_without_a_shared_token_keeps_its_best_one():
    scores = torch.tensor([[0.1, 0.3, 0.9], [0.5, 0.6, 0.7]])
    exists = torch.tensor([[True, True, False], [True, True, True]])
    assert evolutionary_mask(scores, exists, 0.4, 0.0).tolist() == [[0.0, 1.0, 0.0], [1.0, 1.0, 1.0]]
    assert evolutionary_mask(scores, exists, 0.4, 0.5).tolist() == [[0.5, 1.0, 0.5], [1.0, 1.0, 1.0]]


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


def test_pixels_of_masked_patches_are_the_mean():
    pixels = torch.rand(2, 3, 7, 4) + 1  # a row of pixels is left over
    weights = torch.tensor([[1, 0, 1, 1, 0, 1], [1.0] * 6])
    masked = mask_pixels(pixels, weights, 2)
    assert masked[0, :, 0:2, 2:4].abs().max() == 0 and masked[0, :, 4:6, 0:2].abs().max() == 0
    assert (masked == 0).sum() == 2 * 3 * 4
    assert torch.equal(masked[1], pixels[1]) and torch.equal(masked[masked != 0], pixels[masked != 0])


def images(count=24, patches=30, width=16):
    """A few regions each, with noise from none to much."""
    generator = torch.Generator().manual_seed(0)
    regions = torch.randn(count, 10, width, generator=generator, dtype=torch.float64)
    numbers = 1 + torch.arange(count)[:, None] % 10
    owners = (torch.rand(count, patches, generator=generator) * numbers).long()
    noise = torch.randn(count, patches, width, generator=generator, dtype=torch.float64)
    return (
        regions.gather(1, owners[..., None].expand(-1, -1, width)) + torch.linspace(0, 2, count)[:, None, None] * noise
    )


def algorithm_1(image, threshold=0.45):
    """Its labels, and which ways the cut moved."""
    moves = []
    for _ in range(5):
        labels = fcluster(linkage(image.numpy(), "average", metric="cosine"), threshold, "distance")
        sizes = torch.bincount(torch.from_numpy(labels))[1:]
        if sizes.max() / len(image) > 0.87:
            threshold -= 0.05
            moves.append("down")
        elif len(sizes) > 5:
            threshold += 0.05
            moves.append("up")
        else:
            break
    return torch.from_numpy(labels).long(), moves


def assert_same_partition(found, expected):
    assert torch.equal(found[:, None] == found, expected[:, None] == expected)
    assert found.unique().tolist() == list(range(int(found.max()) + 1))


@pytest.mark.parametrize("block", [1, 7, 64])
def test_equals_clustering_anew_for_every_cut(block, monkeypatch):
    monkeypatch.setattr(solar_masks, "IMAGES_PER_BLOCK", block)
    features, seen = images(), []
    for found, image in zip(segment_patches(features), features, strict=True):
        expected, moves = algorithm_1(image)
        assert_same_partition(found, expected)
        seen.append(tuple(moves))
    assert () in seen and ("up",) * 5 in seen and any("down" in moves for moves in seen)
    assert any(0 < len(moves) < 5 for moves in seen)


def test_regions_are_found_whatever_their_norms():
    regions = torch.eye(4)[torch.tensor([[0, 1, 2, 3, 0, 1], [2, 2, 1, 1, 2, 0]])]
    labels = segment_patches((regions * torch.rand(2, 6, 1) * 9).bfloat16())
    assert labels.dtype == torch.long
    for found, region in zip(labels, regions.argmax(2), strict=True):
        assert_same_partition(found, region)


def test_degenerate_images():
    blank = segment_patches(torch.ones(2, 9, 4))
    assert blank.tolist() == [[0] * 9] * 2  # one segment at any cut
    zero = segment_patches(torch.zeros(1, 3, 4))
    assert sorted(zero[0].tolist()) == [0, 1, 2]
    assert segment_patches(torch.rand(3, 1, 4)).tolist() == [[0]] * 3
    assert segment_patches(torch.rand(0, 5, 4)).shape == (0, 5)
    assert_same_partition(segment_patches(torch.tensor([[[1.0, 0], [1, 0]]]))[0], torch.zeros(2))
    with pytest.raises(ValueError, match="must contain only finite values"):
        segment_patches(torch.full((1, 4, 3), float("nan")))


def test_no_gradient_and_no_effect_of_autocast():
    features = images().float().requires_grad_()
    plain = segment_patches(features)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(segment_patches(features), plain)


def mean_of_tokens(tokens, weights):
    """Stands in for E_VL."""
    return (tokens * weights[..., None]).sum(1) / weights.sum(1, keepdim=True)


def pair(patches, words, mask):
    """Tokens whose global ones are zero."""
    tokens = (F.pad(local, (0, 0, 1, 0)) for local in (patches, words))
    return PairTokens(*tokens, torch.ones(patches.shape[:2], dtype=torch.bool), mask)


def things(seed=0):
    """Eight pictures of 8 x 8 patches with two things, and texts that name one of them and another."""
    generator = torch.Generator().manual_seed(seed)
    things = 2 * torch.eye(24, 24)
    patches, words = (0.1 * torch.randn(8, count, 24, generator=generator) for count in (64, 6))
    mask = torch.ones(8, 6, dtype=torch.bool)
    mask[3, 4:] = False
    for row in range(8):
        grid = patches[row].view(8, 8, 24)
        grid[:4, :4] += things[3 * row]  # shared
        grid[4:, 4:] += things[3 * row + 1]  # of the picture alone
        words[row, :2] += things[3 * row]
        words[row, 2:4] += things[3 * row + 2]  # of the text alone
    return pair(patches, words, mask)


def test_scores_are_means_over_the_windows_around_a_token():
    tokens = things(1)
    mask, local = tokens.text_mask, tokens.text[:, 1:]
    patches, words = window_scores(mean_of_tokens, tokens)
    images, texts = (F.normalize(mean_of_tokens(x[:, 1:], m.float()), dim=-1) for x, m in
                     ((tokens.image, tokens.image_mask), (tokens.text, mask)))  # fmt: skip
    found = []
    for top in (0, 3, 4):
        for left in (0, 3, 4):
            if top <= 3 < top + 4 and left <= 5 < left + 4:  # the windows that contain patch (3, 5)
                window = tokens.image[:, 1:].view(8, 8, 8, 24)[:, top : top + 4, left : left + 4].reshape(8, 16, 24)
                cosines = F.normalize(window.mean(1), dim=-1) @ texts.T
                found.append(cosines.diagonal() - cosines.mean(1))
    torch.testing.assert_close(patches.scores[:, 3 * 8 + 5], torch.stack(found).mean(0))
    windows = local[3, 2:4].mean(0), local[3, 3]  # the next place is padding
    rows = [F.normalize(window, dim=-1) @ images.T for window in windows]
    torch.testing.assert_close(words.scores[3, 3], torch.stack([row[3] - row.mean() for row in rows]).mean())
    exists = mask.sum()
    assert words.positive.n == exists and words.negative.n == 7 * exists
    torch.testing.assert_close(words.positive.mean, words.scores[mask].mean())
    torch.testing.assert_close(words.positive.std, words.scores[mask].std(correction=0))
    total = patches.positive.mean * patches.positive.n + patches.negative.mean * patches.negative.n
    assert abs(float(total)) < 1e-3


def test_separation_is_the_chance_that_a_positive_score_is_higher():
    torch.manual_seed(0)
    high, low = 0.3 + 0.2 * torch.randn(4000), 0.1 + 0.3 * torch.randn(4000)
    populations = [ScoreStatistics(torch.tensor(4000), x.mean(), (x - x.mean()).square().sum()) for x in (high, low)]
    found = separation(LocalScores(high[None], *populations))
    assert found.item() == pytest.approx((high[:, None] > low).float().mean().item(), abs=0.01)
    assert separation(LocalScores(high[None], populations[0], populations[0])).item() == pytest.approx(0.5)
