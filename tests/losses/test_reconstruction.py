"""Reconstruction of tokens: equal to the naive form, in bounded memory."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from conjoin.losses import embedding_reconstruction, mean_over_devices, mean_over_rows, token_reconstruction

VOCABULARY = 50


def draw(count, width=6):
    torch.manual_seed(count)
    states, table = torch.randn(count, width).double(), torch.randn(VOCABULARY, width).double()
    return states.requires_grad_(), table.requires_grad_(), torch.randint(VOCABULARY, (count,))


class LargestLogits(TorchDispatchMode):
    """The most elements of any tensor as wide as the vocabulary."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        if isinstance(output, torch.Tensor) and output.ndim == 2 and output.shape[1] == VOCABULARY:
            own = output.untyped_storage().nbytes() // output.element_size()
            self.elements = max(self.elements, 0 if own == VOCABULARY * 6 else output.numel())  # not the table
        return output


@pytest.mark.parametrize("count", [1, 7, 40])
def test_tokens_are_cross_entropy_whatever_the_block(count):
    states, table, ids = draw(count)
    weights = torch.linspace(-1, 2, count).double()
    naive = F.cross_entropy(states @ table.T, ids, reduction="none")
    expected = torch.autograd.grad((naive * weights).sum(), (states, table))
    assert all(gradient.abs().max() > 1e-3 for gradient in expected)
    for logit_bytes in (1, 3 * 8 * VOCABULARY, 2**27):
        found = token_reconstruction(states, table, ids, logit_bytes=logit_bytes)
        torch.testing.assert_close(found, naive, rtol=1e-12, atol=1e-12)
        gradients = torch.autograd.grad((found * weights).sum(), (states, table))
        for gradient, wanted in zip(gradients, expected, strict=True):
            torch.testing.assert_close(gradient, wanted, rtol=1e-12, atol=1e-12)


def test_logits_never_exceed_a_block():
    states, table, ids = draw(40)
    for rows, logit_bytes in ((40, 2**27), (5, 5 * 8 * VOCABULARY), (1, 1)):
        with LargestLogits() as seen:
            token_reconstruction(states, table, ids, logit_bytes=logit_bytes).sum().backward()
        assert seen.elements == rows * VOCABULARY


def test_nothing_to_predict_is_no_loss():
    states, table, ids = draw(0)
    loss = token_reconstruction(states, table, ids)
    assert loss.shape == (0,)
    loss.sum().backward()
    assert not states.grad.any()
    assert embedding_reconstruction(states, states).shape == (0,)


def test_embeddings_are_a_squared_error_without_gradient_to_the_original():
    predicted, original = torch.randn(5, 3).double().requires_grad_(), torch.randn(5, 3).double().requires_grad_()
    found = embedding_reconstruction(predicted, original)
    torch.testing.assert_close(found, ((predicted - original) ** 2).sum(1) / 3)
    found.sum().backward()
    torch.testing.assert_close(predicted.grad, 2 * (predicted - original).detach() / 3)
    assert original.grad is None
    half = embedding_reconstruction(predicted.bfloat16(), original.bfloat16())
    assert half.dtype == torch.float32


def test_rows_have_equal_weight_and_empty_ones_none():
    valid = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0]]).bool()
    values = torch.tensor([1.0, 2.0, 6.0, 5.0], requires_grad=True)
    means, present = mean_over_rows(values, valid)
    assert means.tolist() == [3.0, 5.0, 0.0]
    assert present.tolist() == [True, True, False]
    mean_over_devices(means, present).backward()
    torch.testing.assert_close(values.grad, torch.tensor([1 / 6, 1 / 6, 1 / 6, 1 / 2]))
    assert mean_over_devices(means.detach(), torch.zeros(3, dtype=torch.bool)) == 0


def test_shapes_are_checked():
    states, table, ids = draw(4)
    for wrong in ((states, table[:, :5], ids), (states[0], table, ids), (states, table, ids[:3])):
        with pytest.raises(ValueError, match=r"shape|states"):
            token_reconstruction(*wrong)
    with pytest.raises(ValueError, match="logit_bytes=0"):
        token_reconstruction(states, table, ids, logit_bytes=0)
    with pytest.raises(ValueError, match="predicted has shape"):
        embedding_reconstruction(states, states[:3])
    with pytest.raises(ValueError, match=r"values has shape \(2,\), expected \(1,\)"):
        mean_over_rows(torch.zeros(2), torch.ones(1, 1).bool())
