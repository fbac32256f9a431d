"""Local, global and self-distillation against loops, closed forms, and input without a correlation."""

from functools import partial

import naive_losses as naive
import pytest
import torch
import torch.nn.functional as F
from naive_losses import assert_near, assert_same, leaf

from conjoin.losses import DISTILLATION_KINDS, distillation, global_distillation, local_distillation, self_distillation

MASK = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 0, 1, 1, 0, 1], [1, 1, 0, 0, 0, 0], [0, 1, 0, 1, 1, 0], [0] * 6]).bool()


def tokens(width=4, seed=0):
    return leaf(5, 6, width, seed=seed)


@pytest.mark.parametrize("entries", [1, 72, 2**22])
def test_equal_the_loops_in_chunks_too(entries, monkeypatch):
    monkeypatch.setattr(distillation, "CHUNK_ENTRIES", entries)
    student, teacher = tokens(), tokens(7, seed=1)
    expected = naive.local_distillation(student, teacher, MASK)
    assert_same(local_distillation(student, teacher, MASK), expected, [student])
    assert not local_distillation(student.detach(), teacher, MASK).requires_grad
    student, teacher = leaf(6, 4), leaf(6, 9, seed=1)
    assert_same(global_distillation(student, teacher), naive.global_distillation(student, teacher), [student])
    student = tokens()
    student.data[3, 4] = 0.0
    row = {1: r"\[3:\]\[\(0, 4\)\]", 72: r"\[2:\]\[\(1, 4\)\]", 2**22: r"\[\(3, 4\)\]"}[entries]
    with pytest.raises(ValueError, match=f"student{row} has norm 0"):
        local_distillation(student, tokens(), MASK)


def test_structure_is_compared_not_features():
    student, rotation = tokens(), torch.linalg.qr(leaf(4, 4, seed=3).detach()).Q
    for teacher in (student, 5 * F.normalize(student.detach() @ rotation, dim=-1)):
        assert local_distillation(student, teacher, MASK).item() == pytest.approx(0, abs=1e-12)
        assert global_distillation(student[0], teacher[0]).item() == pytest.approx(0, abs=1e-12)
    near = torch.tensor([[[1.0, 0, 0], [0.9, 0.4, 0], [0, 1, 0]]])
    far = near[:, [0, 2, 1]]  # every token sees the two others in the opposite order
    assert local_distillation(near, far, torch.ones(1, 3).bool()).item() == pytest.approx(2, abs=1e-5)


def test_padding_may_hold_anything():
    dirty, teacher, mask = tokens().detach(), tokens(7, seed=1), F.pad(MASK, (0, 3))
    expected = local_distillation(dirty, teacher, MASK)
    dirty[~MASK] = float("nan")
    wide = F.pad(dirty, (0, 0, 0, 3), value=0.0).requires_grad_()
    found = local_distillation(wide, F.pad(teacher, (0, 0, 0, 3), value=float("inf")), mask)
    torch.testing.assert_close(found, expected)
    (gradient,) = torch.autograd.grad(found, wide)
    assert gradient.isfinite().all() and not gradient[~mask].any() and gradient.any()


def test_tokens_without_a_correlation_are_left_out():
    student, teacher = tokens(), tokens(7, seed=1)
    alone = naive.local_distillation(student[1:], teacher[1:], MASK[1:])
    teacher.data[0] = teacher.data[0, 0] * torch.arange(1, 7)[:, None]  # all tokens alike: a constant vector each
    assert_same(local_distillation(student, teacher, MASK), alone, [student])
    # a student token at right angles to all others, which differ among themselves
    student = torch.tensor([[[0, 0, 1.0], [1, 0, 0], [1, 1, 0], [1, 3, 0]]], requires_grad=True)
    teacher, mask = leaf(1, 4, 5, dtype=torch.float32), torch.ones(1, 4).bool()
    found = local_distillation(student, teacher, mask)
    torch.testing.assert_close(found, naive.local_distillation(student, teacher, mask))
    assert torch.autograd.grad(found, student)[0].isfinite().all()


def test_with_nothing_left_the_loss_is_zero():
    student, teacher, two = tokens(), tokens(7, seed=1), MASK.clone()
    two[:, 2:] = False
    alike = torch.ones(5, 6, 4, dtype=torch.float64, requires_grad=True)
    for inputs, loss in (
        (student, local_distillation(student, teacher, MASK & False)),
        (student, local_distillation(student, teacher, two)),
        (student, local_distillation(student[:, :1], teacher[:, :1], MASK[:, :1])),
        (alike, local_distillation(alike, teacher, MASK)),
        (alike, global_distillation(alike[0], teacher[0])),
        *((student, global_distillation(student[0, :rows], teacher[0, :rows])) for rows in (1, 2)),
    ):
        assert loss.item() == 0 and not torch.autograd.grad(loss, inputs)[0].any()


@pytest.mark.parametrize(("name", "shape", "rest"), [("local", (5, 6), {"mask": MASK}), ("global", (6,), {})])
def test_low_precision_and_autocast(name, shape, rest):
    found, exact = (getattr(module, f"{name}_distillation") for module in (distillation, naive))
    student, teacher = leaf(*shape, 4, dtype=torch.bfloat16), leaf(*shape, 7, seed=1, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        loss, reference = partial(found, teacher=teacher, **rest), partial(exact, teacher=teacher.double(), **rest)
        assert_near(loss, reference, [student], 1e-2)


def naive_self(kind, sq, tq, sc, tc):
    if kind == "mse":
        return F.mse_loss(sq, tq) + F.mse_loss(sc, tc)
    if kind == "squared_norm":
        return (((sq - tq) ** 2).sum() + ((sc - tc) ** 2).sum()) / len(sq)
    if kind == "cosine":
        return 2 - F.cosine_similarity(sq, tq).mean() - F.cosine_similarity(sc, tc).mean()
    student, teacher = ((naive.cosines(q, c) / 0.05).softmax(1) for q, c in ((sq, sc), (tq, tc)))
    return (teacher * (teacher.log() - student.log())).sum(1).mean()


@pytest.mark.parametrize("kind", DISTILLATION_KINDS)
def test_self_distillation_equals_its_formula(kind):
    sq, tq, sc, tc = (leaf(4, 6, seed=seed) for seed in range(4))
    found = self_distillation(sq, tq, sc, tc, kind)
    assert_same(found, naive_self(kind, sq, tq.detach(), sc, tc.detach()), [sq, sc])
    assert torch.autograd.grad(found, [tq, tc], allow_unused=True) == (None, None)
    assert self_distillation(sq, sq, sc, sc, kind).item() == pytest.approx(0, abs=1e-12)
    assert self_distillation(*(x.bfloat16() for x in (sq, tq, sc, tc)), kind).dtype == torch.float32
    if kind == "kl":
        assert 0 < self_distillation(sq, tq, sc, tc, kind, temperature=10.0) < found


def test_errors_name_what_is_wrong():
    x, y, local = leaf(4, 3), leaf(3, 3), tokens()
    for call, message in (
        (lambda: local_distillation(local, local[:, 1:], MASK), r"student \(5, 6, 4\), teacher \(5, 5, 4\): expected"),
        (lambda: local_distillation(local, local, MASK[:, 1:]), r"mask of student has shape \(5, 5\), expected"),
        (lambda: global_distillation(x, y), "teacher has 3 rows, expected 4"),
        (lambda: self_distillation(x, x, x, x, "l1"), "unknown kind 'l1'; expected one of"),
        (lambda: self_distillation(x, y, x, x), r"teacher_queries has shape \(3, 3\), expected \(4, 3\)"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
