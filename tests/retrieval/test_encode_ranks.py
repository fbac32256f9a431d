"""Several processes encode one store: the bytes of one process, whichever is killed and however many resume."""

import signal
import subprocess
import sys
import threading
import time

import pytest

import tiny_encoder as tiny
from conjoin.retrieval import EmbeddingStore, encode_corpus, encode_rank
from conjoin.retrieval.store import STORE
from conjoin.storage import read_manifest
from tiny_encoder import tiny_encoder, tiny_rows

SHARD = 5


def contents(directory):
    return {path.name: path.read_bytes() for path in sorted(directory.glob("[!.]*"))}


def encode(directory, rank, world_size, rows=None, **options):
    rows = tiny_rows() if rows is None else rows
    return encode_rank(rows, tiny_encoder(), directory, rank, world_size, shard_size=SHARD, **options)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    directory = tmp_path_factory.mktemp("reference")
    encode_corpus(tiny_rows(), tiny_encoder(), directory, shard_size=SHARD)
    return contents(directory)


@pytest.mark.parametrize("world_size, order", [(2, (1, 0)), (3, (0, 2, 1)), (7, range(7))])
def test_ranks_write_the_bytes_of_one_process(reference, tmp_path, world_size, order):
    found = [encode(tmp_path, rank, world_size) for rank in order]
    assert found[:-1] == [None] * (world_size - 1) and found[-1].ids == [row["id"] for row in tiny_rows()]
    assert contents(tmp_path) == reference


def test_a_stream_is_shared_too(reference, tmp_path):
    assert encode(tmp_path, 0, 2, iter(tiny_rows())) is None
    assert sorted(path.name[6:11] for path in tmp_path.glob("shard-*")) == ["00000", "00002", "00004"]
    encode(tmp_path, 1, 2, iter(tiny_rows()))
    assert contents(tmp_path) == reference


@pytest.mark.parametrize("before, after", [(2, 1), (1, 2), (3, 2), (2, 3)])
def test_another_number_of_ranks_resumes(reference, tmp_path, before, after):
    class StopError(Exception):
        pass

    def stopping():
        yield from tiny_rows()[:17]
        raise StopError

    for rank in range(before):
        with pytest.raises(StopError):
            encode(tmp_path, rank, before, stopping())
    finished = len(list(tmp_path.glob("shard-*")))
    assert finished == 3 and len(read_manifest(tmp_path, STORE).files) == finished
    times = {path: path.stat().st_mtime_ns for path in tmp_path.glob("shard-*")}
    for rank in range(after):
        encode(tmp_path, rank, after)
    assert contents(tmp_path) == reference
    assert times == {path: path.stat().st_mtime_ns for path in times}  # nothing is encoded twice


@pytest.mark.parametrize("killed, world_size", [(0, 1), (1, 3)])
def test_a_killed_rank(tmp_path, killed, world_size):
    """One of two processes is killed in the middle; others finish the store."""
    whole, store = tmp_path / "whole", tmp_path / "store"
    encode_corpus(tiny_rows(), tiny_encoder(batch_size=1), whole, shard_size=SHARD)
    delays = ["0.2" if rank == killed else "0.01" for rank in range(2)]
    command = [sys.executable, tiny.__file__, str(store)]
    ranks = [subprocess.Popen([*command, delay, str(rank), "2"]) for rank, delay in enumerate(delays)]
    try:
        deadline = time.monotonic() + 120
        while not (store / f"manifest-{killed}.jsonl").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.3)  # into the middle of its second shard
        assert ranks[killed].poll() is None
        ranks[killed].send_signal(signal.SIGKILL)
        assert ranks[1 - killed].wait(120) == 0
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    with pytest.raises(ValueError, match="is unfinished"):
        EmbeddingStore.open(store)
    for rank in range(world_size):
        encode_rank(tiny_rows(), tiny_encoder(batch_size=1), store, rank, world_size, shard_size=SHARD)
    assert contents(store) == contents(whole)


