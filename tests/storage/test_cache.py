"""A cache of rows: resumed byte by byte, refused when it differs, never read when it is damaged."""

import json
import multiprocessing
import os
import pickle
import signal
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch

from conjoin.storage import RowCache, files, lock_folder

KEY = {"model": "m" * 64, "k": 4, "grid": (2, [3])}


class Cache(RowCache):
    kind = "cache of numbers"
    remedy = "run `make`"


class Other(RowCache):
    kind = "cache of words"
    remedy = "run `make`"


def tensors(rows, made=None):
    if made is not None:
        made.append(rows)
    state = torch.stack([torch.full((2, 3), row, dtype=torch.bfloat16) for row in rows])
    return {"state": state, "words": [torch.arange(row % 3 * 4).view(-1, 4) for row in rows]}


def make(folder, kind=Cache, rows=10, key=KEY, stop=None, made=None, **options):
    def stopping(chosen):
        if chosen.start == stop:
            raise KeyboardInterrupt
        return tensors(chosen, made)

    return kind.make(folder, rows, 4, key, stopping, **options)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.glob("[!.]*")}


def flip(content, place):
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


DAMAGES = {
    "truncated": lambda content: content[:-7],
    "empty": lambda content: b"",
    "first bit": lambda content: flip(content, 0),
    "middle bit": lambda content: flip(content, len(content) // 2),
    "last bit": lambda content: flip(content, len(content) - 2),
    "longer": lambda content: content + b"x",
    "list": lambda content: b"[1, 2]",
    "binary": lambda content: b"\xff\xfe\x00",
}


class TestRows:
    def test_rows_of_one_and_of_different_lengths(self, tmp_path):
        cache = pickle.loads(pickle.dumps(make(tmp_path)))
        assert len(cache) == 10 and cache.key == json.loads(json.dumps(KEY))
        for index in (9, 0, 4, 3, 7):
            row, expected = cache[index], tensors(range(index, index + 1))
            assert torch.equal(row["state"], expected["state"][0]) and torch.equal(row["words"], expected["words"][0])
        assert len(list(cache)) == 10
        assert torch.equal(cache.column("state"), tensors(range(10))["state"])
        with pytest.raises(IndexError, match="row 10 of 10"):
            cache[10]

    @pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
    def test_a_shard_is_mapped_and_not_read(self, tmp_path):
        row = make(tmp_path)[4]["state"]
        assert f"{tmp_path}/shard-00001.safetensors" in Path("/proc/self/maps").read_text()
        row.zero_()
        assert Cache(tmp_path)[4]["state"].eq(4).all(), "a private copy"

    @pytest.mark.slow
    def test_another_process_maps_the_shards_again(self, tmp_path):
        cache = make(tmp_path)
        first = cache[1]["state"]
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            assert torch.equal(pool.submit(cache.__getitem__, 1).result()["state"], first)

    def test_no_rows(self, tmp_path):
        assert list(make(tmp_path, rows=0)) == []


class TestResuming:
    @pytest.mark.parametrize("stop", [0, 4, 8])
    def test_interrupted_and_resumed_is_uninterrupted(self, tmp_path, stop):
        make(tmp_path / "whole")
        with pytest.raises(KeyboardInterrupt):
            make(tmp_path / "part", stop=stop)
        assert Cache.finished_rows(tmp_path / "part") == stop and not Cache.is_complete(tmp_path / "part")
        with pytest.raises(ValueError, match=rf"is unfinished: SHA256SUMS lists {stop} of 10 rows; run `make` again"):
            Cache(tmp_path / "part")
        made = []
        make(tmp_path / "part", made=made)
        assert [rows.start for rows in made] == list(range(stop, 10, 4))
        assert contents(tmp_path / "part") == contents(tmp_path / "whole")
        assert Cache.finished_rows(tmp_path / "part") == 10 and Cache.finished_rows(tmp_path / "none") == 0

    @pytest.mark.parametrize("call", range(12))
    def test_interrupted_in_any_replacement_of_a_file(self, tmp_path, monkeypatch, call):
        make(tmp_path / "whole")
        calls, original = [], os.replace

        def failing(source, target):
            calls.append(target)
            if len(calls) > call:
                raise KeyboardInterrupt
            original(source, target)

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", failing)
            if call < 8:
                with pytest.raises(KeyboardInterrupt):
                    make(tmp_path / "part")
            else:
                make(tmp_path / "part")
        make(tmp_path / "part")
        assert contents(tmp_path / "part") == contents(tmp_path / "whole")

    def test_another_key_names_each_difference(self, tmp_path):
        make(tmp_path)
        with pytest.raises(
            ValueError, match=r"made with k 4, not 5, grid \[2, \[3\]\], not \[2, \[9\]\]; use the same"
        ):
            make(tmp_path, key=KEY | {"k": 5, "grid": [2, [9]]})
        with pytest.raises(ValueError, match=r"made with model 'mmmmmmmmmmmm'\.\.\., not None, rows 10, not 9"):
            make(tmp_path, key={"k": 4, "grid": [2, [3]]}, rows=9)
        assert Cache.is_complete(tmp_path, KEY) and not Cache.is_complete(tmp_path, {"k": 4})

    def test_another_key_may_replace(self, tmp_path):
        make(tmp_path, details={"name": "a"})
        cache = make(tmp_path, key={"k": 5}, rows=3, replace=True)
        assert (len(cache), cache.key, cache.details) == (3, {"k": 5}, {})
        assert set(contents(tmp_path)) == {"cache.json", "SHA256SUMS", "shard-00000.safetensors"}

    @pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
    @pytest.mark.parametrize("file", ["shard-00001.safetensors", "cache.json", "SHA256SUMS"])
    def test_damage_is_named_and_made_again(self, tmp_path, damage, file, caplog):
        make(tmp_path)
        before = contents(tmp_path)
        (tmp_path / file).write_bytes(damage(before[file]))
        harmless = DAMAGES["longer"], DAMAGES["first bit"]  # a line too many; the line with the number of files
        if file == "SHA256SUMS" and damage in harmless:
            assert len(Cache(tmp_path)) == 10
            return
        with pytest.raises(ValueError, match=rf"{file}.*; run `make` again"):
            Cache(tmp_path)
        made = []
        make(tmp_path, made=made)
        assert contents(tmp_path) == before
        if file.startswith("shard"):
            assert [rows.start for rows in made] == [4] and f"{file}' is missing, truncated or damaged" in caplog.text

    def test_a_shard_that_is_missing(self, tmp_path, caplog):
        make(tmp_path)
        before = contents(tmp_path)
        (tmp_path / "shard-00001.safetensors").unlink()
        with pytest.raises(ValueError, match=r"shard-00001.safetensors' is missing, .*; run `make` again$"):
            Cache(tmp_path)
        make(tmp_path)
        assert contents(tmp_path) == before

    def test_a_full_disk_is_one_line_that_says_what_is_safe(self, tmp_path):
        resource = pytest.importorskip("resource")
        before = resource.getrlimit(resource.RLIMIT_FSIZE)

        def large(rows):
            return {"state": torch.zeros(len(rows), 9 if rows.start == 0 else 999)}

        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
        try:
            with pytest.raises(OSError, match=r"while writing '.*shard-00001.*': 2 rows are safe; make room and run"):
                Cache.make(tmp_path, 4, 2, {}, large)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert set(contents(tmp_path)) == {"cache.json", "SHA256SUMS", "shard-00000.safetensors"}


class TestPlaces:
    def test_a_folder_with_other_files_is_refused(self, tmp_path):
        (tmp_path / "manifest.json").write_text("not ours")
        with pytest.raises(ValueError, match=r"holds no cache of numbers \(it has 'manifest.json'\); .* run `make`$"):
            make(tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]
        with pytest.raises(ValueError, match=r"'.*manifest.json' is a file; choose a folder for the cache of numbers"):
            make(tmp_path / "manifest.json")

    def test_another_kind_or_layout_is_refused(self, tmp_path, monkeypatch):
        make(tmp_path)
        for use in (Other, Other.check_place, Other.finished_rows, lambda folder: make(folder, Other, replace=True)):
            with pytest.raises(
                ValueError, match="kind 'cache of numbers' and layout 1, expected 'cache of words' and 1"
            ):
                use(tmp_path)
        monkeypatch.setattr("conjoin.storage.cache._LAYOUT", 2)
        with pytest.raises(
            ValueError, match=r"layout 1, expected 'cache of numbers' and 2; .* remove it and run `make`"
        ):
            Cache(tmp_path)

    def test_no_cache_and_no_shard_size(self, tmp_path):
        with pytest.raises(
            FileNotFoundError, match=r"no cache of numbers in .*: it has no cache.json; run `make` to make"
        ):
            Cache(tmp_path)
        with pytest.raises(ValueError, match="shard_size must be at least 1, got 0"):
            Cache.make(tmp_path / "none", 3, 0, {}, tensors)
        assert not (tmp_path / "none").exists()

    def test_what_an_interruption_leaves_before_the_header_is_ours(self, tmp_path):
        make(tmp_path)
        before = contents(tmp_path)
        (tmp_path / "cache.json").unlink()
        (tmp_path / "cache.json.0123456789abcdef.conjoin-tmp").write_bytes(b"{")
        make(tmp_path)
        assert contents(tmp_path) == before


def _hold(folder, ready):
    def slow(rows):
        ready.set()
        time.sleep(60)

    Cache.make(folder, 10, 4, KEY, slow)


class TestTwoWriters:
    def test_the_second_is_refused_and_a_complete_cache_is_opened(self, tmp_path):
        tmp_path.mkdir(exist_ok=True)
        lock = lock_folder(tmp_path)
        with pytest.raises(ValueError, match=f"another process is writing into '{tmp_path}'"):
            make(tmp_path)
        lock.release()
        make(tmp_path)
        lock = lock_folder(tmp_path)
        assert len(make(tmp_path)) == 10
        lock.release()

    @pytest.mark.slow
    def test_a_killed_process_leaves_no_lock(self, tmp_path):
        context = multiprocessing.get_context("spawn")
        ready = context.Event()
        process = context.Process(target=_hold, args=(tmp_path, ready))
        process.start()
        try:
            assert ready.wait(60)
            with pytest.raises(ValueError, match="another process is writing"):
                make(tmp_path)
        finally:
            os.kill(process.pid, signal.SIGKILL)
            process.join()
        assert len(make(tmp_path)) == 10


def test_a_file_is_verified_once_and_again_when_it_changes(tmp_path, monkeypatch):
    make(tmp_path, rows=4)
    digests, real = [], files.file_digest
    monkeypatch.setattr(files, "file_digest", lambda file: (digests.append(file.name), real(file))[1])
    for name in ("cache.json", "shard-00000.safetensors"):
        os.utime(tmp_path / name, (1, 1))
    for _ in range(3):
        Cache(tmp_path)
    assert digests == ["cache.json", "shard-00000.safetensors"]
    path = tmp_path / "shard-00000.safetensors"
    path.write_bytes(flip(path.read_bytes(), 100))
    with pytest.raises(files.DamagedError):
        Cache(tmp_path)
