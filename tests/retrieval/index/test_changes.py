"""Rows are added, removed and updated in every backend, and searched among some of them: as the exact ranking."""

import numpy as np
import pytest
from index_vectors import IN_MEMORY, clustered, filled, naive, names, unit

from conjoin.retrieval import (
    ExactIndex,
    build_index,
    encode_corpus,
    load_index,
    rows_of,
    select_rows,
    update_index,
    update_store,
)
from tiny_encoder import tiny_encoder, tiny_rows

KINDS = IN_MEMORY
CORPUS = clustered(400, 16)
QUERIES = clustered(6, 16, seed=3)


OPTIONS = {"ivfpq": {"subvectors": 16, "probes": 100}, "ivfpqr": {"probes": 100}, "rabitq": {"probes": 100}}


def make(kind):
    return filled(kind, CORPUS, **OPTIONS.get(kind, {}))


def check(index, vectors, ids, among=None, k=8):
    """Compare with the ranking by sorting; of compressed vectors, the first results."""
    places = np.arange(len(ids)) if among is None else among
    order, scores = naive(vectors[places], QUERIES, k)
    expected = [[ids[places[int(name.split("/")[1])]] for name in row] for row in order]
    found = index.search(QUERIES, k, among=among)
    assert all(set(row) <= {ids[place] for place in places} for row in found.ids)
    if index.kind not in ("exact", "flat", "hnsw"):
        overlap = [len(set(a) & set(b)) / len(b) for a, b in zip(found.ids, expected, strict=True)]
        assert np.mean(overlap) > 0.6
    else:
        assert found.ids == expected
        np.testing.assert_allclose(found.scores, scores, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_living_index(kind, tmp_path):
    index, ids, vectors = make(kind), names(400), CORPUS
    for number, gone in enumerate([range(0, 40), range(0, 300, 2), range(5)]):  # the second makes a graph anew
        index.remove([ids[place] for place in gone])
        ids, vectors = [id_ for p, id_ in enumerate(ids) if p not in gone], np.delete(vectors, list(gone), axis=0)
        assert index.ids == ids
        check(index, vectors, ids)
        more = clustered(30, 16, seed=10 + number)
        index.add(names(30, 1000 * (number + 1)), more)
        ids, vectors = ids + names(30, 1000 * (number + 1)), np.concatenate([vectors, more])
        check(index, vectors, ids)
        index.save(tmp_path / "index")
        index = load_index(tmp_path / "index")
        assert index.ids == ids
        check(index, vectors, ids)
    new = clustered(3, 16, seed=50)
    index.update([ids[7], "fresh", ids[2]], new)
    changed = [id_ for p, id_ in enumerate(ids) if p not in (2, 7)] + [ids[7], "fresh", ids[2]]
    check(index, np.concatenate([np.delete(vectors, [2, 7], axis=0), new]), changed)


@pytest.mark.parametrize("kind", KINDS)
def test_among_some_rows(kind):
    index, ids = make(kind), names(400)
    for among in (np.arange(0, 400, 7), np.array([3, 399, 20, 20]), np.arange(400)):
        check(index, CORPUS, ids, np.unique(among), k=min(8, len(np.unique(among))))
    few = index.search(QUERIES, 8, among=np.array([3, 399]))
    assert few.scores.shape == (6, 2) and all(set(row) == {"doc/3", "doc/399"} for row in few.ids)
    nothing = index.search(QUERIES, 8, among=np.array([], dtype=np.int64))
    assert nothing.ids == [[]] * 6 and nothing.scores.shape == (6, 0)
    index.remove(names(100))
    check(index, CORPUS[100:], ids[100:], np.arange(0, 300, 7))
    with pytest.raises(ValueError, match=r"positions must be from 0 to 299, got \[-1, 300\]"):
        index.search(QUERIES, 8, among=np.array([-1, 300]))


@pytest.mark.parametrize("kind", KINDS)
def test_refusals_leave_it_as_it_was(kind):
    index, before = make(kind), names(400)
    with pytest.raises(ValueError, match="the index has no row 'stranger'; nothing was removed"):
        index.remove(["doc/1", "stranger"])
    with pytest.raises(ValueError, match=r"the index has no row 'stranger'$"):
        rows_of(index, ["doc/1", "stranger"])
    with pytest.raises(ValueError, match="the id 'a' occurs twice"):
        index.update(["a", "doc/1", "a"], unit(3, 16))
    with pytest.raises(ValueError, match="the embedding of 'doc/1' has norm 2"):
        index.update(["doc/1"], 2 * unit(1, 16))
    assert index.ids == before
    check(index, CORPUS, before)


@pytest.mark.parametrize("kind", KINDS[:2])
def test_a_change_of_another_process_is_not_overwritten(kind, tmp_path):
    make(kind).save(tmp_path / "index")
    first, second = load_index(tmp_path / "index"), load_index(tmp_path / "index")
    for names_of_one in (["doc/1"], ["doc/2"]):  # saved twice
        first.remove(names_of_one)
        first.save(tmp_path / "index")
    second.remove(["doc/3"])
    with pytest.raises(ValueError, match="was changed since it was loaded; load it again"):
        second.save(tmp_path / "index")
    assert len(load_index(tmp_path / "index")) == 398
    second.save(tmp_path / "another")
    make(kind).save(tmp_path / "index")  # a new one replaces it
    assert len(load_index(tmp_path / "index")) == 400


@pytest.mark.parametrize("kind", KINDS[:3])
def test_all_rows_removed(kind, tmp_path):
    index = make(kind)
    index.remove(index.ids)
    assert index.search(QUERIES, 3).ids == [[]] * 6
    index.save(tmp_path / "index")
    index = load_index(tmp_path / "index")
    index.add(["a"], CORPUS[:1])
    assert index.search(QUERIES, 3).ids == [["a"]] * 6


@pytest.mark.parametrize("kind", KINDS[:3])
def test_an_index_follows_its_store(kind, tmp_path):
    rows = [row | {"kept": {"price": number}} for number, row in enumerate(tiny_rows())]
    encode_corpus(rows, tiny_encoder(), tmp_path / "store", shard_size=5)
    build_index(tmp_path / "store", kind).save(tmp_path / "index")
    reader = load_index(tmp_path / "index")
    before = reader.search(np.eye(8, dtype=np.float32), 5)
    rows[3]["kept"] = {"price": 1000}
    rows[4] = rows[4] | {"image": rows[7]["image"]}
    del rows[10:14]
    rows.append({"id": "new", "text": "a new one", "kept": {"price": 7}})
    update_store(rows, tiny_encoder(), tmp_path / "store", sync=True)
    index = load_index(tmp_path / "index")
    changes = update_index(index, tmp_path / "store")
    assert (changes.added, changes.replaced, changes.removed, changes.unchanged) == (1, 1, 4, 18)
    index.save(tmp_path / "index")
    after, whole = load_index(tmp_path / "index"), build_index(tmp_path / "store")
    assert sorted(after.ids) == sorted(row["id"] for row in rows)
    queries = tiny_encoder().encode([row["text"] or "x" for row in rows])
    np.testing.assert_allclose(after.search(queries, 20).scores, whole.search(queries, 20).scores, atol=1e-5)
    found = select_rows(after, "price >= 1000 or price = 7").tolist()
    assert {after.ids[place] for place in found} == {"row/7", "row/3", "new"}
    again = reader.search(np.eye(8, dtype=np.float32), 5)  # opened before the update
    assert again.ids == before.ids
    assert update_index(after, tmp_path / "store").any is False


def test_an_index_of_something_else_is_refused(tmp_path):
    encode_corpus(tiny_rows(), tiny_encoder(), tmp_path / "store")
    other = ExactIndex()
    other.add(["a"], unit(1, 8))
    with pytest.raises(ValueError, match="the index has vectors of model None, the store of"):
        update_index(other, tmp_path / "store")
    other.model = tiny_encoder().identity
    with pytest.raises(ValueError, match="does not say what its vectors were made from; build it again"):
        update_index(other, tmp_path / "store")
    with pytest.raises(ValueError, match="the index keeps no columns, so it cannot be filtered by 'a = 1'"):
        select_rows(other, "a = 1")
