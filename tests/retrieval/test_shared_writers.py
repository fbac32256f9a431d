"""Two writers of one table at the same time, as the processes of a run and the workers of Ray are."""

from types import SimpleNamespace

import pytest

from conjoin.retrieval import Collection, EncodeOptions
from conjoin.retrieval.collection_table import open_table
from conjoin.retrieval.encode import CollectionWriter, launched_processes
from tiny_encoder import tiny_encoder, tiny_rows

BAR = SimpleNamespace(update=lambda count: None)


def two_writers(uri):
    encoder = tiny_encoder()
    writers = [CollectionWriter(uri, encoder, EncodeOptions(), is_shared=True) for _ in range(2)]
    writers[0].create({}, encoder.dimension)
    writers[1].open()
    return writers


def write(writer, first, end, **kept):
    rows = [row | {"metadata": kept} for row in tiny_rows()[first:end]]
    ids = [row["id"] for row in rows]
    writer.take(first, ids, rows, writer.find(ids), BAR)
    writer.flush()


def publish(one, other):
    one.merge(other.take_report())
    one.finish(23, False)


def test_columns_of_both(tmp_path):
    one, other = two_writers(tmp_path)
    write(one, 0, 5, price=1, name="a")
    write(other, 5, 10, price=2, colour="red")  # it opened the table before the others' columns
    write(one, 10, 15, name="b")
    write(other, 15, 23, price=None, name="c", colour="blue")
    publish(one, other)
    rows = Collection(tmp_path).rows([f"row/{number}" for number in (0, 5, 10, 15)])
    kept = [{name: row[name] for name in ("price", "name", "colour") if name in row} for row in rows]
    assert kept == [{"price": 1, "name": "a"}, {"price": 2, "colour": "red"}, {"name": "b"},
                    {"name": "c", "colour": "blue"}]  # fmt: skip


def test_fractions_in_a_column_of_integers(tmp_path):
    one, other = two_writers(tmp_path)
    write(one, 0, 5, price=1)
    with pytest.raises(ValueError, match="'price' of the collection holds integers, and some rows have fractions"):
        write(other, 5, 10, price=2.5)


@pytest.mark.parametrize("when", ["the end", "the next run"])
def test_rows_that_two_wrote(tmp_path, when):
    one, other = two_writers(tmp_path)
    write(one, 0, 23)
    write(other, 0, 7)
    other.take_report()  # lost, as that of a killed worker
    assert open_table(tmp_path).count_rows() == 30
    if when == "the next run":
        one, other = two_writers(tmp_path)
        write(one, 0, 23)
    publish(one, other)
    collection = Collection(tmp_path)
    assert sorted(collection.ids) == sorted(row["id"] for row in tiny_rows()) and len(collection) == 23


@pytest.mark.parametrize("takes", [0, 7])
def test_a_worker_that_ended_before_it_deleted_what_it_replaced(takes, tmp_path, monkeypatch):
    """Another worker takes its rows, or finds them all there: the new rows are published, not the old ones."""
    one, other = two_writers(tmp_path)
    write(one, 0, 23, price=1)
    publish(one, other)
    one, other = two_writers(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("conjoin.retrieval.encode._delete", lambda table, row_ids: None)
        write(other, 0, 7, price=2)
    assert open_table(tmp_path).count_rows() == 30
    again = CollectionWriter(tmp_path, one.encoder, EncodeOptions(), is_shared=True)
    again.open()
    write(again, 0, takes, price=2)
    publish(one, again)
    collection = Collection(tmp_path)
    assert len(collection) == 23 and len(set(collection.ids)) == 23
    prices = [row["price"] for row in collection.rows([row["id"] for row in tiny_rows()])]
    assert prices == [2] * 7 + [1] * 16


class TestLaunchedProcesses:
    def test_none_without_a_launcher(self, monkeypatch):
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            monkeypatch.delenv(name, raising=False)
        assert launched_processes() is None
        monkeypatch.setenv("WORLD_SIZE", "1")
        assert launched_processes() is None

    @pytest.mark.parametrize("name, value, message", [
        ("RANK", "one", "RANK must be a number, got 'one'"),
        ("WORLD_SIZE", "-2", "WORLD_SIZE must be a number, got '-2'"),
        ("RANK", "2", "RANK must be below WORLD_SIZE, got 2 of 2"),
        ("MASTER_PORT", "http", "MASTER_PORT must be a number"),
    ])  # fmt: skip
    def test_bad_numbers(self, monkeypatch, name, value, message):
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setenv(name, value)
        with pytest.raises(ValueError, match=message):
            launched_processes()
