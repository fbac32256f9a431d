"""Rows of pairs that cannot be used for training."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import datasets

from conjoin.data.interleaved import map_images
from conjoin.processing import load_image
from conjoin.progress import progress

_AT_ONCE = 1000


def problem_of(row: Mapping[str, Any]) -> str | None:
    """Return why a row cannot be used; None if it can.

    Args:
        row: As `load_pairs(on_error="keep")` gives it. Its images are decoded.
    """
    if row.get("problem") is not None:
        return str(row["problem"])
    try:
        map_images(lambda image: load_image(image, f"row with id {row.get('id')!r}"), row["image"])
    except (ValueError, FileNotFoundError) as error:
        return str(error)
    return None


def without_problems(rows: datasets.Dataset, source: str) -> tuple[datasets.Dataset, list[dict[str, str]]]:
    """Return the rows that can be used, and `source`, `id` and `reason` of each of the others.

    Args:
        rows: As `load_pairs(on_error="keep")` gives them. Every image is decoded once.
        source: Name of the rows.

    Raises:
        ValueError: No row can be used.
    """
    reasons: list[str | None] = []
    with progress(desc="checking rows", total=len(rows), unit="rows") as bar, ThreadPoolExecutor() as pool:
        for start in range(0, len(rows), _AT_ONCE):
            some = [rows[place] for place in range(start, min(start + _AT_ONCE, len(rows)))]
            for reason in pool.map(problem_of, some):
                reasons.append(reason)
                bar.update(1)
    used = [place for place, reason in enumerate(reasons) if reason is None]
    ids = rows["id"][:]
    left_out = [
        {"source": source, "id": str(ids[place]), "reason": reason}
        for place, reason in enumerate(reasons)
        if reason is not None
    ]
    if not used:
        raise ValueError(f"none of the {len(rows)} rows of {source!r} can be used; {left_out[0]['reason']}")
    kept = rows.remove_columns("problem") if "problem" in rows.column_names else rows
    return (kept.select(used) if left_out else kept), left_out
