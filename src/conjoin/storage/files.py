"""Files and folders: they appear in one step, one process writes them, and checksums show damage.

A reader finds the old version or the new one, never a part of one. The operating system holds the locks, so a killed
process leaves none behind; a network file system must support `flock`. `sha256sum -c` reads `SHA256SUMS` too.
"""

import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

TEMPORARY = ".conjoin-tmp"
"""How the name of every unfinished file or folder ends."""
LOCK = ".lock"
FOLDER_CHECKSUMS = "SHA256SUMS"
_FULL = re.compile("no space left|disk quota|file write failed|unexpected pos [0-9]", re.IGNORECASE)
"""How libraries say that the disk is full; the last two are PyTorch's words."""
_LINE = re.compile(r"^([0-9a-f]{64})  ((?:(?!\.\.?/)[^/\\\n]+/)*[^/\\\n]+)$", re.MULTILINE)


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; when the block ends, the file written there replaces `path`.

    The temporary name is unique, so several processes may write `path` at once: the last one wins. If the block fails,
    the temporary file is removed. If the process is killed, the next process that locks the folder removes it.
    """
    with temporary_path(path) as temporary:
        yield temporary
        flush(temporary)
        os.replace(temporary, path)
        flush(path.parent)


@contextmanager
def temporary_path(path: Path) -> Iterator[Path]:
    """Yield a unique temporary path beside `path`; the file or folder there is removed when the block ends.

    Raises:
        DiskFullError: The disk became full in the block.
    """
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}{TEMPORARY}")
    try:
        with writing(path):
            yield temporary
    finally:
        _remove(temporary)


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


def remove_temporary(folder: Path) -> None:
    """Remove the temporary files and folders of killed processes."""
    for path in folder.glob(f"*{TEMPORARY}"):
        with suppress(OSError):  # another process removed it, or still has it open
            _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


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


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock an existing folder for writing, and remove the unfinished files that killed processes left there.

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
    try:
        remove_temporary(folder)
        yield
    finally:
        lock.release()


class DamagedError(ValueError):
    """A file is missing, truncated or changed; the message names it."""


class DiskFullError(OSError):
    """The disk is full; the message names what could not be written."""


_OWN = (DamagedError, DiskFullError, GeneratorExit, ImportError, KeyboardInterrupt, MemoryError, SystemExit)
"""What says enough itself, or says nothing of a file."""


@contextmanager
def reading(what: Path | str, remedy: str = "", passed: tuple[type[BaseException], ...] = ()) -> Iterator[None]:
    """Name a file, and say what to do, in whatever a library raises while it reads it.

    Libraries have errors of their own, down to the panics of Rust, which are not even an `Exception`.

    Args:
        what: The file or folder, or words for it.
        remedy: What makes a damaged file again, or what was expected.
        passed: Errors that say enough themselves.

    Raises:
        DamagedError: It cannot be read.
    """
    try:
        yield
    except BaseException as error:
        if isinstance(error, (*_OWN, *passed)):
            raise
        named = repr(str(what)) if isinstance(what, Path) else what
        raise DamagedError(f"{named} cannot be read: {reason_of(error)}{remedy and f'; {remedy}'}") from error


@contextmanager
def writing(what: Path | str) -> Iterator[None]:
    """Name a file or folder in what libraries raise where the disk is full; all else passes.

    Raises:
        DiskFullError: The disk is full.
    """
    try:
        yield
    except BaseException as error:
        cause: BaseException | None = error
        while cause is not None and not _FULL.search(str(cause)):
            cause = cause.__cause__ or cause.__context__
        if cause is None or isinstance(error, _OWN):
            raise
        full = f"the disk is full: {str(what)!r} cannot be written; free some space, then run the same again"
        raise DiskFullError(f"{full} ({reason_of(cause)})") from error


def reason_of(error: BaseException) -> str:
    """Return what an error says in one line, with its name where that alone says little."""
    if type(error).__name__ == "DatasetGenerationError" and error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, StopIteration):  # of a reader that looks at the first row
        return "it has no rows"
    said = " ".join(str(error).split())[:400]
    is_plain = said and (isinstance(error, OSError | RuntimeError | ValueError) or type(error) is Exception)
    return said if is_plain else f"{type(error).__name__}: {said}".removesuffix(": ")


def read_json(path: Path, remedy: str = "") -> Any:  # noqa: ANN401 - any JSON value
    """Read a JSON file.

    Raises:
        DamagedError: It is missing or not JSON; the message names it.
    """
    with reading(path, remedy):
        return json.loads(path.read_text(encoding="utf-8"))


def file_digest(path: Path) -> str:
    """The SHA-256 of a file (the fastest hash of the standard library where the processor has instructions for it)."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_checksums(folder: Path, names: Iterable[str]) -> None:
    """Write the checksums of some files of a folder into its `SHA256SUMS`, which keeps those of other files.

    The lines are for `sha256sum -c`, after a comment with the number of files: so a cut is seen.
    """
    sums = read_checksums(folder) | {name: file_digest(folder / name) for name in names}
    lines = [f"# {len(sums)} files", *(f"{digest}  {name}" for name, digest in sorted(sums.items()))]
    write_text(folder / FOLDER_CHECKSUMS, "".join(f"{line}\n" for line in lines))


def read_checksums(folder: Path) -> dict[str, str]:
    """The checksum of each file that the `SHA256SUMS` of a folder lists; damaged lines are left out."""
    path = folder / FOLDER_CHECKSUMS
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    return {name: digest for digest, name in _LINE.findall(text)}


def check_checksums(folder: Path, remedy: str, only: Collection[str] | None = None) -> None:
    """Compare the files of a folder with its `SHA256SUMS`; a folder without one is accepted.

    Args:
        folder: Their folder.
        remedy: What makes a damaged file again, or replaces it.
        only: The files to compare, which may not be listed; all that are listed when None.

    Raises:
        DamagedError: One differs or is missing; the message names it and ends with `remedy`.
    """
    listed = folder / FOLDER_CHECKSUMS
    if not listed.is_file():
        return
    text, sums = listed.read_text(encoding="utf-8", errors="replace"), read_checksums(folder)
    count = re.match(r"# (\d+) files\n", text)  # not written by `sha256sum`
    lines = [line for line in text.splitlines() if line[:2] != "# "]
    if len(sums) != len(lines) or not sums or (count and int(count[1]) != len(sums)):
        raise DamagedError(f"the file {str(listed)!r} is truncated or damaged; {remedy}")
    for name, digest in sums.items():
        if (only is None or name in only) and (not (folder / name).is_file() or file_digest(folder / name) != digest):
            raise DamagedError(
                f"the file {str(folder / name)!r} is missing, truncated or damaged: it differs from its checksum in "
                f"{FOLDER_CHECKSUMS}; {remedy}"
            )
