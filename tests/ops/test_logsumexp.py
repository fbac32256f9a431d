"""The kernel against the dense matrix, with the exponentials kept and recomputed."""

import pytest
import torch
import torch.nn.functional as F
from conjoin.ops import (
    KEPT_BYTES,
    Exclusion,
    cross_logsumexp,
    gather_with_gradient,
    grouped_logsumexp,
    local_positions,
    pair_logsumexp,
    self_logsumexp,
)
from conjoin.ops.logsumexp import STRIPS, WHOLE_ROWS
from torch.utils._python_dispatch import TorchDispatchMode

N, M, D = 11, 17, 5


def units(*shape, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(*shape, generator=generator, dtype=dtype), dim=-1).requires_grad_()


def scalar(value, dtype=torch.float64):
    return torch.tensor(value, dtype=dtype, requires_grad=True)


def excluded(exclusion, count=N, width=M):
    """`(N, M)` bool."""
    found = torch.zeros(count, width, dtype=torch.bool)
    for offset in exclusion.diagonals:
        found |= torch.arange(count)[:, None] + offset == torch.arange(width)
    for labels in (exclusion.ids, exclusion.groups):
        if labels is not None:
            found |= labels[0][:, None] == labels[1]
    return found


def dense(rows, columns, scale, exclusion):
    """The definition; `scale` is a number or a matrix."""
    left_out = excluded(exclusion, len(rows), len(columns))
    return (rows @ columns.T * scale).masked_fill(left_out, float("-inf")).logsumexp(1)


def gradients(values, inputs):
    """Gradients of a sum that weighs every row differently."""
    weights = torch.linspace(0.5, 2.0, len(values), dtype=values.dtype)
    found = torch.autograd.grad((values * weights).sum(), inputs)
    assert all(grad.abs().max() > 1e-6 for grad in found)
    return found


def assert_equal(found, expected, inputs, tolerance=1e-10):
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)
    for mine, theirs in zip(gradients(found, inputs), gradients(expected, inputs), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=tolerance)


def exclusions():
    row_ids, column_ids = torch.arange(N), torch.arange(M)
    hashed = torch.tensor([9_007_199_254_740_993, -5, 70_000_000_000])
    groups = torch.arange(N) % 4, torch.arange(M) % 4
    return {
        "nothing": Exclusion(),
        "diagonal": Exclusion(diagonals=(0,)),
        "diagonals": Exclusion(diagonals=(0, -4, 7, 30)),
        "permuted": Exclusion(ids=(row_ids, column_ids.flip(0))),
        "shared": Exclusion(ids=(hashed[row_ids % 3], hashed[column_ids % 3])),
        "groups": Exclusion(groups=groups),
        "everything": Exclusion((2,), (row_ids, column_ids), (groups[0].sort()[0], groups[1].sort()[0])),
    }


KEPT = pytest.mark.parametrize("kept_bytes", [0, KEPT_BYTES], ids=["recomputed", "kept"])
"""Both paths: the backward pass computes the matrix again, or uses what the forward pass kept."""


@KEPT
@pytest.mark.parametrize("block_size", [1, 3, 8, None])
@pytest.mark.parametrize("name", exclusions())
def test_cross_equals_the_dense_matrix(name, block_size, kept_bytes):
    inputs, exclusion = (units(N, D), units(M, D, seed=1), scalar(7.0)), exclusions()[name]
    found = cross_logsumexp(*inputs, exclusion, block_size=block_size, kept_bytes=kept_bytes)
    assert_equal(found, dense(*inputs, exclusion), inputs)


def test_every_exclusion_of_these_tests_leaves_out_something_else():
    inputs = units(N, D), units(M, D, seed=1), scalar(7.0)
    sums = [cross_logsumexp(*inputs, exclusion).sum().item() for exclusion in exclusions().values()]
    assert len({round(value, 6) for value in sums}) == len(sums)


