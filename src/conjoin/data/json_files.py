"""The rows of a JSON-lines file by number, and what text files are checked for before a library reads them."""

import gzip
import json
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import IO, Any, cast

import numpy as np

from conjoin.storage import reading


def open_bytes(path: Path) -> IO[bytes]:
    """Open a file that may be compressed (`.gz`)."""
    return cast(IO[bytes], gzip.open(path, "rb") if path.suffix.lower() == ".gz" else path.open("rb"))


def text_problem(path: Path, encoding: str = "utf-8") -> str | None:
    """Return why a text file, perhaps compressed, is not of an encoding; None if it is."""
    with open_bytes(path) as file:
        for number, line in enumerate(file, start=1):
            try:
                line.decode(encoding)
            except UnicodeDecodeError as error:
                return f"line {number}: not valid {encoding.upper()} (byte {line[error.start]:#04x})"
    return None


class JsonLines:
    """Rows of a JSON-lines file, read on access; memory holds only the offset of each row (8 bytes).

    Each read opens the file, so worker processes can share an instance.

    Args:
        path: The file.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file has no rows; on access, a row is not a JSON object (the message names the line).
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise FileNotFoundError(f"no such file: {str(path)!r}")
        with self.path.open("rb") as file:
            ends = np.fromiter(accumulate(map(len, file)), dtype=np.int64)
        if not len(ends):
            raise ValueError(f"{str(path)!r} is empty: it has no rows")
        self._starts = np.concatenate(([0], ends[:-1]))

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> dict[str, Any]:
        with self.path.open("rb") as file:
            file.seek(int(self._starts[index]))
            return self._parse(file.readline(), index)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        with self.path.open("rb") as file:
            for index, line in enumerate(file):
                yield self._parse(line, index)

    def _parse(self, line: bytes, index: int) -> dict[str, Any]:
        return json_object(line, f"{str(self.path)!r}, line {index + 1}")


def json_object(text: bytes, where: str) -> dict[str, Any]:
    """Parse an object from UTF-8 with or without a byte order mark.

    Raises:
        ValueError: Not UTF-8, not JSON, no object, or nested too deep. The message starts with `where`.
    """
    with reading(where, "expected JSON"):
        value = json.loads(text.decode("utf-8-sig"))
    if not isinstance(value, dict):
        raise ValueError(f"{where}: expected an object, got {type(value).__name__}")
    return value
