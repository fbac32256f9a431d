"""Self-distillation against its formulas."""

import naive_losses as naive
import pytest
import torch
import torch.nn.functional as F
from naive_losses import assert_same, leaf

from conjoin.losses import DISTILLATION_KINDS, self_distillation


def states(width=6):
    """Student queries, teacher queries, student candidates, teacher candidates."""
    return [leaf(4, width, seed=seed) for seed in range(4)]


def _naive_self(kind, sq, tq, sc, tc):
    tq, tc = tq.detach(), tc.detach()
    if kind == "mse":
        return F.mse_loss(sq, tq) + F.mse_loss(sc, tc)
    if kind == "squared_norm":
        return torch.stack(
            [((a - b) ** 2).sum() for a, b in [*zip(sq, tq, strict=True), *zip(sc, tc, strict=True)]]
        ).sum() / len(sq)
    if kind == "cosine":
        return 2 - F.cosine_similarity(sq, tq).mean() - F.cosine_similarity(sc, tc).mean()
    student, teacher = ((naive.cosines(q, c) / 0.05).softmax(1) for q, c in ((sq, sc), (tq, tc)))
    return (teacher * (teacher.log() - student.log())).sum(1).mean()


@pytest.mark.parametrize("kind", DISTILLATION_KINDS)
def test_self_distillation_equals_its_formula(kind):
    tensors = states()
    found, expected = self_distillation(*tensors, kind=kind), _naive_self(kind, *tensors)
    assert_same(found, expected, [tensors[0], tensors[2]])
    assert torch.autograd.grad(found, [tensors[1], tensors[3]], allow_unused=True) == (None, None)
    student_is_teacher = self_distillation(tensors[0], tensors[0], tensors[2], tensors[2], kind=kind)
    assert student_is_teacher.item() == pytest.approx(0, abs=1e-12)


def test_self_distillation_kinds_relate():
    tensors = states(width=6)
    mse, squared = (self_distillation(*tensors, kind=kind) for kind in ("mse", "squared_norm"))
    torch.testing.assert_close(squared, 6 * mse)
    assert torch.equal(self_distillation(*tensors), mse)
    low = [tensor.detach().bfloat16() for tensor in tensors]
    assert self_distillation(*low).dtype == torch.float32
    wide = self_distillation(tensors[0], tensors[1], tensors[2], tensors[3], kind="kl", temperature=10.0)
    assert 0 < wide < self_distillation(*tensors, kind="kl")


def test_errors_name_what_is_wrong():
    with pytest.raises(ValueError, match="unknown kind 'l1'; expected one of"):
        self_distillation(*states(), kind="l1")
    with pytest.raises(ValueError, match=r"teacher_queries has shape \(4, 5\), expected \(4, 6\)"):
        self_distillation(states()[0], states(5)[1], *states()[2:])
