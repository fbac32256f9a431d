"""A fixed and a learned temperature."""

import math

import pytest

from conjoin.losses import Temperature


def test_a_fixed_temperature_stays():
    temperature = Temperature(0.005)
    assert temperature().item() == pytest.approx(0.005)
    assert [p for p in temperature.parameters() if p.requires_grad] == []


@pytest.mark.parametrize(("start", "end"), [(5.0, 1.0), (1e-4, 0.01)])
def test_a_learned_temperature_is_clamped_and_can_come_back(start, end):
    temperature = Temperature(learn=True)
    temperature.log_value.data.fill_(math.log(start))
    value = temperature()
    assert value.item() == pytest.approx(end)
    value.backward()
    assert temperature.log_value.grad.item() == pytest.approx(end)


def test_temperature_refuses():
    for value in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match=f"temperature must be positive, got {value}"):
            Temperature(value)
    with pytest.raises(ValueError, match=r"a learned temperature starts within \[0.01, 1.0\], got 2.0"):
        Temperature(2.0, True)
