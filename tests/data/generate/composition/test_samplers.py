"""Composed queries against the catalogue: every positive, every hard negative, every constraint by brute force."""

import itertools
import json
from collections import Counter

import numpy as np
import pytest

from conjoin.data import SAMPLERS, CompositionSettings, compose_queries, read_catalogue
from tiny_catalogue import products, write_catalogue

SHARE = 0.2
FAMILIES = {row["sku"]: row["family"] for row in products()}
DESCRIBED = {row["sku"]: row for row in products()}
ATTRIBUTES = ("color", "material", "style", "shape")


@pytest.fixture(scope="module")
def catalogue(tmp_path_factory):
    return read_catalogue(write_catalogue(tmp_path_factory.mktemp("shop")), columns={"group": "family"})


@pytest.fixture
def made(catalogue, tmp_path):
    """Composes training queries of all products."""
    numbers = itertools.count()

    def compose(count, vectors=None, of=catalogue, **changes):
        settings = {"queries": count, "test_share": 0.0, "max_positive_share": SHARE} | changes
        folder = tmp_path / str(next(numbers))
        return read(compose_queries(of, folder, CompositionSettings(**settings), vectors=vectors))

    return compose


def read(folder, split="train"):
    return [json.loads(line) for line in (folder / f"queries-{split}.json").read_text(encoding="utf-8").splitlines()]


