"""A fixed and a learned temperature."""

import math

import pytest
import torch

from conjoin.losses import Temperature


def test_a_fixed_temperature_stays():
    temperature = Temperature(0.005)
    assert temperature().item() == pytest.approx(0.005)
    assert [p for p in temperature.parameters() if p.requires_grad] == []


@pytest.mark.parametrize(("start", "end"), [(5.0, 1.0), (1e-4, 0.01)])
def test_a_learned_temperature_is_clamped_and_can_come_back(start, end):
    temperature = Temperature(learn=True)
    with torch.no_grad():
        temperature.log_value.fill_(math.log(start))
    value = temperature()
    assert value.item() == pytest.approx(end)
    value.backward()
    assert temperature.log_value.grad.item() == pytest.approx(end)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0.0,), "temperature must be positive, got 0.0"),
        ((-1.0,), "got -1.0"),
        ((float("nan"),), "got nan"),
        ((2.0, True), r"a learned temperature starts within \[0.01, 1.0\], got 2.0"),
    ],
)
def test_temperature_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        Temperature(*arguments)
