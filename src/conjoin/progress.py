"""Progress of long work: a bar, which outside of a terminal or a notebook appears every half minute."""

import sys
from collections.abc import Iterable
from typing import Any

from tqdm.auto import tqdm

SECONDS_IN_LOGS = 30.0


def shows_bars() -> bool:
    """Whether a bar can be drawn again and again: in a terminal and in a notebook."""
    from transformers.utils import is_in_notebook

    return sys.stderr.isatty() or is_in_notebook()


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
    options: dict[str, Any] = {"unit": unit, "disable": not show}
    if not shows_bars():
        options |= dict.fromkeys(("mininterval", "maxinterval", "delay"), SECONDS_IN_LOGS)
    return tqdm(rows, desc, total, **options)
