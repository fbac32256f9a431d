"""Every ablation switch of SOLAR that docs/methods.md lists does to the loss what its row says."""

import re
from pathlib import Path

import pytest
import torch
import yaml

from conjoin import SolarStage1Config, SolarStage2Config
from conjoin.losses import multi_positive
from conjoin.trainers import solar
from tiny_solar import make_stage, move_to

ROOT = Path(__file__).parents[2]
TERMS = ("itc_loss", "gla_loss", "gd_loss", "ld_loss")
SECTION = (ROOT / "docs/methods.md").read_text(encoding="utf-8").split("### Ablations of SOLAR")[1].split("\n## ")[0]
ROWS = re.findall(r"^\| (Table \d+) \| (.+?) \| ([12]) \| `(.+?)` \|", SECTION, re.MULTILINE)
SWITCHES = {(table, row): yaml.safe_load("{" + keys + "}") for table, row, _, keys in ROWS}


def switch(table, row):
    return SWITCHES[f"Table {table}", row]


def test_the_table_names_every_ablation_and_its_keys_exist():
    assert len(ROWS) == len(SWITCHES) == 16
    for table, row, stage, _ in ROWS:
        config = (SolarStage1Config, SolarStage2Config)[int(stage) - 1]
        made = config(output_dir="unused", use_cpu=True, **SWITCHES[table, row])
        assert {name: vars(made)[name] for name in SWITCHES[table, row]} == SWITCHES[table, row]


def stage_1_terms(checkpoints, folder, progress=1.0, **arguments):
    """The terms in evaluation mode, with projection heads that are not the identity."""
    trainer, batch = make_stage(1, checkpoints, folder, **arguments)
    if "heads" in trainer.loss:
        torch.manual_seed(1)
        for parameter in trainer.loss["heads"].parameters():
            torch.nn.init.normal_(parameter)
    move_to(trainer, progress)
    with torch.no_grad():
        return {name: term.item() for name, term in trainer.model(**batch).items()}


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
def test_a_weight_of_zero_takes_its_term_out_and_changes_no_other(tiny_checkpoints, tmp_path, row, kept):
    arguments = switch(2, row)
    whole = stage_1_terms(tiny_checkpoints, tmp_path, mask=arguments.get("mask", "evolutionary"))
    left = stage_1_terms(tiny_checkpoints, tmp_path, **arguments)
    assert {name for name in left if name.endswith("_loss")} == kept
    assert all(whole[name] > 1e-4 for name in TERMS)
    assert {name: left[name] for name in kept} == pytest.approx({name: whole[name] for name in kept}, rel=1e-5)


def test_mask_switches_change_the_contrastive_term_alone(tiny_checkpoints, tmp_path):
    def terms(progress, **arguments):
        return stage_1_terms(tiny_checkpoints, tmp_path, progress, **arguments)

    start, end = terms(0.0), terms(1.0)
    assert start["itc_loss"] != pytest.approx(end["itc_loss"], rel=1e-3)
    for row, expected in (("hard mask", end), ("w/o M", start)):
        for progress in (0.0, 1.0):
            found = terms(progress, **switch(2, row))
            assert {name: found[name] for name in TERMS} == pytest.approx({name: expected[name] for name in TERMS})
    linear, cosine = terms(0.1), terms(0.1, **switch(10, "cosine decay"))
    assert (linear["rho"], cosine["rho"]) == pytest.approx((0.8, 0.9045), abs=1e-4)
    assert linear["itc_loss"] != cosine["itc_loss"]


def test_without_heads_the_contrastive_term_sees_the_encoder_itself(tiny_checkpoints, tmp_path):
    trainer, batch = make_stage(1, tiny_checkpoints, tmp_path)
    bare, _ = make_stage(1, tiny_checkpoints, tmp_path, **switch(2, "w/o W"))
    assert "heads" not in bare.loss
    expected = bare.model(**batch)["itc_loss"].item()
    assert expected == trainer.model(**batch)["itc_loss"].item()  # as new heads are the identity
    with torch.no_grad():
        trainer.loss["heads"].image.weight.neg_()
    assert expected != pytest.approx(trainer.model(**batch)["itc_loss"].item())


def stage_2(checkpoints, folder, **arguments):
    """The embedded samples, their masks, and the loss."""
    trainer, batch = make_stage(2, checkpoints, folder, learn_temperature=False, **arguments)
    batch.pop("ids")
    torch.manual_seed(2)
    with torch.no_grad():
        found = trainer.embed(trainer.encoder, batch)
        samples, mask = trainer.samples_of(found, batch)
        loss = trainer.loss_terms(found, batch)["solar_loss"].item()
    return found | {"positives": samples[:, :1], "negatives": samples[:, 1:], "mask": mask}, loss


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
    calls = {"segment_patches": [], "construct_samples": []}
    for name, seen in calls.items():
        original = vars(solar)[name]
        monkeypatch.setattr(
            solar, name, lambda *a, seen=seen, original=original: seen.append((a, original(*a))) or seen[-1][1]
        )
    found, _ = stage_2(tiny_checkpoints, tmp_path, **switch(3, row))
    assert not calls["segment_patches"]
    assert found["mask"][:, :1].all()
    assert found["negatives"].shape[1] == (5 if row == "w/o Seg." else 2)
    assert (torch.cosine_similarity(found["anchors"], found["positives"][:, 0]) < 1 - 1e-6).any()
    if row == "AP, w/o CN":
        assert not calls["construct_samples"]
        return
    ((image_scores, image_mask, image_tau, text_scores, text_mask, text_tau, *segments), samples) = calls[
        "construct_samples"
    ][0]
    shared = (image_scores > image_tau) & image_mask, (text_scores > text_tau) & text_mask
    whole = bool(shared[0].all() and torch.equal(shared[1], text_mask))
    assert whole == (row == "RP, w/o CN")  # anything may go, or the intersection only, patch by patch
    assert not ((samples.image_weights[0] == 0) & ~shared[0]).any()
    assert segments in ([], [None])
