"""Batches of which little is left: losses and gradients of both stages stay finite."""

import pytest
import torch
from PIL import Image
from tiny_solar import stage1_objective, stage2_objective, texts

from conjoin.losses import Threshold
from conjoin.methods.solar.masking import construct_samples
from conjoin.training.objective import total_loss
from tiny_training import without_dropout

CASES = ("one-token texts", "blank images", "identical pairs", "identical but named apart", "two pairs", "one pair")
NEVER, ALWAYS = 2.0, -2.0


def degenerate(case):
    rows = texts({"one pair": 1, "two pairs": 2}.get(case, 6))
    blank, first = Image.new("RGB", (16, 16), "white"), rows[0]
    change = {
        "one-token texts": lambda row: {"text": "a"},
        "blank images": lambda row: {"image": blank},
        "identical pairs": lambda row: dict(first),
        "identical but named apart": lambda row: {"image": first["image"], "text": first["text"]},
    }.get(case)
    return rows if change is None else rows.map(change)


def check(objective, batch):
    """One forward and backward in training mode; returns the terms and whether any gradient is not zero."""
    without_dropout(objective)
    objective.train().zero_grad()
    terms = objective(**batch)
    loss = total_loss(terms)
    loss.backward()
    assert all(term.isfinite() for term in terms.values()), terms
    gradients = {name: p.grad for name, p in objective.named_parameters() if p.grad is not None}
    assert not [name for name, gradient in gradients.items() if not gradient.isfinite().all()]
    assert gradients
    return terms, any(gradient.any() for gradient in gradients.values())


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("arguments", [{}, {"mask": "hard"}, {"mask": "none"}], ids=["evolutionary", "hard", "none"])
def test_stage_1(tiny_checkpoints, case, arguments):
    objective, batch = stage1_objective(tiny_checkpoints, degenerate(case), **arguments)
    if case == "one-token texts":
        pairs = batch["pairs"]
        assert ((pairs["attention_mask"] & ~pairs["special_tokens_mask"].bool()).sum(1) == 1).all()
    for objective.progress in (0.0, 0.25, 1.0):
        check(objective, batch)


@pytest.mark.parametrize("threshold", [NEVER, ALWAYS], ids=["everything masked", "nothing masked"])
@pytest.mark.parametrize("case", ["two pairs", "identical pairs", ""])
def test_stage_1_with_a_threshold_beyond_all_scores(tiny_checkpoints, case, threshold, monkeypatch):
    """A row without a shared token keeps its best one, so rows that differ keep different embeddings."""
    objective, batch = stage1_objective(tiny_checkpoints, degenerate(case), mask="hard")
    found = Threshold(torch.tensor(threshold), torch.tensor(False))
    monkeypatch.setattr("conjoin.methods.solar.scores.qda_threshold", lambda *_: found)
    terms, moves = check(objective, batch)
    assert moves
    if threshold == NEVER:
        assert terms["image_shared_rate"] == terms["text_shared_rate"] == 0
        with torch.no_grad():
            embeddings = objective.embed(**{name: value for name, value in batch.items() if name != "ids"})
        assert embeddings["image"].isfinite().all()
        assert terms["image_empty_rate"] == terms["text_empty_rate"] == 1
        alike = torch.allclose(embeddings["image"], embeddings["image"][:1].expand_as(embeddings["image"]))
        assert alike == (case == "identical pairs")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"itc_weight": 1.0, "mask_source": "online", "segments": False},
        {"mask_level": "input"},
        {"positive": "random", "constructed_negatives": False},
        {"positive": "augmented", "constructed_negatives": False},
    ],
    ids=["default", "mixed", "input level", "random", "augmented"],
)
def test_stage_2(tiny_checkpoints, tmp_path, case, arguments):
    objective, batch = stage2_objective(tiny_checkpoints, tmp_path, degenerate(case), **arguments)
    check(objective, batch)


@pytest.mark.parametrize("level", ["feature", "input"])
@pytest.mark.parametrize("threshold", [NEVER, ALWAYS], ids=["no intersection", "no difference"])
def test_stage_2_with_a_threshold_beyond_all_scores(tiny_checkpoints, tmp_path, threshold, level, monkeypatch):
    objective, batch = stage2_objective(tiny_checkpoints, tmp_path, mask_level=level)
    found = Threshold(torch.tensor(threshold), torch.tensor(False))
    monkeypatch.setattr("conjoin.methods.solar.scores.qda_threshold", lambda *_: found)
    terms, moves = check(objective, batch)
    assert terms["positive_rate"] == float(threshold == ALWAYS)
    assert moves == (threshold == ALWAYS)
    assert (terms["solar_loss"] == 0) == (threshold == NEVER)


@pytest.mark.parametrize("level", ["feature", "input"])
def test_stage_2_with_samples_of_which_nothing_is_left(tiny_checkpoints, tmp_path, level, monkeypatch):
    objective, batch = stage2_objective(tiny_checkpoints, tmp_path, mask_level=level)

    def everything(*arguments):
        samples = construct_samples(*arguments)
        text = ~arguments[4].expand_as(samples.text_weights).bool()
        return samples._replace(image_weights=torch.zeros_like(samples.image_weights), text_weights=text.float())

    monkeypatch.setattr("conjoin.methods.solar.stage2.construct_samples", everything)
    _, moves = check(objective, batch)
    assert moves
