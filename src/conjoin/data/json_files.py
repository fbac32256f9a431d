"""JSON on disk: the rows of a JSON-lines file by number, and JSON tables as datasets with one type for each column.

Libraries cannot type mixed columns as `open_json` does. PyArrow refuses a column of numbers and texts. `datasets`
takes the types of the first 10 MB, and makes dates of texts and floats of large integers. Polars makes one text of a
list beside a text, and refuses an object beside a number without naming the row. All keep the last of two equal names.
"""

import gzip
import hashlib
import json
from collections.abc import Iterator
from itertools import accumulate, chain, islice
from pathlib import Path
from typing import IO, Any, TypeAlias, cast

import datasets
import numpy as np
import pyarrow as pa

from conjoin.storage.files import atomic_path

MAX_KEYS = 1000
"""Objects of a column with more different keys are refused: each key is a column of its own."""

ROWS_AT_ONCE = 1000
VERSION = 1
"""Of what a file is made into; another one leaves old caches aside."""

_Kind: TypeAlias = Any
"""`bool`, `int`, `float`, `str`, `[kind]` of a list, `{name: kind}` of an object, or None: no value is known."""
_SCALARS = {bool: "bool", int: "int64", float: "float64", str: "string"}
_INT64 = range(-(2**63), 2**63)

MAX_NESTING = 50
"""Deeper values are refused; Arrow has 64 levels."""

MOST_UNPACKED, MOST_RATIO = 2**28, 100
"""A compressed file that becomes larger than both 256 MB and 100 times its size is refused."""

_NAMES: dict[type, str] = {dict: "object", list: "array"}


def open_bytes(path: Path) -> IO[bytes]:
    """Open a file that may be compressed (`.gz`)."""
    return cast(IO[bytes], gzip.open(path, "rb") if path.suffix.lower() == ".gz" else path.open("rb"))


def check_unpacked(path: Path) -> None:
    """Refuse a compressed file (`.gz`) that is made to fill memory or disk.

    Raises:
        ValueError: It becomes larger than `MOST_UNPACKED` bytes and `MOST_RATIO` times its size.
    """
    packed = path.stat().st_size
    most = max(MOST_UNPACKED, MOST_RATIO * packed)
    if path.suffix.lower() != ".gz" or packed * 1032 <= most:  # deflate's largest ratio
        return
    unpacked = 0
    with open_bytes(path) as file:
        while chunk := file.read(2**20):
            unpacked += len(chunk)
            if unpacked > most:
                raise ValueError(f"{packed} compressed bytes become more than {most}: unpack it if you trust it")


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
                byte = f"byte {line[error.start]:#04x} at position {error.start}"
                raise ValueError(f"line {number}: not valid UTF-8 ({byte}); save it as UTF-8") from None


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
        byte = f"byte {text[error.start]:#04x} at position {error.start}"
        raise ValueError(f"{where}: not valid UTF-8 ({byte})") from error
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
    result = dict(pairs)
    if len(result) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for index, name in enumerate(names) if name in names[:index])
        raise ValueError(f"an object has the name {repeated!r} twice")
    return result


def open_json(path: Path) -> datasets.Dataset | None:
    """Open a JSON table; None if it has no rows. The dataset is a file in the cache of `datasets`, as long as it fits.

    A column holds what all its values can be: the keys of all objects; floats, if some numbers are; text, if some
    scalars are, where a number is its JSON; lists, if some values are, where another value is a list of one. Integers
    beyond 64 bits are text. A name that a row lacks is null.

    Raises:
        ValueError: Not UTF-8, not JSON, or an object and another value in one column. The message names the row.
    """
    stamp = path.stat()
    facts = (VERSION, str(path.resolve()), stamp.st_mtime_ns, stamp.st_size)
    folder = Path(datasets.config.HF_DATASETS_CACHE) / "conjoin"
    cached = folder / f"{hashlib.sha256(repr(facts).encode()).hexdigest()}.arrow"
    if not cached.is_file():
        kind = _kind_of_rows(path)
        if not kind:
            return None
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_path(cached) as temporary:
            _write(path, kind, temporary)
    return datasets.Dataset.from_file(str(cached))


