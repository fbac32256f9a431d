"""Matryoshka: each contrastive loss is the mean over the embeddings cut to each width."""

import pytest
import torch

from conjoin.data import PairCollator
from conjoin.losses import ContrastiveLoss, GclLoss
from conjoin.training import Objective, RetrievalConfig
from conjoin.training.objective import total_loss
from tiny_training import make_encoder, make_rows

LOSSES = {"contrastive": (ContrastiveLoss, ("image", "text")), "gcl": (GclLoss, ("image", "text", "fused"))}


def make(tiny_checkpoints, name):
    loss_class, views = LOSSES[name]
    model, processor = make_encoder(tiny_checkpoints)
    objective = Objective(model, loss_class(), views).double().eval()
    return objective, PairCollator(processor)([make_rows(6)[i] for i in range(6)])


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_it_is_the_mean_over_truncated_and_normalised_widths(tiny_checkpoints, name):
    objective, batch = make(tiny_checkpoints, name)
    embeddings, ids = objective.embed(**{"pairs": batch["pairs"]}), batch.get("ids")
    expected = 0.0
    for width in (4, 7, 16):
        cut = {view: torch.nn.functional.normalize(value[:, :width], dim=1) for view, value in embeddings.items()}
        expected += total_loss(objective.loss(**cut, ids=ids)).item() / 3
    objective.widths = (4, 7, 16)
    assert total_loss(objective(**batch)).item() == pytest.approx(expected, abs=1e-12)


def test_the_whole_width_alone_is_the_plain_loss(tiny_checkpoints):
    objective, batch = make(tiny_checkpoints, "contrastive")
    plain = total_loss(objective(**batch))
    objective.widths = (16,)
    assert torch.equal(total_loss(objective(**batch)), plain)
    objective.widths = (17,)
    with pytest.raises(ValueError, match="matryoshka_dims has 17, the embeddings have 16 numbers"):
        objective(**batch)


def test_the_configuration(tmp_path):
    with pytest.raises(ValueError, match=r"matryoshka_dims=\(8, 8\); expected positive numbers, each once"):
        RetrievalConfig(str(tmp_path), matryoshka_dims=(8, 8))
