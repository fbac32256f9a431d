"""LanceDB and Milvus: the rows lie in a database, and a search sees one state of it."""

import errno
from datetime import date, datetime, timedelta
from zoneinfo import ZoneInfo

import numpy as np
import pytest
from index_vectors import clustered, filled, naive, names, unit

from conjoin.retrieval import (
    build_index,
    encode_corpus,
    load_index,
    new_index,
    remove_rows,
    rows_of,
    search_items,
    select_rows,
    update_index,
    update_store,
)
from tiny_encoder import tiny_encoder, tiny_rows

pytest.importorskip("lancedb")
pytest.importorskip("pymilvus")
pytest.importorskip("milvus_lite")
CORPUS, QUERIES = clustered(400, 16), clustered(6, 16, seed=3)
KINDS = ["lancedb", "milvus"]
WHERES = [
    "price < 5",
    "not price < 5",
    "price in (1, 3.0) or \"on sale\" = true and label like 'a%'",
    "not (label like 'a%' or price = 2)",
    "label is null",
    "label is not null and label != 'b''s \"x\"'",
    "day >= '2026-01-03'",
    "sent >= '2026-01-03'",
    "sent = '2026-01-03 00:30:00' or sent < '2026-01-01T23:59:00Z'",
    "id in ('row/1', 'row/2', 'elsewhere')",
    "nothing is null and not nothing = 1",
    "nothing = 1",
]


def make(kind, tmp_path, vectors=CORPUS):
    options = {"uri": str(tmp_path / "rows.db")} if kind == "milvus" else {}
    return filled(kind, vectors, **options)


def check(index, vectors, ids, among=None):
    places = np.arange(len(ids)) if among is None else among
    order, scores = naive(vectors[places], QUERIES, 8)
    found = index.search(QUERIES, 8, among=among)
    assert found.ids == [[ids[places[int(name.split("/")[1])]] for name in row] for row in order]
    np.testing.assert_allclose(found.scores, scores, atol=1e-5)


