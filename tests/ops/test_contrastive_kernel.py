"""The kernel against the dense matrix it never builds."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from conjoin.ops import (
    Exclusion,
    cross_logsumexp,
    gather_with_gradient,
    grouped_logsumexp,
    local_positions,
    ring_logsumexp,
    self_logsumexp,
)

N, M, D = 11, 17, 5


def units(*shape, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(*shape, generator=generator, dtype=dtype), dim=-1).requires_grad_()


def scalar(value, dtype=torch.float64):
    return torch.tensor(value, dtype=dtype, requires_grad=True)


def dense(rows, columns, scale, exclusion):
    """The definition; `scale` is a number or a matrix."""
    excluded = exclusion.row_ids[:, None] == exclusion.column_ids
    if exclusion.row_groups is not None:
        excluded = excluded | (exclusion.row_groups[:, None] == exclusion.column_groups)
    cosines = rows @ columns.T
    masked = torch.zeros(len(rows), dtype=torch.long)
    if exclusion.thresholds is not None:
        above = ~excluded & (cosines > exclusion.thresholds[:, None])
        masked, excluded = above.sum(1), excluded | above
    return (cosines * scale).masked_fill(excluded, float("-inf")).logsumexp(1), masked


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
    groups = torch.arange(N) % 3, torch.arange(M) % 3
    thresholds = torch.full((N,), 0.2, dtype=torch.float64)
    return {
        "own": Exclusion(row_ids, column_ids),
        "none": Exclusion(row_ids, column_ids + N),
        "permuted": Exclusion(row_ids, column_ids.flip(0)),
        "shared": Exclusion(hashed[row_ids % 3], hashed[column_ids % 3]),
        "groups": Exclusion(row_ids, column_ids, *groups),
        "sorted groups": Exclusion(row_ids, column_ids, groups[0].sort()[0], groups[1].sort()[0]),
        "thresholds": Exclusion(row_ids, column_ids, thresholds=thresholds),
        "everything": Exclusion(row_ids, column_ids, *groups, thresholds=thresholds),
    }


@pytest.mark.parametrize("block_size", [1, 3, 8, 1024])
@pytest.mark.parametrize("name", exclusions())
def test_cross_equals_the_dense_matrix(name, block_size):
    inputs = units(N, D), units(M, D, seed=1), scalar(7.0)
    found, masked = cross_logsumexp(*inputs, exclusions()[name], block_size=block_size)
    expected, expected_masked = dense(*inputs, exclusions()[name])
    assert_equal(found, expected, inputs)
    assert torch.equal(masked, expected_masked)
    assert bool(masked.any()) == (exclusions()[name].thresholds is not None)


@pytest.mark.parametrize("block_size", [1, 4, 1024])
@pytest.mark.parametrize("with_groups", [False, True])
def test_self_equals_the_dense_matrix_at_half_the_blocks(with_groups, block_size):
    vectors, scale = units(13, D), scalar(7.0)
    ids = torch.arange(13) % 10
    groups = (torch.arange(13) // 5,) * 2 if with_groups else ()
    exclusion = Exclusion(ids, ids, *groups)
    found = self_logsumexp(vectors, scale, exclusion, block_size=block_size)
    assert_equal(found, dense(vectors, vectors, scale, exclusion)[0], (vectors, scale))


@pytest.mark.parametrize("block_size", [3, 1024])
@pytest.mark.parametrize("thresholds", [None, torch.full((N,), 0.2, dtype=torch.float64)])
def test_grouped_has_two_scales(thresholds, block_size):
    rows, columns, scale, group_scale = units(N, D), units(M, D, seed=1), scalar(7.0), scalar(4.0)
    row_groups, column_groups = torch.arange(N) % 4, torch.arange(M) % 3  # a group without columns, too
    exclusion = Exclusion(torch.arange(N), torch.arange(M), thresholds=thresholds)
    matrix = torch.where(row_groups[:, None] == column_groups, group_scale, scale)
    found, masked = grouped_logsumexp(
        rows, columns, scale, group_scale, row_groups, column_groups, exclusion, block_size=block_size
    )
    expected, expected_masked = dense(rows, columns, matrix, exclusion)
    assert_equal(found, expected, (rows, columns, scale, group_scale))
    assert torch.equal(masked, expected_masked)


def test_ring_of_one_rank_is_cross():
    inputs = units(N, D), units(M, D, seed=1), scalar(7.0)
    exclusion = exclusions()["everything"]
    found, masked = ring_logsumexp(*inputs, exclusion, block_size=4)
    expected, expected_masked = cross_logsumexp(*inputs, exclusion)
    assert_equal(found, expected, inputs)
    assert torch.equal(masked, expected_masked)


def test_gradcheck():
    exclusion = Exclusion(torch.arange(4), torch.arange(6))
    cross = units(4, 3), units(6, 3, seed=1), scalar(3.0)
    assert torch.autograd.gradcheck(lambda *x: cross_logsumexp(*x, exclusion, block_size=2)[0], cross)
    exclusion = Exclusion(torch.arange(6), torch.arange(6))
    assert torch.autograd.gradcheck(
        lambda v, s: self_logsumexp(v, s, exclusion, block_size=4), (units(6, 3), scalar(3.0))
    )


@pytest.mark.parametrize("block_size", [2, 1024])
def test_a_row_without_negatives_is_minus_infinity_and_has_no_gradient(block_size):
    rows, columns, scale = units(4, D), units(6, D, seed=1), scalar(7.0)
    exclusion = Exclusion(torch.tensor([0, 1, 1, 1]), torch.ones(6, dtype=torch.long))
    found, _ = cross_logsumexp(rows, columns, scale, exclusion, block_size=block_size)
    assert found[0].isfinite() and (found[1:] == float("-inf")).all()
    row_grad, column_grad, scale_grad = torch.autograd.grad(found.exp().sum(), (rows, columns, scale))
    assert row_grad[0].abs().min() > 0 and torch.equal(row_grad[1:], torch.zeros(3, D, dtype=torch.float64))
    assert column_grad.isfinite().all() and scale_grad.isfinite()


def test_all_equal_vectors_count_the_negatives():
    ones = F.normalize(torch.ones(9, D, dtype=torch.float64), dim=-1)
    ids = torch.arange(9)
    expected = torch.full((9,), 3.0 + torch.tensor(8.0).log().item(), dtype=torch.float64)
    torch.testing.assert_close(self_logsumexp(ones, 3.0, Exclusion(ids, ids), block_size=4), expected)
    torch.testing.assert_close(cross_logsumexp(ones, ones, 3.0, Exclusion(ids, ids), block_size=4)[0], expected)


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
@pytest.mark.parametrize("kernel", ["cross", "ring", "self"])
def test_float32_holds_down_to_small_temperatures(kernel, kind, temperature):
    rows, columns = clouds(kind)
    inputs = [rows, columns, scalar(1 / temperature, torch.float32)]
    exclusion = Exclusion(torch.arange(N), torch.arange(M) + N)
    if kernel == "self":
        vectors = torch.cat([rows, columns])
        exclusion = Exclusion(torch.arange(N + M), torch.arange(N + M))
        found = self_logsumexp(vectors, inputs[2], exclusion, block_size=8)
    else:
        found = {"cross": cross_logsumexp, "ring": ring_logsumexp}[kernel](*inputs, exclusion, block_size=8)[0]
    double = [x.detach().double().requires_grad_() for x in inputs]
    left, right = (torch.cat(double[:2]),) * 2 if kernel == "self" else double[:2]
    expected = dense(left, right, double[2], exclusion)[0]
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    for mine, theirs in zip(gradients(found, inputs), gradients(expected, double), strict=True):
        assert mine.dtype == torch.float32
        assert (mine - theirs).norm() < 2e-4 * theirs.norm()


def test_bfloat16_vectors_are_summed_in_float32():
    inputs = [x.detach().bfloat16().requires_grad_() for x in (units(64, 32), units(90, 32, seed=1))]
    scale = scalar(14.0, torch.float32)
    exclusion = Exclusion(torch.arange(64), torch.arange(90))
    found, _ = cross_logsumexp(*inputs, scale, exclusion, block_size=16)
    exact = [x.detach().double().requires_grad_() for x in (*inputs, scale)]
    expected = dense(*exact, exclusion)[0]
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
        found = cross_logsumexp(rows, columns, scale, Exclusion(ids, ids))[0]
        found = found + self_logsumexp(rows, scale, Exclusion(ids, ids))
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
    inputs, exclusion = (rows, columns, scalar(3.0)), Exclusion(torch.arange(N), torch.arange(M))
    assert_equal(cross_logsumexp(*inputs, exclusion, block_size=4)[0], dense(*inputs, exclusion)[0], inputs)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_gradient_to_one_side_only(which):
    inputs = [units(N, D), units(M, D, seed=1), scalar(7.0)]
    exclusion = exclusions()["own"]
    whole = gradients(cross_logsumexp(*inputs, exclusion)[0], inputs)[which]
    only = [x if i == which else x.detach() for i, x in enumerate(inputs)]
    (alone,) = gradients(cross_logsumexp(*only, exclusion)[0], (only[which],))
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


def test_nothing_larger_than_the_vectors_or_a_block_ever_exists():
    vectors, columns = units(300, 4, dtype=torch.float32), units(200, 4, seed=1, dtype=torch.float32)
    ids, scale = torch.arange(300) % 250, scalar(14.0, torch.float32)
    thresholds = torch.full((300,), 0.9)
    with LargestTensor() as largest:
        self_logsumexp(vectors, scale, Exclusion(ids, ids, ids % 3, ids % 3), block_size=16).sum().backward()
        exclusion = Exclusion(ids, ids[:200], thresholds=thresholds)
        cross_logsumexp(vectors, columns, scale, exclusion, block_size=16)[0].sum().backward()
    assert 300 * 4 <= largest.elements <= 300 * 4 + 200 * 4


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf"), 651.0])
def test_a_scale_out_of_range_is_refused(scale):
    ids = torch.arange(3)
    with pytest.raises(ValueError, match=r"scale \(1 / temperature\) .* is outside \(0, 650\]"):
        cross_logsumexp(units(3, D), units(3, D), scale, Exclusion(ids, ids))


def test_self_refuses_thresholds():
    ids = torch.arange(3)
    with pytest.raises(ValueError, match="use cross_logsumexp"):
        self_logsumexp(units(3, D), 3.0, Exclusion(ids, ids, thresholds=torch.ones(3)))


def test_without_a_process_group_nothing_is_gathered():
    tensor = units(3, D)
    assert gather_with_gradient(tensor) is tensor
    assert local_positions(3, tensor.device).tolist() == [0, 1, 2]
