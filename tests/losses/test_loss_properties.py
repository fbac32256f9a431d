"""The contrastive losses equal loops over rows for random shapes and duplicate ids, in any order of the rows."""

import pytest
import torch

pytest.importorskip("hypothesis")

import naive_losses
from hypothesis import given, strategies as st

from conjoin.losses import info_nce, multi_positive, symmetric_info_nce

ROWS = st.integers(1, 9)
TEMPERATURES = st.floats(0.01, 2)
SEEDS = st.integers(0, 99)


def vectors(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@given(ROWS, ROWS, TEMPERATURES, st.integers(1, 6), SEEDS)
def test_info_nce(count, more, temperature, labels, seed):
    queries, candidates = vectors(count, 4, seed=seed), vectors(count + more, 4, seed=seed + 100)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(labels, (count + more,), generator=generator)
    places = torch.randperm(count + more, generator=generator)[:count]
    options = {"positive_indices": places, "candidate_ids": ids}
    found = info_nce(queries, candidates, temperature, **options)
    close(found, naive_losses.info_nce(queries, candidates, temperature, places, ids))
    assert found >= 0
    order = torch.randperm(count, generator=generator)
    close(info_nce(queries[order], candidates, temperature, positive_indices=places[order], candidate_ids=ids), found)


@given(ROWS, TEMPERATURES, st.integers(1, 6), SEEDS)
def test_both_directions(count, temperature, labels, seed):
    a, b = vectors(count, 4, seed=seed), vectors(count, 4, seed=seed + 100)
    ids = torch.randint(labels, (count,), generator=torch.Generator().manual_seed(seed))
    found = symmetric_info_nce(a, b, temperature, gathered_ids=ids)
    close(found, symmetric_info_nce(b, a, temperature, gathered_ids=ids))
    both = [naive_losses.info_nce(*pair, temperature, ids=ids) for pair in ((a, b), (b, a))]
    close(found, (both[0] + both[1]) / 2)


@given(ROWS, st.integers(1, 3), st.integers(0, 3), TEMPERATURES, st.integers(1, 6), SEEDS)
def test_several_positives(count, positives, negatives, temperature, labels, seed):
    generator = torch.Generator().manual_seed(seed)
    anchors = vectors(count, 4, seed=seed)
    pulled, pushed = vectors(count, positives, 4, seed=seed + 1), vectors(count, negatives, 4, seed=seed + 2)
    masks = [torch.rand(count, size, generator=generator) < 0.6 for size in (positives, negatives)]
    masks[0][0, 0] = True
    ids = torch.randint(labels, (count,), generator=generator)
    found = multi_positive(anchors, pulled, pushed, temperature, *masks, ids=ids)
    close(found, naive_losses.multi_positive(anchors, pulled, pushed, temperature, *masks, ids=ids))
