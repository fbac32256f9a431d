"""Checks of rows: what is wrong with one names it, and is raised or kept."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import datasets

from conjoin.storage import row_digest

Result = TypeVar("Result")


class RowChecks:
    """Checks of rows, which raise or are kept as `problems`.

    Args:
        names: Of the rows, for messages.
        keep: Whether to keep what is wrong instead of raising.
    """

    def __init__(self, names: Sequence[str], keep: bool) -> None:
        self.names, self.keep = names, keep
        self.problems: dict[int, str] = {}

    def run(self, check: Callable[[Any, str], Result], values: Sequence[Any]) -> list[Result | None]:
        """Check every row, then raise the first error with the number of wrong rows; None for those kept."""
        checked: list[Result | None] = []
        wrong: list[ValueError | FileNotFoundError] = []
        for row, (value, name) in enumerate(zip(values, self.names, strict=True)):
            try:
                checked.append(check(value, name))
            except (ValueError, FileNotFoundError) as error:
                checked.append(None)
                wrong.append(error)
                self.problems.setdefault(row, str(error))
        if self.keep or not wrong:
            return checked
        if len(wrong) > 1:
            raise type(wrong[0])(f"{wrong[0]} ({len(wrong)} of {len(values)} rows cannot be used)") from wrong[0]
        raise wrong[0]

    def fail(self, row: int, error: ValueError) -> None:
        """Raise what is wrong with a row, or keep it."""
        if not self.keep:
            raise error
        self.problems.setdefault(row, str(error))


def row_name(index: int | str, row_id: str) -> str:
    """Return the name of a row for error messages."""
    return f"row {index} (id {row_id!r})"


def check_ids(ids: Sequence[str]) -> None:
    """Reject duplicate ids.

    Raises:
        ValueError: An id occurs twice; the message gives the first few.
    """
    duplicates = [f"{name!r} ({count} times)" for name, count in Counter(ids).items() if count > 1]
    if duplicates:
        raise ValueError(f"{len(duplicates)} ids occur more than once: {', '.join(duplicates[:3])}")


def check_same_images(dataset: datasets.Dataset, picture: str | None, ids: Sequence[str]) -> None:
    """Refuse rows of one id whose images differ."""
    counts = Counter(ids)
    rows = [row for row, row_id in enumerate(ids) if counts[row_id] > 1]
    pictures: dict[str, int] = {}
    if picture is not None:
        repeated = dataset.select_columns(picture).select(rows)
        digests = (row_digest({"image": row[picture]}) for row in repeated)
        if all(pictures.setdefault(ids[row], digest) == digest for row, digest in zip(rows, digests, strict=True)):
            return
    try:
        check_ids(ids)
    except ValueError as error:
        raise ValueError(
            f'{error}; choose a column of unique ids by --id-column (id_column), or row numbers by "" (only several '
            "captions of one image may share an id)"
        ) from error
