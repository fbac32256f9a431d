"""Files that are replaced in one step: a reader finds the old version or the new one, never a part of one."""

import json
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

TEMPORARY = ".conjoin-tmp"
"""How the name of every unfinished file ends."""
STALE_SECONDS = 24 * 3600
"""Older unfinished files are those of killed processes."""


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; when the block ends, the file written there replaces `path`.

    The temporary name is unique, so several processes may write `path` at once: the last one wins. If the block fails,
    the temporary file is removed. If the process is killed, the temporary file is removed a day later by the next
    write into the folder, or at once by the next `FolderWriter` of the folder.
    """
    with temporary_path(path) as temporary:
        yield temporary
        commit(temporary, path)


@contextmanager
def temporary_path(path: Path) -> Iterator[Path]:
    """Yield a unique temporary path beside `path`, which is removed when the block ends."""
    _remove_once(path.parent.absolute())
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}{TEMPORARY}")
    try:
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def commit(temporary: Path, path: Path) -> None:
    """Flush a finished temporary file to the disk and replace `path` by it."""
    flush(temporary)
    os.replace(temporary, path)
    flush(path.parent)


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path` atomically, as UTF-8."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write `content` to `path` atomically; equal content gives equal bytes."""
    write_text(path, json.dumps(content, indent=2, ensure_ascii=True) + "\n")


def remove_temporary(folder: Path, older_than: float = 0) -> None:
    """Remove the temporary files of killed processes that were not changed for `older_than` seconds."""
    for path in folder.glob(f"*{TEMPORARY}"):
        with suppress(OSError):  # another process removed it, or still has it open
            if time.time() - path.stat().st_mtime >= older_than:
                path.unlink()


@lru_cache(maxsize=1024)
def _remove_once(folder: Path) -> None:
    """Clean a folder up at this process's first write into it."""
    remove_temporary(folder, STALE_SECONDS)


def flush(path: Path) -> None:
    """Flush a file or a folder's list of files to the disk."""
    is_folder = path.is_dir()
    if is_folder and os.name != "posix":  # other systems cannot open a folder, and need not flush it
        return
    descriptor = os.open(path, os.O_RDONLY if is_folder else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