def _kind_of_rows(path: Path) -> _Kind:
    """Return what all rows can be, None without rows."""
    kind: _Kind = None
    for number, row in enumerate(json_rows(path), start=1):
        try:
            kind = _join(kind, _kind_of(row))
        except UnlikeError as error:
            raise ValueError(f"row {number}, {' in '.join(map(repr, error.names))}: {error}") from error
    return kind


def _write(path: Path, kind: _Kind, out: Path) -> None:
    """Write the rows as an Arrow file."""
    schema = datasets.Features({name: _feature(part) for name, part in kind.items()}).arrow_schema
    rows = (_as(row, kind) for row in datasets.utils.tqdm(json_rows(path), desc=f"Reading {path.name}", unit=" rows"))
    with pa.OSFile(str(out), "wb") as file, pa.ipc.new_stream(file, schema) as writer:
        while block := list(islice(rows, ROWS_AT_ONCE)):
            writer.write_table(pa.Table.from_pylist(block, schema=schema))


def json_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Read the objects of a file that is an array of them, or has one per line; it may be compressed (`.json.gz`).

    Raises:
        ValueError: Not UTF-8, not JSON, or not objects; the message names the line.
    """
    with open_bytes(path) as file:
        lines = ((number, line) for number, line in enumerate(file, start=1) if line.strip(b" \t\r\n\xef\xbb\xbf"))
        first = next(lines, None)
        if first is None:
            return
        if not first[1].lstrip(b" \t\xef\xbb\xbf").startswith(b"["):
            for number, line in chain([first], lines):
                yield json_object(line, f"line {number}")
            return
        whole = json_object(first[1] + file.read(), f"the array that begins in line {first[0]}", list)
    for number, row in enumerate(whole, start=1):
        if not isinstance(row, dict):
            raise ValueError(f"entry {number}: expected an object, got {type(row).__name__}")
        yield row


class UnlikeError(ValueError):
    """Values of one column that have no common type, and the names that lead to them, the innermost first."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.names: list[str] = []


def _kind_of(value: Any) -> _Kind:  # noqa: ANN401 - any JSON value
    if isinstance(value, dict):
        return {name: _kind_of(part) for name, part in value.items()}
    if isinstance(value, list):
        kind: _Kind = None
        for part in value:
            kind = _join(kind, _kind_of(part))
        return [kind]
    if value is None:
        return None
    return str if isinstance(value, int) and value not in _INT64 else type(value)


def _join(first: _Kind, second: _Kind) -> _Kind:
    """Return the kind of values that are of either kind."""
    if second is None or first == second:
        return first
    if first is None:
        return second
    if isinstance(first, dict) and isinstance(second, dict):
        return _join_objects(first, second)
    if isinstance(first, list) or isinstance(second, list):
        return [_join(*(kind[0] if isinstance(kind, list) else kind for kind in (first, second)))]
    if isinstance(first, dict) or isinstance(second, dict):
        raise UnlikeError("an object here and another value elsewhere; expected one of them in all rows")
    return float if {first, second} == {int, float} else str


def _join_objects(first: dict[str, _Kind], second: dict[str, _Kind]) -> dict[str, _Kind]:
    joined = dict(first)
    for name, kind in second.items():
        try:
            joined[name] = _join(first.get(name), kind)
        except UnlikeError as error:
            error.names.append(name)
            raise
    if len(joined) > MAX_KEYS:
        raise UnlikeError(f"the objects so far have more than {MAX_KEYS} different keys")
    return joined


def _feature(kind: _Kind) -> Any:  # noqa: ANN401 - any feature of `datasets`
    if isinstance(kind, dict) and kind:
        return {name: _feature(part) for name, part in kind.items()}
    if isinstance(kind, list):
        return datasets.List(_feature(kind[0]))
    return datasets.Value(_SCALARS[kind] if kind else "null")


def _as(value: Any, kind: _Kind) -> Any:  # noqa: ANN401 - any JSON value
    """Return a value as one of its column's kind."""
    if value is None or not kind:
        return None
    if isinstance(kind, dict):
        return {name: _as(value.get(name), part) for name, part in kind.items()}
    if isinstance(kind, list):
        return [_as(part, kind[0]) for part in (value if isinstance(value, list) else [value])]
    if kind is str:
        return value if isinstance(value, str) else json.dumps(value)
    return kind(value)
