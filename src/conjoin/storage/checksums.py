"""Checksums of the files of a folder: `SHA256SUMS`, which `sha256sum -c` reads too."""

import hashlib
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from .atomic import commit, temporary_path, write_text

FOLDER_CHECKSUMS = "SHA256SUMS"
_LINE = re.compile(r"([0-9a-f]{64})  ((?:(?!\.\.?/)[^/\\]+/)*[^/\\]+)")
_CLOCK_TICK = 10**9  # a file that changes twice within it may keep its time
_verified: set[tuple[str, int, int, int, str]] = set()


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
    lines = "".join(f"{file_digest(folder / name)}  {name}\n" for name in names)
    (folder / FOLDER_CHECKSUMS).write_text(lines, encoding="utf-8")


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
            _write(path.parent, sums | {path.name: [*sums[path.name], digest]})
        commit(temporary, path)
    _write(path.parent, sums | {path.name: [digest]})


def read_checksums(folder: Path) -> dict[str, list[str]]:
    """The checksums of each file that the `SHA256SUMS` of a folder lists; damaged lines are left out."""
    sums: dict[str, list[str]] = {}
    for line in map(_LINE.fullmatch, _read(folder).splitlines()):
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
        lines = _read(folder).splitlines()
        if not lines or not all(map(_LINE.fullmatch, lines)):
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


def _existing(folder: Path) -> dict[str, list[str]]:
    """The checksums of the files that are there: a damaged line may name another one."""
    return {name: digests for name, digests in read_checksums(folder).items() if (folder / name).is_file()}


def _read(folder: Path) -> str:
    path = folder / FOLDER_CHECKSUMS
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def _write(folder: Path, sums: dict[str, list[str]]) -> None:
    lines = (f"{digest}  {name}\n" for name, digests in sorted(sums.items()) for digest in digests)
    write_text(folder / FOLDER_CHECKSUMS, "".join(lines))
