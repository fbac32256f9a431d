"""Paths of this machine, which nobody else needs to see: recognised, and shortened to their last part."""

import re
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

_FOLDERS = ("runs/", "data/", "outputs/")
_SUFFIXES = (".csv", ".tsv", ".json", ".jsonl", ".ndjson", ".parquet", ".tar", ".zip")


def is_local(name: str) -> bool:
    """Whether the name of a model or a dataset is a path, not a repository on the Hub.

    A relative path of another folder counts when it has a suffix of data or begins with a folder of outputs.
    """
    if name.startswith((".", "/", "~", "file:", *_FOLDERS)) or name.endswith(_SUFFIXES) or "\\" in name:
        return True
    return name.count("/") > 1 or Path(name).exists()


def public_name(source: str) -> str:
    """Return the id of a repository as it is, and of a path its last part."""
    return _last_part(source) if is_local(source) else source


def without_paths(value: Any) -> Any:  # noqa: ANN401 - any JSON value
    """Shorten every absolute path in a JSON value to its last part."""
    if isinstance(value, dict):
        return {without_paths(key): without_paths(part) for key, part in value.items()}
    if isinstance(value, list):
        return [without_paths(part) for part in value]
    return _last_part(value) if isinstance(value, str) and is_absolute(value) else value


def is_absolute(text: str) -> bool:
    """Whether a text is an absolute path of this or another operating system, or one from a home folder."""
    if text.startswith("file:"):
        return True
    if "\n" in text or text.startswith(("//", "{")):
        return False
    pure = PurePosixPath(text)
    is_home = re.match(r"~[\w.-]*/", text) is not None
    return (pure.is_absolute() and len(pure.parts) > 1) or is_home or PureWindowsPath(text).is_absolute()


def _last_part(path: str) -> str:
    return PureWindowsPath(path).name or PurePosixPath(path).name or path
