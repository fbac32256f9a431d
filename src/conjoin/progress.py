"""Progress of long work: a bar in a terminal, a line every half minute elsewhere."""

import io
import sys
from collections.abc import Iterable
from typing import Any

from tqdm.auto import tqdm

SECONDS_BETWEEN_LINES = 30.0


def progress(
    rows: Iterable[Any] | None = None, desc: str = "", *, total: int | None = None, unit: str = "it", show: bool = True
) -> tqdm:
    """Return a progress bar over `rows`, or one that the caller updates.

    Args:
        rows: What to iterate over.
        desc: What is being done.
        total: How many there are; the length of `rows` when None.
        unit: What is counted.
        show: Whether to show anything.
    """
    if sys.stderr.isatty():
        return tqdm(rows, desc, total, unit=unit, disable=not show)
    form = "{desc}: {n_fmt} of {total_fmt} in {elapsed}" if total or rows is not None else None
    seconds = {"mininterval": SECONDS_BETWEEN_LINES, "maxinterval": SECONDS_BETWEEN_LINES}
    return _Lines(rows, desc, total, unit=unit, disable=not show, bar_format=form, **seconds)


class _Lines(tqdm):
    """A bar that prints one line at a time, for logs; nothing for work that ends before the first line is due."""

    def display(self, msg: str | None = None, pos: int | None = None) -> bool:
        if self.n and self.format_dict["elapsed"] >= SECONDS_BETWEEN_LINES:
            self.fp.write(f"{msg or self}\n")
            self.fp.flush()
        return True

    def close(self) -> None:
        if not self.disable:
            if self.n != self.last_print_n:
                self.display()
            self.fp = io.StringIO()  # where the line breaks of an ordinary bar may go
        super().close()
