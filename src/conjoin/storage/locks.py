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
        ValueError: Another process holds a lock.
    """
    lock = _acquire(folder / LOCK)
    try:
        for path in folder.glob(f"{LOCK}-*"):  # of further processes, see `lock_also`
            _acquire(path).release()
            path.unlink(missing_ok=True)
    except BaseException:
        lock.release()
        raise
    return lock


def lock_also(folder: Path, name: str) -> BaseFileLock:
    """Lock a folder for a further process of the run whose first one holds `lock_folder`.

    If the first process is killed, no run begins while this lock is held.

    Args:
        folder: To write into.
        name: Of the process, unique in the run.

    Raises:
        ValueError: A process of that name holds a lock.
    """
    return _acquire(folder / f"{LOCK}-{name}")


def _acquire(path: Path) -> BaseFileLock:
    lock = FileLock(path, blocking=False, thread_local=False)
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
