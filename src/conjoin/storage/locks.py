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
_PATIENCE = 10.0
"""Seconds to wait for the further processes of a run whose first one has ended."""


def lock_folder(folder: Path) -> BaseFileLock:
    """Lock an existing folder for writing, until `release` or the end of the process.

    Raises:
        ValueError: Another process holds the lock, or one of `lock_also`.
    """
    lock = _acquire(folder / LOCK, 0)
    try:
        for other in folder.glob(f"{LOCK}-*"):
            _acquire(other, _PATIENCE).release()
            other.unlink(missing_ok=True)
    except BaseException:
        lock.release()
        raise
    return lock


def lock_also(folder: Path, name: str) -> BaseFileLock:
    """Lock a folder for a further process of the run whose first one holds `lock_folder`.

    Args:
        folder: To write into; no other run begins while this lock is held, even if the first process has ended.
        name: Of the process, unique in the run.

    Raises:
        ValueError: A process of that name holds the lock.
    """
    return _acquire(folder / f"{LOCK}-{name}", 0)


def _acquire(path: Path, patience: float) -> BaseFileLock:
    lock = FileLock(path, timeout=patience, blocking=patience > 0, thread_local=False)
    try:
        lock.acquire()
    except Timeout as error:
        raise ValueError(
            f"another process is writing into {str(path.parent)!r}; wait until it ends, or choose another folder"
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
