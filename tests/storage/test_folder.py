"""A resumable folder: resumed byte by byte, refused when it differs, never read when it is damaged."""

import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest
import torch

from conjoin.storage import (
    DamagedError,
    FolderKind,
    FolderUpdate,
    FolderWriter,
    Manifest,
    StoredFolder,
    check_place,
    is_current,
    lock_folder,
    read_folder,
    read_manifest,
    recorded_rows,
    replace_folder,
)
from conjoin.storage.manifest import StoredFile

STORE = FolderKind("store of numbers", 3, "run `make`")
CACHE = FolderKind("cache of numbers", 3, "run `make`", is_cache=True)
KEY = {"model": "m" * 64, "k": 4, "grid": (2, [3])}


def tensors(number):
    return {"numbers": torch.arange(5) + 5 * number, "names": torch.arange(5)}


def write(folder, shards=3, kind=STORE, key=KEY, stop=None, made=None):
    with FolderWriter(folder, kind, key) as writer:
        for number in range(shards):
            if number == stop:
                raise KeyboardInterrupt
            if not writer.has(number):
                writer.write(number, tensors(number), 5)
                if made is not None:
                    made.append(number)
        writer.finish()


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
    "deep": lambda content: b"[" * 100_000,
}


class TestResuming:
    @pytest.mark.parametrize("stop", range(4))
    def test_interrupted_and_resumed_is_uninterrupted(self, tmp_path, stop):
        write(tmp_path / "whole")
        if stop < 3:
            with pytest.raises(KeyboardInterrupt):
                write(tmp_path / "part", stop=stop)
        made = []
        write(tmp_path / "part", made=made)
        assert made == list(range(stop % 3, 3))  # nothing is made twice
        assert contents(tmp_path / "part") == contents(tmp_path / "whole")

    def test_an_unfinished_folder_is_not_read(self, tmp_path):
        with pytest.raises(KeyboardInterrupt):
            write(tmp_path, stop=2)
        with pytest.raises(ValueError, match=r"is unfinished \(10 rows so far\); run `make` again, it resumes"):
            StoredFolder(tmp_path, STORE)
        assert recorded_rows(tmp_path, STORE) == 10 and recorded_rows(tmp_path / "none", STORE) == 0

    def test_another_key_names_each_difference(self, tmp_path):
        write(tmp_path)
        before = contents(tmp_path)
        with pytest.raises(ValueError) as caught:
            write(tmp_path, key={"model": "n" * 64, "k": 5, "grid": [2, [4]], "new": None, "more": 1})
        message = str(caught.value)
        for part in ("'mmmmmmmmmmmm'..., not 'nnnnnnnnnnnn'...", "k 4, not 5", "grid [2, [3]], not [2, [4]]"):
            assert part in message
        assert "more None, not 1" in message
        assert contents(tmp_path) == before

    def test_another_kind_or_version_is_refused(self, tmp_path):
        write(tmp_path)
        for kind in (CACHE, FolderKind("store of numbers", 4, "run `remake`", is_cache=True)):
            with pytest.raises(ValueError, match="has format 'store of numbers' and version 3, expected"):
                write(tmp_path, kind=kind)
            again = ", or remove this one and run" if kind.name == "store of numbers" else "$"
            with pytest.raises(ValueError, match=f"choose another folder{again}"):
                is_current(tmp_path, kind, KEY)

    @pytest.mark.parametrize("damage", [*DAMAGES, "missing"])
    def test_a_damaged_shard_is_made_again(self, tmp_path, damage, caplog):
        write(tmp_path)
        before = contents(tmp_path)
        path = tmp_path / "shard-00001.safetensors"
        path.unlink() if damage == "missing" else path.write_bytes(DAMAGES[damage](path.read_bytes()))
        assert not is_current(tmp_path, STORE, KEY)
        made = []
        write(tmp_path, made=made)
        assert made == [1] and contents(tmp_path) == before
        assert "shard-00001.safetensors" in caplog.text

    @pytest.mark.parametrize("damage", DAMAGES)
    def test_a_damaged_manifest_stops_a_store_and_restarts_a_cache(self, tmp_path, damage, caplog):
        for kind in (STORE, CACHE):
            folder = tmp_path / kind.name
            write(folder, kind=kind)
            before = contents(folder)
            (folder / "manifest.json").write_bytes(DAMAGES[damage](before["manifest.json"]))
            if kind is STORE:
                with pytest.raises(ValueError, match=r"manifest\.json' (is damaged|has format)"):
                    write(folder, kind=kind)
            else:
                made = []
                write(folder, kind=kind, made=made)
                assert made == [0, 1, 2] and contents(folder) == before and "making all files again" in caplog.text


