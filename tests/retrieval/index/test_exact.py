"""Exact search equals sorting everything."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from index_vectors import clustered, filled, naive, names, unit
from safetensors import safe_open

from conjoin.retrieval import ExactIndex


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
        monkeypatch.setattr("conjoin.retrieval.index.exact._CORPUS_BLOCK", block)
        monkeypatch.setattr("conjoin.retrieval.index.exact._SCORES_AT_ONCE", block * rows)
        monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: precision)
        index = ExactIndex()
        for start in range(0, 210, 30):
            index.add(names(30, start), corpus[start : start + 30])
        for k in (1, 10, 60, 210):
            found = index.search(queries, k)
            ids, scores = naive(corpus, queries, k)
            assert found.ids == ids
            np.testing.assert_array_equal(found.scores, scores)

    @pytest.mark.skipif(not hasattr(torch.backends, "fp32_precision"), reason="this torch has no such setting")
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


class TestFiles:
    @pytest.mark.parametrize("dtype", ["float32", "float16"])
    @pytest.mark.parametrize("precision", ["highest", "high"])
    def test_a_loaded_index_finds_the_same(self, dtype, precision, tmp_path, monkeypatch):
        monkeypatch.setattr("conjoin.retrieval.index.exact._CORPUS_BLOCK", 100)
        monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: precision)
        corpus, queries = clustered(350, 24).astype(dtype), clustered(20, 24, seed=1)
        corpus[300:] = corpus[:50]
        filled("exact", corpus).save(tmp_path)
        (file,) = tmp_path.glob("vectors-*")
        assert file.stat().st_size == pytest.approx(corpus.nbytes, abs=150)
        with safe_open(file, "np") as opened:
            np.testing.assert_array_equal(opened.get_tensor("embeddings"), corpus)
        ids, scores = naive(corpus, queries, 60)
        found = ExactIndex.load(tmp_path).search(queries, 60)
        assert found.ids == ids
        np.testing.assert_array_equal(found.scores, scores)

    def test_both_precisions_are_saved_as_the_higher(self, tmp_path):
        index = filled("exact", unit(3, 8).astype(np.float16))
        index.add(["new"], unit(1, 8))
        index.save(tmp_path)
        assert ExactIndex.load(tmp_path).search(unit(1, 8), 1).ids == [["new"]]

    @pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
    def test_saved_vectors_stay_in_their_file(self, tmp_path):
        def held():
            status = Path("/proc/self/status").read_text()
            return 1024 * int(re.search(r"RssAnon:\s+(\d+)", status)[1])

        vectors = np.tile(unit(1000, 512), (20, 1))
        filled("exact", vectors).save(tmp_path)
        before = held()
        index = ExactIndex.load(tmp_path)
        index.search(vectors[:2], 3)
        assert held() - before < vectors.nbytes / 2

    def test_the_array_is_copied_unless_told_otherwise(self):
        for copy, best in ((True, "doc/0"), (False, "doc/1")):
            vectors = unit(2, 8)
            index, query = ExactIndex(), vectors[:1].copy()
            index.add(names(2), vectors, copy=copy)
            vectors[:] = vectors[::-1].copy()
            assert index.search(query, 1).ids == [[best]]
