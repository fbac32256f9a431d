"""Locks of folders: one process writes.

The operating system holds the locks, so a killed process leaves none behind. On a network file system, it must support
`flock`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import BaseFileLock, FileLock, Timeout

from .atomic import remove_temporary

LOCK = ".lock"


def lock_folder(folder: Path) -> BaseFileLock:
    """Lock an existing folder for writing, until `release` or the end of the process.

    Raises:
        ValueError: Another process holds the lock.
    """
    lock = FileLock(folder / LOCK, blocking=False, thread_local=False)
    try:
        lock.acquire()
    except Timeout as error:
        raise ValueError(
            f"another process is writing into {str(folder)!r}; wait until it ends, or choose another folder"
        ) from error
    return lock


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock an existing folder for writing, and remove the unfinished files that killed processes left there.

    Raises:
        ValueError: Another process holds the lock.
    """
    lock = lock_folder(folder)
    try:
        remove_temporary(folder)
        yield
    finally:
        lock.release()
