import errno
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_encoder import tiny_encoder, tiny_rows

from conjoin.retrieval import (
    INDEX_KINDS,
    ExactIndex,
    FaissIndex,
    Index,
    ModelIdentity,
    build_index,
    check_model,
    encode_corpus,
    load_index,
    new_index,
    search_items,
    search_store,
)
from conjoin.retrieval.embedding_store import EmbeddingStore, Manifest, write_shard


def unit(count: int, dimension: int, seed: int = 0) -> np.ndarray:
    vectors = np.random.default_rng(seed).standard_normal((count, dimension)).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def clustered(count: int, dimension: int, seed: int = 0) -> np.ndarray:
    """Vectors around 50 centres, as embeddings are, not spread evenly."""
    centres = unit(50, dimension, 99)
    vectors = centres[np.arange(count) % 50] + 0.7 * unit(count, dimension, seed)
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def names(count: int, start: int = 0) -> list[str]:
    return [f"doc/{number}" for number in range(start, start + count)]


def filled(kind: str, vectors: np.ndarray, **options) -> Index:
    index = new_index(kind, **options)
    index.add(names(len(vectors)), vectors)
    return index


def naive(corpus: np.ndarray, queries: np.ndarray, k: int) -> tuple[list[list[str]], np.ndarray]:
    scores = (queries.astype(np.float64) @ corpus.astype(np.float64).T).astype(np.float32)
    order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    return [[f"doc/{column}" for column in row] for row in order], np.take_along_axis(scores, order, 1)


class TestExact:
    @pytest.mark.parametrize("k", [1, 7, 300, 1000])
    def test_equals_sorting_everything(self, k):
        corpus, queries = unit(300, 24), unit(40, 24, seed=1)
        found = filled("exact", corpus).search(queries, k)
        ids, scores = naive(corpus, queries, k)
        assert found.ids == ids
        np.testing.assert_array_equal(found.scores, scores)
        assert found.scores.shape == (40, min(k, 300)) and found.scores.dtype == np.float32

    @pytest.mark.parametrize("block, rows", [(7, 3), (50, 64), (1, 5)])
    @pytest.mark.parametrize("precision", ["highest", "high"])
    def test_blocks_do_not_matter(self, block, rows, precision, monkeypatch):
        corpus, queries = clustered(210, 16), clustered(9, 16, seed=1)
        monkeypatch.setattr("conjoin.retrieval.index._CORPUS_BLOCK", block)
        monkeypatch.setattr("conjoin.retrieval.index._SCORES_AT_ONCE", block * rows)
        monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: precision)
        index = ExactIndex()
        for start in range(0, 210, 30):
            index.add(names(30, start), corpus[start : start + 30])
        for k in (1, 10, 60, 210):
            found = index.search(queries, k)
            ids, scores = naive(corpus, queries, k)
            assert found.ids == ids
            np.testing.assert_array_equal(found.scores, scores)

    def test_reduced_precision_set_in_the_newer_way(self, monkeypatch):
        monkeypatch.setattr(torch.backends, "fp32_precision", "tf32")  # get_float32_matmul_precision raises now
        corpus, queries = unit(50, 8), unit(4, 8, seed=1)
        assert filled("exact", corpus).search(queries, 5).ids == naive(corpus, queries, 5)[0]

    def test_equal_vectors_tie_and_keep_the_order_of_insertion(self):
        corpus = np.concatenate([unit(1, 33, seed=number % 5) for number in range(2003)])
        queries = unit(6, 33, seed=0)
        together = filled("exact", corpus).search(queries, 1500)
        np.testing.assert_array_equal(together.ids, naive(corpus, queries, 1500)[0])
        assert len(np.unique(together.scores[0])) <= 5
        alone = [filled("exact", corpus).search(query[None], 1500) for query in queries]
        assert [found.ids[0] for found in alone] == together.ids
        np.testing.assert_array_equal(np.concatenate([found.scores for found in alone]), together.scores)

    def test_no_queries(self):
        found = filled("exact", unit(5, 3)).search(np.empty((0, 3), dtype=np.float32), 2)
        assert found.ids == [] and found.scores.shape == (0, 2)

    def test_half_precision_vectors(self):
        corpus = unit(20, 16).astype(np.float16)
        found = filled("exact", corpus).search(corpus, 1)
        assert [ids[0] for ids in found.ids] == names(20)


