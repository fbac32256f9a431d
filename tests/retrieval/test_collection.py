"""A collection is searched, filtered, changed and indexed; sorting all scores is the oracle."""

from datetime import date, datetime

import datasets
import numpy as np
import pytest

from conjoin.retrieval import INDEX_KINDS, Collection, encode_collection, search_exactly, search_items
from tiny_collections import check, clustered, lookup_encoder, lookup_rows, made, naive, names, state, unit
from tiny_encoder import tiny_encoder, tiny_rows

COUNT, WIDTH = 2000, 24
VECTORS, QUERIES = clustered(COUNT, WIDTH), clustered(6, WIDTH, seed=3)
FLAT = {"kind": "ivf_flat", "probes": 1000}


def kept(number):
    label = ["apple", 'b\'s "x"', None][number % 3]
    row = {"price": number % 50, "on sale": number % 2 == 0, "label": label, "day": date(2026, 1, 1 + number % 5)}
    return row | {"sent": datetime(2026, 1, 1 + number % 5, 0, 30), "sizes": [number % 4, 9], "nothing": None}


WHERES = [
    ("price < 5", lambda row: row["price"] < 5),
    ("not price < 5", lambda row: row["price"] >= 5),
    ("price in (1, 3) or `on sale` = true and label like 'a%'",
     lambda row: row["price"] in (1, 3) or (row["on sale"] and row["label"] == "apple")),
    ("label is null", lambda row: row["label"] is None),
    ("label is not null and label != 'b''s \"x\"'", lambda row: row["label"] == "apple"),
    ("day >= date '2026-01-03'", lambda row: row["day"] >= date(2026, 1, 3)),
    ("sent < timestamp '2026-01-02 00:00:00'", lambda row: row["sent"] < datetime(2026, 1, 2)),
    ("array_has(sizes, 3)", lambda row: 3 in row["sizes"]),
    ("id in ('doc/00001', 'elsewhere')", lambda row: row["number"] == 1),
    ("price = 77", lambda row: False),
    ("true", lambda row: True),
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return made(tmp_path_factory.mktemp("made") / "it", VECTORS, kept).uri


@pytest.fixture(scope="module", params=["table", "memory", "indexed"])
def collection(request, folder, tmp_path_factory):
    """The same rows: searched in the table, in memory, and with an index that looks everywhere."""
    if request.param == "indexed":
        indexed = made(tmp_path_factory.mktemp("indexed"), VECTORS, kept)
        indexed.index(**FLAT)
        return Collection(indexed.uri)
    return Collection(folder, memory=10**9 if request.param == "memory" else 0)


class TestSearch:
    @pytest.mark.parametrize("k", [1, 10, 150, COUNT, COUNT + 5])
    def test_equals_sorting(self, collection, k):
        check(collection, VECTORS, QUERIES, k)
        check(collection, VECTORS, QUERIES[:1], np.int64(k))

    def test_many_queries(self, collection, monkeypatch):
        monkeypatch.setattr("conjoin.retrieval.collection._BYTES_AT_ONCE", 4 * WIDTH * 7 * 10)
        check(collection, VECTORS, clustered(33, WIDTH, seed=5), 7)

    @pytest.mark.parametrize(("where", "holds"), WHERES)
    def test_conditions(self, collection, where, holds):
        places = np.array([n for n in range(COUNT) if holds(kept(n) | {"number": n})], dtype=int)
        ids = [f"doc/{place:05d}" for place in places]
        assert sorted(collection.select(where)) == ids
        if ids:
            check(collection, VECTORS[places], QUERIES, 9, ids, where=where)
        else:
            found = collection.rank(QUERIES, 9, where=where)
            assert found.ids == [[]] * 6 and found.scores.shape == (6, 0)

    def test_equal_vectors_are_in_the_order_of_their_ids(self, tmp_path):
        vectors = np.tile(unit(5, 8), (20, 1))
        made(tmp_path, vectors)
        for memory in (0, 10**6):
            check(Collection(tmp_path, memory=memory), vectors, unit(5, 8), 20)

    def test_memory_is_taken_up_to_a_limit(self, folder):
        bytes_ = COUNT * WIDTH * 4
        assert [Collection(folder, memory=m)._held is not None for m in (0, bytes_ - 1, bytes_)] == [0, 0, 1]

    def test_the_exact_ranker_over_a_collection(self, folder):
        collection = Collection(folder)
        right, scores = naive(VECTORS, QUERIES, 12)
        found = search_exactly(collection, QUERIES, 12)
        assert found.ids == right
        np.testing.assert_array_equal(found.scores, scores)
        some = names(COUNT)[7::11]
        found = search_exactly(collection, QUERIES, 12, ids={*some, "elsewhere"})
        assert found.ids == naive(VECTORS[7::11], QUERIES, 12, some)[0]
        with pytest.raises(ValueError, match="none of the ids to search among is in the collection"):
            search_exactly(collection, QUERIES, 12, ids=["elsewhere"])

    def test_items_need_the_model_of_the_collection(self, tmp_path):
        collection = encode_collection(tiny_rows(), tiny_encoder(), tmp_path)
        (found,) = search_items(collection, tiny_encoder(), ["thing number 6 again again"], 1).ids
        assert found[0] in collection.ids
        with pytest.raises(ValueError, match=r"the collection was made with model .*, these queries come from"):
            search_items(collection, tiny_encoder(seed=1), ["query"])

    @pytest.mark.parametrize("where", ["", "prize < 3", "price <", "price < 3 label = 'x'", "price < 3; drop",
                                       "price < 3 order by price", "price < 3) or (true", "price < 3) label",
                                       "price = 'x'", "price", "id in (select id from t)",
                                       "day >= 'soon'", "\x00", "ü🙂", "f(price)"])  # fmt: skip
    def test_bad_conditions_name_the_columns(self, collection, where):
        for use in (
            lambda: collection.select(where),
            lambda: collection.rank(QUERIES, 3, where=where),
            lambda: list(collection.scan(["id"], where)),
        ):
            with pytest.raises(
                ValueError, match=r"cannot be evaluated: (?s:.)*; the columns are id .string., text .string., image "
            ):
                use()

    def test_a_list_of_any_length(self, collection):
        names = ", ".join(f"'it''s not ({number})'" for number in range(20_000))
        assert collection.select(f"id in ({names})") == []
        assert collection.select(f"id in ('{collection.ids[0]}', {names})") == collection.ids[:1]
        assert collection.select(f"price in ({', '.join(map(str, range(20_000)))})")


def test_with_words_exact_stays_exact_and_new_texts_are_found(tmp_path):
    collection = made(tmp_path, VECTORS)
    collection.index("ivf_pq", probes=1, refine=1)
    right, _ = naive(VECTORS, QUERIES, 100)
    words = ["zzz"] * len(QUERIES)
    assert collection.rank(QUERIES, 100, words=words, exact=True).ids == right
    assert collection.rank(QUERIES, 100, words=words).ids != right
    rows = lookup_rows(COUNT)
    rows[5]["text"] = "5 violin"
    collection = encode_collection(rows, lookup_encoder(VECTORS), tmp_path)
    assert collection.rank(QUERIES[:1], 6, words=["violin"]).ids[0][0] == "doc/00005"


def test_a_store_that_cannot_be_reached_is_not_called_damaged(monkeypatch):
    for name, value in (("AWS_ENDPOINT", "http://127.0.0.1:9"), ("AWS_ALLOW_HTTP", "true"), ("AWS_REGION", "a"),
                        ("AWS_ACCESS_KEY_ID", "a"), ("AWS_SECRET_ACCESS_KEY", "b"),
                        ("OBJECT_STORE_CLIENT_MAX_RETRIES", "0")):  # fmt: skip
        monkeypatch.setenv(name, value)
    with pytest.raises(
        ConnectionError, match=r"'s3://bucket/it' cannot be read: .*check the address, the network and"
    ):
        Collection("s3://bucket/it")


class TestRows:
    def test_vectors_and_rows_in_any_order(self, folder):
        collection = Collection(folder)
        np.testing.assert_array_equal(collection.vectors(), VECTORS)
        places = [1999, 0, 3, 3, 1234]
        ids = [f"doc/{place:05d}" for place in places]
        np.testing.assert_array_equal(collection.vectors(ids), VECTORS[places])
        known = [{name: value for name, value in kept(n).items() if value is not None} for n in places]
        expected = [{"id": id_, "text": str(n), **each} for id_, n, each in zip(ids, places, known, strict=True)]
        assert collection.rows(ids) == expected
        np.testing.assert_array_equal(collection.vectors(collection.ids[::-1]), VECTORS[::-1])
        assert len(collection.rows(collection.ids)) == COUNT
        assert collection.rows([]) == [] and collection.vectors([]).shape == (0, WIDTH)
        for use in (collection.rows, collection.vectors, collection.remove):
            with pytest.raises(ValueError, match="the collection has no row 'stranger'"):
                use(["doc/00001", "stranger"])
        assert len(collection) == COUNT

    def test_a_dataset(self, folder):
        data = Collection(folder).to_dataset()
        assert isinstance(data, datasets.Dataset) and len(data) == COUNT
        assert data.column_names == ["id", "vector", "text", "image", *(name for name in kept(0) if name != "nothing")]
        np.testing.assert_array_equal(np.array(data[7]["vector"], dtype=np.float32), VECTORS[7])
        assert data[7]["label"] == kept(7)["label"] and data[7]["day"] == kept(7)["day"]

    def test_what_is_opened_stays_as_it_was(self, tmp_path):
        opened, other = made(tmp_path, VECTORS, count=50), Collection(tmp_path)
        other.remove(names(20))
        made(tmp_path, VECTORS, count=80)
        assert len(opened) == 50 and len(other) == 30 and len(Collection(tmp_path)) == 80
        check(opened, VECTORS[:50], QUERIES)
        check(other, VECTORS[20:50], QUERIES, ids=names(30, 20))


class TestChanges:
    @pytest.mark.parametrize("indexed", [None, FLAT])
    @pytest.mark.parametrize("memory", [0, 10**9])
    def test_search_after_updates_and_removals(self, indexed, memory, tmp_path):
        made(tmp_path, VECTORS, count=400)
        if indexed:
            Collection(tmp_path).index(**indexed)
        rng, known = np.random.default_rng(0), dict(zip(names(400), range(400), strict=True))
        encoder = lookup_encoder(VECTORS)
        for step in range(4):
            collection = Collection(tmp_path, memory=memory)
            gone = rng.choice(sorted(known), 40, replace=False).tolist()
            collection.remove([*gone, gone[0]])
            known = {id_: place for id_, place in known.items() if id_ not in gone}
            check(collection, VECTORS[[*known.values()]], QUERIES, 12, [*known])
            changed = rng.choice(sorted(known), 20, replace=False).tolist()
            rows = [{"id": id_, "text": str(1000 + 20 * step + n)} for n, id_ in enumerate(changed)]
            rows += lookup_rows(30, 600 + 100 * step)
            encode_collection(rows, encoder, tmp_path)
            known |= {row["id"]: int(row["text"]) for row in rows}
            collection = Collection(tmp_path, memory=memory)
            assert sorted(collection.ids) == sorted(known)
            check(collection, VECTORS[[*known.values()]], QUERIES, 12, [*known])
            some = [id_ for id_ in known if id_ > "doc/00300"]
            check(collection, VECTORS[[known[id_] for id_ in some]], QUERIES, 9, some, where="id > 'doc/00300'")
        collection.verify()

    def test_an_empty_collection(self, tmp_path):
        collection = made(tmp_path, VECTORS[:9])
        collection.remove(collection.ids)
        for memory in (0, 10**6):
            emptied = Collection(tmp_path, memory=memory)
            assert (len(emptied), emptied.ids, emptied.vectors().shape) == (0, [], (0, WIDTH))
            assert emptied.rank(QUERIES, 3).ids == [[]] * 6 and len(emptied.to_dataset()) == 0
            assert emptied.select("true") == [] and emptied.recall() == 1.0
        assert made(tmp_path, VECTORS[:9]).changes.added == 9
        check(Collection(tmp_path), VECTORS[:9], QUERIES)


class TestIndex:
    @pytest.mark.parametrize("kind", INDEX_KINDS)
    def test_every_kind_finds_and_records_its_recall(self, kind, folder, tmp_path):
        collection = made(tmp_path, VECTORS)
        recall = collection.index(kind, probes=100, recall_queries=30)
        assert recall > 0.85
        settings = Collection(tmp_path).metadata["index"]
        assert settings == {"kind": kind, "probes": 100, "refine": 10}
        found, right = collection.rank(QUERIES, 10), naive(VECTORS, QUERIES, 10)[0]
        assert np.mean([len({*a} & {*b}) / 10 for a, b in zip(found.ids, right, strict=True)]) > 0.8
        assert (np.diff(found.scores, axis=1) <= 0).all()
        check(collection, VECTORS, QUERIES, exact=True)
        assert state(tmp_path) == state(folder) or collection.ids == names(COUNT)

    def test_rows_that_come_later_are_found(self, tmp_path):
        made(tmp_path, VECTORS, count=1500).index(**FLAT)
        check(made(tmp_path, VECTORS), VECTORS, QUERIES, 10)
        collection = Collection(tmp_path)
        assert collection.metadata["index"]["kind"] == "ivf_flat" and collection.recall() == 1.0

    def test_few_probes_find_less_and_none_is_exact_again(self, tmp_path):
        vectors = unit(COUNT, WIDTH)
        collection = made(tmp_path, vectors)
        few = collection.index("ivf_pq", probes=1, refine=1)
        assert 0.05 < few < 0.9 and few < collection.index("ivf_pq", probes=1000, refine=30)
        assert collection.index(None) is None and collection.metadata["index"] is None
        check(Collection(tmp_path), vectors, QUERIES)

    def test_columns_are_indexed(self, tmp_path):
        collection = made(tmp_path, VECTORS[:300], kept)
        collection.index(None)
        indexed = {index.name for index in collection.table.list_indices()}
        assert indexed == {"id", "price", "label", "day", "sent"}
        places = [n for n in range(300) if n % 50 == 7]
        assert sorted(collection.select("price = 7")) == [f"doc/{place:05d}" for place in places]

    def test_bad_kinds(self, tmp_path):
        collection = made(tmp_path, VECTORS[:5])
        before = state(tmp_path)
        with pytest.raises(ValueError, match=r"unknown kind 'hnsw' of index; expected one of .*'ivf_hnsw_sq'"):
            collection.index("hnsw")
        assert state(tmp_path) == before and Collection(tmp_path).metadata["index"] is None

    @pytest.mark.parametrize("kind", INDEX_KINDS)
    def test_few_rows(self, kind, tmp_path):
        collection = made(tmp_path, VECTORS[:5])
        collection.index(kind)
        check(collection, VECTORS[:5], QUERIES)
