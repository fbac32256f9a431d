"""`SHA256SUMS`: written for `sha256sum -c`, compared on reading, replaced with the file."""

import os
import shutil
import subprocess

import pytest

from conjoin.storage import DamagedError, check_checksums, checksummed_path, file_digest, write_checksums


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
    assert (tmp_path / "SHA256SUMS").read_text() == f"{file_digest(tmp_path / 'a')}  a\n"
    assert len(list(tmp_path.iterdir())) == 2


def test_a_file_that_is_replaced_while_it_is_compared(tmp_path, monkeypatch):
    from conjoin.storage import checksums

    put(tmp_path / "a", "old")
    intact = checksums.has_checksum

    def meanwhile(path, sha256):
        monkeypatch.undo()
        put(tmp_path / "a", "new")
        return intact(path, sha256)

    monkeypatch.setattr(checksums, "has_checksum", meanwhile)
    check_checksums(tmp_path, "again", ["a"])


def test_a_file_that_must_be_listed(tmp_path):
    check_checksums(tmp_path, "again")  # nothing to compare
    (tmp_path / "a").write_text("a")
    with pytest.raises(DamagedError, match=r"a' is missing, truncated or damaged: .* SHA256SUMS; again$"):
        check_checksums(tmp_path, "again", ["a"])