@KEPT
@pytest.mark.parametrize("block_size", [1, 3, 8, None])
@pytest.mark.parametrize("name", exclusions())
def test_pair_is_cross_in_both_directions(name, block_size, kept_bytes):
    rows, columns, scale = inputs = units(N, D), units(M, D, seed=1), scalar(7.0)
    exclusion = exclusions()[name]
    for select in (torch.cat, lambda sides: sides[0], lambda sides: sides[1]):  # the other side may be unused
        found = pair_logsumexp(*inputs, exclusion, block_size=block_size, kept_bytes=kept_bytes)
        there = dense(*inputs, exclusion)
        back = (rows @ columns.T * scale).masked_fill(excluded(exclusion), float("-inf")).logsumexp(0)
        assert [len(part) for part in found] == [N, M]
        assert_equal(select(found), select((there, back)), inputs)


@KEPT
@pytest.mark.parametrize("block_size", [1, 4, 16, None])
@pytest.mark.parametrize("name", ["ids", "groups", "diagonals"])
@pytest.mark.parametrize("count", [13, 200])
def test_self_equals_the_dense_matrix(count, name, block_size, kept_bytes):
    vectors, scale = units(count, D), scalar(7.0)
    ids, groups = torch.arange(count) % 10, torch.arange(count) // 5
    exclusion = {
        "ids": Exclusion(ids=(ids, ids)),
        "groups": Exclusion(ids=(ids, ids), groups=(groups, groups)),
        "diagonals": Exclusion(diagonals=(-8, -4, 0, 4, 8)),
    }[name]
    found = self_logsumexp(vectors, scale, exclusion, block_size=block_size, kept_bytes=kept_bytes)
    assert_equal(found, dense(vectors, vectors, scale, exclusion), (vectors, scale))


@KEPT
@pytest.mark.parametrize("blocks", ["one", "strips"])
def test_a_symmetric_matrix_is_one_block_up_to_a_size_and_strips_beyond(blocks, kept_bytes):
    count = WHOLE_ROWS + (blocks == "strips")
    vectors, scale, ids = units(count, D), scalar(7.0), torch.arange(count) // 3
    exclusion = Exclusion(ids=(ids, ids))
    found = self_logsumexp(vectors, scale, exclusion, kept_bytes=kept_bytes)
    if kept_bytes:
        kept = found.grad_fn.saved_tensors[4:]
        assert len(kept) == 1 if blocks == "one" else len(kept) >= STRIPS
        assert (sum(block.numel() for block in kept) == count**2) == (blocks == "one")
    assert_equal(found, dense(vectors, vectors, scale, exclusion), (vectors, scale))


@KEPT
@pytest.mark.parametrize("block_size", [3, None])
@pytest.mark.parametrize("name", ["diagonal", "shared"])
def test_grouped_has_two_scales(name, block_size, kept_bytes):
    rows, columns, scale, group_scale = units(N, D), units(M, D, seed=1), scalar(7.0), scalar(4.0)
    row_groups, column_groups = torch.arange(N) % 4, torch.arange(M) % 3  # a group without columns, too
    exclusion = exclusions()[name]
    matrix = torch.where(row_groups[:, None] == column_groups, group_scale, scale)
    found = grouped_logsumexp(
        rows,
        columns,
        scale,
        group_scale,
        (row_groups, column_groups),
        exclusion,
        block_size=block_size,
        kept_bytes=kept_bytes,
    )
    assert_equal(found, dense(rows, columns, matrix, exclusion), (rows, columns, scale, group_scale))


@KEPT
@pytest.mark.parametrize("largest", [12.0, 300.0])
def test_grouped_holds_in_float32(largest, kept_bytes):
    inputs = [units(N, D, dtype=torch.float32), units(M, D, seed=1, dtype=torch.float32)]
    inputs += [scalar(7.0, torch.float32), scalar(largest, torch.float32)]
    groups = torch.arange(N) % 4, torch.arange(M) % 3
    exact = [x.detach().double().requires_grad_() for x in inputs]
    found = grouped_logsumexp(*inputs, groups, Exclusion(), kept_bytes=kept_bytes)
    matrix = torch.where(groups[0][:, None] == groups[1], exact[3], exact[2])
    expected = dense(*exact[:2], matrix, Exclusion())
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    for mine, theirs in zip(gradients(found, inputs), gradients(expected, exact), strict=True):
        assert (mine - theirs).norm() < 1e-4 * theirs.norm()


