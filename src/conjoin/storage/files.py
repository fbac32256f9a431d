"""Files and folders: they appear in one step, one process writes them, and checksums show damage.

A reader finds the old version or the new one, never a part of one. The operating system holds the locks, so a killed
process leaves none behind; a network file system must support `flock`. `sha256sum -c` reads `SHA256SUMS` too.
"""

import hashlib
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path

from filelock import BaseFileLock, FileLock, Timeout

TEMPORARY = ".conjoin-tmp"
"""How the name of every unfinished file or folder ends."""
STALE_SECONDS = 24 * 3600
"""Older unfinished files and folders are those of killed processes."""
LOCK = ".lock"
FOLDER_CHECKSUMS = "SHA256SUMS"
_LINE = re.compile(r"([0-9a-f]{64})  ((?:(?!\.\.?/)[^/\\]+/)*[^/\\]+)")
_COUNT = re.compile(r"# (\d+) files")
_CLOCK_TICK = 10**9  # a file that changes twice within it may keep its time
_verified: set[tuple[str, int, int, int, str]] = set()


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
    """Flush a folder that was written aside, and rename it; an empty folder may be in its place.

    Raises:
        OSError: `folder` is not empty.
    """
    flush_tree(aside)
    if folder.is_dir():
        folder.rmdir()
    os.replace(aside, folder)
    flush(folder.parent)


def make_folder(folder: Path) -> None:
    """Make a folder and its parents, which may exist, and flush the folders that new ones are in."""
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in new:
        flush(path.parent)


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


def lock_folder(folder: Path) -> BaseFileLock:
    """Lock an existing folder for writing, until `release` or the end of the process.

    Raises:
        ValueError: Another process holds the lock.
    """
    lock = FileLock(folder / LOCK, blocking=False, thread_local=False)
    try:
        lock.acquire()
    except Timeout as error:
        raise ValueError(
            f"another process is writing into {str(folder)!r}; wait until it ends, or choose another folder"
        ) from error
    return lock


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock an existing folder for writing, and remove the unfinished files that killed processes left there.

    Raises:
        ValueError: Another process holds the lock.
    """
    lock = lock_folder(folder)
    try:
        remove_temporary(folder)
        yield
    finally:
        lock.release()


class DamagedError(ValueError):
    """A file is missing, truncated or changed; the message names it."""


def file_digest(path: Path) -> str:
    """The SHA-256 of a file (the fastest hash of the standard library where the processor has instructions for it)."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def has_checksum(path: Path, sha256: str) -> bool:
    """Whether a file has this checksum, which is computed once in a process."""
    state = path.stat()
    known = (str(path.absolute()), state.st_ino, state.st_size, state.st_mtime_ns, sha256)
    if known in _verified:
        return True
    intact = file_digest(path) == sha256
    if intact and time.time_ns() - state.st_mtime_ns > _CLOCK_TICK:
        _verified.add(known)
    return intact


def write_checksums(folder: Path, names: Iterable[str]) -> None:
    """Write the checksums of some files of a folder, which nobody reads yet, into its `SHA256SUMS`."""
    sums = {name: [file_digest(folder / name)] for name in names}
    (folder / FOLDER_CHECKSUMS).write_text(_format_sums(sums), encoding="utf-8")


@contextmanager
def checksummed_path(path: Path) -> Iterator[Path]:
    """As `atomic_path`, with the checksum of the new file in the `SHA256SUMS` of its folder.

    While a file is replaced, `SHA256SUMS` has the old and the new checksum, so a reader accepts either file. Only one
    process may write into the folder.
    """
    with temporary_path(path) as temporary:
        yield temporary
        sums, digest = _existing(path.parent), file_digest(temporary)
        if path.name in sums:
            _write_sums(path.parent, sums | {path.name: [*sums[path.name], digest]})
        commit(temporary, path)
    _write_sums(path.parent, sums | {path.name: [digest]})


def read_checksums(folder: Path) -> dict[str, list[str]]:
    """The checksums of each file that the `SHA256SUMS` of a folder lists; damaged lines are left out."""
    sums: dict[str, list[str]] = {}
    for line in map(_LINE.fullmatch, _read_sums(folder).splitlines()):
        if line is not None:
            sums.setdefault(line[2], []).append(line[1])
    return sums


def check_checksums(folder: Path, remedy: str, names: Iterable[str] | None = None) -> None:
    """Compare the files of a folder with its `SHA256SUMS`, once in a process.

    Args:
        folder: Their folder.
        remedy: What makes a damaged file again, or replaces it.
        names: The files, which must be listed; None for all that are, and a folder without `SHA256SUMS` is accepted.

    Raises:
        DamagedError: One differs or is missing; the message names it and ends with `remedy`.
    """
    sums = read_checksums(folder)
    path = folder / FOLDER_CHECKSUMS
    if names is None and path.is_file():
        lines = _read_sums(folder).splitlines()
        count = _COUNT.fullmatch(lines[0]) if lines else None  # written by `sha256sum`, a file has none
        listed = lines[1:] if count else lines
        if not listed or not all(map(_LINE.fullmatch, listed)) or (count and int(count[1]) != len(sums)):
            raise DamagedError(f"the file {str(path)!r} is truncated or damaged; {remedy}")
    for name in sums if names is None else names:
        file, digests = folder / name, sums.get(name)
        while not file.is_file() or not any(has_checksum(file, sha256) for sha256 in digests or ()):
            before, digests = digests, read_checksums(folder).get(name)
            if digests == before:  # no other process is replacing the file
                raise DamagedError(
                    f"the file {str(file)!r} is missing, truncated or damaged: it differs from its checksum in "
                    f"{FOLDER_CHECKSUMS}; {remedy}"
                )


def check_listed(path: Path, remedy: str) -> None:
    """Compare a file with its checksum, if the `SHA256SUMS` of its folder lists it; errors as `check_checksums`."""
    if path.name in read_checksums(path.parent):
        check_checksums(path.parent, remedy, [path.name])


def _existing(folder: Path) -> dict[str, list[str]]:
    """The checksums of the files that are there: a damaged line may name another one."""
    return {name: digests for name, digests in read_checksums(folder).items() if (folder / name).is_file()}


def _read_sums(folder: Path) -> str:
    path = folder / FOLDER_CHECKSUMS
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def _write_sums(folder: Path, sums: dict[str, list[str]]) -> None:
    write_text(folder / FOLDER_CHECKSUMS, _format_sums(dict(sorted(sums.items()))))


def _format_sums(sums: dict[str, list[str]]) -> str:
    """Lines for `sha256sum -c`, after a comment with the number of files: so a cut is seen."""
    lines = (f"{digest}  {name}\n" for name, digests in sums.items() for digest in digests)
    return "".join((f"# {len(sums)} files\n", *lines))
