"""A file is the old version or the new one; checksums show damage."""

import shutil
import subprocess
import threading
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from conjoin.storage import (
    TEMPORARY,
    DamagedError,
    DiskFullError,
    atomic_path,
    check_checksums,
    flush_tree,
    publish_folder,
    write_checksums,
    write_text,
)
from conjoin.storage.files import remove_temporary


def test_a_failed_block_leaves_the_old_file_and_nothing_else(tmp_path):
    write_text(tmp_path / "a", "old")
    with pytest.raises(RuntimeError), atomic_path(tmp_path / "a") as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert [path.name for path in tmp_path.iterdir()] == ["a"] and (tmp_path / "a").read_text() == "old"


def safetensors(file):
    """What it says of a full disk; it replaces files, so that a device cannot stand for one."""
    raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")


FULL = {
    "Python": lambda file: file.write(b"a" * 9**6),
    "PyTorch": lambda file: torch.save({"a": torch.zeros(9**6)}, file),
    "safetensors": safetensors,
}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a device that is full")
@pytest.mark.parametrize("library", FULL)
def test_a_full_disk_is_said_whichever_library_writes(library, tmp_path):
    with (
        pytest.raises(DiskFullError, match=r"the disk is full: .*weights' cannot be written; free some space"),
        atomic_path(tmp_path / "weights"),
        open("/dev/full", "wb", buffering=0) as file,
    ):
        FULL[library](file)
    assert not [*tmp_path.iterdir()]


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


def test_sha256sum_reads_it(tmp_path):
    if shutil.which("sha256sum") is None:
        pytest.skip("no sha256sum")
    (tmp_path / "part").mkdir()
    for name in ("a", "part/b c"):
        (tmp_path / name).write_text(name)
    check_checksums(tmp_path, "again")  # nothing to compare
    write_checksums(tmp_path, ["a", "part/b c"])
    check_checksums(tmp_path, "again")
    subprocess.run(["sha256sum", "-c", "--strict", "SHA256SUMS"], cwd=tmp_path, check=True, capture_output=True)
    (tmp_path / "a").write_text("b")
    with pytest.raises(DamagedError, match=r"a' is missing, truncated or damaged: .* SHA256SUMS; again$"):
        check_checksums(tmp_path, "again")
