"""Files and folders that appear in one step: a reader finds the old version or the new one, never a part of one."""

import os
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path

TEMPORARY = ".conjoin-tmp"
"""How the name of every unfinished file or folder ends."""
STALE_SECONDS = 24 * 3600
"""Older unfinished files and folders are those of killed processes."""


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; when the block ends, the file written there replaces `path`.

    The temporary name is unique, so several processes may write `path` at once: the last one wins. If the block fails,
    the temporary file is removed. If the process is killed, the temporary file is removed a day later by the next
    write into the folder, or at once by the next process that locks the folder.
    """
    with temporary_path(path) as temporary:
        yield temporary
        commit(temporary, path)


@contextmanager
def temporary_path(path: Path) -> Iterator[Path]:
    """Yield a unique temporary path beside `path`; the file or folder there is removed when the block ends."""
    _remove_once(path.parent.absolute())
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}{TEMPORARY}")
    try:
        yield temporary
    finally:
        _remove(temporary)


def commit(temporary: Path, path: Path) -> None:
    """Flush a finished temporary file to the disk and replace `path` by it."""
    flush(temporary)
    os.replace(temporary, path)
    flush(path.parent)


def publish_folder(aside: Path, folder: Path) -> None:
    """Rename a folder that was written aside; an empty folder may be in its place.

    Raises:
        OSError: `folder` is not empty.
    """
    if folder.is_dir():
        folder.rmdir()
    os.replace(aside, folder)
    flush(folder.parent)


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path` atomically, as UTF-8."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def remove_temporary(folder: Path, older_than: float = 0) -> None:
    """Remove the temporary files and folders of killed processes, not changed for `older_than` seconds."""
    for path in folder.glob(f"*{TEMPORARY}"):
        with suppress(OSError):  # another process removed it, or still has it open
            if time.time() - path.stat().st_mtime >= older_than:
                _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@lru_cache(maxsize=1024)
def _remove_once(folder: Path) -> None:
    """Clean a folder up at this process's first write into it."""
    remove_temporary(folder, STALE_SECONDS)


def flush(path: Path) -> None:
    """Flush a file, or a folder's list of files, to the disk."""
    is_folder = path.is_dir()
    if is_folder and os.name != "posix":  # other systems cannot open a folder, and need not flush it
        return
    descriptor = os.open(path, os.O_RDONLY if is_folder else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_tree(folder: Path) -> None:
    """Flush a folder and all files and folders below it to the disk."""
    for path in (*folder.rglob("*"), folder):
        flush(path)