class TestReading:
    @pytest.mark.parametrize("damage", [*DAMAGES, "missing"])
    @pytest.mark.parametrize("file", ["shard-00001.safetensors", "manifest.json"])
    def test_damage_is_one_line_that_names_the_file(self, tmp_path, damage, file):
        write(tmp_path)
        path = tmp_path / file
        path.unlink() if damage == "missing" else path.write_bytes(DAMAGES[damage](path.read_bytes()))
        with pytest.raises((ValueError, FileNotFoundError)) as caught:
            StoredFolder(tmp_path, STORE).shard(1)
        assert file in str(caught.value) and "run `make`" in str(caught.value) and "\n" not in str(caught.value)

    def test_every_flipped_bit_of_a_manifest_is_noticed(self, tmp_path):
        write(tmp_path)
        content = (tmp_path / "manifest.json").read_bytes()
        for place in range(len(content)):
            (tmp_path / "manifest.json").write_bytes(flip(content, place))
            with pytest.raises(ValueError):
                read_manifest(tmp_path, STORE)

    def test_without_verification_only_the_size_counts(self, tmp_path):
        write(tmp_path)
        path = tmp_path / "shard-00001.safetensors"
        path.write_bytes(flip(path.read_bytes(), path.stat().st_size - 2))
        assert StoredFolder(tmp_path, STORE, verify=False).shard(1).get_tensor("numbers").shape == (5,)
        with pytest.raises(DamagedError, match="differs from its checksum"):
            StoredFolder(tmp_path, STORE).shard(1)

    def test_a_file_is_verified_once_and_again_when_it_changes(self, tmp_path, monkeypatch):
        write(tmp_path)
        path, digests = tmp_path / "shard-00000.safetensors", []
        from conjoin.storage import checksums

        real = checksums.file_digest
        monkeypatch.setattr(checksums, "file_digest", lambda file: (digests.append(file), real(file))[1])
        os.utime(path, (1, 1))
        for _ in range(3):
            StoredFolder(tmp_path, STORE).shard(0)
        assert digests == [path]
        path.write_bytes(flip(path.read_bytes(), 100))
        with pytest.raises(DamagedError):
            StoredFolder(tmp_path, STORE).shard(0)

    @pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/b", "..", ".hidden", "", "a\\b", "C:x", "x\n"])
    def test_only_bare_file_names(self, tmp_path, name):
        Manifest(STORE.name, STORE.version, True, {}, {}, (StoredFile(name, 1, 1, "0"),)).save(tmp_path)
        with pytest.raises(ValueError, match=r"manifest\.json' is damaged .* is not a bare file name"):
            StoredFolder(tmp_path, STORE)


def _hold(folder, ready):
    with FolderWriter(folder, STORE, KEY):
        ready.set()
        time.sleep(60)


def test_a_journal_that_a_kill_left_beside_the_complete_manifest_is_removed(tmp_path):
    write(tmp_path)
    reference = contents(tmp_path)
    for enter in (FolderWriter(tmp_path, STORE, KEY), FolderUpdate(tmp_path, STORE)):
        (tmp_path / "manifest-1.jsonl").write_text("a line")
        with enter:
            assert contents(tmp_path) == reference


