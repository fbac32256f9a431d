"""A collection that was copied to Milvus answers as it does here; readers see whole copies."""

from datetime import date

import numpy as np
import pytest

from conjoin.retrieval import Collection, MilvusCollection, copy_to_milvus, encode_collection, open_collection
from conjoin.retrieval.collection import milvus_address, with_kind
from conjoin.retrieval.search import search_groups
from tiny_collections import clustered, lookup_encoder, lookup_rows, made
from tiny_encoder import tiny_encoder

pymilvus = pytest.importorskip("pymilvus")
pytest.importorskip("milvus_lite")
VECTORS, QUERIES = clustered(1200, 16), clustered(6, 16, seed=3)


def kept(number):
    label = ["apple", 'b\'s "x"\\', None][number % 3]
    return {"price": number % 50, "half": number / 2, "sale": number % 2 == 0, "label": label, "day": date(2026, 1, 2)}


@pytest.fixture(scope="module")
def collection(tmp_path_factory):
    return made(tmp_path_factory.mktemp("made") / "it", VECTORS, kept)


@pytest.fixture(scope="module")
def copied(collection, tmp_path_factory):
    uri = f"{tmp_path_factory.mktemp('milvus') / 'rows.db'}/photos"
    copy_to_milvus(collection, uri)
    return open_collection(uri)


@pytest.mark.parametrize(
    ("owner", "token"), [(None, ""), ("http://127.0.0.1:19531", ""), ("http://127.0.0.1:19530/", "secret")]
)
def test_a_token_is_sent_to_its_server_alone(owner, token, monkeypatch):
    sent = []
    monkeypatch.setenv("MILVUS_TOKEN", "secret")
    monkeypatch.delenv("MILVUS_URI", raising=False)
    if owner is not None:
        monkeypatch.setenv("MILVUS_URI", owner)

    def client(uri, **options):
        sent.append((uri, options))
        raise pymilvus.MilvusException(message="no")

    monkeypatch.setattr(pymilvus, "MilvusClient", client)
    with pytest.raises(ConnectionError):
        open_collection("http://127.0.0.1:19530/photos")
    assert sent == [("http://127.0.0.1:19530", {"token": token})]


def near(found, right):
    assert found.ids == right.ids
    np.testing.assert_allclose(found.scores, right.scores, atol=1e-5)


def test_search_rows_and_what_is_known(collection, copied):
    assert isinstance(copied, MilvusCollection) and len(copied) == 1200 and copied.dimension == 16
    assert copied.model == collection.model and copied.schema == collection.schema
    for k in (1, 10, 150):
        near(copied.rank(QUERIES, k), collection.rank(QUERIES, k))
    near(copied.rank(QUERIES[:1], np.int64(3)), collection.rank(QUERIES[:1], 3))
    cheap = with_kind("price < 4", "text")
    near(copied.rank(QUERIES, 9, where=cheap), collection.rank(QUERIES, 9, where=cheap))
    assert copied.rank(QUERIES, 9, where=with_kind(None, "image")).ids == [[]] * len(QUERIES)
    ids = ["doc/00007", "doc/01000", "doc/00007"]
    assert copied.rows(ids) == [row | {"day": "2026-01-02"} for row in collection.rows(ids)]
    assert copied.rows([]) == []
    with pytest.raises(ValueError, match="the collection has no row 'stranger'"):
        copied.rows(["doc/00001", "stranger"])
    with pytest.raises(ValueError, match="is in Milvus, which has vectors only"):
        copied.rank(QUERIES, 3, words=["word"] * len(QUERIES))
    with pytest.raises(ValueError, match="is in Milvus, where results are not grouped here"):
        search_groups(copied, QUERIES, 3, "label")
    for queries, k, message in ((2 * QUERIES, 1, "query 0 has norm 2"), (QUERIES, 0, "k must be a positive integer")):
        with pytest.raises(ValueError, match=message):
            copied.rank(queries, k)


@pytest.mark.parametrize(
    ("where", "here"),
    [
        ("price < 5", "price < 5"),
        ("not (price < 5)", "price >= 5"),
        ('price in [1, 3] or (sale == true and label like "a%")', "price in (1, 3) or (sale and label = 'apple')"),
        ("half >= 512.5", "half >= 512.5"),
        (r'label == "b\'s \"x\"\\"', "label = 'b''s \"x\"\\'"),
        ('id in ["doc/00001", "elsewhere"]', "id = 'doc/00001'"),
        ("price == 77", "price = 77"),
    ],
)
def test_conditions(where, here, collection, copied):
    near(copied.rank(QUERIES, 1200, where=where), collection.rank(QUERIES, 1200, where=here))