def vectors_of(catalogue, seed=0):
    vectors = np.random.default_rng(seed).standard_normal((len(catalogue.products), 16), dtype=np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def wanted(query):
    return [pair for condition in query["query"].values() for pair in condition.items()]


def missed(pid, pairs):
    return [(name, DESCRIBED[pid][name]) for name, value in pairs if DESCRIBED[pid][name] != value]


@pytest.mark.parametrize("has_families", [True, False])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_queries_are_right_by_brute_force(made, catalogue, tmp_path, sampler, has_families):
    shop = catalogue if has_families else read_catalogue(write_catalogue(tmp_path), attributes=ATTRIBUTES)
    queries = made(100, of=shop, samplers={sampler: 1.0}, conditions={2: 0.2, 3: 0.3, 4: 0.5})
    assert len(queries) == 100
    assert {len(query["query"]) for query in queries} == {2, 3, 4}
    for query in queries:
        pairs, shown = wanted(query), list(query["query"])
        assert len({name for name, _ in pairs}) == len(pairs) == len(shown)
        for pid, condition in query["query"].items():
            assert not missed(pid, condition.items())
            others = [other for other in shown if other != pid]
            assert all(missed(other, condition.items()) for other in others), "one product would serve for two"
        assert sorted(query["pos_candidate"]) == [int(pid) for pid in DESCRIBED if not missed(pid, pairs)]
        assert 0 < len(query["pos_candidate"]) < SHARE * len(DESCRIBED)
        barred = {*map(int, shown), *query["pos_candidate"]}
        assert barred.isdisjoint(query["hard_negative"])
        siblings = {pid for pid in FAMILIES if FAMILIES[pid] == FAMILIES[shown[0]]} if has_families else set()
        for pid in map(str, query["hard_negative"]):
            failed = missed(pid, pairs)
            assert any(value for _, value in failed), "a value that it has is another one"
            assert pid in siblings or len(failed) == 1, "misses one condition"
        assert len(set(query["hard_negative"])) == len(query["hard_negative"]) <= 8


def test_similar_products_are_positives_and_siblings_hard_negatives(made):
    queries = made(80, samplers={"high_similarity": 1.0})
    with_siblings = unknown = 0
    for query in queries:
        shown = list(query["query"])
        family = [pid for pid in FAMILIES if FAMILIES[pid] == FAMILIES[shown[0]] and pid != shown[0]]
        answers = [int(pid) for pid in family if int(pid) in query["pos_candidate"]]
        assert answers, "a variant of the first product is an answer"
        rest = {int(pid): [value for _, value in missed(pid, wanted(query))] for pid in family if pid not in shown}
        rest = {pid: values for pid, values in rest.items() if values}
        known = {pid for pid, values in rest.items() if any(values)}
        assert set(rest) & set(query["hard_negative"]) == known
        with_siblings += bool(known)
        unknown += len(rest) - len(known)
    assert with_siblings > 40 and unknown > 0


def attributes_of(queries):
    counts = Counter(name for query in queries for name, _ in wanted(query))
    return np.array([counts[name] for name in ATTRIBUTES]) / counts.total()


def test_frequent_keys_are_damped_and_attribute_uniform_sampling_is_even(made, monkeypatch):
    options = {"conditions": {2: 1.0}, "max_positive_share": 1.0}
    plain, damped = [], []
    for damping, found in ((0.0, plain), (3.0, damped)):
        monkeypatch.setattr("conjoin.data.generate.composition.samplers.DAMPING", damping)
        found[:] = attributes_of(made(300, samplers={"conventional": 1.0}, **options))
    uniform = attributes_of(made(300, samplers={"attribute_uniform": 1.0}, **options))
    assert damped[0] < plain[0] - 0.05, "most products have a colour"
    assert np.abs(uniform - 0.25).max() < np.abs(np.array(plain) - 0.25).max() - 0.02


@pytest.mark.parametrize("has_vectors", [True, False])
def test_positives_are_ranked_by_mean_similarity(made, catalogue, has_vectors):
    pids = [*catalogue.products["idx"]]
    vectors = vectors_of(catalogue) if has_vectors else None

    def similarity(pid, other):
        if has_vectors:
            return vectors[pids.index(pid)] @ vectors[pids.index(other)]
        return sum(DESCRIBED[pid][name] == DESCRIBED[other][name] != "" for name in ATTRIBUTES)

    queries = made(60, vectors)
    assert any(query["pos_candidate"] != sorted(query["pos_candidate"]) for query in queries)
    for query in queries:
        scores = [np.mean([similarity(str(pid), shown) for shown in query["query"]]) for pid in query["pos_candidate"]]
        assert (np.diff(scores) <= 1e-6).all()


def test_without_families_the_most_similar_product_is_the_answer(made, tmp_path):
    alone = read_catalogue(write_catalogue(tmp_path), attributes=["color", "material"])
    ids = alone.products["idx"]
    vectors = np.eye(len(ids), dtype=np.float32)
    twins = [products for products in itertools.pairwise(range(len(ids)))][::2]
    for first, second in twins:
        vectors[second] = vectors[first]
    settings = {"samplers": {"high_similarity": 1.0}, "conditions": {2: 1.0}, "max_positive_share": 0.5}
    twin = {ids[a]: int(ids[b]) for pair in twins for a, b in (pair, pair[::-1])}
    queries = [made(100, given, of=alone, **settings) for given in (vectors, None)]
    answers = [[twin[next(iter(query["query"]))] in query["pos_candidate"] for query in found] for found in queries]
    assert sum(answers[0]) > 2 * sum(answers[1])


def test_fewer_queries_are_the_first_of_more(made):
    assert made(20) == made(60)[:20] != made(20, seed=1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"queries": 0}, "queries=0; expected at least 1"),
        ({"samplers": {"conventional": -1.0}}, "samplers=.*; expected weights from 0 on"),
        ({"samplers": {"conventional": 0.0}}, "samplers=.*; expected weights from 0 on, one of them above 0"),
        ({"conditions": {2: 0.0}}, "conditions=.*; expected weights from 0 on, one of them above 0"),
        ({"conditions": {2: -1.0, 3: 2.0}}, "conditions=.*; expected weights from 0 on"),
        ({"conditions": {}}, "conditions={}; expected at least 2"),
        ({"samplers": {"uniform": 1.0}}, "samplers={'uniform': 1.0}; expected some of conventional"),
        ({"conditions": {1: 1.0}}, "conditions={1: 1.0}; expected at least 2"),
    ],
)
def test_settings_are_checked(change, message):
    with pytest.raises(ValueError, match=message):
        CompositionSettings(**change)
