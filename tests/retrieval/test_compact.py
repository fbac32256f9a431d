"""Compact vectors: packed, truncated, stored and searched."""

import numpy as np
import pytest

from conjoin.retrieval import (
    EmbeddingStore,
    ExactIndex,
    build_index,
    encode_corpus,
    load_index,
    search_items,
    update_index,
    update_store,
)
from conjoin.retrieval.compact import pack, truncate, unpack
from tiny_encoder import tiny_encoder, tiny_rows


def unit(count, dimension, seed=0):
    vectors = np.random.default_rng(seed).standard_normal((count, dimension)).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


@pytest.mark.parametrize("dtype, nbytes, least", [("int8", 37, 0.9999), ("binary", 5, 0.7), ("float16", 74, 0.999)])
def test_packed_vectors_keep_their_direction(dtype, nbytes, least):
    vectors = unit(200, 37)
    packed = pack(vectors, dtype)
    assert packed.nbytes == 200 * nbytes
    again = unpack(packed, dtype, 37)
    np.testing.assert_allclose(np.linalg.norm(again.astype(np.float32), axis=1), 1, atol=1e-3)
    assert (np.einsum("nd,nd->n", again, vectors) > least).all()
    np.testing.assert_array_equal(pack(again, dtype), packed)  # packing what was packed loses nothing


def test_binary_keeps_the_signs():
    vectors = unit(9, 20)
    np.testing.assert_array_equal(unpack(pack(vectors, "binary"), "binary", 20) > 0, vectors > 0)


def test_truncated_vectors_are_normalised():
    np.testing.assert_allclose(truncate(np.array([[3.0, 4.0, 12.0]]) / 13, 2), [[0.6, 0.8]], rtol=1e-6)


@pytest.mark.parametrize("dtype", ["int8", "binary"])
def test_a_compact_store_is_resumed_updated_and_searched(dtype, tmp_path):
    rows, encoder = tiny_rows(), tiny_encoder()
    plain = encode_corpus(rows, encoder, tmp_path / "plain", shard_size=5).load()[1]
    store = encode_corpus(rows, encoder, tmp_path / "store", shard_size=5, dtype=dtype)
    expected = unpack(pack(plain, dtype), dtype, 8)
    np.testing.assert_array_equal(store.load()[1], expected)
    encode_corpus(rows, encoder, tmp_path / "store", shard_size=5, dtype=dtype)
    index = build_index(store)
    index.save(tmp_path / "index")
    rows[2] = rows[2] | {"kept": {"price": 3}}
    rows[3] = rows[3] | {"image": rows[7]["image"]}
    update_store(rows, encoder, tmp_path / "store")
    loaded = load_index(tmp_path / "index")
    before = loaded.search(plain[:3], 5)
    np.testing.assert_array_equal(before.scores[:, 0], index.search(plain[:3], 1).scores[:, 0])
    np.testing.assert_allclose(before.scores[:, 0], (plain[:3] @ expected.T).max(axis=1), atol=1e-6)
    update_index(loaded, tmp_path / "store")
    whole = build_index(tmp_path / "store")
    np.testing.assert_array_equal(loaded.search(plain, 9).scores, whole.search(plain, 9).scores)
    vectors = next((tmp_path / "index").glob("vectors-*")).stat().st_size
    assert vectors < len(rows) * 8 + 200


def test_an_index_may_be_more_compact_than_its_store(tmp_path):
    store = encode_corpus(tiny_rows(60), tiny_encoder(), tmp_path / "store")
    assert build_index(store).recall is None
    int8, binary = (build_index(store, dtype=dtype).recall for dtype in ("int8", "binary"))
    assert 0 < binary < int8 <= 1
    with pytest.raises(ValueError, match=r"unknown dtype 'int4'; expected one of \['float32', "):
        ExactIndex(dtype="int4")


def test_truncated_indexes_and_queries(tmp_path):
    rows, encoder = tiny_rows(), tiny_encoder()
    whole = encode_corpus(rows, encoder, tmp_path / "store")
    store = EmbeddingStore.open(tmp_path / "store", dims=4)
    assert store.dimension == 4
    index = build_index(store)
    index.save(tmp_path / "index")
    queries = ["a query", "another"]
    vectors = truncate(encoder.encode(queries), 4)
    found = search_items(load_index(tmp_path / "index"), encoder, queries, 5)  # the query is truncated as the index is
    expected = (vectors @ truncate(whole.load()[1], 4).T).max(axis=1)
    np.testing.assert_allclose(found.scores[:, 0], expected, atol=1e-6)
    assert update_index(load_index(tmp_path / "index"), tmp_path / "store").any is False
    short = tiny_encoder(dims=4)
    np.testing.assert_array_equal(short.encode(queries), vectors)
    assert encode_corpus(rows, short, tmp_path / "short").dimension == 4
    with pytest.raises(ValueError, match="dims None, not 4"):
        encode_corpus(rows, short, tmp_path / "store")
    with pytest.raises(ValueError, match=r"dims must be from 1 to 8, the dimension of .*, got 9"):
        EmbeddingStore.open(tmp_path / "store", dims=9)
    with pytest.raises(ValueError, match=r"dims must be from 1 to 8, the dimension of .*, got 9"):
        tiny_encoder(dims=9).encode(queries)