def test_a_damaged_shard_is_made_again_by_any_rank(reference, tmp_path):
    encode(tmp_path, 1, 2)
    (tmp_path / "shard-00003.safetensors").write_bytes(b"torn")
    for rank in range(3):
        encode(tmp_path, rank, 3)
    assert contents(tmp_path) == reference
    (tmp_path / "shard-00001.safetensors").write_bytes(b"torn")
    encode(tmp_path, 1, 2)  # of a complete store
    assert contents(tmp_path) == reference


def test_left_out_rows_are_listed_in_order(tmp_path):
    rows = tiny_rows()
    for place in (3, 7, 21):
        rows[place] = {"id": f"bad/{place}", "problem": "broken"}
    encode_corpus(rows, tiny_encoder(), tmp_path / "one", shard_size=SHARD, on_error="skip")
    for rank in (1, 2, 0):
        store = encode(tmp_path / "three", rank, 3, rows, on_error="skip")
    assert [row.row for row in store.left_out] == [3, 7, 21]
    assert contents(tmp_path / "one") == contents(tmp_path / "three")


def test_an_id_of_two_ranks_is_noticed(tmp_path):
    rows = tiny_rows()
    rows[14]["id"] = "row/6"
    encode(tmp_path, 0, 2, rows)
    with pytest.raises(ValueError, match="row 14: the id 'row/6' occurs twice"):
        encode(tmp_path, 1, 2, rows)
    with pytest.raises(ValueError, match="is unfinished"):
        EmbeddingStore.open(tmp_path)


def test_ranks_that_read_other_data_are_noticed(tmp_path):
    encode(tmp_path, 1, 2, tiny_rows(24))
    with pytest.raises(ValueError, match=r"do not read the same data: they count \[23, 24\] rows"):
        encode(tmp_path, 0, 2, tiny_rows(23))


def test_the_end_of_an_earlier_run_counts(tmp_path):
    encode(tmp_path, 0, 2)
    with pytest.raises(ValueError, match="it holds 18 rows and now the data ends after 15"):
        encode(tmp_path, 1, 2, tiny_rows(15))
    with pytest.raises(ValueError, match="ended after 23 rows, and now the data continues with id 'row/23'"):
        encode(tmp_path, 0, 1, tiny_rows(24))


class TestTwoRuns:
    def during(self, directory, rank, world_size, call):
        """Call during the run of a rank."""
        found = []

        def rows():
            for number, row in enumerate(tiny_rows()):
                if number == 8:
                    with pytest.raises(ValueError) as caught:
                        call()
                    found.append(caught.value)
                yield row

        encode(directory, rank, world_size, rows())
        return str(found[0])

    @pytest.mark.parametrize("other", [(0, 2), (0, 1), (2, 3)])
    def test_the_second_is_refused(self, reference, tmp_path, other):
        message = self.during(tmp_path, 0, 2, lambda: encode(tmp_path, *other))
        assert f"another process is writing into '{tmp_path}'" in message
        encode(tmp_path, 1, 2)
        assert contents(tmp_path) == reference

    def test_ranks_wait_for_no_other_writer(self, tmp_path, monkeypatch):
        monkeypatch.setattr("conjoin.storage.writer._PATIENCE", 0.1)
        message = self.during(tmp_path, 0, 1, lambda: encode(tmp_path, 0, 2))
        assert f"another process is writing into '{tmp_path}'" in message

    def test_other_settings_are_refused(self, tmp_path):
        encode(tmp_path, 0, 2)
        with pytest.raises(ValueError, match="was made with dtype 'float32', not 'float16'"):
            encode(tmp_path, 1, 2, dtype="float16")

    def test_ranks_begin_at_once(self, reference, tmp_path):
        ranks = [threading.Thread(target=encode, args=(tmp_path, rank, 4)) for rank in range(4)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        assert contents(tmp_path) == reference


@pytest.mark.parametrize("rank, world_size", [(2, 2), (-1, 2), (0, 0)])
def test_ranks_that_cannot_be(rank, world_size, tmp_path):
    with pytest.raises(ValueError, match="rank must be from 0"):
        encode(tmp_path, rank, world_size)
