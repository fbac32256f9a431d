"""Files that are either the old version or the new one, never half of one."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; what is written there appears at `path` at once, and on the disk.

    When the block fails nothing is left behind. When the process dies in it, the temporary file stays until the next
    attempt overwrites it, and `path` is as it was.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        yield temporary
        _flush(temporary)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if os.name == "posix":  # elsewhere a directory cannot be opened, nor need it be flushed
        _flush(path.parent)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write `content` to `path` atomically, always the same bytes for the same content."""
    with atomic_path(path) as temporary:
        temporary.write_text(json.dumps(content, indent=2, ensure_ascii=True) + "\n", encoding="ascii")


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
