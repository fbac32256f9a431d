"""Checks that all readers of rows share, and the rows that are skipped because they cannot be used."""

import hashlib
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import numpy as np

from conjoin.constants import ON_ERROR
from conjoin.data.row_images import map_images
from conjoin.processing import load_image
from conjoin.processing.item_error import ItemError
from conjoin.progress import progress

logger = logging.getLogger(__name__)
SKIPPED_FILE = "skipped.jsonl"
_AT_ONCE = 1000


def row_name(index: int, row_id: str | None) -> str:
    """Return what messages call a row."""
    return f"row {index}" if row_id is None else f"row {index} (id {row_id!r})"


def counted(errors: Sequence[ItemError], count: int) -> ItemError:
    """Return the first of the errors of some rows; it says how many of all rows have one."""
    first = errors[0]
    if len(errors) == 1:
        return first
    return type(first)(first.item, f"{first.message} ({len(errors)} of {count} rows cannot be used)")


def repeated_id(row_id: str, name: str = "the data") -> ItemError:
    """Return the error of an id that two rows have."""
    return ItemError(name, f"the id {row_id!r} occurs twice; ids must be unique")


def id_keys(ids: Iterable[str]) -> np.ndarray:
    """64-bit digests `(N,)` uint64 of ids."""
    content = b"".join(hashlib.blake2b(row_id.encode(), digest_size=8).digest() for row_id in ids)
    return np.frombuffer(content, dtype=np.uint64)


def check_ids(ids: Iterable[str], seen: set[int] | None = None, start: int = 0) -> None:
    """Refuse repeated ids of rows.

    Args:
        ids: The ids of some rows.
        seen: The `id_keys` of the rows before, to which those of these are added.
        start: The number of the first row.

    Raises:
        ItemError: An id occurs twice.
    """
    ids, seen = [*ids], set() if seen is None else seen
    for row, key in enumerate(id_keys(ids).tolist()):
        if key in seen:
            raise repeated_id(ids[row], f"row {start + row}")
        seen.add(key)


class Skipped(NamedTuple):
    """A row that cannot be used.

    Attributes:
        source: Name of the rows, where there may be several.
        row: Its number in the data, where it is known.
        id: Its id.
        reason: What is wrong with it.
    """

    source: str | None
    row: int | None
    id: str
    reason: str


def read_skipped(path: Path) -> list[Skipped]:
    """Read the file of skipped rows; there are none without it."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return [Skipped(**{"source": None, "row": None} | json.loads(line)) for line in lines]


class SkippedFile:
    """The file `skipped.jsonl` of an output folder, which lists each skipped row once.

    Args:
        folder: The output folder.
        main: Whether this is the main process; the others write `skipped-RANK.jsonl`.
        rank: Of this process.
    """

    def __init__(self, folder: str | Path, main: bool = True, rank: int = 0) -> None:
        self.main = main
        self.path = Path(folder) / (SKIPPED_FILE if main else f"skipped-{rank}.jsonl")
        self.rows = set(read_skipped(self.path))

    def add(self, rows: Iterable[Skipped]) -> None:
        """Append rows that are not listed yet, and log their number."""
        new = [row for row in rows if row not in self.rows]
        if not new:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            for row in new:
                known = {name: value for name, value in row._asdict().items() if value is not None}
                file.write(json.dumps(known) + "\n")
        self.rows.update(new)
        logger.warning("skipped %d rows that cannot be used, %d in all; see %s", len(new), len(self.rows), self.path)


def remove_skipped(folder: Path) -> None:
    """Remove the lists of an earlier run."""
    for path in folder.glob("skipped*.jsonl"):
        path.unlink()


def check_on_error(on_error: str) -> bool:
    """Whether rows that cannot be used are skipped.

    Raises:
        ValueError: It is neither "raise" nor "skip".
    """
    if on_error not in ON_ERROR:
        raise ValueError(f"on_error={on_error!r}; expected 'raise' or 'skip'")
    return on_error == "skip"


def problem_of(row: Mapping[str, Any]) -> str | None:
    """Return why a row cannot be used; None if it can.

    Args:
        row: As `load_pairs(on_error="skip")` gives it. Its images are decoded.
    """
    if row.get("problem") is not None:
        return str(row["problem"])
    try:
        map_images(lambda image: load_image(image, f"row with id {row.get('id')!r}"), row["image"])
    except ItemError as error:
        return str(error)
    return None


def without_problems(rows: datasets.Dataset, source: str) -> tuple[datasets.Dataset, list[Skipped]]:
    """Return the rows that can be used, and the others.

    Args:
        rows: As `load_pairs(on_error="skip")` gives them. Every image is decoded once.
        source: Name of the rows.

    Raises:
        ValueError: No row can be used.
    """
    reasons: list[str | None] = []
    with progress(desc="checking rows", total=len(rows), unit="rows") as bar, ThreadPoolExecutor() as pool:
        for start in range(0, len(rows), _AT_ONCE):
            chunk = [rows[index] for index in range(start, min(start + _AT_ONCE, len(rows)))]
            reasons += pool.map(problem_of, chunk)
            bar.update(len(chunk))
    used = [index for index, reason in enumerate(reasons) if reason is None]
    names = zip(rows["id"][:], reasons, strict=True)
    skipped = [Skipped(source, None, str(name), reason) for name, reason in names if reason is not None]
    if not used:
        raise ValueError(f"none of the {len(rows)} rows of {source!r} can be used; {skipped[0].reason}")
    rows = rows.remove_columns("problem") if "problem" in rows.column_names else rows
    return (rows.select(used) if skipped else rows), skipped
