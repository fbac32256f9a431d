"""Scores, schedule and the mask between all ones and hard."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from conjoin.losses import alignment_terms
from conjoin.methods.solar.masking import evolutionary_mask, mask_schedule


def test_scores_that_masks_are_made_of_are_cosines():
    generator = torch.Generator().manual_seed(0)
    text, image = (torch.randn(3, 8, generator=generator, requires_grad=True) for _ in range(2))
    patches, tokens = (torch.randn(3, count, 8, generator=generator) for count in (5, 4))
    terms = alignment_terms(text, patches, torch.ones(3, 5).bool(), image, tokens, torch.ones(3, 4).bool())
    torch.testing.assert_close(terms.image.scores, F.cosine_similarity(text[:, None], patches, dim=-1))
    torch.testing.assert_close(terms.text.scores, F.cosine_similarity(image[:, None], tokens, dim=-1))
    assert not terms.image.scores.requires_grad


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_rho_goes_from_one_to_zero(schedule):
    values = [mask_schedule(step / 100, schedule) for step in range(101)]
    assert values[0] == 1 and values[25] == pytest.approx(0.5)
    assert all(first >= second for first, second in pairwise(values))
    assert values[49] > 0 and values[50:] == [0.0] * 51
    assert mask_schedule(0.0, schedule, 0.0) == 0  # hard from the start
    assert mask_schedule(0.5, schedule, 1.0) == pytest.approx(0.5) and mask_schedule(1.0, schedule, 1.0) == 0


def test_masks_can_start_late():
    values = [mask_schedule(progress, "linear", 0.5, 0.3) for progress in (0.0, 0.3, 0.4, 0.5, 1.0)]
    assert values == pytest.approx([1.0, 1.0, 0.5, 0.0, 0.0])
    with pytest.raises(ValueError, match=r"mask_start_ratio=0.6 must lie in \[0, mask_warmup_ratio=0.5\]"):
        mask_schedule(0.5, "linear", 0.5, 0.6)


def test_linear_and_cosine_differ():
    assert mask_schedule(0.1) == pytest.approx(0.8)
    assert mask_schedule(0.1, "cosine") == pytest.approx(0.9045, abs=1e-4)


def test_the_mask_lies_between_ones_and_hard():
    scores = torch.tensor([[0.1, 0.3, 0.2], [0.5, -1.0, 0.21]])
    hard = [[0.0, 1.0, 0.0], [1.0, 0.0, 1.0]]
    exists = torch.ones(2, 3, dtype=torch.bool)
    assert evolutionary_mask(scores, exists, 0.2, 0.0).tolist() == hard
    assert evolutionary_mask(scores, exists, torch.tensor(0.2), 1.0).tolist() == [[1.0] * 3] * 2
    torch.testing.assert_close(evolutionary_mask(scores, exists, 0.2, 0.25), 0.25 + 0.75 * torch.tensor(hard))


def test_a_row_without_a_shared_token_keeps_its_best_one():
    scores = torch.tensor([[0.1, 0.3, 0.9], [0.5, 0.6, 0.7]])
    exists = torch.tensor([[True, True, False], [True, True, True]])
    assert evolutionary_mask(scores, exists, 0.4, 0.0).tolist() == [[0.0, 1.0, 0.0], [1.0, 1.0, 1.0]]
    assert evolutionary_mask(scores, exists, 0.4, 0.5).tolist() == [[0.5, 1.0, 0.5], [1.0, 1.0, 1.0]]


def test_errors_name_what_is_wrong():
    with pytest.raises(ValueError, match="unknown schedule 'step'"):
        mask_schedule(0.1, "step")
    with pytest.raises(ValueError, match=r"progress=1.5 must lie in \[0, 1\]"):
        mask_schedule(1.5)
    with pytest.raises(ValueError, match="mask_warmup_ratio=-1"):
        mask_schedule(0.5, mask_warmup_ratio=-1)
    with pytest.raises(ValueError, match="rho=2"):
        evolutionary_mask(torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool), 0.0, 2)