@pytest.mark.parametrize("where", ["price <", "price < 'x' (", "))"])
def test_bad_conditions(where, copied):
    with pytest.raises(ValueError, match=r"Milvus at .*rows.db/photos' refuses"):
        copied.rank(QUERIES, 3, where=where)


def test_pictures_in_one_and_in_several_files(tmp_path, pictures):
    paths = []
    for number, picture in enumerate(pictures[:2]):
        paths.append(str(tmp_path / f"{number}.png"))
        picture.save(paths[-1])
    rows = [{"id": "one", "image": paths[0]}, {"id": "two", "image": paths, "text": "x"}, {"id": "text", "text": "x"}]
    here = encode_collection(rows, tiny_encoder(input_type="cat"), tmp_path / "it", keep_pictures=8)
    copied = copy_to_milvus(here, f"{tmp_path / 'm.db'}/pictures")
    assert copied.rows(["one", "two", "text"], pictures=True) == here.rows(["one", "two", "text"])
    assert copied.model.input_type == "cat"


def test_a_copy_replaces_the_one_before_and_readers_see_one(collection, tmp_path, monkeypatch):
    uri, other = f"{tmp_path / 'm.db'}/photos", f"{tmp_path / 'm.db'}/other"
    encoder = lookup_encoder(VECTORS)
    made(tmp_path / "it", VECTORS, kept, count=50)
    copy_to_milvus(Collection(tmp_path / "it"), uri)
    copy_to_milvus(collection, other)
    opened = MilvusCollection(uri)
    newer = encode_collection(lookup_rows(90, 20, kept), encoder, tmp_path / "it", sync=True)

    def interrupted(*args, **options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Collection, "scan", interrupted)
        copy_to_milvus(newer, uri)
    assert len(opened) == len(MilvusCollection(uri)) == 50
    for _ in range(2):
        copied = copy_to_milvus(newer, uri)
        near(copied.rank(QUERIES, 9), newer.rank(QUERIES, 9))
        assert len(copied) == len(opened) == 90 and len(MilvusCollection(other)) == 1200
    client = pymilvus.MilvusClient(str(tmp_path / "m.db"))
    assert sum(name.startswith("photos") for name in client.list_collections()) == 1


def test_addresses(tmp_path):
    assert (
        milvus_address("http://host:19530/photos")
        and milvus_address("https://a.b/c")
        and milvus_address("x/rows.db/photos")
    )
    for uri in ("http://host:19530", "http://host/a/b", "rows.db", "runs/photos", "s3://bucket/rows"):
        assert not milvus_address(uri)
        with pytest.raises(ValueError, match=f"'{uri}' is no address of a collection in Milvus; expected http://HOST"):
            MilvusCollection(uri)
    with pytest.raises(FileNotFoundError, match=r"there is no collection at '.*/m.db/none': run `conjoin copy`"):
        MilvusCollection(f"{tmp_path / 'm.db'}/none")


def test_a_server_that_is_not_there_and_one_that_is_gone(collection, copied, monkeypatch):
    import pymilvus

    for use in (MilvusCollection, lambda uri: copy_to_milvus(collection, uri), open_collection):
        with pytest.raises(ConnectionError, match=r"Milvus at 'http://127.0.0.1:9/photos' does not answer: "):
            use("http://127.0.0.1:9/photos")

    def gone(*args, **options):
        raise pymilvus.MilvusException(code=2, message="Fail connecting to server")

    monkeypatch.setattr(pymilvus.MilvusClient, "search", gone)
    with pytest.raises(ConnectionError, match=r"does not answer: "):
        copied.rank(QUERIES, 3)


def test_what_milvus_cannot_hold_is_named_and_nothing_is_left(tmp_path):
    collection = encode_collection([{"id": "x" * 70_000, "text": "a"}], tiny_encoder(), tmp_path / "it")
    with pytest.raises(ValueError, match="refuses insert"):
        copy_to_milvus(collection, f"{tmp_path / 'm.db'}/long")
    with pytest.raises(FileNotFoundError, match="there is no collection"):
        MilvusCollection(f"{tmp_path / 'm.db'}/long")
