"""Every ablation switch of SOLAR that docs/recipes.md lists does to the loss what its row says."""

import re
from pathlib import Path

import pytest
import torch
import yaml
from tiny_solar import stage1_objective, stage2_objective

from conjoin.losses import multi_positive
from conjoin.training import load_recipe

ROOT = Path(__file__).parents[3]
TERMS = ("itc_loss", "gla_loss", "gd_loss", "ld_loss")
SECTION = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8").split("## SOLAR")[1].split("\n## ")[0]
ROWS = re.findall(r"^\| (Table \d+) \| (.+?) \| ([12]) \| `(.+?)` \|", SECTION, re.MULTILINE)
SWITCHES = {(table, row): yaml.safe_load("{" + keys + "}") for table, row, _, keys in ROWS}


def switch(table, row):
    return SWITCHES[f"Table {table}", row]


def test_the_table_names_every_ablation_and_its_keys_exist():
    assert len(ROWS) == len(SWITCHES) == 16
    for table, row, stage, _ in ROWS:
        overrides = {f"training.{key}": str(value).lower() for key, value in SWITCHES[table, row].items()}
        recipe = load_recipe(ROOT / f"training_args/solar/stage{stage}_clip.yaml", overrides)
        for key, value in SWITCHES[table, row].items():
            assert vars(recipe.training)[key] == value


def stage_1_terms(checkpoints, progress=1.0, **arguments):
    """The terms in evaluation mode, with projection heads that are not the identity."""
    objective, batch = stage1_objective(checkpoints, **arguments)
    if objective.heads is not None:
        torch.manual_seed(1)
        for parameter in objective.heads.parameters():
            torch.nn.init.normal_(parameter)
    objective.progress = progress
    with torch.no_grad():
        return {name: term.item() for name, term in objective(**batch).items()}


@pytest.mark.parametrize(
    ("row", "kept"),
    [
        ("ITC only", {"itc_loss"}),
        ("w/o ITC", {"gla_loss", "gd_loss", "ld_loss"}),
        ("w/o GLA", {"itc_loss", "gd_loss", "ld_loss"}),
        ("w/o GD", {"itc_loss", "gla_loss", "ld_loss"}),
        ("w/o LD", {"itc_loss", "gla_loss", "gd_loss"}),
    ],
)
def test_a_weight_of_zero_takes_its_term_out_and_changes_no_other(tiny_checkpoints, row, kept):
    arguments = switch(2, row)
    whole = stage_1_terms(tiny_checkpoints, mask=arguments.get("mask", "evolutionary"))
    left = stage_1_terms(tiny_checkpoints, **arguments)
    assert {name for name in left if name.endswith("_loss")} == kept
    assert all(whole[name] > 1e-4 for name in TERMS)
    assert {name: left[name] for name in kept} == pytest.approx({name: whole[name] for name in kept}, rel=1e-5)


def test_mask_switches_change_the_contrastive_term_alone(tiny_checkpoints):
    start, end = (stage_1_terms(tiny_checkpoints, progress) for progress in (0.0, 1.0))
    hard = [stage_1_terms(tiny_checkpoints, progress, **switch(2, "hard mask")) for progress in (0.0, 1.0)]
    never = [stage_1_terms(tiny_checkpoints, progress, **switch(2, "w/o M")) for progress in (0.0, 1.0)]
    assert start["itc_loss"] != pytest.approx(end["itc_loss"], rel=1e-3)
    for found, expected in ((hard[0], end), (hard[1], end), (never[0], start), (never[1], start)):
        assert {name: found[name] for name in TERMS} == pytest.approx({name: expected[name] for name in TERMS})
    linear, cosine = (
        stage_1_terms(tiny_checkpoints, 0.1, **arguments) for arguments in ({}, switch(10, "cosine decay"))
    )
    assert (linear["rho"], cosine["rho"]) == pytest.approx((0.8, 0.9045), abs=1e-4)
    assert linear["itc_loss"] != cosine["itc_loss"]


def test_without_heads_the_contrastive_term_sees_the_encoder_itself(tiny_checkpoints):
    objective, batch = stage1_objective(tiny_checkpoints)
    bare, _ = stage1_objective(tiny_checkpoints, **switch(2, "w/o W"))
    bare.encoder.load_state_dict(objective.encoder.state_dict())
    objective.progress = bare.progress = 1.0
    assert bare.heads is None
    assert bare(**batch)["itc_loss"].item() == objective(**batch)["itc_loss"].item()  # as new heads are the identity
    with torch.no_grad():
        objective.heads.image.weight.neg_()
    assert bare(**batch)["itc_loss"].item() != pytest.approx(objective(**batch)["itc_loss"].item())


