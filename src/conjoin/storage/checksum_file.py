"""Checksums in the format of `sha256sum`, for files that other programs read too: beside one file, or of a folder."""

import re
from collections.abc import Callable, Iterable
from pathlib import Path

from .atomic import commit, temporary_path, write_text
from .manifest import DamagedError, file_digest, has_checksum

SUFFIX = ".sha256"
FOLDER_CHECKSUMS = "SHA256SUMS"
_LINE = re.compile(r"([0-9a-f]{64})  ((?:(?!\.\.?/)[^/\\]+/)*[^/\\]+)")


def write_with_checksum(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file atomically, and its checksum beside it.

    While the file is replaced, the checksum file holds the old and the new checksum, so a reader accepts either file.

    Args:
        path: The file.
        write: Writes it to the path that it is given.
    """
    with temporary_path(path) as temporary:
        write(temporary)
        line = f"{file_digest(temporary)}  {path.name}\n"
        old = _read(path)
        write_text(_beside(path), (old or "") + line if path.exists() else line)
        commit(temporary, path)
    write_text(_beside(path), line)


def check_checksum(path: Path, remedy: str) -> None:
    """Compare a file with its checksum; a file without one is accepted.

    Raises:
        DamagedError: It differs; the message names the file and ends with `remedy`.
    """
    recorded = _read(path)
    while recorded is not None:
        digests = re.findall(rf"^([0-9a-f]{{64}})  {re.escape(path.name)}$", recorded, flags=re.MULTILINE)
        if file_digest(path) in digests:
            return
        before, recorded = recorded, _read(path)
        if recorded == before:  # no other process is replacing the file
            raise DamagedError(
                f"the file {str(path)!r} is truncated or damaged: it differs from its checksum in "
                f"{path.name + SUFFIX}; {remedy}"
            )


def write_checksums(folder: Path, names: Iterable[str]) -> None:
    """Write the checksums of some files of a folder, which nobody reads yet, into its `SHA256SUMS`."""
    lines = "".join(f"{file_digest(folder / name)}  {name}\n" for name in names)
    (folder / FOLDER_CHECKSUMS).write_text(lines, encoding="utf-8")


def check_checksums(folder: Path, remedy: str) -> None:
    """Compare the files of a folder with its `SHA256SUMS`, once in a process; a folder without it is accepted.

    Raises:
        DamagedError: One differs or is missing; the message names it and ends with `remedy`.
    """
    path = folder / FOLDER_CHECKSUMS
    if not path.is_file():
        return
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    found = [_LINE.fullmatch(line) for line in lines]
    if not all(found) or not found:
        raise DamagedError(f"the file {str(path)!r} is truncated or damaged; {remedy}")
    for sha256, name in (line.groups() for line in found if line):
        file = folder / name
        if not file.is_file() or not has_checksum(file, sha256):
            raise DamagedError(
                f"the file {str(file)!r} is missing, truncated or damaged: it differs from its checksum in "
                f"{FOLDER_CHECKSUMS}; {remedy}"
            )


def _read(path: Path) -> str | None:
    beside = _beside(path)
    return beside.read_text(encoding="utf-8", errors="replace") if beside.is_file() else None


def _beside(path: Path) -> Path:
    return path.with_name(path.name + SUFFIX)
