"""A FAISS index beside a collection answers as the collection does, or is not current."""

import shutil

import numpy as np
import pytest

from conjoin.retrieval import Collection, encode_collection, open_collection
from tiny_collections import check, clustered, lookup_encoder, made, naive, unit

faiss = pytest.importorskip("faiss")
VECTORS, QUERIES = clustered(2000, 16), clustered(6, 16, seed=3)
EXACT = ["Flat", "IVF8,Flat", "HNSW16", "RR16,Flat"]
ROUGH = ["SQfp16", "IVF8,SQ8", "IVF4,PQ4np", "PCA12,IVF4,Flat", "IVF4,PQ4np,RFlat", "HNSW8"]


def kept(number):
    return {"price": number % 50, "label": ["a", None, 'b\'s "x"'][number % 3]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made") / "it"
    made(folder, VECTORS, kept, count=1990)
    collection = Collection(folder)
    collection.remove(["doc/00005", "doc/00006"])  # rows are then numbered with gaps
    made(folder, VECTORS, kept).remove(["doc/00007"])
    return folder


def build(folder, factory=None, **options):
    collection = Collection(folder)
    collection.index_faiss(factory, **options)
    return collection


def places():
    return [number for number in range(2000) if number != 7]


def near(found, right, scores, tolerance=1e-5):
    assert found.ids == right
    np.testing.assert_allclose(found.scores, scores, atol=tolerance)


@pytest.mark.parametrize("factory", EXACT)
def test_exact_kinds_answer_as_the_collection(factory, folder, tmp_path):
    shutil.copytree(folder, tmp_path / "it")
    index = build(tmp_path / "it", factory, probes=2000)
    settings = index.faiss.settings
    assert (settings["factory"], settings["probes"]) == (factory, 2000) and index.recall() > 0.99
    collection, words = Collection(folder), ["17"] * len(QUERIES)
    for opened in (index, open_collection(tmp_path / "it")):
        assert opened.faiss is not None and opened.ids == collection.ids and len(opened) == 1999
        for options in ({}, {"where": "label is null and price != 4"}):
            near(opened.rank(QUERIES, 10, **options), *collection.rank(QUERIES, 10, **options))
        check(opened, VECTORS[places()], QUERIES, ids=[f"doc/{n:05d}" for n in places()], exact=True)
        assert opened.rows(["doc/00003"]) == collection.rows(["doc/00003"])
        assert opened.select("price = 3") == collection.select("price = 3")
        assert opened.rank(QUERIES, 3, words=words).ids == collection.rank(QUERIES, 3, words=words).ids
        with pytest.raises(ValueError, match=r"'prize < 3' cannot be evaluated: .*price"):
            opened.rank(QUERIES, 3, where="prize < 3")
        with pytest.raises(ValueError, match="query 0 has norm 2"):
            opened.rank(2 * QUERIES, 3)
    assert index.rank(QUERIES[:1], 5000).scores.shape == (1, 1999)


@pytest.mark.parametrize("factory", [*ROUGH, None])
def test_rough_kinds_find_most(factory, folder, tmp_path):
    index = Collection(shutil.copytree(folder, tmp_path / "it"))
    measured = index.index_faiss(factory, recall_queries=30)
    assert measured > 0.25 and open_collection(tmp_path / "it").recall(30) == measured
    right = naive(VECTORS[places()], QUERIES, 10, [f"doc/{n:05d}" for n in places()])[0]
    found = index.rank(QUERIES, 10)
    assert np.mean([len({*a} & {*b}) / 10 for a, b in zip(found.ids, right, strict=True)]) > 0.25
    assert {len(ids) for ids in index.rank(QUERIES, 1000).ids} == {1000}


def test_an_index_of_an_earlier_version_is_not_used(folder, tmp_path, warnings):
    folder = shutil.copytree(folder, tmp_path / "it")
    before = build(folder, "Flat")
    encode_collection([{"id": "new", "text": "17"}], lookup_encoder(VECTORS), folder)
    near(before.rank(QUERIES, 5), *naive(VECTORS[places()], QUERIES, 5, [f"doc/{n:05d}" for n in places()]))
    assert warnings() == ""
    opened = open_collection(folder)
    assert opened.faiss is None and "new" in opened.rank(VECTORS[17:18], 2).ids[0]
    assert "the FAISS index of" in warnings() and "run `conjoin index --faiss` again" in warnings()
    assert "new" in build(folder, "Flat").rank(VECTORS[17:18], 2).ids[0]
    assert open_collection(folder).faiss is not None


def test_equal_scores_are_in_the_order_of_ids(tmp_path):
    vectors = np.tile(unit(5, 8), (4, 1))
    made(tmp_path, vectors)
    index = build(tmp_path, "Flat")
    near(index.rank(unit(5, 8), 20), *naive(vectors, unit(5, 8), 20))


def test_a_disk_that_is_full(folder, tmp_path, monkeypatch):
    folder, write = shutil.copytree(folder, tmp_path / "it"), faiss.write_index
    monkeypatch.setattr(faiss, "write_index", lambda index, path: write(index, "/dev/full"))
    with pytest.raises(OSError, match=r"the disk is full: .*faiss' cannot be written"):
        build(folder, "Flat")


def test_refusals(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no collection"):
        build(tmp_path)
    made(tmp_path / "few", VECTORS[:20])
    for factory, message in (("nonsense", "could not parse|nonsense"), ("IVF64,Flat", "of 20 vectors: "),
                             ("IDMap,Flat", "cannot make")):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            build(tmp_path / "few", factory)
    assert open_collection(tmp_path / "few").faiss is None
    assert len(build(tmp_path / "few")) == 20  # the default suits few rows, too
