"""Local and global distillation against loops, closed forms, and input without a correlation."""

import naive_losses as naive
import pytest
import torch
import torch.nn.functional as F
from naive_losses import assert_same, leaf

from conjoin.losses import distillation, global_distillation, local_distillation

MASK = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 0, 1, 1, 0, 1], [1, 1, 0, 0, 0, 0], [0, 1, 0, 1, 1, 0], [0] * 6]).bool()


def tokens(width=4, seed=0, dtype=torch.float64):
    return leaf(5, 6, width, seed=seed, dtype=dtype)


def test_local_equals_the_loop_over_tokens():
    student, teacher = tokens(), tokens(7, seed=1)
    assert_same(
        local_distillation(student, teacher, MASK), naive.local_distillation(student, teacher, MASK), [student]
    )
    assert local_distillation(student.detach(), teacher, MASK).requires_grad is False


@pytest.mark.parametrize("entries", [1, 72, 2**22])
def test_local_is_the_same_in_chunks(entries, monkeypatch):
    student, teacher = tokens(), tokens(7, seed=1)
    expected = local_distillation(student, teacher, MASK)
    monkeypatch.setattr(distillation, "CHUNK_ENTRIES", entries)
    assert_same(local_distillation(student, teacher, MASK), expected, [student], 1e-14)


def test_local_names_the_row_whatever_the_chunk(monkeypatch):
    student = tokens()
    student.data[3, 4] = 0.0
    with pytest.raises(ValueError, match=r"student\[\(3, 4\)\] has norm 0"):
        local_distillation(student, tokens(), MASK)
    monkeypatch.setattr(distillation, "CHUNK_ENTRIES", 72)
    with pytest.raises(ValueError, match=r"student\[2:\]\[\(1, 4\)\] has norm 0"):
        local_distillation(student, tokens(), MASK)


def test_local_compares_structure_not_features():
    student = tokens()
    rotation = torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))).Q
    teacher = F.normalize(student.detach() @ rotation, dim=-1)
    assert local_distillation(student, teacher, MASK).item() == pytest.approx(0, abs=1e-12)
    assert local_distillation(student, 5 * teacher, MASK).item() == pytest.approx(0, abs=1e-12)
    near = torch.tensor([[[1.0, 0, 0], [0.9, 0.4, 0], [0, 1, 0]]])
    far = near[:, [0, 2, 1]]  # every token sees the two others in the opposite order
    assert local_distillation(near, far, torch.ones(1, 3).bool()).item() == pytest.approx(2, abs=1e-5)


def test_local_padding_may_hold_anything():
    student, teacher = tokens(), tokens(7, seed=1)
    expected = local_distillation(student, teacher, MASK)
    dirty = student.detach().clone()
    dirty[~MASK] = float("nan")
    wide = F.pad(dirty, (0, 0, 0, 3), value=0.0).requires_grad_()
    found = local_distillation(wide, F.pad(teacher, (0, 0, 0, 3), value=float("inf")), F.pad(MASK, (0, 3)))
    torch.testing.assert_close(found, expected)
    (gradient,) = torch.autograd.grad(found, wide)
    assert gradient.isfinite().all() and gradient[~F.pad(MASK, (0, 3))].abs().max() == 0


def test_local_leaves_out_constant_vectors():
    student, teacher = tokens(), tokens(7, seed=1)
    alone = naive.local_distillation(student[1:], teacher[1:], MASK[1:])
    teacher.data[0] = teacher.data[0, 0] * torch.arange(1, 7)[:, None]  # all tokens alike: a constant vector each
    assert_same(local_distillation(student, teacher, MASK), alone, [student])
    # a student token at right angles to all others, which differ among themselves
    student = torch.tensor([[[0, 0, 1.0], [1, 0, 0], [1, 1, 0], [1, 3, 0]]], requires_grad=True)
    teacher = torch.randn(1, 4, 5, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(1, 4).bool()
    found = local_distillation(student, teacher, mask)
    torch.testing.assert_close(found, naive.local_distillation(student, teacher, mask))
    assert torch.autograd.grad(found, student)[0].isfinite().all()


@pytest.mark.parametrize("case", ["no tokens", "two tokens", "all alike", "no samples wide"])
def test_local_with_nothing_left_is_zero(case):
    student, teacher, mask = tokens(dtype=torch.float32), tokens(7, seed=1, dtype=torch.float32), MASK.clone()
    if case == "no tokens":
        mask[:] = False
    elif case == "two tokens":
        mask[:, 2:] = False
    elif case == "all alike":
        student = (student[:, :1] * torch.rand(5, 6, 1)).detach().requires_grad_()
    else:
        student, teacher, mask = student[:, :1], teacher[:, :1], mask[:, :1]
    loss = local_distillation(student, teacher, mask)
    assert loss.item() == 0
    assert torch.autograd.grad(loss, student)[0].abs().max() == 0


def test_global_equals_the_loop():
    student, teacher = leaf(6, 4), leaf(6, 9, seed=1)
    assert_same(global_distillation(student, teacher), naive.global_distillation(student, teacher), [student])
    assert global_distillation(student, 2 * student).item() == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("rows", [1, 2])
def test_global_without_a_correlation_is_zero(rows):
    for student in (leaf(rows, 4), torch.ones(5, 4, requires_grad=True)):
        loss = global_distillation(student, leaf(len(student), 3, seed=1))
        assert loss.item() == 0
        assert torch.autograd.grad(loss, student)[0].abs().max() == 0


@pytest.mark.parametrize("kind", ["local", "global"])
def test_correlations_in_low_precision_and_autocast(kind):
    if kind == "local":
        rest, functions = (MASK,), (local_distillation, naive.local_distillation)
        student, teacher = tokens(dtype=torch.bfloat16), tokens(7, seed=1, dtype=torch.bfloat16)
    else:
        rest, functions = (), (global_distillation, naive.global_distillation)
        student, teacher = leaf(6, 4, dtype=torch.bfloat16), leaf(6, 9, seed=1, dtype=torch.bfloat16)
    exact = student.detach().double().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        found = functions[0](student, teacher, *rest)
    expected = functions[1](exact, teacher.double(), *rest)
    assert found.dtype == torch.float32 and found.item() == pytest.approx(expected.item(), rel=1e-4)
    mine, right = torch.autograd.grad(found, student)[0], torch.autograd.grad(expected, exact)[0]
    assert right.norm() > 1e-2 and (mine - right).norm() < 1e-2 * right.norm()


def test_errors_name_what_is_wrong():
    with pytest.raises(ValueError, match=r"shapes \(5, 6, 4\) and \(5, 5, 4\), expected \(N, T, D\)"):
        local_distillation(tokens(), tokens()[:, 1:], MASK)
    with pytest.raises(ValueError, match=r"mask of student has shape \(5, 5\), expected \(5, 6\)"):
        local_distillation(tokens(), tokens(), MASK[:, 1:])
    with pytest.raises(ValueError, match="teacher has 3 rows, expected 4"):
        global_distillation(leaf(4, 3), leaf(3, 3))
    with pytest.raises(ValueError, match=r"student\[2\] has norm nan"):
        global_distillation(torch.tensor([[1.0], [1.0], [float("nan")]]), leaf(3, 3))