def test_the_matrix_is_kept_up_to_the_limit_and_backward_can_run_twice():
    inputs = units(N, D), units(M, D, seed=1), scalar(7.0)

    def kept_entries(kept_bytes):
        found = cross_logsumexp(*inputs, Exclusion(), block_size=4, kept_bytes=kept_bytes)
        sizes = [tensor.numel() for tensor in found.grad_fn.saved_tensors[4:]]
        once, twice = (torch.autograd.grad(found.sum(), inputs, retain_graph=True) for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(once, twice, strict=True))
        return sum(sizes)

    assert kept_entries(8 * N * M) == N * M
    assert kept_entries(8 * N * M - 1) == 0


def test_gradcheck():
    exclusion = Exclusion(ids=(torch.arange(4), torch.arange(6)))
    cross = units(4, 3), units(6, 3, seed=1), scalar(3.0)
    assert torch.autograd.gradcheck(lambda *x: cross_logsumexp(*x, exclusion, block_size=2), cross)
    exclusion = Exclusion(ids=(torch.arange(6), torch.arange(6)))
    assert torch.autograd.gradcheck(
        lambda v, s: self_logsumexp(v, s, exclusion, block_size=4), (units(6, 3), scalar(3.0))
    )


@pytest.mark.parametrize("block_size", [2, 1024])
def test_a_row_without_negatives_is_minus_infinity_and_has_no_gradient(block_size):
    rows, columns, scale = units(4, D), units(6, D, seed=1), scalar(7.0)
    exclusion = Exclusion(ids=(torch.tensor([0, 1, 1, 1]), torch.ones(6, dtype=torch.long)))
    found = cross_logsumexp(rows, columns, scale, exclusion, block_size=block_size)
    assert found[0].isfinite() and (found[1:] == float("-inf")).all()
    row_grad, column_grad, scale_grad = torch.autograd.grad(found.exp().sum(), (rows, columns, scale))
    assert row_grad[0].abs().min() > 0 and torch.equal(row_grad[1:], torch.zeros(3, D, dtype=torch.float64))
    assert column_grad.isfinite().all() and scale_grad.isfinite()


def test_all_equal_vectors_count_the_negatives():
    ones = F.normalize(torch.ones(9, D, dtype=torch.float64), dim=-1)
    ids = torch.arange(9)
    expected = torch.full((9,), 3.0 + torch.tensor(8.0).log().item(), dtype=torch.float64)
    torch.testing.assert_close(self_logsumexp(ones, 3.0, Exclusion(ids=(ids, ids)), block_size=4), expected)
    torch.testing.assert_close(cross_logsumexp(ones, ones, 3.0, Exclusion(ids=(ids, ids)), block_size=4), expected)


def clouds(kind):
    """Rows and columns in float32 whose cosines are near 0, near 1, near -1, or each row's own mixture."""
    rows, columns = units(N, 32, dtype=torch.float32), units(M, 32, seed=1, dtype=torch.float32)
    with torch.no_grad():
        if kind in ("aligned", "opposed"):
            center = F.normalize(torch.ones(32), dim=0)
            rows = F.normalize(center + 0.03 * rows, dim=-1)
            columns = F.normalize((center if kind == "aligned" else -center) + 0.03 * columns, dim=-1)
        elif kind == "mixed":
            columns = torch.cat([rows[:3], -rows[3:6], columns[6:]])
    return rows.detach().requires_grad_(), columns.detach().requires_grad_()


@pytest.mark.parametrize("temperature", [0.07, 0.0129, 0.0127, 0.01, 0.005, 0.002])
@pytest.mark.parametrize("kind", ["random", "aligned", "opposed", "mixed"])
@pytest.mark.parametrize("kernel", ["cross", "self"])
def test_float32_holds_down_to_small_temperatures(kernel, kind, temperature):
    rows, columns = clouds(kind)
    inputs = [rows, columns, scalar(1 / temperature, torch.float32)]
    exclusion = Exclusion(ids=(torch.arange(N), torch.arange(M) + N))
    if kernel == "self":
        vectors = torch.cat([rows, columns])
        exclusion = Exclusion(ids=(torch.arange(N + M), torch.arange(N + M)))
        found = self_logsumexp(vectors, inputs[2], exclusion, block_size=8)
    else:
        found = cross_logsumexp(*inputs, exclusion, block_size=8)
    double = [x.detach().double().requires_grad_() for x in inputs]
    left, right = (torch.cat(double[:2]),) * 2 if kernel == "self" else double[:2]
    expected = dense(left, right, double[2], exclusion)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    for mine, theirs in zip(gradients(found, inputs), gradients(expected, double), strict=True):
        assert mine.dtype == torch.float32
        assert (mine - theirs).norm() < 2e-4 * theirs.norm()


