"""A file of records that only grows: one JSON line for each, with its checksum, on the disk when `append` returns.

A manifest is written as a whole. While a folder grows, its finished files are appended here instead, so that the cost
of a file does not depend on how many there are.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from .atomic import flush

_DIGITS = 64


class Journal:
    """Records in the order appended.

    A killed process leaves at most one unfinished line, which the next `append` removes.

    Args:
        path: The file; absent while there are no records.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._end: int | None = None

    def read(self) -> list[dict[str, Any]]:
        """All records up to the first line that is unfinished or damaged."""
        records: list[dict[str, Any]] = []
        end = 0
        content = self.path.read_bytes() if self.path.is_file() else b""
        for line in content.splitlines(keepends=True):
            record = line[_DIGITS + 1 : -1]
            if not line.endswith(b"\n") or line[:_DIGITS].decode("ascii", "replace") != _digest(record):
                break
            records.append(json.loads(record))
            end += len(line)
        self._end = end
        return records

    def append(self, record: dict[str, Any]) -> None:
        """Append a record and flush it to the disk."""
        if self._end is None:
            self.read()
        is_new = not self.path.exists()
        content = json.dumps(record, ensure_ascii=True).encode("ascii")
        with self.path.open("r+b" if not is_new else "wb") as file:
            file.truncate(self._end)
            file.seek(self._end or 0)
            file.write(f"{_digest(content)} ".encode("ascii") + content + b"\n")
            file.flush()
            os.fsync(file.fileno())
            self._end = file.tell()
        if is_new:
            flush(self.path.parent)

    def remove(self) -> None:
        """Remove the file."""
        self.path.unlink(missing_ok=True)
        self._end = 0


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
