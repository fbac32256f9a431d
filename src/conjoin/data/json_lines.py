"""Random access to the rows of a JSON-lines file on disk."""

import gzip
import json
import re
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

MAX_NESTING = 100
"""Deeper values are refused: the libraries that read JSON recurse, and end the process."""

_NO_BRACKET = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[^][{}"]+', re.DOTALL)


def check_nesting(path: Path) -> None:
    """Refuse a JSON file, or a JSON-lines file, whose values are nested deeply; it may be compressed (`.json.gz`).

    Raises:
        ValueError: They are; the message names the line.
    """
    name = path.name.lower()
    with gzip.open(path, "rb") if name.endswith(".gz") else path.open("rb") as file:
        lines = [file.read()] if name.removesuffix(".gz").endswith(".json") else file
        for number, line in enumerate(lines, start=1):
            if line.count(b"[") + line.count(b"{") > MAX_NESTING:
                brackets = np.frombuffer(_NO_BRACKET.sub(b"", line), dtype=np.uint8)
                depth = np.cumsum(np.where(np.isin(brackets, list(b"[{")), 1, -1)).max(initial=0)
                if depth > MAX_NESTING:
                    raise ValueError(f"line {number}: its values are nested {depth} deep; the limit is {MAX_NESTING}")


def check_utf8(path: Path) -> None:
    """Refuse a text file with bytes that are not UTF-8; it may be compressed (`.csv.gz`).

    Raises:
        ValueError: It has; the message names the line.
    """
    with gzip.open(path, "rb") if path.suffix.lower() == ".gz" else path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                line.decode()
            except UnicodeDecodeError as error:
                found = f"byte {line[error.start]:#04x} at position {error.start}"
                raise ValueError(f"line {number}: not valid UTF-8 ({found}); save it as UTF-8") from None


class JsonLines:
    """Rows of a JSON-lines file, read on access; memory holds only the offset of each row (8 bytes).

    Each read opens the file, so worker processes can share an instance.

    Args:
        path: The file.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file has no rows; on access, a row is not a JSON object, or one in it has a name twice (the
            message names the line).
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
        where = f"{str(self.path)!r}, line {index + 1}"
        try:
            row = json.loads(line.decode("utf-8-sig" if index == 0 else "utf-8"), object_pairs_hook=_object)
        except UnicodeDecodeError as error:
            found = f"byte {line[error.start]:#04x} at position {error.start}"
            raise ValueError(f"{where}: not valid UTF-8 ({found})") from error
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{where}: not valid JSON ({error})") from error
        if not isinstance(row, dict):
            raise ValueError(f"{where}: expected an object, got {type(row).__name__}")
        return row


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object of names and values; `json` itself would keep the last of equal names without a word."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for place, name in enumerate(names) if name in names[:place])
        raise ValueError(f"an object has the name {repeated!r} twice")
    return found