def test_bfloat16_vectors_are_summed_in_float32():
    inputs = [x.detach().bfloat16().requires_grad_() for x in (units(64, 32), units(90, 32, seed=1))]
    scale = scalar(14.0, torch.float32)
    exclusion = Exclusion(ids=(torch.arange(64), torch.arange(90)))
    found = cross_logsumexp(*inputs, scale, exclusion, block_size=16)
    exact = [x.detach().double().requires_grad_() for x in (*inputs, scale)]
    expected = dense(*exact, exclusion)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-5)
    grads = gradients(found, [*inputs, scale])
    assert [grad.dtype for grad in grads] == [torch.bfloat16, torch.bfloat16, torch.float32]
    for mine, theirs, tolerance in zip(grads, gradients(expected, exact), (4e-3, 4e-3, 1e-5), strict=True):
        assert (mine - theirs).norm() < tolerance * theirs.norm()


def test_autocast_does_not_lower_the_precision():
    rows, columns = units(40, 16, dtype=torch.float32), units(40, 16, seed=1, dtype=torch.float32)
    scale, ids = scalar(14.0, torch.float32), torch.arange(40)

    def run():
        found = cross_logsumexp(rows, columns, scale, Exclusion(ids=(ids, ids)))
        found = found + self_logsumexp(rows, scale, Exclusion(ids=(ids, ids)))
        return found, *gradients(found, (rows, columns, scale))

    plain = run()
    with torch.autocast("cpu", torch.bfloat16):
        assert (rows @ columns.T).dtype == torch.bfloat16
        cast = run()
    for mine, theirs in zip(cast, plain, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)


def test_strided_vectors():
    rows = units(D, N).detach().T.requires_grad_()
    columns = units(M, 2 * D, seed=1).detach()[:, ::2].requires_grad_()
    assert not rows.is_contiguous() and not columns.is_contiguous()
    inputs, exclusion = (rows, columns, scalar(3.0)), Exclusion(ids=(torch.arange(N), torch.arange(M)))
    assert_equal(cross_logsumexp(*inputs, exclusion, block_size=4), dense(*inputs, exclusion), inputs)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_gradient_to_one_side_only(which):
    inputs = [units(N, D), units(M, D, seed=1), scalar(7.0)]
    exclusion = exclusions()["diagonal"]
    whole = gradients(cross_logsumexp(*inputs, exclusion), inputs)[which]
    only = [x if i == which else x.detach() for i, x in enumerate(inputs)]
    (alone,) = gradients(cross_logsumexp(*only, exclusion), (only[which],))
    torch.testing.assert_close(alone, whole)


class LargestTensor(TorchDispatchMode):
    """Records the size of the largest tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


def test_beyond_the_limit_nothing_larger_than_the_vectors_or_a_block_exists():
    vectors, columns = units(300, 4, dtype=torch.float32), units(200, 4, seed=1, dtype=torch.float32)
    ids, scale = torch.arange(300) % 250, scalar(14.0, torch.float32)
    with LargestTensor() as largest:
        self_logsumexp(
            vectors, scale, Exclusion(ids=(ids, ids), groups=(ids % 3, ids % 3)), block_size=16, kept_bytes=0
        ).sum().backward()
        exclusion = Exclusion(ids=(ids, ids[:200]))
        cross_logsumexp(vectors, columns, scale, exclusion, block_size=16, kept_bytes=0).sum().backward()
    assert 300 * 4 <= largest.elements <= 300 * 4 + 200 * 4


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf"), 651.0])
def test_a_scale_out_of_range_is_refused(scale):
    ids = torch.arange(3)
    with pytest.raises(ValueError, match=r"scale \(1 / temperature\) .* is outside \(0, 650\]"):
        cross_logsumexp(units(3, D), units(3, D), scale, Exclusion(ids=(ids, ids)))


def test_without_a_process_group_nothing_is_gathered():
    tensor = units(3, D)
    assert gather_with_gradient(tensor) is tensor
    assert local_positions(3, tensor.device).tolist() == [0, 1, 2]
