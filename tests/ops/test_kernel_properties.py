"""The kernel equals the dense float64 matrix for random shapes, blocks, scales and ids."""

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("hypothesis")

from conjoin.ops import Exclusion, cross_logsumexp, grouped_logsumexp, pair_logsumexp, self_logsumexp
from hypothesis import given, strategies as st

SIZES = st.integers(1, 23)
BLOCKS = st.integers(1, 30)
KEPT = st.sampled_from([0, 2**28])
SCALES = st.floats(0.1, 600)


def units(count, width, generator):
    """Unit vectors, some of them twice."""
    rows = F.normalize(torch.randn(count, width, generator=generator, dtype=torch.float64), dim=-1)
    return rows[torch.randint(count, (count,), generator=generator)].requires_grad_()


def dense(scores, mask):
    return scores.masked_fill(mask, -torch.inf).logsumexp(1)


def check(found, expected, inputs):
    """Values and gradients; a row without negatives is minus infinity and has no gradient."""
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
    finite = expected.isfinite()
    if finite.any():
        weights = torch.linspace(0.5, 2, len(expected), dtype=expected.dtype)
        mine, theirs = (
            torch.autograd.grad((values * weights)[finite].sum(), inputs, retain_graph=True)
            for values in (found, expected)
        )
        for one, other in zip(mine, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def problem(count, width, labels, seed, offset):
    """Rows, columns, an exclusion by ids and a diagonal, and the same as a matrix."""
    generator = torch.Generator().manual_seed(seed)
    rows, columns = units(count, 4, generator), units(width, 4, generator)
    ids = torch.randint(labels, (count,), generator=generator), torch.randint(labels, (width,), generator=generator)
    mask = (ids[0][:, None] == ids[1]) | (torch.arange(count)[:, None] + offset == torch.arange(width))
    return rows, columns, ids, Exclusion((offset,), ids), mask


@given(SIZES, SIZES, SCALES, st.integers(1, 9), BLOCKS, KEPT, st.integers(0, 99), st.integers(-5, 25))
def test_rows_columns_and_both(count, width, scale, labels, block_size, kept_bytes, seed, offset):
    rows, columns, _, exclusion, mask = problem(count, width, labels, seed, offset)
    options = {"block_size": block_size, "kept_bytes": kept_bytes}
    scores = rows @ columns.T * scale
    finite = ~mask.all(1)
    found = cross_logsumexp(rows, columns, scale, exclusion, **options)
    assert (found.isfinite() == finite).all()
    check(found[finite], dense(scores, mask)[finite], (rows, columns))
    forth, back = pair_logsumexp(rows, columns, scale, exclusion, **options)
    torch.testing.assert_close(forth, found, rtol=0, atol=1e-9)
    used = ~mask.all(0)
    check(back[used], dense(scores.T, mask.T)[used], (rows, columns))


@given(SIZES, SCALES, st.integers(1, 9), BLOCKS, KEPT, st.integers(0, 99))
def test_a_set_with_itself(count, scale, labels, block_size, kept_bytes, seed):
    rows, _, ids, _, _ = problem(count, count, labels, seed, 0)
    exclusion, mask = Exclusion((0,), (ids[0], ids[0])), ids[0][:, None] == ids[0]
    found = self_logsumexp(rows, scale, exclusion, block_size=block_size, kept_bytes=kept_bytes)
    finite = ~mask.all(1)
    assert (found.isfinite() == finite).all()
    check(found[finite], dense(rows @ rows.T * scale, mask)[finite], (rows,))


@given(SIZES, SIZES, SCALES, SCALES, st.integers(1, 9), BLOCKS, KEPT, st.integers(0, 99))
def test_two_scales(count, width, scale, group_scale, labels, block_size, kept_bytes, seed):
    rows, columns, _, exclusion, mask = problem(count, width, labels, seed, 0)
    groups = torch.arange(count) % 3, torch.arange(width) % 2
    scales = torch.full((count, width), scale, dtype=rows.dtype).masked_fill(
        groups[0][:, None] == groups[1], group_scale
    )
    options = {"block_size": block_size, "kept_bytes": kept_bytes}
    found = grouped_logsumexp(rows, columns, scale, group_scale, groups, exclusion, **options)
    finite = ~mask.all(1)
    check(found[finite], dense(rows @ columns.T * scales, mask)[finite], (rows, columns))
