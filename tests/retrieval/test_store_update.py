"""A store takes rows in, replaces and removes them; readers see one state; a killed update resumes."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from conjoin.retrieval import EmbeddingStore, build_index, encode_corpus, load_index, remove_rows, update_store
from conjoin.retrieval.encode import store_key
from conjoin.retrieval.encode_rows import row_content, row_parts
from conjoin.retrieval.store import STORE, write_embeddings
from conjoin.retrieval.store_update import StoreChanges
from conjoin.storage import FolderWriter
from tiny_encoder import tiny_encoder, tiny_rows

SHARD = 5


def encoded(folder, rows=None, **options):
    return encode_corpus(tiny_rows() if rows is None else rows, tiny_encoder(), folder, shard_size=SHARD, **options)


def update(folder, rows, encoder=None, **options):
    return update_store(rows, encoder or tiny_encoder(), folder, **options)


def state(folder):
    """Vectors and kept columns by id."""
    store = EmbeddingStore.open(folder)
    ids, vectors = store.load()
    assert len(set(ids)) == len(ids) == len(store) == sum(len(some) for some, _ in store)
    kept = store.kept.take(range(len(ids)))
    assert [id_ for table in store.kept for id_ in table["id"].to_pylist()] == ids
    return {id_: (vector.tobytes(), row) for id_, vector, row in zip(ids, vectors, kept, strict=True)}


def changed_rows():
    """Of 23 rows: two replaced, three removed, four new."""
    rows = tiny_rows(27)
    rows[6] |= {"text": "another text"}
    rows[13] |= {"image": Image.new("RGB", (5, 5), "white")}
    return rows[:2] + rows[5:]


def stopped(folder, rows, encoder=None, **options):
    """Update with rows after which the process stops."""

    def stopping():
        yield from rows
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        update(folder, stopping(), encoder or tiny_encoder(batch_size=1), **options)


def test_sync_is_encoding_again(tmp_path):
    store = encoded(tmp_path / "store")
    checksum, encoder = store.checksum, tiny_encoder()
    assert update(tmp_path / "store", changed_rows(), encoder, sync=True) == StoreChanges(4, 2, 3, 18, 0, 6)
    assert sum(encoder.model.batches) == 6
    encoded(tmp_path / "whole", changed_rows())
    assert state(tmp_path / "store") == state(tmp_path / "whole")
    assert EmbeddingStore.open(tmp_path / "store").checksum != checksum
    assert EmbeddingStore.open(tmp_path / "store").manifest.details["updates"] == 1


def test_without_sync_nothing_is_removed(tmp_path):
    encoded(tmp_path / "store")
    assert update(tmp_path / "store", changed_rows()[3:]) == StoreChanges(4, 2, 0, 15, 0, 6)
    everything = {row["id"]: row for row in (*tiny_rows(), *changed_rows())}
    encoded(tmp_path / "whole", list(everything.values()))
    assert state(tmp_path / "store") == state(tmp_path / "whole")


def test_the_same_rows_change_nothing(tmp_path):
    encoded(tmp_path)
    files = [path for path in tmp_path.iterdir() if path.name != ".lock"]  # old filelock touches it
    times = {path: path.stat().st_mtime_ns for path in files}
    encoder = tiny_encoder()
    assert update(tmp_path, tiny_rows(), encoder, sync=True) == StoreChanges(unchanged=23)
    assert encoder.model.batches == [] and {path: path.stat().st_mtime_ns for path in files} == times


def test_many_updates_stay_compact(tmp_path):
    encoded(tmp_path / "store")
    rows = tiny_rows()
    for day in range(40):
        rows[day % 23] |= {"text": f"day {day}"}
        assert update(tmp_path / "store", rows, sync=True).replaced == 1
    encoded(tmp_path / "whole", rows)
    assert state(tmp_path / "store") == state(tmp_path / "whole")
    store = EmbeddingStore.open(tmp_path / "store")
    assert store.shards < 15 and len(list((tmp_path / "store").glob("shard-*"))) < 25
    assert len(list((tmp_path / "store").glob("removed-*"))) <= 2


class TestPictures:
    @pytest.fixture
    def rows(self, tmp_path):
        rows = []
        for number in range(4):
            Image.new("RGB", (4, 4), (60 * number, 0, 0)).save(tmp_path / f"{number}.png")
            rows.append({"id": str(number), "image": str(tmp_path / f"{number}.png"), "kept": {"price": number}})
        encoded(tmp_path / "store", rows)
        return rows

    def test_a_picture_that_changed_under_its_id_is_encoded(self, rows, tmp_path):
        Image.new("RGB", (4, 4), "blue").save(tmp_path / "2.png")
        assert update(tmp_path / "store", rows, sync=True) == StoreChanges(replaced=1, unchanged=3, encoded=1)
        encoded(tmp_path / "whole", rows)
        assert state(tmp_path / "store") == state(tmp_path / "whole")

    def test_a_touched_or_moved_picture_and_a_new_price_keep_the_vector(self, rows, tmp_path):
        os.utime(tmp_path / "0.png", (1, 1))
        (tmp_path / "1.png").rename(tmp_path / "moved.png")
        rows[1]["image"] = str(tmp_path / "moved.png")
        rows[2]["kept"] = {"price": 99, "colour": "red"}
        encoder = tiny_encoder()
        assert update(tmp_path / "store", rows, encoder) == StoreChanges(replaced=3, unchanged=1, encoded=0)
        assert encoder.model.batches == []
        encoded(tmp_path / "whole", rows)
        assert state(tmp_path / "store") == state(tmp_path / "whole")

    def test_a_picture_that_broke_is_left_out(self, rows, tmp_path):
        (tmp_path / "3.png").write_bytes(b"no picture")
        with pytest.raises(ValueError, match=r"item '3'.*: cannot read the image"):
            update(tmp_path / "store", rows)
        assert len(state(tmp_path / "store")) == 4
        changes = update(tmp_path / "store", rows, on_error="skip")
        assert changes == StoreChanges(removed=1, unchanged=3, left_out=1)
        (left_out,) = EmbeddingStore.open(tmp_path / "store").left_out
        assert (left_out.row, left_out.id) == (3, "3") and set(state(tmp_path / "store")) == {"0", "1", "2"}
        Image.new("RGB", (4, 4)).save(tmp_path / "3.png")
        assert update(tmp_path / "store", rows).added == 1
        assert EmbeddingStore.open(tmp_path / "store").left_out == []


def test_remove_rows(tmp_path):
    encoded(tmp_path)
    with pytest.raises(ValueError, match="has no row 'stranger'; nothing was removed"):
        remove_rows(tmp_path, ["row/1", "stranger"])
    remove_rows(tmp_path, ["row/1", "row/7", "row/7", *(f"row/{number}" for number in range(10, 15))])
    assert sorted(state(tmp_path), key=lambda id_: int(id_[4:])) == [
        f"row/{number}" for number in range(23) if number not in (1, 7, 10, 11, 12, 13, 14)
    ]
    assert update(tmp_path, tiny_rows()).added == 7


def test_remove_rows_publishes_no_stopped_update(tmp_path):
    encoded(tmp_path)
    before = state(tmp_path)
    stopped(tmp_path, [row | {"text": "another"} for row in tiny_rows()[:20]])
    remove_rows(tmp_path, ["row/3"])
    assert state(tmp_path) == {id_: row for id_, row in before.items() if id_ != "row/3"}
    assert update(tmp_path, tiny_rows(), sync=True).added == 1


class TestRefusals:
    @pytest.fixture(autouse=True)
    def unchanged(self, tmp_path):
        encoded(tmp_path, source={"data": "a", "only": None})
        before = state(tmp_path)
        yield
        assert state(tmp_path) == before

    def refused(self, folder, message, rows=None, encoder=None, **options):
        options = {"source": {"data": "b", "only": None}} | options
        with pytest.raises(ValueError, match=message):
            update(folder, changed_rows() if rows is None else rows, encoder, **options)

    def test_another_model_or_setting(self, tmp_path):
        self.refused(tmp_path, "was made with fingerprint", encoder=tiny_encoder(seed=1))
        self.refused(tmp_path, "was made with instruction None, not 'find'", instruction="find")
        self.refused(tmp_path, "was made with source .*only.*not", source={"only": "image"})
        self.refused(tmp_path, "unknown on_error 'ignore'", on_error="ignore")

    def test_bad_rows(self, tmp_path):
        self.refused(tmp_path, "the data is empty: the store stays as it is", rows=[], sync=True)
        self.refused(tmp_path, "row 22: the id 'row/9' occurs twice", rows=[*tiny_rows()[:22], tiny_rows()[9]])
        self.refused(tmp_path, "item 'x' has neither", rows=[{"id": "x"}])

    def test_two_writers(self, tmp_path):
        def rows():
            yield from changed_rows()[:8]
            for use in (lambda: update(tmp_path, tiny_rows()), lambda: remove_rows(tmp_path, ["row/1"])):
                with pytest.raises(ValueError, match=f"another process is writing into '{tmp_path}'"):
                    use()
            raise ValueError("done")

        self.refused(tmp_path, "done", rows=rows())

    def test_no_store(self, tmp_path):
        with pytest.raises(FileNotFoundError, match="no embedding store in"):
            update(tmp_path / "none", tiny_rows())

    def test_a_full_disk(self, tmp_path, monkeypatch):
        original = Path.write_bytes

        def write_bytes(path, content):
            original(path, content[: len(content) // 2])
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch, pytest.raises(OSError, match="the embedding store is as it was before"):
            patch.setattr(Path, "write_bytes", write_bytes)
            update(tmp_path, changed_rows(), source={"only": None})


def test_encode_corpus_refuses_an_updated_store(tmp_path):
    encoded(tmp_path)
    update(tmp_path, changed_rows(), sync=True)
    with pytest.raises(ValueError, match="was updated; update it again, or encode into a new one"):
        encoded(tmp_path, changed_rows())


def test_a_damaged_shard_needs_all_the_data(tmp_path):
    encoded(tmp_path / "store")
    path = tmp_path / "store" / "shard-00001.safetensors"
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(ValueError, match=r"shard-00001.* again with --sync \(sync\) and all the data"):
        update(tmp_path / "store", changed_rows())
    assert update(tmp_path / "store", changed_rows(), sync=True).encoded == 4 + 2 + 4
    encoded(tmp_path / "whole", changed_rows())
    assert state(tmp_path / "store") == state(tmp_path / "whole")


def test_a_store_of_an_earlier_version(tmp_path):
    rows, encoder = tiny_rows(6), tiny_encoder()
    with FolderWriter(tmp_path, STORE, store_key(encoder, "float32", SHARD, None, None)) as writer:
        writer.details["model"] = "m"
        vectors = encoder.encode([row_parts(row["id"], row) for row in rows])
        contents = [row_content(row["id"], row) for row in rows]
        write_embeddings(writer, 0, [row["id"] for row in rows], vectors, contents)
        writer.finish()
    rows[2]["kept"] = {"price": 3}
    assert update(tmp_path, [*rows, {"id": "new", "text": "x"}]) == StoreChanges(1, 1, 0, 5, 0, 2)
    found = state(tmp_path)
    assert found["row/2"][1]["price"] == 3 and found["row/0"][1] == {} and found["new"][1] == {"text": "x"}
    index = build_index(tmp_path)
    index.save(tmp_path / "index")
    assert load_index(tmp_path / "index").ids == list(found)


def test_an_unfinished_store_can_be_synced(tmp_path):
    def stopping():
        yield from tiny_rows()[:12]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        encoded(tmp_path / "store", stopping())
    for use in (lambda: remove_rows(tmp_path / "store", ["row/1"]), lambda: update(tmp_path / "store", tiny_rows())):
        with pytest.raises(ValueError, match=r"is unfinished \(10 rows so far\); run `conjoin encode` again"):
            use()
    assert update(tmp_path / "store", changed_rows(), sync=True).unchanged == 10 - 3 - 1
    encoded(tmp_path / "whole", changed_rows())
    assert state(tmp_path / "store") == state(tmp_path / "whole")


def test_rows_of_two_stopped_updates_come_once(tmp_path):
    encoded(tmp_path / "store")
    for version in ("first", "second"):
        rows = [row | {"text": f"{version} {row['id']}"} for row in tiny_rows()]
        stopped(tmp_path / "store", rows[:20])
    assert update(tmp_path / "store", rows, sync=True).replaced == 23
    encoded(tmp_path / "whole", rows)
    assert state(tmp_path / "store").keys() == state(tmp_path / "whole").keys()


@pytest.mark.parametrize("kept", [{}, {"price": 1}])
def test_a_resumed_update_knows_that_items_have_several_images(kept, tmp_path, pictures):
    encode_corpus([{"id": "a", "text": "a"}], tiny_encoder(input_type="cat"), tmp_path, shard_size=SHARD)
    rows = [{"id": f"two {number}", "image": pictures[:2]} for number in range(20)]
    stopped(tmp_path, rows, tiny_encoder(batch_size=1, input_type="cat"))
    assert update(tmp_path, [rows[0] | {"kept": kept}], tiny_encoder(input_type="cat")).encoded == 0
    store = EmbeddingStore.open(tmp_path)
    assert store.model.input_type == "cat" and store.manifest.details["parts"] == ["image", "text"]


def test_a_reader_meanwhile_sees_the_old_state_or_the_new(tmp_path):
    encoded(tmp_path)
    old, states, errors, done = state(tmp_path), [], [], threading.Event()

    def read():
        while not done.is_set():
            try:
                states.append(state(tmp_path))
            except Exception as error:
                errors.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    opened = EmbeddingStore.open(tmp_path)
    for rows in (changed_rows(), tiny_rows()):
        update(tmp_path, rows, sync=True)
        new = state(tmp_path)
        assert set(opened.load()[0]) == set(old)  # opened before
        opened, old_and_new = EmbeddingStore.open(tmp_path), (old, new)
        old = new
    done.set()
    reader.join()
    encoded_states = [json.dumps(sorted(found)) for found in states]
    assert not errors and set(encoded_states) <= {json.dumps(sorted(one)) for one in old_and_new}


SLOW = """
import sys, time
sys.path[:0] = [{tests!r}, {own!r}]
from test_store_update import changed_rows, update
from tiny_encoder import tiny_encoder
def rows():
    for row in changed_rows():
        open({folder!r} + "-started", "w").close()
        time.sleep(0.05)
        yield row
