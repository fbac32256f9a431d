"""Data sets that are made once: a file in the folder says what it was made with."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from conjoin.storage import differences, write_text


def made_with(path: Path) -> dict[str, Any]:
    """The settings that a file holds; empty if there is none, or another one."""
    try:
        settings = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError:
        settings = {}
    return settings if isinstance(settings, dict) else {}


def write_settings(path: Path, settings: Mapping[str, Any]) -> None:
    """Write what `made_with` reads."""
    write_text(path, json.dumps(settings, indent=1) + "\n")


def is_made(out: Path, name: str, settings: Mapping[str, Any], title: str) -> bool:
    """Whether `out` is complete and was made with these settings.

    Args:
        out: The folder.
        name: Of the file in it that holds its settings.
        settings: Of values that JSON has.
        title: What an error calls the data set.

    Raises:
        FileExistsError: `out` is there and is something else.
    """
    recorded = made_with(out / name)
    if recorded == settings:
        return True
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        other = f": it was made with {differences(recorded, settings)}" if recorded else ""
        raise FileExistsError(f"{str(out)!r} exists and is not {title}{other}; remove it or choose another folder")
    return False


def check_queries(limits: Mapping[str, int]) -> None:
    """Check the most queries of each split.

    Raises:
        ValueError: One is not positive.
    """
    for split, limit in limits.items():
        if limit < 1:
            raise ValueError(f"{split}_queries={limit} must be at least 1")
