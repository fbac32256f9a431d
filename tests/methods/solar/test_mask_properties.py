"""What holds of every mask: its range, a token in every row, and the same masks for the same rows in any order."""

import pytest
import torch

pytest.importorskip("hypothesis")

from hypothesis import given, strategies as st

from conjoin.methods.solar.masking import SCHEDULES, Modality, evolutionary_mask, mask_schedule, window_scores

SEEDS = st.integers(0, 99)
SHARES = st.floats(0, 1)


@given(st.integers(1, 5), st.integers(1, 7), st.floats(-1.5, 1.5), SHARES, SEEDS)
def test_the_evolutionary_mask(rows, tokens, threshold, rho, seed):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(-2, 3, (rows, tokens), generator=generator) / 2  # with ties
    exists = torch.rand(rows, tokens, generator=generator) < 0.6
    exists[:, 0] |= ~exists.any(1)
    mask = evolutionary_mask(scores, exists, threshold, rho)
    assert ((mask == 1) | (mask == torch.tensor(rho, dtype=mask.dtype))).all()
    hard = evolutionary_mask(scores, exists, threshold, 0.0)
    assert ((hard > 0) & exists).any(1).all()  # a token that exists in every row
    torch.testing.assert_close(mask, rho + (1 - rho) * hard)
    order = torch.randperm(rows, generator=generator)
    torch.testing.assert_close(evolutionary_mask(scores[order], exists[order], threshold, rho), mask[order])
    above = evolutionary_mask(scores, exists, threshold - 0.5, 0.0)
    kept = hard.bool() & (scores > threshold)
    assert above.bool()[kept].all()  # a lower threshold keeps more


@given(st.sampled_from(SCHEDULES), SHARES, SHARES, st.lists(SHARES, min_size=2, max_size=5).map(sorted))
def test_the_schedule_falls_from_one_to_zero(schedule, start, end, points):
    start, end = sorted((start, end))
    values = [mask_schedule(point, schedule, end, start) for point in points]
    assert all(0 <= value <= 1 for value in values)
    assert values == sorted(values, reverse=True)
    assert mask_schedule(1.0, schedule, end, start) == 0
    assert mask_schedule(0.0, schedule, end, start) == (0 if end == 0 else 1)


def mean_of_tokens(tokens, weights):
    return (tokens * weights[..., None]).sum(1) / weights.sum(1, keepdim=True)


@given(st.integers(2, 5), st.integers(1, 5), st.integers(1, 5), SEEDS)
def test_window_scores(rows, side, words, seed):
    generator = torch.Generator().manual_seed(seed)
    patches, texts = (
        torch.randn(rows, side**2, 6, generator=generator),
        torch.randn(rows, words, 6, generator=generator),
    )
    exists = torch.arange(words) < torch.randint(1, words + 1, (rows, 1), generator=generator)
    images = Modality(patches, torch.ones(rows, side**2, dtype=torch.bool), patches.mean(1))
    sentences = Modality(texts, exists, mean_of_tokens(texts, exists.float()))
    found = window_scores(mean_of_tokens, images, sentences)
    order = torch.randperm(rows, generator=generator)
    moved = window_scores(mean_of_tokens, *(Modality(*(part[order] for part in each)) for each in (images, sentences)))
    for local, other in zip(found, moved, strict=True):
        assert (local.scores.abs() <= 2).all()  # a cosine less a mean of cosines
        torch.testing.assert_close(other.scores, local.scores[order], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(other.positive.mean, local.positive.mean, rtol=1e-4, atol=1e-5)
    assert (found[1].scores[~exists] == 0).all()