def kept_rows():
    rows = []
    for number, row in enumerate(tiny_rows()):
        label = ["apple", 'b\'s "x"', None][number % 3]
        kept = {"price": number, "on sale": number % 2 == 0, "label": label, "day": date(2026, 1, 1 + number % 5)}
        sent = datetime(2026, 1, 1 + number % 5, 0, 30, tzinfo=ZoneInfo("Europe/Berlin"))
        rows.append(row | {"kept": kept | {"nothing": None, "sent": sent}})
    return rows


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return encode_corpus(kept_rows(), tiny_encoder(), tmp_path_factory.mktemp("store"), shard_size=5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_living_index(kind, tmp_path):
    index, ids, vectors = make(kind, tmp_path), names(400), CORPUS
    check(index, vectors, ids, np.arange(0, 400, 7))
    index.save(tmp_path / "index")
    reader = load_index(tmp_path / "index")
    for number, gone in enumerate([range(40), range(0, 300, 2)]):
        index.remove([ids[place] for place in gone])
        ids, vectors = [id_ for p, id_ in enumerate(ids) if p not in gone], np.delete(vectors, list(gone), axis=0)
        more = clustered(30, 16, seed=10 + number)
        index.add(names(30, 1000 * (number + 1)), more)
        ids, vectors = ids + names(30, 1000 * (number + 1)), np.concatenate([vectors, more])
        assert index.ids == ids and len(index) == len(ids)
        check(index, vectors, ids)
        if number == 0:
            check(reader, CORPUS, names(400))  # the saved state, while another is made
        index.save(tmp_path / "index")
        index = load_index(tmp_path / "index")
        assert index.ids == ids
        check(index, vectors, ids)
    new = clustered(3, 16, seed=50)
    index.update([ids[7], "fresh", ids[2]], new)
    changed = [id_ for p, id_ in enumerate(ids) if p not in (2, 7)] + [ids[7], "fresh", ids[2]]
    check(index, np.concatenate([np.delete(vectors, [2, 7], axis=0), new]), changed)


@pytest.mark.parametrize("kind", KINDS)
def test_ids_with_special_characters(kind, tmp_path):
    ids = ["dir\\name", '12" lamp', "it's", "two\nlines", "50%_"]
    index = new_index(kind, **({"uri": str(tmp_path / "rows.db")} if kind == "milvus" else {}))
    index.add(ids, unit(5, 16))
    index.save(tmp_path / "index")
    index = load_index(tmp_path / "index")
    assert index.ids == ids and rows_of(index, ids) == [{}] * 5
    assert [found for (found,) in index.search(unit(5, 16), 1).ids] == ids
    index.update([ids[0]], unit(5, 16)[:1])
    index.remove(ids[1:3])
    assert index.ids == [*ids[3:], ids[0]]


@pytest.mark.parametrize("kind", KINDS)
def test_refusals(kind, tmp_path):
    index = make(kind, tmp_path)
    index.save(tmp_path / "index")
    with pytest.raises(ValueError, match="the index has no row 'stranger'; nothing was removed"):
        index.remove(["doc/1", "stranger"])
    with pytest.raises(ValueError, match=r"the index has no row 'stranger'$"):
        rows_of(index, ["doc/1", "stranger"])
    with pytest.raises(ValueError, match="the id 'doc/3' occurs twice"):
        index.add(["a", "doc/3"], unit(2, 16))
    with pytest.raises(ValueError, match="the embedding of 'doc/1' has norm 2"):
        index.update(["doc/1"], 2 * unit(1, 16))
    check(index, CORPUS, names(400))
    other, late = load_index(tmp_path / "index"), load_index(tmp_path / "index")
    index.remove(["doc/0"])
    with pytest.raises(ValueError, match="another process is writing into"):
        other.remove(["doc/1"])
    index.save(tmp_path / "index")
    with pytest.raises(ValueError, match="was changed since it was loaded; load it again"):
        late.remove(["doc/1"])


@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupted_change_is_taken_back(kind, tmp_path):
    index = make(kind, tmp_path)
    index.save(tmp_path / "index")
    index.remove(names(100))
    index.add(["lost"], unit(1, 16))
    index._lock.release()  # as when its process ends
    again = load_index(tmp_path / "index")
    check(again, CORPUS, names(400))
    again.remove(["doc/5"])
    again.save(tmp_path / "index")
    again = load_index(tmp_path / "index")
    assert again.ids == [name for name in names(400) if name != "doc/5"]
    check(again, np.delete(CORPUS, 5, axis=0), again.ids)


@pytest.mark.parametrize("kind", KINDS)
def test_conditions_hold_as_in_memory(kind, store, tmp_path):
    exact = build_index(store)
    build_index(store, kind, **({"uri": str(tmp_path / "m.db")} if kind == "milvus" else {})).save(tmp_path / "index")
    index = load_index(tmp_path / "index")
    assert index.recall == 1.0
    for where in WHERES:
        expected = {exact.ids[place] for place in select_rows(exact, where)}
        found = search_items(index, tiny_encoder(), ["a", "b"], 100, where=where)
        assert [set(ids) for ids in found.ids] == [expected] * 2, where
        assert found.scores.shape == (2, len(expected))
    assert rows_of(index, ["row/4"]) == rows_of(exact, ["row/4"])
    with pytest.raises(ValueError, match="names the unknown column 'colour'"):
        select_rows(index, "colour = 'red'")
    with pytest.raises(ValueError, match="compares the column 'price' of type int64 with 'x' of another type"):
        select_rows(index, "price = 'x'")
    with pytest.raises(ValueError, match="the index was built with model"):
        search_items(index, tiny_encoder(seed=1), ["query"])


@pytest.mark.parametrize("kind", KINDS)
def test_an_index_follows_its_store(kind, tmp_path):
    rows = kept_rows()
    encode_corpus(rows, tiny_encoder(), tmp_path / "store", shard_size=5)
    options = {"uri": str(tmp_path / "m.db")} if kind == "milvus" else {"directory": tmp_path / "index"}
    build_index(tmp_path / "store", kind, **options).save(tmp_path / "index")
    rows[3]["kept"] = rows[3]["kept"] | {"price": 1000.5, "new": "x"}
    rows[4] = rows[4] | {"image": rows[7]["image"]}
    rows.append({"id": "late", "text": "a new one", "kept": {"price": 7}})
    update_store(rows, tiny_encoder(), tmp_path / "store")
    remove_rows(tmp_path / "store", ["row/10"])
    index = load_index(tmp_path / "index")
    changes = update_index(index, tmp_path / "store")
    assert (changes.added, changes.replaced, changes.removed) == (1, 2, 1)
    index.save(tmp_path / "index")
    after, whole = load_index(tmp_path / "index"), build_index(tmp_path / "store")
    assert sorted(after.ids) == sorted(whole.ids)
    queries = tiny_encoder().encode([row["text"] or "x" for row in rows])
    np.testing.assert_allclose(after.search(queries, 20).scores, whole.search(queries, 20).scores, atol=1e-5)
    for where in ("price > 999.5 or price = 7", "new = 'x'"):
        found = after.search(queries[:1], 9, among=select_rows(after, where)).ids[0]
        assert set(found) == {whole.ids[place] for place in select_rows(whole, where)}
    assert update_index(after, tmp_path / "store").any is False


class TestLance:
    def test_partitions_are_rescored(self):
        corpus, queries = clustered(2000, 32), clustered(50, 32, seed=1)
        index = filled("lancedb", corpus, partitions=8, probes=4)
        index.prepare()
        exact, found = filled("exact", corpus).search(queries, 10), index.search(queries, 10)
        assert np.mean([len(set(a) & set(b)) / 10 for a, b in zip(exact.ids, found.ids, strict=True)]) >= 0.8
        assert index._is_partitioned and (np.diff(found.scores, axis=1) <= 0).all()

    def test_it_is_replaced_in_one_step(self, tmp_path):
        make("lancedb", tmp_path).save(tmp_path / "index")
        reader = load_index(tmp_path / "index")
        filled("exact", unit(3, 16)).save(tmp_path / "index")
        assert load_index(tmp_path / "index").ids == names(3)
        check(reader, CORPUS, names(400))  # its files stay until the next replacement
        filled("exact", unit(4, 16)).save(tmp_path / "index")
        assert not list((tmp_path / "index").glob("*.lance"))

    def test_a_full_disk_leaves_the_old_state(self, tmp_path, monkeypatch):
        make("lancedb", tmp_path).save(tmp_path / "index")
        index = load_index(tmp_path / "index")
        index.remove(["doc/1"])

        def full(*args):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(index._table, "add", full)
        with pytest.raises(OSError, match=r"No space left on device while writing the table .* is as it was before"):
            index.add(["a"], unit(1, 16))
        index._lock.release()
        check(load_index(tmp_path / "index"), CORPUS, names(400))

    def test_versions_are_removed_after_the_manifest_is_replaced(self, tmp_path, monkeypatch):
        monkeypatch.setattr("conjoin.retrieval.index.lance._KEPT_FOR", timedelta(milliseconds=1))
        make("lancedb", tmp_path).save(tmp_path / "index")
        index = load_index(tmp_path / "index")
        index.remove(["doc/1"])

        def full(*args, **kwargs):
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch, pytest.raises(OSError, match="the index is as it was before"):
            patch.setattr("conjoin.retrieval.index.lance.save_index", full)
            index.save(tmp_path / "index")
        index._lock.release()
        index = load_index(tmp_path / "index")
        check(index, CORPUS, names(400))
        index.remove(["doc/1"])
        index.save(tmp_path / "index")
        assert load_index(tmp_path / "index").ids == [name for name in names(400) if name != "doc/1"]
        assert len(index._table.list_versions()) <= 2  # the last one, and the recorded one

    @pytest.mark.parametrize("name", ["_distance", "query_index", "_place"])
    def test_names_that_the_database_uses_are_refused(self, name, tmp_path):
        encode_corpus([{"id": "a", "text": "a", "kept": {name: 1}}], tiny_encoder(), tmp_path)
        with pytest.raises(ValueError, match=f"the kept column '{name}' has a name that the index uses"):
            build_index(tmp_path, "lancedb")

    def test_lists_of_another_type_need_a_new_index(self, tmp_path):
        rows = [{"id": str(number), "text": "a", "kept": {"sizes": [number]}} for number in range(3)]
        encode_corpus(rows, tiny_encoder(), tmp_path / "store")
        index = build_index(tmp_path / "store", "lancedb")
        rows[0]["kept"] = {"sizes": [0.5]}
        update_store(rows, tiny_encoder(), tmp_path / "store")
        with pytest.raises(
            ValueError, match=r"'sizes' has the type list.*int64.* in the index, list.*double.* now; build"
        ):
            update_index(index, tmp_path / "store")
        assert rows_of(index, ["0"]) == [{"text": "a", "sizes": [0]}]

    def test_damage_is_reported(self, tmp_path):
        make("lancedb", tmp_path).save(tmp_path / "index")
        for path in (tmp_path / "index").glob("*.lance/data/*"):
            path.unlink()
        with pytest.raises(ValueError, match=r"LanceDB cannot read the table .* run `conjoin index` again"):
            load_index(tmp_path / "index").search(QUERIES, 3)

    def test_missing_package_names_the_extra(self, monkeypatch):
        monkeypatch.setitem(__import__("sys").modules, "lancedb", None)
        with pytest.raises(ImportError, match=r'pip install "conjoin\[lancedb\]"'):
            new_index("lancedb")


class TestMilvus:
    def test_a_file_that_is_opened_anew(self, tmp_path):
        make("milvus", tmp_path).save(tmp_path / "index")
        index = load_index(tmp_path / "index")
        index._client.release_collection(index._name)  # as Milvus Lite does when its process ends
        check(load_index(tmp_path / "index"), CORPUS, names(400))

    def test_an_unreachable_server(self, monkeypatch, tmp_path):
        waited = []
        monkeypatch.setattr("conjoin.retrieval.index.milvus.time.sleep", waited.append)
        with pytest.raises(ConnectionError, match=r"cannot reach Milvus at 'http://127.0.0.1:9' after 3 attempts"):
            new_index("milvus", uri="http://127.0.0.1:9", timeout=1)
        assert waited == [1.0, 2.0]
        (tmp_path / "file").mkdir()
        (tmp_path / "file" / "LOCK").mkdir()
        with pytest.raises(ConnectionError, match=r"after 3 attempts: .*; one process at a time opens a file"):
            new_index("milvus", uri=str(tmp_path / "file"))

    def test_a_server_that_fails_in_a_change(self, monkeypatch, tmp_path):
        from pymilvus import MilvusException

        index = make("milvus", tmp_path)
        index.save(tmp_path / "index")

        def fail(*args, **kwargs):
            raise MilvusException(message="gone")

        index.remove(names(50))
        monkeypatch.setattr(index._client, "insert", fail)
        with pytest.raises(ConnectionError, match=r"failed .*gone.* as it was when it was last saved"):
            index.add(["a"], unit(1, 16))
        index._lock.release()
        check(load_index(tmp_path / "index"), CORPUS, names(400))

    def test_a_server_that_fails_while_rows_are_read(self, monkeypatch, tmp_path):
        from pymilvus import MilvusException

        class Pages:
            def next(self):
                raise MilvusException(message="gone")

        index = make("milvus", tmp_path)
        monkeypatch.setattr(index._client, "query_iterator", lambda *args, **kwargs: Pages())
        with pytest.raises(ConnectionError, match=r"Milvus at .* failed .*gone"):
            rows_of(index, ["doc/1"])

    def test_a_file_knows_no_escapes(self, store, tmp_path):
        index = build_index(store, "milvus", uri=str(tmp_path / "m.db"), recall_queries=0)
        with pytest.raises(ValueError, match=r"Milvus Lite knows no backslash in a pattern of 'like', got '%100"):
            search_items(index, tiny_encoder(), ["a"], where="label like '%100\\%%'")
        assert len(search_items(index, tiny_encoder(), ["a"], 30, where="label like '%\"%'").ids[0]) == 8

    def test_it_needs_an_address(self):
        with pytest.raises(ValueError, match="pass the uri of a Milvus server"):
            new_index("milvus")
