"""The threshold of two Gaussians: equal densities, continuity, and where there is none."""

import math

import pytest
import torch
from torch.distributions import Normal

from conjoin.losses import qda_threshold


def random_populations(count=2000):
    generator = torch.Generator().manual_seed(0)
    low, gap, high_std, low_std = torch.rand(4, count, generator=generator, dtype=torch.float64)
    return low + gap, 0.01 + high_std, low, 0.01 + low_std


def test_densities_are_equal_between_the_means():
    high, high_std, low, low_std = random_populations()
    found = qda_threshold(high, high_std, low, low_std)
    at = found.threshold
    assert ((low <= at) & (at <= high)).all()
    gaps = Normal(high, high_std).log_prob(at) - Normal(low, low_std).log_prob(at)
    assert gaps[~found.fallback].abs().max() < 1e-8
    assert torch.equal(at[found.fallback], ((high + low) / 2)[found.fallback])
    assert 200 < found.fallback.sum() < 1800  # both happen


def test_it_falls_back_exactly_where_one_density_is_above_the_other():
    high, high_std, low, low_std = random_populations()
    fallback = qda_threshold(high, high_std, low, low_std).fallback
    first, second = Normal(high, high_std), Normal(low, low_std)
    crosses = (first.log_prob(high) > second.log_prob(high)) & (first.log_prob(low) < second.log_prob(low))
    assert torch.equal(fallback, ~crosses)


def test_the_printed_sign_would_give_another_root():
    """Eq. 7 to 10 at mean 0.4, std 0.1 against mean 0.1, std 0.2."""
    a, b, c = 0.01 - 0.04, 2 * (0.4 * 0.04 - 0.1 * 0.01), (0.1 * 0.1) ** 2 - (0.2 * 0.4) ** 2 + 8e-4 * math.log(2)
    roots = [(-b + sign * math.sqrt(b * b - 4 * a * c)) / (2 * a) for sign in (1, -1)]
    (between,) = (root for root in roots if 0.1 < root < 0.4)
    found = qda_threshold(0.4, 0.1, 0.1, 0.2)
    assert found.threshold.item() == pytest.approx(between, abs=1e-12)
    assert not found.fallback
    assert not any(0.1 < -root < 0.4 for root in roots)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_near_equal_deviations_are_continuous(dtype):
    ratios = torch.cat([1 + torch.logspace(-18, -2, 400), 1 - torch.logspace(-18, -2, 400), torch.ones(1)]).to(dtype)
    mean, std = torch.tensor(0.3, dtype=dtype), torch.tensor(0.07, dtype=dtype)
    found = qda_threshold(mean, std * ratios, torch.tensor(0.1, dtype=dtype), std)
    assert not found.fallback.any()
    assert (found.threshold - 0.2).abs().max() < 0.07**2 / 0.2 * 0.011 + 1e-3
    slopes = (found.threshold - 0.2).abs() / (ratios - 1).abs().clamp(min=torch.finfo(dtype).eps)
    assert slopes.max() < 1  # no jump anywhere: the threshold moves with the ratio
    assert found.threshold[-1].item() == pytest.approx(0.2, abs=1e-7)


def test_shift_and_scale():
    high, high_std, low, low_std = random_populations(200)
    plain = qda_threshold(high, high_std, low, low_std)
    moved = qda_threshold(3 + 0.01 * high, 0.01 * high_std, 3 + 0.01 * low, 0.01 * low_std)
    torch.testing.assert_close(moved.threshold, 3 + 0.01 * plain.threshold)


@pytest.mark.parametrize(
    ("populations", "midpoint"),
    [
        ((0.1, 0.1, 0.3, 0.1), 0.2),  # the wrong way round
        ((0.3, 0.1, 0.3, 0.2), 0.3),  # no gap
        ((0.3, 0.0, 0.1, 0.2), 0.2),  # no spread
        ((0.3, 0.2, 0.1, 0.0), 0.2),
        ((0.3, 0.0, 0.1, 0.0), 0.2),
        ((0.0, 0.0, 0.0, 0.0), 0.0),
        ((0.31, 0.5, 0.3, 0.01), 0.305),  # a narrow one on top of a wide one
    ],
)
def test_fallback_is_the_midpoint(populations, midpoint):
    for values in (populations, [torch.tensor(value) for value in populations]):
        found = qda_threshold(*values)
        assert found.fallback and found.threshold.item() == pytest.approx(midpoint, abs=1e-7)


def test_no_gradient():
    mean = torch.tensor(0.4, requires_grad=True)
    assert not qda_threshold(mean, 0.1, 0.2, 0.1).threshold.requires_grad
