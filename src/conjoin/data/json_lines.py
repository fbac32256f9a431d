"""Random access to the rows of a JSON-lines file on disk."""

import gzip
import json
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import IO, Any, cast

import numpy as np

MAX_NESTING = 50
"""Deeper values are refused; Arrow has 64 levels."""

_NAMES: dict[type, str] = {dict: "object", list: "array"}


def open_bytes(path: Path) -> IO[bytes]:
    """Open a file that may be compressed (`.gz`)."""
    return cast(IO[bytes], gzip.open(path, "rb") if path.suffix.lower() == ".gz" else path.open("rb"))


def check_utf8(path: Path) -> None:
    """Refuse a text file with bytes that are not UTF-8; it may be compressed (`.csv.gz`).

    Raises:
        ValueError: It has; the message names the line.
    """
    with open_bytes(path) as file:
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
        return json_object(line, f"{str(self.path)!r}, line {index + 1}")


def json_object(text: bytes, where: str, kind: type = dict) -> Any:  # noqa: ANN401 - of that type
    """Parse an object, or a value of another type, from UTF-8 with or without a byte order mark.

    Args:
        text: The JSON.
        where: Its place, for messages.
        kind: The expected type.

    Raises:
        ValueError: Not UTF-8, not JSON, another type, deeper than `MAX_NESTING`, or a name is twice in one object.
    """
    try:
        value = json.loads(text.decode("utf-8-sig"), object_pairs_hook=_object)
    except UnicodeDecodeError as error:
        found = f"byte {text[error.start]:#04x} at position {error.start}"
        raise ValueError(f"{where}: not valid UTF-8 ({found})") from error
    except RecursionError:
        raise _too_deep(where) from None
    except ValueError as error:
        raise ValueError(f"{where}: not valid JSON ({error})") from error
    if not isinstance(value, kind):
        raise ValueError(f"{where}: expected an {_NAMES[kind]}, got {type(value).__name__}")
    if text.count(b"[") + text.count(b"{") > MAX_NESTING and _depth(value) > MAX_NESTING:
        raise _too_deep(where)
    return value


def _too_deep(where: str) -> ValueError:
    return ValueError(f"{where}: its values are nested too deep; the limit is {MAX_NESTING} levels")


def _depth(value: Any, limit: int = MAX_NESTING + 1) -> int:  # noqa: ANN401 - any JSON value
    """Return how deep a value is nested, counted to a limit."""
    if limit == 0 or not isinstance(value, dict | list):
        return 0
    parts = value.values() if isinstance(value, dict) else value
    return 1 + max((_depth(part, limit - 1) for part in parts), default=0)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object of names and values; `json` itself would keep the last of equal names without a word."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for place, name in enumerate(names) if name in names[:place])
        raise ValueError(f"an object has the name {repeated!r} twice")
    return found