class TestFaiss:
    def test_flat_equals_exact(self):
        corpus, queries = unit(500, 24), unit(40, 24, seed=1)
        exact, flat = (filled(kind, corpus).search(queries, 10) for kind in ("exact", "flat"))
        assert flat.ids == exact.ids
        np.testing.assert_allclose(flat.scores, exact.scores, atol=1e-6)

    @pytest.mark.parametrize("kind, least", [("hnsw", 0.95), ("ivfpq", 0.6)])
    def test_recall_against_exact(self, kind, least):
        corpus, queries = clustered(4000, 32), clustered(100, 32, seed=1)
        exact, found = (filled(name, corpus).search(queries, 10) for name in ("exact", kind))
        recall = np.mean([len(set(a) & set(b)) / 10 for a, b in zip(exact.ids, found.ids, strict=True)])
        assert recall >= least
        assert (np.diff(found.scores, axis=1) <= 0).all()

    def test_ties_keep_the_order_of_insertion(self):
        found = filled("flat", np.repeat(unit(1, 8), 6, axis=0)).search(unit(1, 8), 6)
        assert found.ids == [names(6)]

    @pytest.mark.parametrize("kind", ["flat", "hnsw"])
    def test_k_above_the_corpus(self, kind):
        found = filled(kind, unit(5, 8)).search(unit(2, 8, seed=1), 50)
        assert [sorted(ids) for ids in found.ids] == [names(5)] * 2 and found.scores.shape == (2, 5)

    def test_few_found_in_the_probed_clusters(self):
        found = filled("ivfpq", clustered(400, 8), lists=10, probes=1).search(clustered(3, 8, seed=1), 400)
        for ids, scores in zip(found.ids, found.scores, strict=True):
            assert 0 < len(ids) < 400 and len(set(ids)) == len(ids)
            assert np.isfinite(scores[: len(ids)]).all() and (scores[len(ids) :] == -np.inf).all()

    def test_training_needs_enough_vectors(self):
        with pytest.raises(ValueError, match='"ivfpq" needs at least 256 vectors to learn from, got 100; use "flat"'):
            filled("ivfpq", unit(100, 8))

    def test_options_are_checked(self):
        with pytest.raises(ValueError, match="subvectors must divide the dimension 8, got 3"):
            filled("ivfpq", unit(300, 8), subvectors=3)
        with pytest.raises(ValueError, match="lists must be at most the number of training vectors 300, got 301"):
            filled("ivfpq", unit(300, 8), lists=301)
        with pytest.raises(ValueError, match=r"unknown kind 'lsh' of FAISS index; expected one of \['flat', "):
            FaissIndex("lsh")
        with pytest.raises(ValueError, match="the index is trained already"):
            filled("flat", unit(5, 8)).train(unit(5, 8))

    def test_missing_package_names_the_extra(self, monkeypatch):
        monkeypatch.setitem(__import__("sys").modules, "faiss", None)
        with pytest.raises(ImportError, match=r'this index needs faiss: pip install "conjoin\[faiss\]"'):
            FaissIndex("flat")


@pytest.mark.parametrize("kind", ["exact", "flat", "hnsw"])
class TestErrors:
    def test_bad_k(self, kind):
        for k in (0, -1, 1.5, True, None):
            with pytest.raises(ValueError, match=f"k must be a positive integer, got {k!r}"):
                filled(kind, unit(5, 8)).search(unit(1, 8), k)

    def test_empty_index(self, kind, tmp_path):
        with pytest.raises(ValueError, match="the index is empty; add embeddings before searching it"):
            new_index(kind).search(unit(1, 8), 1)
        with pytest.raises(ValueError, match="the index is empty; add embeddings before saving it"):
            new_index(kind).save(tmp_path)

    def test_dimension(self, kind):
        index = filled(kind, unit(5, 8))
        with pytest.raises(ValueError, match="the queries have 9 dimensions, the index has 8"):
            index.search(unit(1, 9), 1)
        with pytest.raises(ValueError, match="the embeddings have 9 dimensions, the index has 8"):
            index.add(["new"], unit(1, 9))
        with pytest.raises(ValueError, match=r"queries must be a matrix \(N, D\), got the shape \(8,\)"):
            index.search(unit(1, 8)[0], 1)

    @pytest.mark.parametrize("value", [np.nan, np.inf])
    def test_not_finite(self, kind, value):
        index, bad = filled(kind, unit(5, 8)), unit(3, 8)
        bad[1, 4] = value
        with pytest.raises(ValueError, match="query 1 has values that are not finite"):
            index.search(bad, 1)
        with pytest.raises(ValueError, match="the embedding of 'b' has values that are not finite"):
            index.add(["a", "b", "c"], bad)
        assert len(index.ids) == 5

    def test_not_normalised(self, kind):
        index = filled(kind, unit(5, 8))
        with pytest.raises(ValueError, match="query 0 has norm 2, expected an L2-normalised vector"):
            index.search(2 * unit(1, 8), 1)
        with pytest.raises(ValueError, match="the embedding of 'zero' has norm 0, expected"):
            index.add(["zero"], np.zeros((1, 8)))

    def test_ids(self, kind):
        index = filled(kind, unit(5, 8))
        with pytest.raises(ValueError, match="got 2 ids for 3 embeddings"):
            index.add(["a", "b"], unit(3, 8))
        with pytest.raises(ValueError, match="the id 'doc/3' occurs twice"):
            index.add(["a", "doc/3"], unit(2, 8))
        with pytest.raises(ValueError, match="the id 'a' occurs twice"):
            index.add(["a", "a"], unit(2, 8))
        with pytest.raises(ValueError, match=r"ids must be strings, got 7 \(int\)"):
            index.add([7], unit(1, 8))
        assert index.ids == names(5) and len(index.search(unit(1, 8), 9).ids[0]) == 5


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


