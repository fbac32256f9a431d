"""Checks that all readers of rows share: what is wrong with a row names it."""

import hashlib
from collections.abc import Callable, Iterable
from typing import TypeVar

import numpy as np

from conjoin.processing.item_error import ItemError

Row = TypeVar("Row")
Result = TypeVar("Result")

_KEYS_AT_ONCE = 2**20


def row_name(index: int | str, row_id: str) -> str:
    """Return what messages call a row."""
    return f"row {index} (id {row_id!r})"


def read_id(value: object, index: int | str) -> str:
    """Return the id of a row as a text.

    Raises:
        ItemError: It is missing.
    """
    if value is None or value == "":
        raise ItemError(f"row {index}", "the id is missing")
    return str(value)


def read_rows(rows: Iterable[Row], read: Callable[[Row, int], Result]) -> list[Result]:
    """Return what `read` makes of every row and its index.

    Raises:
        ItemError: A row cannot be used. It is that of the first such row, and says how many there are.
    """
    results: list[Result] = []
    errors: list[ItemError] = []
    index = -1
    for index, row in enumerate(rows):
        try:
            results.append(read(row, index))
        except ItemError as error:
            errors.append(error)
    if len(errors) > 1:
        first, counts = errors[0], f"({len(errors)} of {index + 1} rows cannot be used)"
        raise type(first)(first.item, f"{first.message} {counts}") from first
    if errors:
        raise errors[0]
    return results


def repeated_id(row_id: str, name: str = "the data") -> ItemError:
    """Return the error of an id that two rows have."""
    return ItemError(name, f"the id {row_id!r} occurs twice; ids must be unique")


def id_keys(ids: Iterable[str]) -> np.ndarray:
    """64-bit digests `(N,)` uint64 of ids."""
    content = b"".join(hashlib.blake2b(row_id.encode(), digest_size=8).digest() for row_id in ids)
    return np.frombuffer(content, dtype=np.uint64)


class UniqueIds:
    """The ids of rows that are read in chunks, of which none may occur twice: 8 bytes a row."""

    def __init__(self) -> None:
        self._blocks: list[np.ndarray] = []  # sorted

    def add(self, ids: list[str], start: int | None = None) -> np.ndarray:
        """Add the ids of a chunk, whose first row has the number `start`; returns their `id_keys`.

        Raises:
            ItemError: An id occurs twice.
        """
        keys = id_keys(ids)
        order = np.argsort(keys, kind="stable")
        ordered = keys[order]
        known = np.zeros(len(keys), dtype=bool)
        known[order[1:]] = ordered[1:] == ordered[:-1]
        for block in self._blocks:
            indices = np.minimum(np.searchsorted(block, keys), len(block) - 1)
            known |= block[indices] == keys
        if known.any():
            index = int(known.argmax())
            raise repeated_id(ids[index], "the data" if start is None else f"row {start + index}")
        if len(keys):
            self._blocks.append(ordered)
        while len(self._blocks) > 1 and len(self._blocks[-2]) <= len(self._blocks[-1]) < _KEYS_AT_ONCE:
            self._blocks[-2:] = [np.sort(np.concatenate(self._blocks[-2:]))]
        return keys


def check_ids(ids: Iterable[str]) -> None:
    """Refuse repeated ids of rows.

    Raises:
        ItemError: An id occurs twice.
    """
    UniqueIds().add(list(ids), 0)
