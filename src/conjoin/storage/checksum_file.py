"""A single file with its checksum beside it, in the format of `sha256sum`, for files that other programs read too."""

import re
from collections.abc import Callable
from pathlib import Path

from .atomic import commit, temporary_path, write_text
from .manifest import DamagedError, file_digest

SUFFIX = ".sha256"


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
                f"the file {str(path)!r} is truncated or damaged: it differs from its checksum; {remedy}"
            )


def _read(path: Path) -> str | None:
    beside = _beside(path)
    return beside.read_text(encoding="utf-8", errors="replace") if beside.is_file() else None


def _beside(path: Path) -> Path:
    return path.with_name(path.name + SUFFIX)
