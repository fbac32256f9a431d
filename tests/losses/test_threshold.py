"""The threshold of two Gaussians: equal densities, continuity, and where there is none."""

import pytest
import torch
from torch.distributions import Normal

from conjoin.losses import qda_threshold


def populations(count=2000):
    generator = torch.Generator().manual_seed(0)
    low, gap, high_std, low_std = torch.rand(4, count, generator=generator, dtype=torch.float64)
    return low + gap, 0.01 + high_std, low, 0.01 + low_std


def test_densities_are_equal_between_the_means_or_it_is_the_midpoint():
    high, high_std, low, low_std = populations()
    at, fallback = qda_threshold(high, high_std, low, low_std)
    first, second = Normal(high, high_std), Normal(low, low_std)
    assert ((low <= at) & (at <= high)).all()
    assert (first.log_prob(at) - second.log_prob(at))[~fallback].abs().max() < 1e-8
    assert torch.equal(at[fallback], ((high + low) / 2)[fallback])
    crosses = (first.log_prob(high) > second.log_prob(high)) & (first.log_prob(low) < second.log_prob(low))
    assert torch.equal(fallback, ~crosses) and 200 < fallback.sum() < 1800  # both happen
    moved = qda_threshold(3 + 0.01 * high, 0.01 * high_std, 3 + 0.01 * low, 0.01 * low_std)
    torch.testing.assert_close(moved.threshold, 3 + 0.01 * at)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_near_equal_deviations_are_continuous(dtype):
    ratios = torch.cat([1 + torch.logspace(-18, -2, 400), 1 - torch.logspace(-18, -2, 400), torch.ones(1)]).to(dtype)
    mean, std = torch.tensor(0.3, dtype=dtype), torch.tensor(0.07, dtype=dtype)
    found = qda_threshold(mean, std * ratios, torch.tensor(0.1, dtype=dtype), std)
    slopes = (found.threshold - 0.2).abs() / (ratios - 1).abs().clamp(min=torch.finfo(dtype).eps)
    assert not found.fallback.any() and slopes.max() < 1  # no jump anywhere: the threshold moves with the ratio
    assert found.threshold[-1].item() == pytest.approx(0.2, abs=1e-7)


def test_fallback_is_the_midpoint():
    for midpoint, *values in (
        (0.2, 0.1, 0.1, 0.3, 0.1),  # the wrong way round
        (0.3, 0.3, 0.1, 0.3, 0.2),  # no gap
        (0.2, 0.3, 0.0, 0.1, 0.2),  # no spread
        (0.2, 0.3, 0.2, 0.1, 0.0),
        (0.305, 0.31, 0.5, 0.3, 0.01),  # a narrow one on top of a wide one
    ):
        for given in (values, map(torch.tensor, values)):
            found = qda_threshold(*given)
            assert found.fallback and found.threshold.item() == pytest.approx(midpoint, abs=1e-7)
