"""From a store to an index, and from items to results."""

import numpy as np
import pytest
from index_vectors import IN_MEMORY, clustered, filled, names, unit

from conjoin.retrieval import (
    EmbeddingStore,
    ExactIndex,
    SearchResult,
    build_index,
    check_model,
    encode_corpus,
    load_index,
    search_items,
    search_store,
)
from conjoin.retrieval.index.build import BACKENDS, Backend
from conjoin.retrieval.store import STORE, write_embeddings
from conjoin.storage import FolderWriter
from tiny_encoder import tiny_encoder, tiny_rows


class TestWithModel:
    @pytest.fixture(scope="class")
    @classmethod
    def store(cls, tmp_path_factory):
        directory = tmp_path_factory.mktemp("store")
        return encode_corpus(tiny_rows(600), tiny_encoder(name="first"), directory, shard_size=128)

    @pytest.mark.parametrize("kind", [*IN_MEMORY, "lancedb"])
    def test_items_find_themselves(self, kind, store, tmp_path):
        build_index(store.directory, kind).save(tmp_path)
        index = load_index(tmp_path)
        assert index.ids == store.ids and index.dimension == 8
        rows = tiny_rows(600)[3:60:3]  # texts
        found = search_items(index, tiny_encoder(), [row["text"] for row in rows], k=5)
        hits = [row["id"] in ids for row, ids in zip(rows, found.ids, strict=True)]
        assert np.mean(hits) >= (0.95 if kind in ("exact", "flat", "hnsw", "lancedb") else 0.5)

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

    def test_a_backend_is_one_class_and_one_entry(self, store, monkeypatch, tmp_path):
        class Reversed(ExactIndex):
            kind = "reversed"

            def search(self, queries, k):
                found = super().search(queries, k)
                return SearchResult([ids[::-1] for ids in found.ids], found.scores[:, ::-1])

        monkeypatch.setitem(BACKENDS, "reversed", Backend(Reversed, Reversed.load))
        build_index(store, "reversed").save(tmp_path)
        queries = store.load()[1][:2]
        expected = build_index(store).search(queries, 3)
        assert load_index(tmp_path).search(queries, 3).ids == [ids[::-1] for ids in expected.ids]

    def test_training_sample_spans_the_store(self, store, monkeypatch):
        monkeypatch.setattr("conjoin.retrieval.index.build.training_vectors", lambda corpus: corpus // 2)
        samples, sample = [], EmbeddingStore.sample
        monkeypatch.setattr(EmbeddingStore, "sample", lambda *args: samples.append(sample(*args)) or samples[-1])
        assert len(build_index(store, "ivfpq").ids) == 600
        ids = samples[0][0]
        assert len(ids) == 300 and {store.ids.index(id_) // 128 for id_ in ids} == set(range(5))


@pytest.mark.parametrize("rows", [1, 40, 100, None])
def test_a_store_searched_in_parts_equals_one_index(tmp_path, rows):
    """Ties, which span the parts, too; and a search among some of the ids."""
    vectors = clustered(100, 8)
    vectors[60:80] = vectors[:20]
    with FolderWriter(tmp_path, STORE, {"dtype": "float32"}) as writer:
        for number, start in enumerate(range(0, 100, 25)):
            write_embeddings(writer, number, names(25, start), vectors[start : start + 25], [0] * 25)
        writer.finish()
    store, queries = EmbeddingStore(tmp_path), clustered(7, 8, seed=1)
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