def stage_2(checkpoints, folder, **arguments):
    """The embedded samples, their masks, and the loss."""
    objective, batch = stage2_objective(checkpoints, folder, learn_temperature=False, **arguments)
    ids = batch.pop("ids")
    torch.manual_seed(2)
    with torch.no_grad():
        found = objective.embed(**batch)
        samples, mask = objective._samples(found, batch)
        found |= {"positives": samples[:, :1], "negatives": samples[:, 1:], "mask": mask}
        return found, objective.contrast(found, ids, batch)["solar_loss"].item()


def loss_of(found, negatives):
    return multi_positive(
        found["anchors"], found["positives"], found["negatives"][:, negatives], 0.07,
        found["mask"][:, :1], found["mask"][:, 1:][:, negatives],
    ).item()  # fmt: skip


@pytest.mark.parametrize(
    ("table", "row", "kept"), [(3, "w/o CN", slice(3, 5)), (6, "w/o hard negatives", slice(0, 3))]
)
def test_switches_that_take_negatives_out(tiny_checkpoints, tmp_path, table, row, kept):
    """Of three constructed and two mined ones; everything else stays as it was."""
    whole, loss = stage_2(tiny_checkpoints, tmp_path)
    left, smaller = stage_2(tiny_checkpoints, tmp_path, **switch(table, row))
    assert whole["negatives"].shape[1] == 5
    assert torch.allclose(left["negatives"], whole["negatives"][:, kept], atol=1e-6)
    assert torch.allclose(left["positives"], whole["positives"], atol=1e-6)
    assert loss == pytest.approx(loss_of(whole, slice(0, 5)), rel=1e-5)
    assert smaller == pytest.approx(loss_of(whole, kept), rel=1e-5)
    assert smaller < loss


@pytest.mark.parametrize("row", ["RP, w/o CN", "AP, w/o CN", "w/o Seg."])
def test_switches_that_change_the_samples(tiny_checkpoints, tmp_path, row, monkeypatch):
    from conjoin.methods.solar import stage2 as solar_stage2

    segmented, masked = [], []
    originals = {name: vars(solar_stage2)[name] for name in ("segment_patches", "construct_samples")}

    def segment(features):
        segmented.append(originals["segment_patches"](features))
        return segmented[-1]

    def construct(*arguments):
        masked.append((arguments, originals["construct_samples"](*arguments)))
        return masked[-1][1]

    monkeypatch.setattr(solar_stage2, "segment_patches", segment)
    monkeypatch.setattr(solar_stage2, "construct_samples", construct)
    found, _ = stage_2(tiny_checkpoints, tmp_path, **switch(3, row))
    assert not segmented
    assert found["mask"][:, :1].all()
    assert found["negatives"].shape[1] == (5 if row == "w/o Seg." else 2)
    cosines = torch.cosine_similarity(found["anchors"], found["positives"][:, 0])
    assert (cosines < 1 - 1e-6).any()
    if row == "AP, w/o CN":
        assert not masked
        return
    (arguments, samples) = masked[0]
    image_scores, image_mask, image_tau, text_scores, text_mask, text_tau = arguments[:6]
    shared = (image_scores > image_tau) & image_mask, (text_scores > text_tau) & text_mask
    whole = bool(shared[0].all() and torch.equal(shared[1], text_mask))
    assert whole == (row == "RP, w/o CN")  # anything may go, or the intersection only, patch by patch
    assert not ((samples.image_weights[0] == 0) & ~shared[0]).any()
    assert len(arguments) == 6 or arguments[6] is None


def test_fewer_miners_are_miners_left_out_of_the_file():
    """The rows of Table 6 that leave miners out are miners left out of the file that `conjoin mine` reads."""
    from conjoin.retrieval import parse_miners

    (block,) = re.findall(r"```yaml\n(.*?)```", SECTION, re.DOTALL)
    miners = parse_miners(yaml.safe_load(block)["miners"])
    assert len(miners) == 7
    assert [sum("clip-vit" in miner.model for miner in miners), len({miner.model for miner in miners})] == [4, 4]
