"""Locks of folders: one writer, or the processes of one run that share the files among them.

The operating system holds the locks, so a killed process leaves none behind. On a network file system, it must support
`flock`.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import BaseFileLock, FileLock, Timeout

from .atomic import remove_temporary

LOCK = ".lock"
_PATIENCE = 10.0  # seconds; another process of the same run is about to leave


def lock_folder(folder: Path) -> BaseFileLock:
    """Lock an existing folder for writing, until `release` or the end of the process.

    Raises:
        ValueError: Another writer holds a lock.
    """
    lock = _acquire(folder / LOCK, 0)
    try:
        _refuse_others(folder, 1)
    except BaseException:
        lock.release()
        raise
    return lock


def lock_also(folder: Path, name: str) -> BaseFileLock:
    """Lock a folder for a further process of the run whose first one holds `lock_folder`.

    Args:
        folder: To write into. When the first process has ended, no run begins while this lock is held.
        name: Of the process, unique in the run.

    Raises:
        ValueError: A process of that name holds a lock.
    """
    return _acquire(folder / f"{LOCK}-{name}-of-many", 0)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock an existing folder for writing, and remove the unfinished files that killed processes left there.

    Raises:
        ValueError: Another writer holds a lock.
    """
    lock = lock_folder(folder)
    try:
        remove_temporary(folder)
        yield
    finally:
        lock.release()


def lock_rank(folder: Path, rank: int, world_size: int) -> BaseFileLock:
    """Lock an existing folder for one process of a run; the others of the run may lock it too.

    Raises:
        ValueError: A process of another run holds a lock, or this rank of a run of the same size does.
    """
    with entrance(folder):
        _refuse_others(folder, world_size)
        return _acquire(folder / f"{LOCK}-{rank}-of-{world_size}", 0)


@contextmanager
def entrance(folder: Path, patience: float | None = None) -> Iterator[None]:
    """What one process of a run does at a time.

    Args:
        folder: Locked by `lock_rank`, or about to be.
        patience: Seconds to wait for another process, a few by default; -1 waits without limit.

    Raises:
        ValueError: A writer of another run holds the lock of the folder.
    """
    lock = _acquire(folder / LOCK, _PATIENCE if patience is None else patience)
    try:
        yield
    finally:
        lock.release()


def _refuse_others(folder: Path, world_size: int) -> None:
    """Make sure that no process of a run of another size is at work, and remove the locks that such runs left."""
    for path in folder.glob(f"{LOCK}-*-of-*"):
        if not path.name.endswith(f"-of-{world_size}"):
            _acquire(path, _PATIENCE).release()
            with suppress(OSError):
                path.unlink()


def _acquire(path: Path, patience: float) -> BaseFileLock:
    lock = FileLock(path, timeout=patience, blocking=patience != 0, thread_local=False)
    try:
        lock.acquire()
    except Timeout as error:
        raise ValueError(
            f"another process is writing into {str(path.parent)!r}; wait until it ends, or choose another folder"
        ) from error
    return lock