update({folder!r}, rows(), tiny_encoder(batch_size=1), sync=True)
"""


@pytest.mark.parametrize("wait_for", ["store/update.jsonl", "store-started"])
def test_killed(wait_for, tmp_path):
    encoded(tmp_path / "store", tiny_rows(7))
    before = state(tmp_path / "store")
    here = Path(__file__).parent
    code = SLOW.format(tests=str(here.parent), own=str(here), folder=str(tmp_path / "store"))
    process = subprocess.Popen([sys.executable, "-c", code])
    try:
        deadline = time.monotonic() + 120
        while not (tmp_path / wait_for).exists() and time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.01)
        time.sleep(0.15)  # into the middle of the next shard
        assert process.poll() is None
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert state(tmp_path / "store") == before
    encoder = tiny_encoder(batch_size=1)
    update(tmp_path / "store", changed_rows(), encoder, sync=True)
    encoded(tmp_path / "whole", changed_rows())
    found, whole = state(tmp_path / "store"), state(tmp_path / "whole")
    assert found.keys() == whole.keys() and all(found[id_][1] == whole[id_][1] for id_ in whole)
    for id_ in whole:
        np.testing.assert_allclose(*(np.frombuffer(one[id_][0], np.float32) for one in (found, whole)), atol=1e-6)
    new = 24 - 4 + 1  # rows that the store of seven did not have, or had otherwise
    assert sum(encoder.model.batches) <= new - (5 if "update" in wait_for else 0)
