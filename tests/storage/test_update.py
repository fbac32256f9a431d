"""A folder is updated in one step, resumed after an interruption, and its journals survive torn writes."""

import os

import pytest
import torch

from conjoin.storage import FolderKind, FolderUpdate, FolderWriter, StoredFolder, read_manifest
from conjoin.storage.journal import Journal

STORE = FolderKind("store of numbers", 3, "run `make`")


def tensors(number):
    return {"numbers": torch.arange(3) + 3 * number}


@pytest.fixture
def folder(tmp_path):
    with FolderWriter(tmp_path, STORE, {"k": 1}) as writer:
        for number in range(2):
            writer.write(number, tensors(number), 3)
        writer.finish()
    return tmp_path


def numbers(folder):
    opened = StoredFolder(folder, STORE)
    return [opened.shard(place).get_tensor("numbers").tolist() for place in range(len(opened.manifest.files))]


class TestJournal:
    def test_records_come_back_and_a_torn_line_does_not(self, tmp_path):
        journal = Journal(tmp_path / "j")
        assert journal.read() == []
        for number in range(3):
            journal.append({"number": number, "text": "ü\n"})
        whole = journal.path.read_bytes()
        for end in range(len(whole) - len(whole) // 3 + 1, len(whole)):
            journal.path.write_bytes(whole[:end])
            assert [record["number"] for record in Journal(journal.path).read()] == [0, 1]
        Journal(journal.path).append({"number": 2, "text": "ü\n"})
        assert journal.path.read_bytes() == whole

    @pytest.mark.parametrize("place", [0, 70, 160])
    def test_a_flipped_bit_ends_the_records(self, tmp_path, place):
        journal = Journal(tmp_path / "j")
        for number in range(3):
            journal.append({"number": number, "text": "x" * 40})
        content = bytearray(journal.path.read_bytes())
        content[place] ^= 1
        journal.path.write_bytes(bytes(content))
        assert len(journal.read()) == (1 if place > 120 else 0)


def test_the_cost_of_a_shard_does_not_grow(tmp_path):
    with FolderWriter(tmp_path, STORE, {"k": 1}) as writer:
        sizes = []
        for number in range(40):
            writer.write(number, tensors(number), 3)
            sizes.append((tmp_path / "manifest.json").stat().st_size)
        assert len(set(sizes)) == 1 and len((tmp_path / "manifest-0.jsonl").read_text().splitlines()) == 40
        assert len(read_manifest(tmp_path, STORE).files) == 40
        writer.finish()
    assert not (tmp_path / "manifest-0.jsonl").exists() and len(numbers(tmp_path)) == 40


class TestUpdate:
    def test_readers_see_one_state(self, folder):
        before = StoredFolder(folder, STORE)
        with FolderUpdate(folder, STORE) as update:
            new = update.write(tensors(7), 3)
            assert numbers(folder) == [[0, 1, 2], [3, 4, 5]]
            with pytest.raises(ValueError, match="another process is writing into"), FolderUpdate(folder, STORE):
                pass
            update.commit([update.manifest.files[1], new], {"k": 2}, {"d": 1})
        assert numbers(folder) == [[3, 4, 5], [21, 22, 23]]
        manifest = read_manifest(folder, STORE)
        assert manifest.key == {"k": 2} and manifest.details == {"d": 1} and manifest.complete
        assert before.shard(0).get_tensor("numbers").tolist() == [0, 1, 2]  # a reader of the state before finishes
        with FolderUpdate(folder, STORE) as update:
            update.commit(update.manifest.files, {"k": 2}, {})
        assert sorted(path.name for path in folder.glob("[!.]*")) == [
            "manifest.json",
            "shard-00001.safetensors",
            "shard-00002.safetensors",
        ]

    def test_an_interruption_keeps_the_state_and_the_finished_shards(self, folder):
        with pytest.raises(KeyboardInterrupt), FolderUpdate(folder, STORE) as update:
            first, second = update.write(tensors(7), 3), update.write(tensors(8), 3)
            raise KeyboardInterrupt
        assert numbers(folder) == [[0, 1, 2], [3, 4, 5]]
        (folder / second.file).write_bytes(b"torn")
        with FolderUpdate(folder, STORE) as update:
            assert update.pending == (first,)
            third = update.write(tensors(9), 3)
            assert third.file == "shard-00004.safetensors"
            update.commit([first, third], {"k": 1}, {})
        assert numbers(folder) == [[21, 22, 23], [27, 28, 29]]
        assert not (folder / second.file).exists()

    @pytest.mark.parametrize("call", range(2))
    def test_interrupted_in_any_replacement_of_a_file(self, folder, monkeypatch, call):
        calls, original = iter(range(9)), os.replace

        def failing(source, target):
            if next(calls) == call:
                raise KeyboardInterrupt
            original(source, target)

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(os, "replace", failing)
            with FolderUpdate(folder, STORE) as update:
                update.commit([update.write(tensors(7), 3)], {"k": 1}, {})
        assert numbers(folder) == [[0, 1, 2], [3, 4, 5]]
        with FolderUpdate(folder, STORE) as update:
            assert len(update.pending) == call

    def test_killed_between_the_manifest_and_its_journal(self, folder):
        with FolderUpdate(folder, STORE) as update:
            new = update.write(tensors(7), 3)
            journal = (folder / "update.jsonl").read_bytes()
            update.commit([*update.manifest.files, new], {"k": 1}, {})
        (folder / "update.jsonl").write_bytes(journal)
        with FolderUpdate(folder, STORE) as update:
            assert update.pending == () and len(update.manifest.files) == 3
        assert not (folder / "update.jsonl").exists()

    def test_no_folder(self, tmp_path):
        with pytest.raises(FileNotFoundError, match="no store of numbers in"), FolderUpdate(tmp_path, STORE):
            pass
        assert list(tmp_path.iterdir()) == []