class TestSaving:
    @pytest.mark.parametrize("kind", INDEX_KINDS)
    def test_round_trip(self, kind, tmp_path):
        corpus, queries = clustered(600, 16), clustered(7, 16, seed=1)
        model = ModelIdentity("some/model", "f" * 64)
        options = {"probes": 3, "lists": 4} if kind == "ivfpq" else {}
        index = filled(kind, corpus, model=model, **options)
        index.save(tmp_path / "a" / "b")
        loaded = load_index(tmp_path / "a" / "b")
        assert type(loaded) is type(index) and loaded.kind == kind
        assert (loaded.model, loaded.ids, loaded.dimension) == (model, index.ids, 16)
        before, after = index.search(queries, 9), loaded.search(queries, 9)
        assert after.ids == before.ids
        np.testing.assert_array_equal(after.scores, before.scores)
        loaded.add(["one more"], queries[:1])
        assert loaded.search(queries[:1], 1).ids == [["one more"]] or kind == "ivfpq"

    def test_saving_onto_itself_replaces_everything(self, tmp_path):
        filled("exact", unit(6, 8)).save(tmp_path)
        loaded = load_index(tmp_path)
        loaded.add(["new"], unit(1, 8, seed=5))
        loaded.save(tmp_path)
        assert load_index(tmp_path).ids == [*names(6), "new"]
        filled("flat", unit(3, 8)).save(tmp_path)
        assert load_index(tmp_path).ids == names(3)
        assert sorted(contents(tmp_path)) == ["ids-3.json", "index.json", "vectors-3.faiss"]

    def test_files_of_others_stay(self, tmp_path):
        (tmp_path / "vectors-0.npy").write_text("mine")
        for _ in range(2):
            filled("exact", unit(6, 8)).save(tmp_path)
        assert (tmp_path / "vectors-0.npy").read_text() == "mine"

    @pytest.mark.parametrize("kind", ["exact", "flat"])
    @pytest.mark.parametrize("function", ["replace", "fsync"])
    @pytest.mark.parametrize("call", range(3))  # vectors, ids, index.json
    def test_interrupted_save_leaves_the_old_index(self, kind, function, call, tmp_path, monkeypatch):
        filled(kind, unit(6, 8)).save(tmp_path)
        before = contents(tmp_path)
        calls = iter(range(100))
        original = getattr(os, function)

        def failing(*arguments):
            number = next(calls)
            if number == (call if function == "replace" else 2 * call):  # every second fsync is of the directory
                raise OSError(errno.ENOSPC, "No space left on device")
            return original(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(os, function, failing)
            with pytest.raises(OSError, match="No space left on device"):
                filled(kind, unit(9, 8, seed=1)).save(tmp_path)
        assert before.items() <= contents(tmp_path).items()
        assert load_index(tmp_path).ids == names(6)
        filled(kind, unit(9, 8, seed=1)).save(tmp_path)
        assert load_index(tmp_path).ids == names(9) and len(contents(tmp_path)) == 3

    def test_nothing_is_pickled(self, tmp_path):
        filled("exact", unit(6, 8)).save(tmp_path)
        assert np.load(tmp_path / "vectors-1.npy", allow_pickle=False).shape == (6, 8)
        assert json.loads((tmp_path / "ids-1.json").read_text()) == names(6)

    @pytest.mark.parametrize("kind", INDEX_KINDS)
    @pytest.mark.parametrize("file", ["vectors", "ids"])
    @pytest.mark.parametrize("damage", ["truncated", "empty", "missing"])
    def test_damage_is_reported(self, kind, file, damage, tmp_path):
        filled(kind, clustered(300, 8)).save(tmp_path)
        (path,) = tmp_path.glob(f"{file}-1.*")
        path.write_bytes(path.read_bytes()[:-5] if damage == "truncated" else b"")
        if damage == "missing":
            path.unlink()
        with pytest.raises(ValueError, match=f"the index file '.*{path.name}' is missing, truncated or damaged"):
            load_index(tmp_path)

    def test_wrong_counts(self, tmp_path):
        for kind in ("exact", "flat"):
            filled(kind, unit(6, 8)).save(tmp_path / kind)
            (tmp_path / kind / "ids-1.json").write_text(json.dumps(names(5)))
            with pytest.raises(ValueError, match="has 5 ids, expected 6"):
                load_index(tmp_path / kind)

    def test_not_an_index(self, tmp_path):
        with pytest.raises(FileNotFoundError, match=r"is not an index: it has no index\.json"):
            load_index(tmp_path)
        for content in ("{", "{}", "[]"):
            (tmp_path / "index.json").write_text(content)
            with pytest.raises(ValueError, match="is not the description of an index"):
                load_index(tmp_path)
        (tmp_path / "index.json").write_text('{"format": "conjoin-index-9"}')
        with pytest.raises(ValueError, match="has format 'conjoin-index-9', expected 'conjoin-index-1'"):
            load_index(tmp_path)

    def test_of_another_kind(self, tmp_path):
        filled("flat", unit(6, 8)).save(tmp_path)
        with pytest.raises(ValueError, match=r"is of kind 'flat', expected \['exact'\]"):
            ExactIndex.load(tmp_path)


class TestWithModel:
    @pytest.fixture(scope="class")
    def store(self, tmp_path_factory):
        directory = tmp_path_factory.mktemp("store")
        return encode_corpus(tiny_rows(600), tiny_encoder(name="first"), directory, shard_size=128)

    @pytest.mark.parametrize("kind", INDEX_KINDS)
    def test_items_find_themselves(self, kind, store, tmp_path):
        build_index(store.directory, kind).save(tmp_path)
        index = load_index(tmp_path)
        assert index.ids == store.ids and index.dimension == 8
        rows = tiny_rows(600)[3:60:3]  # texts
        found = search_items(index, tiny_encoder(), [row["text"] for row in rows], k=5)
        hits = [row["id"] in ids for row, ids in zip(rows, found.ids, strict=True)]
        assert np.mean(hits) >= (0.5 if kind == "ivfpq" else 0.95)

    def test_another_model_is_refused(self, store):
        index = build_index(store)
        other = tiny_encoder(seed=1, name="second")
        message = (
            r"the index was built with model 'first' \(fingerprint \w+\), these queries come from 'second' \(fing"
        )
        with pytest.raises(ValueError, match=message):
            search_items(index, other, ["query"])
        check_model(index, tiny_encoder(name="first, moved"))

    def test_index_without_a_model_accepts_any(self):
        index = filled("exact", unit(5, 8))
        check_model(index, tiny_encoder())
        assert len(search_items(index, tiny_encoder(), ["query"], k=3).ids[0]) == 3

    def test_unknown_kind(self, store):
        with pytest.raises(
            ValueError, match=r"unknown kind 'tree' of index; expected one of \['exact', 'flat', 'hnsw"
        ):
            build_index(store, "tree")

    def test_training_sample_spans_the_store(self, store, monkeypatch):
        monkeypatch.setattr("conjoin.retrieval.build._TRAINING_VECTORS", 300)
        assert len(build_index(store, "ivfpq").ids) == 600


@pytest.mark.parametrize("rows", [1, 40, 100, None])
def test_a_store_searched_in_parts_equals_one_index(tmp_path, rows):
    """Ties, which span the parts, too; and a search among some of the ids."""
    vectors = clustered(100, 8)
    vectors[60:80] = vectors[:20]
    shards = [
        write_shard(tmp_path / f"{start}.safetensors", names(25, start), vectors[start : start + 25])
        for start in range(0, 100, 25)
    ]
    manifest = Manifest("m", "f", "full", 8, "float32", 25, True, tuple(shards), {})
    store, queries = EmbeddingStore(tmp_path, manifest), clustered(7, 8, seed=1)
    found = search_store(store, queries, 30, rows_at_once=rows)
    expected = filled("exact", vectors).search(queries, 30)
    assert found.ids == expected.ids
    assert np.array_equal(found.scores, expected.scores)
    some = names(3, 98) + names(2, 10)
    among = search_store(store, queries, 30, ids=some, rows_at_once=rows)
    ranked = filled("exact", vectors).search(queries, 100).ids
    assert among.ids == [[name for name in row if name in some] for row in ranked]
    with pytest.raises(ValueError, match="none of the ids to search among is in the store"):
        search_store(store, queries, 3, ids=["elsewhere"])