class TestTwoWriters:
    def test_the_second_is_refused(self, tmp_path):
        with FolderWriter(tmp_path, STORE, KEY) as first:
            first.write(0, tensors(0), 5)
            for use in (lambda: write(tmp_path), lambda: lock_folder(tmp_path)):
                with pytest.raises(ValueError, match=f"another process is writing into '{tmp_path}'"):
                    use()
        write(tmp_path)

    def test_a_complete_folder_is_opened_by_many(self, tmp_path):
        write(tmp_path)
        with FolderWriter(tmp_path, STORE, KEY) as first, FolderWriter(tmp_path, STORE, KEY) as second:
            assert first.has(2) and second.has(2)

    def test_a_killed_process_leaves_no_lock(self, tmp_path):
        context = multiprocessing.get_context("spawn")
        ready = context.Event()
        process = context.Process(target=_hold, args=(tmp_path, ready))
        process.start()
        try:
            assert ready.wait(60)
            with pytest.raises(ValueError, match="another process is writing"):
                write(tmp_path)
        finally:
            os.kill(process.pid, signal.SIGKILL)
            process.join()
        write(tmp_path)
        assert StoredFolder(tmp_path, STORE).rows == 15


class TestReplacing:
    def replace(self, folder, text, **options):
        files = {name: lambda path, name=name: path.write_text(f"{name} {text}") for name in ("a.txt", "b.bin")}
        replace_folder(folder, CACHE, {"text": text}, files, **options)

    def read(self, folder):
        return read_folder(folder, CACHE, lambda opened: [opened.path(number).read_text() for number in (0, 1)])

    def test_the_new_files_take_the_place_of_the_old(self, tmp_path):
        for text in ("old", "new"):
            self.replace(tmp_path, text)
            (tmp_path / "a-mine.txt").write_text("not ours")
            assert self.read(tmp_path) == [f"a.txt {text}", f"b.bin {text}"]
        assert len(contents(tmp_path)) == 4 and is_current(tmp_path, CACHE, {"text": "new"})
        assert not is_current(tmp_path, CACHE, {"text": "old"})

    @pytest.mark.parametrize("call", range(3))
    def test_an_interruption_leaves_the_old_files(self, tmp_path, monkeypatch, call):
        self.replace(tmp_path, "old")
        before, calls, original = contents(tmp_path), iter(range(9)), os.replace

        def failing(source, target):
            if next(calls) == call:
                raise KeyboardInterrupt
            original(source, target)

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(os, "replace", failing)
            self.replace(tmp_path, "new")
        assert before.items() <= contents(tmp_path).items() and self.read(tmp_path) == ["a.txt old", "b.bin old"]
        self.replace(tmp_path, "new")
        assert len(contents(tmp_path)) == 3

    def test_a_reader_meanwhile_reads_one_state(self, tmp_path):
        self.replace(tmp_path, "old")
        reads = []

        def read(opened):
            reads.append(1)
            first = opened.path(0).read_text()
            if len(reads) == 1:
                self.replace(tmp_path, "new")
            return first, opened.path(1).read_text()

        assert read_folder(tmp_path, CACHE, read) == ("a.txt new", "b.bin new") and len(reads) == 2


class TestPlaces:
    @pytest.mark.parametrize("make", [write, TestReplacing().replace], ids=["shards", "files"])
    def test_a_folder_with_other_files_is_refused(self, tmp_path, make):
        (tmp_path / "model.safetensors").write_text("not ours")
        with pytest.raises(ValueError, match=r"is not empty and not an earlier .* it has 'model.safetensors'"):
            make(tmp_path, *([] if make is write else ["text"]))
        assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
        with pytest.raises(ValueError, match=r"'.*model.safetensors' is a file; choose a folder for the"):
            make(tmp_path / "model.safetensors", *([] if make is write else ["text"]))

    def test_what_an_interruption_leaves_before_the_manifest_is_ours(self, tmp_path):
        write(tmp_path)
        (tmp_path / "manifest.json").unlink()
        write(tmp_path)
        assert StoredFolder(tmp_path, STORE).rows == 15

    def test_a_manifest_of_another_kind_is_refused_early(self, tmp_path):
        write(tmp_path)
        check_place(tmp_path, STORE)
        check_place(tmp_path / "absent", STORE)
        with pytest.raises(ValueError, match="has format 'store of numbers'"):
            check_place(tmp_path, CACHE)

    def test_another_process_may_begin_meanwhile(self, tmp_path, monkeypatch):
        def iterdir(path):
            monkeypatch.undo()
            write(path)
            return path.iterdir()

        monkeypatch.setattr(Path, "iterdir", iterdir)
        check_place(tmp_path, STORE)
