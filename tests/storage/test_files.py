"""A file is the old version or the new one; checksums show damage."""

import os
import shutil
import subprocess
import threading

import pytest

from conjoin.storage import DamagedError, check_checksums, checksummed_path, file_digest, write_checksums
from conjoin.storage.files import TEMPORARY, atomic_path, flush_tree, publish_folder, remove_temporary, write_text


def test_a_failed_block_leaves_the_old_file_and_nothing_else(tmp_path):
    write_text(tmp_path / "a", "old")
    with pytest.raises(RuntimeError), atomic_path(tmp_path / "a") as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert [path.name for path in tmp_path.iterdir()] == ["a"] and (tmp_path / "a").read_text() == "old"


def test_a_reader_never_sees_a_part(tmp_path):
    path, contents = tmp_path / "a", ["x" * 200_000, "y" * 300_000]
    write_text(path, contents[0])
    done = threading.Event()

    def write():
        for number in range(30):
            write_text(path, contents[number % 2])
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    while not done.is_set():
        assert path.read_text() in contents
    writer.join()


def test_leftovers_of_a_killed_process_are_removed(tmp_path):
    left, other = tmp_path / f"a.1{TEMPORARY}", tmp_path / "a.tmp"
    for path in (left, other):
        path.write_text("half")
    remove_temporary(tmp_path)
    assert not left.exists() and other.exists()


def test_a_folder_appears_whole_where_none_or_an_empty_one_was(tmp_path):
    for number, name in enumerate(("new", "empty", "full")):
        aside, folder = tmp_path / f"{name}.partial", tmp_path / name
        aside.mkdir()
        write_text(aside / "a", str(number))
        flush_tree(aside)
        if name != "new":
            folder.mkdir()
        if name == "full":
            (folder / "b").touch()
            with pytest.raises(OSError):
                publish_folder(aside, folder)
            assert (folder / "b").exists() and aside.exists()
        else:
            publish_folder(aside, folder)
            assert (folder / "a").read_text() == str(number) and not aside.exists()


def put(path, text):
    with checksummed_path(path) as temporary:
        temporary.write_text(text)


def test_sha256sum_reads_it(tmp_path):
    if shutil.which("sha256sum") is None:
        pytest.skip("no sha256sum")
    (tmp_path / "part").mkdir()
    for name in ("a", "part/b c"):
        (tmp_path / name).write_text(name)
    write_checksums(tmp_path, ["a", "part/b c"])
    put(tmp_path / "d", "text")
    check_checksums(tmp_path, "again")
    subprocess.run(["sha256sum", "-c", "--strict", "SHA256SUMS"], cwd=tmp_path, check=True, capture_output=True)


@pytest.mark.parametrize("call", range(4))
def test_an_interrupted_replacement_leaves_the_old_file_or_the_new_one(tmp_path, monkeypatch, call):
    put(tmp_path / "a", "old")
    calls, original = [], os.replace

    def failing(source, target):
        calls.append(target)
        if len(calls) > call:
            raise KeyboardInterrupt
        original(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", failing)
        if call < 3:
            with pytest.raises(KeyboardInterrupt):
                put(tmp_path / "a", "new")
        else:
            put(tmp_path / "a", "new")
    check_checksums(tmp_path, "again", ["a"])
    assert (tmp_path / "a").read_text() == ("old" if call < 2 else "new")
    put(tmp_path / "a", "newer")
    assert (tmp_path / "SHA256SUMS").read_text() == f"# 1 files\n{file_digest(tmp_path / 'a')}  a\n"
    assert len(list(tmp_path.iterdir())) == 2


def test_a_file_that_is_replaced_while_it_is_compared(tmp_path, monkeypatch):
    from conjoin.storage import files

    put(tmp_path / "a", "old")

    def meanwhile(path):
        monkeypatch.undo()
        put(tmp_path / "a", "new")
        return file_digest(path)

    monkeypatch.setattr(files, "file_digest", meanwhile)
    check_checksums(tmp_path, "again", ["a"])


def test_a_file_that_must_be_listed(tmp_path):
    check_checksums(tmp_path, "again")  # nothing to compare
    (tmp_path / "a").write_text("a")
    with pytest.raises(DamagedError, match=r"a' is missing, truncated or damaged: .* SHA256SUMS; again$"):
        check_checksums(tmp_path, "again", ["a"])
