import math

import pytest
import torch
from naive_losses import leaf

from conjoin.losses import ContrastiveLoss, GclLoss, Temperature, gcl, symmetric_info_nce


def views(count=4):
    return {name: leaf(count, 6, seed=seed) for seed, name in enumerate(("image", "text", "fused"))}


def test_contrastive_loss_is_symmetric_info_nce_and_trains_its_temperature():
    x = views()
    loss = ContrastiveLoss(temperature=0.2)
    terms = loss(x["image"], x["text"])
    assert set(terms) == {"contrastive_loss", "temperature"}
    assert terms["contrastive_loss"].item() == pytest.approx(symmetric_info_nce(x["image"], x["text"], 0.2).item())
    assert terms["temperature"].item() == pytest.approx(0.2) and not terms["temperature"].requires_grad
    terms["contrastive_loss"].backward()
    assert loss.temperature.log_value.grad.abs() > 1e-3


def test_gcl_loss_passes_its_flags_on():
    x = views()
    pairs = (("image", "text"), ("fused", "text"))
    terms = GclLoss(0.2, False, False, False, True, pairs)(**x)
    assert set(terms) == {"gcl_loss", "temperature"}
    expected = gcl(*x.values(), 0.2, False, False, True, pairs=pairs)
    assert terms["gcl_loss"].item() == pytest.approx(expected.item(), abs=1e-6)
    assert expected.item() != pytest.approx(gcl(*x.values(), 0.2).item(), abs=1e-3)


def test_gcl_loss_refuses_unknown_pairs():
    with pytest.raises(ValueError, match="expected some of"):
        GclLoss(pairs=(("image", "sound"),))


def test_masked_negatives_are_counted():
    x = views()
    ids = torch.tensor([4, 9, 4, 4])  # three rows lose two negatives each
    assert ContrastiveLoss()(x["image"], x["text"], ids)["masked_negatives"].item() == 6 / 4
    assert GclLoss()(**x, ids=ids)["masked_negatives"].item() == 6 / 4
    everything = ContrastiveLoss(false_negative_margin=-2.0)(x["image"], x["text"])
    assert everything["masked_negatives"].item() == 3
    assert everything["contrastive_loss"].item() == pytest.approx(0.0)
    both = ContrastiveLoss(false_negative_margin=-2.0)(x["image"], x["text"], ids)
    assert both["masked_negatives"].item() == 3  # by id or by margin, not counted twice
    nothing = ContrastiveLoss(false_negative_margin=2.0)(x["image"], x["text"])
    assert nothing["masked_negatives"].item() == 0


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
