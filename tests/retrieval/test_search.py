"""From items to results: weights of parts, and the best row of each group."""

from datetime import date, datetime

import numpy as np
import pytest

from conjoin.retrieval import encode_collection, open_collection, rank_items, search_items
from conjoin.retrieval.search import search_groups
from conjoin.retrieval.words import WordQuery
from tiny_collections import made, naive, names, unit
from tiny_encoder import tiny_encoder, tiny_rows

VECTORS = unit(60, 8)


def first_of_groups(ids, groups, k):
    best = {}
    for id_ in ids:
        best.setdefault(groups[id_], id_)
    return list(best.values())[:k]


@pytest.mark.parametrize("memory", [0, 10**6])
@pytest.mark.parametrize("k", [1, 3, 7])
def test_the_best_row_of_each_group(tmp_path, k, memory):
    """One group holds most rows, so a search for k rows is not enough; three rows without a value are groups."""
    products = {n: None if n >= 57 else f"p{n % 5}" if n < 10 else "many" for n in range(60)}
    made(tmp_path / "c", VECTORS, kept=lambda n: {"product": products[n]})
    collection, queries = open_collection(tmp_path / "c", memory=memory), unit(5, 8, 1)
    groups = dict(zip(names(60), (products[n] or f"row {n}" for n in range(60)), strict=True))
    found = search_groups(collection, queries, k, "product")
    ranked, scores = naive(VECTORS, queries, 60)
    assert found.ids == [first_of_groups(ids, groups, k) for ids in ranked]
    of_id = [dict(zip(ids, row, strict=True)) for ids, row in zip(ranked, scores, strict=True)]
    right = [[own[id_] for id_ in ids] for own, ids in zip(of_id, found.ids, strict=True)]
    np.testing.assert_array_equal(found.scores, right)


def test_fewer_groups_than_asked_for(tmp_path):
    collection = made(tmp_path / "c", VECTORS, kept=lambda n: {"size": n % 2})
    found = search_groups(collection, VECTORS[:2], 10, "size")
    assert [len(ids) for ids in found.ids] == [2, 2] and found.ids[0][0] == names(1)[0]
    assert len(search_groups(collection, VECTORS[:1], 10, "size", where="size = 1").ids[0]) == 1
    with pytest.raises(ValueError, match="no column 'colour'; it has id, text, image, size"):
        search_groups(collection, VECTORS[:2], 10, "colour")


def test_groups_do_not_read_the_rows_of_large_ones(tmp_path, monkeypatch):
    """4000 rows of one group, 3 of another, for each kind of value."""
    values = {"word": ["it's", "b"], "number": [-1.5, 2.0], "day": [date(2026, 1, 2), date(2025, 1, 1)],
              "yes": [True, False], "moment": [datetime(2026, 1, 2, 3), datetime(2025, 1, 1)]}  # fmt: skip
    vectors = unit(4003, 8)
    collection = made(tmp_path, vectors, kept=lambda n: {name: each[n >= 4000] for name, each in values.items()})
    read, rows = [], collection.rows
    monkeypatch.setattr(collection, "rows", lambda ids: read.extend(ids) or rows(ids))
    for name in values:
        read.clear()
        found = search_groups(collection, vectors[:1], 10, name).ids[0]
        assert found[0] == names(1)[0] and found[1] > "doc/03999" and len(found) == 2 and len(read) < 100


def test_words_and_groups(tmp_path):
    collection = made(tmp_path / "c", VECTORS, kept=lambda n: {"odd": n % 2})
    odd, other, *_ = (id_ for id_ in collection.rank(VECTORS[:1], 60).ids[0] if int(id_[-1]) % 2)
    assert search_groups(collection, VECTORS[:1], 2, "odd").ids == [[names(1)[0], odd]]
    words = str(names(60).index(other))
    ranked = collection.rank(VECTORS[:1], 60, words=[words]).ids[0]
    best = [next(id_ for id_ in ranked if int(id_[-1]) % 2 == rest) for rest in (0, 1)]
    assert set(search_groups(collection, VECTORS[:1], 2, "odd", words=[words]).ids[0]) == {*best}
    assert best[1] != odd


def test_lists_are_no_groups(tmp_path):
    collection = made(tmp_path, VECTORS, kept=lambda n: {"sizes": [n]})
    with pytest.raises(ValueError, match=r"cannot group by 'sizes', which holds values such as \[\d+\]"):
        search_groups(collection, VECTORS[:1], 30, "sizes")


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    encoder = tiny_encoder()
    return encode_collection(tiny_rows(), encoder, tmp_path_factory.mktemp("shop") / "c"), encoder


def test_min_score(shop):
    collection, encoder = shop
    scores = rank_items(collection, encoder, ["thing"], 23).scores[0]
    found = rank_items(collection, encoder, ["thing", "7"], 23, min_score=float(scores[4]))
    assert len(found.ids[0]) == 5 and (found.scores[0][:5] == scores[:5]).all()


@pytest.mark.parametrize("weights", [{"image": 0.3, "text": 0.7}, {"image": 2, "text": 0}, {"image": 1, "text": -0.5}])
def test_weights_of_parts(shop, weights):
    collection, encoder = shop
    row = next(row for row in tiny_rows() if None not in row.values())
    query = {"image": row["image"], "text": row["text"]}
    image, text = encoder.encode([{"image": row["image"]}, {"text": row["text"]}])
    total = weights["image"] * image + weights["text"] * text
    vectors = np.stack([total / np.linalg.norm(total), image])
    share = max(weights["text"], 0) / sum(map(abs, weights.values()))
    right = collection.rank(vectors, 5, words=[WordQuery(row["text"], share), ""])
    found = rank_items(collection, encoder, [query, {"image": row["image"]}], 5, weights=weights)
    assert found.ids == right.ids
    np.testing.assert_allclose(found.scores, right.scores, atol=1e-6)


@pytest.mark.parametrize(
    ("item", "weights", "problem"),
    [
        ("a word", {"text": 1}, "item 0: only items"),
        ({"text": "a"}, {"image": 1}, "item 0: its text has no weight"),
        ({"text": "a"}, {"text": 0}, "leave nothing of its parts"),
    ],
)
def test_weights_without_their_parts(shop, item, weights, problem):
    with pytest.raises(ValueError, match=problem):
        search_items(*shop, [item], weights=weights)
