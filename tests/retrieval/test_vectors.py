"""Exact search equals sorting all scores in float64, ties by position."""

import itertools

import numpy as np
import pytest
import torch

from conjoin.retrieval import exact_search
from tiny_collections import clustered, unit


def naive(vectors, queries, k, among=None):
    scores = (queries.astype(np.float64) @ vectors.astype(np.float64).T).astype(np.float32)
    places = np.arange(len(vectors)) if among is None else among
    order = places[np.argsort(-scores[:, places], axis=1, kind="stable")[:, :k]]
    return order, np.take_along_axis(scores, order, 1)


def check(vectors, queries, k, among=None, given=None):
    positions, scores = exact_search(queries, vectors if given is None else given, k, among=among)
    right, right_scores = naive(vectors, queries, k, among)
    np.testing.assert_array_equal(positions, right)
    np.testing.assert_array_equal(scores, right_scores)
    assert (positions.dtype, scores.dtype) == (np.int64, np.float32)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("k", [1, 7, 300, 1000])
def test_equals_sorting_everything(k, dtype):
    vectors, queries = clustered(300, 24).astype(dtype), clustered(40, 24, seed=1)
    for given in (None, torch.from_numpy(vectors)):  # a tensor is ranked on its device
        check(vectors, queries, k, given=given)
        check(vectors, queries, k, among=np.arange(5, 300, 7), given=given)


@pytest.mark.parametrize("has_faiss", [False, True])
@pytest.mark.parametrize("block, queries_at_once", [(7, 3), (50, 64), (1, 5)])
@pytest.mark.parametrize("precision", ["highest", "high"])
def test_blocks_and_who_multiplies_do_not_matter(block, queries_at_once, precision, has_faiss, monkeypatch):
    if has_faiss:
        pytest.importorskip("faiss")
    vectors, queries = clustered(210, 16), clustered(9, 16, seed=1)
    sizes = {"_CORPUS_BLOCK": block, "_TORCH_BLOCK": (queries_at_once, 5), "_NUMBERS_AT_ONCE": 100, "_SPARE": 1}
    for name, value in (sizes | {"_HAS_FAISS": has_faiss, "_LARGE": 1, "_MANY_QUERIES": 1}).items():
        monkeypatch.setattr(f"conjoin.retrieval.vectors.{name}", value)
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: precision)
    some = np.array([0, 3, 29, 30, 31, 100, 209])
    for k in (1, 10, 60, 210):
        for among in (None, some):
            check(vectors, queries, k, among)
            check(vectors, queries, k, among, (vectors[start : start + 30] for start in range(0, 210, 30)))


@pytest.mark.skipif(not hasattr(torch.backends, "fp32_precision"), reason="this torch has no such setting")
def test_reduced_precision_set_in_the_newer_way(monkeypatch):
    monkeypatch.setattr(torch.backends, "fp32_precision", "tf32")  # get_float32_matmul_precision raises now
    check(unit(50, 8), unit(4, 8, seed=1), 5)


def test_any_numbers_of_rows_of_queries_and_of_blocks():
    hypothesis = pytest.importorskip("hypothesis")
    from hypothesis import strategies as st

    @hypothesis.given(st.data())
    def holds(data):
        draw = data.draw
        count, dimension, seed = draw(st.integers(1, 60)), draw(st.integers(1, 9)), draw(st.integers(0, 999))
        vectors = unit(max(1, count // draw(st.integers(1, 4))), dimension, seed)
        vectors = vectors[np.arange(count) % len(vectors)]  # with ties
        cuts = [0, *sorted(draw(st.lists(st.integers(0, count), max_size=4))), count]
        among = np.flatnonzero(np.random.default_rng(seed).random(count) < 0.4) if draw(st.booleans()) else None
        parts = [vectors[start:end] for start, end in itertools.pairwise(cuts)]
        check(vectors, unit(draw(st.integers(1, 4)), dimension, seed + 1), draw(st.integers(1, 70)), among, parts)

    holds()


def test_nothing_to_rank():
    for found in (
        exact_search(np.empty((0, 3), dtype=np.float32), unit(5, 3), 2),
        exact_search(unit(2, 3), np.empty((0, 3), dtype=np.float32), 2),
        exact_search(unit(2, 3), iter([]), 2),
        exact_search(unit(2, 3), unit(5, 3), 2, among=np.empty(0, dtype=np.int64)),
    ):
        assert [part.size for part in found] == [0, 0]
    assert exact_search(np.empty((0, 3), dtype=np.float32), unit(5, 3), 2)[1].shape == (0, 2)


@pytest.mark.parametrize(
    ("queries", "k", "message"),
    [
        *((unit(1, 8), k, f"k must be a positive integer, got {k!r}") for k in (0, -1, 1.5, True, None)),
        (unit(1, 9), 1, "the queries have 9 dimensions, expected 8"),
        (unit(1, 8)[0], 1, r"queries must be a matrix \(N, D\), got the shape \(8,\)"),
        (np.array([unit(1, 8)[0], [np.nan] * 8]), 1, "query 1 has values that are not finite"),
        (np.array([unit(1, 8)[0], [np.inf] * 8]), 1, "query 1 has values that are not finite"),
        (2 * unit(1, 8), 1, "query 0 has norm 2, expected an L2-normalised vector"),
        (np.zeros((1, 8)), 1, "query 0 has norm 0, expected"),
    ],
)
def test_bad_queries(queries, k, message):
    with pytest.raises(ValueError, match=message):
        exact_search(queries, unit(5, 8), k)
