"""FAISS finds what exact search finds."""

import numpy as np
import pytest
from index_vectors import clustered, filled, names, unit

from conjoin.retrieval import FaissIndex


class TestFaiss:
    def test_flat_equals_exact(self):
        corpus, queries = unit(500, 24), unit(40, 24, seed=1)
        exact, flat = (filled(kind, corpus).search(queries, 10) for kind in ("exact", "flat"))
        assert flat.ids == exact.ids
        np.testing.assert_allclose(flat.scores, exact.scores, atol=1e-6)

    @pytest.mark.parametrize(
        "kind, least", [("hnsw", 0.95), ("ivfpq", 0.6), ("ivfpqr", 0.9), ("rabitq", 0.9), ("binary", 0.5)]
    )
    def test_recall_against_exact(self, kind, least):
        corpus, queries = clustered(2000, 32), clustered(100, 32, seed=1)
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
