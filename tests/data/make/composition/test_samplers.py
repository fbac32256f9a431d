"""The samplers against the catalogue itself: every positive, every hard negative, every constraint by brute force."""

from collections import Counter

import numpy as np
import pytest

from conjoin.data import CompositionSettings, load_templates, read_catalogue
from conjoin.data.make.composition.compose import _split, evenness
from conjoin.data.make.composition.composer import Composer
from conjoin.data.make.composition.samplers import (
    SAMPLERS,
    Condition,
    Pool,
    check_conditions,
    draw_attribute_uniform,
    find_similar,
    near_misses,
)
from tiny_catalogue import products, write_catalogue

SHARE = 0.2
FAMILIES = {row["sku"]: row["family"] for row in products()}
DESCRIBED = {row["sku"]: row for row in products()}


@pytest.fixture(scope="module")
def catalogue(tmp_path_factory):
    return read_catalogue(write_catalogue(tmp_path_factory.mktemp("shop")), columns={"group": "family"})


def vectors_of(catalogue, seed=0):
    vectors = np.random.default_rng(seed).standard_normal((len(catalogue), 16), dtype=np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def outcomes(catalogue, count, vectors=None, rows=None, **changes):
    settings = CompositionSettings(**{"max_positive_share": SHARE, "languages": ("en",)} | changes)
    rows = np.arange(len(catalogue)) if rows is None else rows
    pool = Pool(catalogue, rows, vectors, settings.damping, settings.exclude_most_frequent)
    composer = Composer(catalogue, pool, 0, settings, load_templates(settings.languages))
    return [composer.outcome(number) for number in range(count)]


def made(*arguments, **options):
    return [record["query"] for record in outcomes(*arguments, **options) if record["query"] is not None]


def wanted(query):
    return [pair for condition in query["query"].values() for pair in condition.items()]


def missed(pid, pairs):
    return [(name, DESCRIBED[pid][name]) for name, value in pairs if DESCRIBED[pid][name] != value]


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_queries_are_right_by_brute_force(catalogue, sampler):
    queries = made(catalogue, 150, samplers={sampler: 1.0}, conditions={2: 0.2, 3: 0.3, 4: 0.5})
    assert len(queries) > 100
    assert {len(query["query"]) for query in queries} == {2, 3, 4}
    for query in queries:
        pairs, shown = wanted(query), list(query["query"])
        assert len({name for name, _ in pairs}) == len(pairs) == len(shown)
        for pid, condition in query["query"].items():
            assert not missed(pid, condition.items())
            others = [other for other in shown if other != pid]
            assert all(missed(other, condition.items()) for other in others), "one product would serve for two"
        assert query["pos_candidate"] == [int(pid) for pid in DESCRIBED if not missed(pid, pairs)]
        assert 0 < len(query["pos_candidate"]) < SHARE * len(DESCRIBED)
        barred = {*map(int, shown), *query["pos_candidate"]}
        assert barred.isdisjoint(query["hard_negative"])
        siblings = {pid for pid in FAMILIES if FAMILIES[pid] == FAMILIES[shown[0]]}
        for pid in map(str, query["hard_negative"]):
            failed = missed(pid, pairs)
            assert any(value for _, value in failed), "a value that it has is another one"
            assert pid in siblings or len(failed) == 1, "misses one condition"
        assert len(set(query["hard_negative"])) == len(query["hard_negative"]) <= 8


def test_similar_products_are_positives_and_siblings_hard_negatives(catalogue):
    queries = made(catalogue, 80, samplers={"high_similarity": 1.0})
    with_siblings = unknown = 0
    for query in queries:
        shown = list(query["query"])
        family = [pid for pid in FAMILIES if FAMILIES[pid] == FAMILIES[shown[0]] and pid != shown[0]]
        answers = [int(pid) for pid in family if int(pid) in query["pos_candidate"]]
        assert answers, "a variant of the first product is an answer"
        assert all(FAMILIES[pid] != FAMILIES[shown[0]] for pid in shown[1:])
        rest = {int(pid): [value for _, value in missed(pid, wanted(query))] for pid in family}
        rest = {pid: values for pid, values in rest.items() if values}
        known = {pid for pid, values in rest.items() if any(values)}
        assert set(rest) & set(query["hard_negative"]) == known
        with_siblings += bool(known)
        unknown += len(rest) - len(known)
    assert with_siblings > 40 and unknown > 0


def test_number_of_conditions_follows_the_paper_before_filtering(catalogue):
    drawn = Counter()
    for record in outcomes(catalogue, 600, samplers={"conventional": 1.0}):
        drawn.update(record["conditions"])
    total = sum(drawn.values())
    assert total > 1000
    for number, share in (("2", 0.75), ("3", 0.10), ("4", 0.15)):
        assert abs(drawn[number] / total - share) < 0.04


def attributes_of(queries):
    return Counter(name for query in queries for name, _ in wanted(query))


def test_frequent_keys_are_damped_and_attribute_uniform_sampling_is_even(catalogue):
    options = {"conditions": {2: 1.0}}
    plain = attributes_of(made(catalogue, 300, samplers={"conventional": 1.0}, damping=0.0, **options))
    damped = attributes_of(made(catalogue, 300, samplers={"conventional": 1.0}, damping=3.0, **options))
    uniform = attributes_of(made(catalogue, 300, samplers={"attribute_uniform": 1.0}, **options))
    assert damped["color"] / damped.total() < plain["color"] / plain.total() - 0.05
    assert evenness(uniform) > evenness(plain) + 0.002


def test_the_most_frequent_values_of_the_catalogue_can_be_left_out_of_each_split(catalogue):
    def most_frequent(rows):
        counts = {name: Counter(row[name] for row in rows if row[name]) for name in catalogue.attributes}
        return {(name, found.most_common(1)[0][0]) for name, found in counts.items()}

    most = most_frequent(DESCRIBED.values())
    splits = _split(catalogue, CompositionSettings(test_share=0.1))
    assert most_frequent([DESCRIBED[catalogue.ids[row]] for row in splits["test"]]) != most
    for rows in splits.values():
        queries = [made(catalogue, 200, rows=rows, exclude_most_frequent=chosen) for chosen in (False, True)]
        asked, fewer = ({pair for query in found for pair in wanted(query)} for found in queries)
        assert asked & most and fewer and not fewer & most


def test_positives_are_ranked_by_mean_similarity(catalogue):
    vectors = vectors_of(catalogue)
    places = {int(pid): place for place, pid in enumerate(catalogue.ids)}
    queries = made(catalogue, 60, vectors)
    assert any(query["pos_candidate"] != sorted(query["pos_candidate"]) for query in queries)
    for query in queries:
        shown = [places[int(pid)] for pid in query["query"]]
        found = [places[pid] for pid in query["pos_candidate"]]
        scores = (vectors[found] @ vectors[shown].T).mean(axis=1)
        assert (np.diff(scores) <= 1e-6).all()


def test_without_families_the_most_similar_product_is_found(catalogue, tmp_path):
    alone = read_catalogue(write_catalogue(tmp_path), attributes=["color", "shape"])
    vectors = vectors_of(alone)
    copy = int(np.flatnonzero(alone.codes[0] == alone.codes[0, 0])[5])
    vectors[copy] = vectors[0]
    alone.codes[1, [0, copy]] = 0, 1  # it shares the first value and differs in the second
    pool = Pool(alone, np.arange(len(alone)), vectors)
    found = {find_similar(pool, 0, np.random.default_rng(seed)) for seed in range(20)}
    assert copy in found
    assert Pool(alone, np.arange(len(alone))).families is None
    queries = made(alone, 40, samplers={"high_similarity": 1.0}, conditions={2: 1.0}, max_positive_share=0.5)
    assert len(queries) > 20


def test_near_misses_without_vectors_come_from_all_products(catalogue, monkeypatch):
    monkeypatch.setattr("conjoin.data.make.composition.samplers.MOST_COMPARED", 20)
    pool, found = Pool(catalogue, np.arange(len(catalogue))), []
    for seed in range(50):
        generator = np.random.default_rng(seed)
        found += near_misses(pool, draw_attribute_uniform(pool, 2, generator), 8, generator).tolist()
    assert 0.4 < np.mean(found) / len(pool) < 0.6


def test_an_outcome_depends_on_its_number_only(catalogue):
    pool = Pool(catalogue, np.arange(len(catalogue)))
    settings = CompositionSettings(max_positive_share=SHARE)
    composer = Composer(catalogue, pool, 0, settings, load_templates(("en",)))
    assert composer.outcome(29) == outcomes(catalogue, 30)[29]


def test_conditions_that_share_a_value_are_refused(catalogue):
    pool = Pool(catalogue, np.arange(len(catalogue)))
    value = int(pool.codes[0, 0])
    second, other = (int(found[0]) for found in (pool.products(0, value)[1:], np.flatnonzero(pool.codes[0] != value)))
    shape = int(pool.codes[1, second])
    conditions = (Condition(0, 0, value), Condition(second, 1, shape))
    assert check_conditions(pool, conditions) == "two products share the value of a condition"
    assert check_conditions(pool, (conditions[0], conditions[0])) == "one product for two conditions"
    assert pool.codes[0, other] != value


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"queries": 0}, "queries must be at least 1"),
        ({"test_share": 1.0}, "test_share must be in"),
        ({"max_positive_share": 0.0}, "max_positive_share must be in"),
        ({"damping": -1.0}, "damping must be at least 0"),
        ({"samplers": {"conventional": -1.0}}, "samplers: expected weights"),
        ({"samplers": {"uniform": 1.0}}, "unknown sampler 'uniform'"),
        ({"conditions": {1: 1.0}}, "a query has at least 2 conditions, got 1"),
    ],
)
def test_settings_are_checked(change, message):
    with pytest.raises(ValueError, match=message):
        CompositionSettings(**change)
