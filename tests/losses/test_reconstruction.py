"""Reconstruction of tokens: equal to the naive form, in bounded memory."""

import pytest
import torch
import torch.nn.functional as F
from naive_losses import Largest, leaf

from conjoin.losses import embedding_reconstruction, mean_over_devices, mean_over_rows, token_reconstruction

VOCABULARY = 50


def draw(count):
    return leaf(count, 2), leaf(VOCABULARY, 2, seed=1), torch.arange(count) * 7 % VOCABULARY


@pytest.mark.parametrize("count", [1, 7, 40])
def test_tokens_are_cross_entropy_in_blocks(count):
    states, table, ids = draw(count)
    weights = torch.linspace(-1, 2, count).double()
    naive = F.cross_entropy(states @ table.T, ids, reduction="none")
    expected = torch.autograd.grad((naive * weights).sum(), (states, table))
    for rows in (1, 3, 40):
        with Largest() as seen:
            found = token_reconstruction(states, table, ids, logit_bytes=rows * 8 * VOCABULARY)
            gradients = torch.autograd.grad((found * weights).sum(), (states, table))
        torch.testing.assert_close((found, gradients), (naive, expected), rtol=1e-12, atol=1e-12)
        assert seen.elements == max(min(rows, count), 2) * VOCABULARY  # of logits, or of the table


def test_nothing_to_predict_is_no_loss():
    states, table, ids = draw(0)
    loss = token_reconstruction(states, table, ids)
    assert loss.shape == embedding_reconstruction(states, states).shape == (0,)
    assert not torch.autograd.grad(loss.sum(), table)[0].any()


def test_embeddings_are_a_squared_error_without_gradient_to_the_original():
    predicted, original = leaf(5, 3), leaf(5, 3, seed=1)
    found = embedding_reconstruction(predicted, original)
    torch.testing.assert_close(found, ((predicted - original) ** 2).sum(1) / 3)
    found.sum().backward()
    torch.testing.assert_close(predicted.grad, 2 * (predicted - original).detach() / 3)
    assert original.grad is None
    torch.testing.assert_close(embedding_reconstruction(predicted, original, "squared_norm"), 3 * found)
    assert embedding_reconstruction(predicted.bfloat16(), original.bfloat16()).dtype == torch.float32


def test_rows_have_equal_weight_and_empty_ones_none():
    valid = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0]]).bool()
    values = torch.tensor([1.0, 2.0, 6.0, 5.0], requires_grad=True)
    means, present = mean_over_rows(values, valid)
    assert (means.tolist(), present.tolist()) == ([3.0, 5.0, 0.0], [True, True, False])
    mean_over_devices(means, present).backward()
    torch.testing.assert_close(values.grad, torch.tensor([1 / 6, 1 / 6, 1 / 6, 1 / 2]))
    assert mean_over_devices(means.detach(), ~present & False) == 0


def test_shapes_are_checked():
    states, table, ids = draw(4)
    for call, message in (
        (lambda: token_reconstruction(states, table[:, :1], ids), r"states \(4, 2\), table \(50, 1\)"),
        (lambda: token_reconstruction(states, table, ids[:3]), r"ids has shape \(3,\), expected \(4,\)"),
        (lambda: token_reconstruction(states, table, ids, logit_bytes=0), "logit_bytes=0"),
        (lambda: embedding_reconstruction(states, states[:3]), "predicted has shape"),
        (lambda: embedding_reconstruction(states, states, "sum"), "kind='sum'; expected mean or squared_norm"),
        (lambda: mean_over_rows(torch.zeros(2), torch.ones(1, 1).bool()), r"values has shape \(2,\), expected \(1,\)"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
