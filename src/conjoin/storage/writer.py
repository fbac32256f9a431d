"""Folders of numbered shards: written by one process or by several, and resumed by any number of them."""

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from filelock import BaseFileLock
from torch import Tensor

from .atomic import remove_temporary
from .cache import plain
from .checksums import DamagedError
from .folder import check_place, write_shard
from .locks import LOCK, lock_folder
from .manifest import (
    MANIFEST,
    FolderKind,
    Manifest,
    StoredFile,
    check_file,
    check_key,
    file_record,
    merge_details,
    rank_journal,
    rank_journals,
    read_manifest,
    remove_journals,
)

logger = logging.getLogger(__name__)

_DONE = "done"
_PATIENCE = 10.0  # seconds; another process of the same run is about to leave


class FolderWriter:
    """Writes numbered shards into a folder, or resumes; a context manager.

    The manifest is written at the beginning and at the end. In between, a journal of each process lists its finished
    shards, so the cost of a shard does not depend on how many there are.

    From entering to leaving, the folder is locked; a complete one only from the first write on. The processes of one
    run share the lock; each writes the shards that no other one does. Any number of processes resumes.

    Args:
        folder: Made if needed.
        kind: What it holds.
        key: What the shards are made from, each part under a name that an error message can use.
        rank: Which of the processes of this run this one is.
        world_size: How many they are.

    Attributes:
        details: What else the manifest records of the folder as a whole; those recorded until they are changed.
        files: The finished shards by number: those that were finished on entering, and those of this process.

    Raises:
        ValueError: On entering: the folder was made from another key (the message names what differs), another
            process writes into it, or it holds something else. A damaged manifest of a cache is replaced.
    """

    def __init__(
        self, folder: str | Path, kind: FolderKind, key: Mapping[str, Any], rank: int = 0, world_size: int = 1
    ) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank must be from 0 to {world_size - 1} for the world size {world_size}, got {rank}")
        self.folder, self.kind, self._key = Path(folder), kind, plain(key)
        self.rank, self.world_size = rank, world_size
        self.manifest = Manifest(kind.name, kind.version, False, self._key, {})
        self.details: dict[str, Any] = {}
        self.files: dict[int, StoredFile] = {}
        self._recorded: dict[str, Any] = {}
        self._lock: BaseFileLock | None = None
        self._is_begun = False  # whether there is a manifest on the disk
        self._journal = rank_journal(self.folder, rank)

    def __enter__(self) -> Self:
        check_place(self.folder, self.kind, rf"{re.escape(self.kind.prefix)}-\d{{5,}}\.safetensors")
        self.folder.mkdir(parents=True, exist_ok=True)
        if not _is_complete(self.folder, self.kind):
            self._acquire()
        try:
            with self._alone() if self._lock is not None else nullcontext():
                self._read()
                if self._lock is not None and _end(self._journal.read()) is not None:
                    self._journal.append({_DONE: None})
        except BaseException:
            self._release()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._release()

    def has(self, number: int) -> bool:
        """Whether a shard is finished and intact; warns if it is damaged."""
        return number in self.files and is_intact(self.folder, self.files[number], self.kind)

    def write(
        self, number: int, tensors: Mapping[str, Tensor], rows: int, details: Mapping[str, Any] | None = None
    ) -> None:
        """Write a shard that is missing or damaged.

        Args:
            number: Of the shard.
            tensors: What it holds.
            rows: How many rows these are.
            details: The details of the folder that follow from this shard; see `merge_details`.

        Raises:
            OSError: The disk is full or fails; the message says what is safe.
        """
        self._acquire()
        try:
            stored = write_shard(self.folder, self.kind, number, tensors, rows)
            self.record(number, stored, details or {})
        except OSError as error:
            done = f"{sum(file.rows for file in self.files.values())} rows in {len(self.files)} shards are safe"
            raise OSError(
                error.errno,
                f"{error.strerror or error} while writing {str(self.folder / self.kind.file(number))!r}: {done}; "
                "make room and run the same again, it resumes after them",
            ) from error

    def record(self, number: int, stored: StoredFile, details: Mapping[str, Any]) -> None:
        """Record that a shard is finished; arguments as for `write`.

        Raises:
            OSError: The disk is full or fails.
        """
        self._acquire()
        self._begin()
        if self.manifest.complete:
            with self._alone():
                found = read_manifest(self.folder, self.kind)
                files = tuple(stored if file.file == stored.file else file for file in found.files)
                self.manifest = replace(found, files=files, details=merge_details(found.details, plain(details)))
                self.manifest.save(self.folder)
        else:
            self._journal.append(file_record(number, stored, plain(details)))
        self.files[number] = stored

    @contextmanager
    def ending(self, rows: int) -> Iterator[bool]:
        """Say that this process wrote its shards; yields whether all of them did, so that it may `finish`.

        Args:
            rows: The rows of all processes, as this one counted them.

        Raises:
            ValueError: The processes counted differently.
        """
        if self.manifest.complete:
            yield False
            return
        self._begin()
        self._journal.append({_DONE: [self.world_size, rows]})
        with self._alone(-1):
            self._take(read_manifest(self.folder, self.kind))
            ends = filter(None, (_end(journal.read()) for journal in rank_journals(self.folder)))
            counts = [rows for world_size, rows in ends if world_size == self.world_size]
            if len(set(counts)) > 1:
                raise ValueError(
                    f"the processes that write {str(self.folder)!r} do not read the same data: they count "
                    f"{sorted(set(counts))} rows"
                )
            yield len(counts) == self.world_size and not self.manifest.complete

    def finish(self) -> None:
        """Mark the folder as complete."""
        if not self.manifest.complete:
            found = read_manifest(self.folder, self.kind) if self._is_begun else self.manifest
            changed = {name: value for name, value in self.details.items() if self._recorded.get(name) != value}
            self.manifest = replace(found, complete=True, details=found.details | plain(changed))
            self.manifest.save(self.folder)
            self._is_begun = True

    def _begin(self) -> None:
        """Write the manifest, if there is none."""
        if self._is_begun:
            return
        with self._alone():
            if self.world_size > 1 and (self.folder / MANIFEST).exists():
                check_key(read_manifest(self.folder, self.kind).key, self._key, self.folder, self.kind)
            else:
                self.manifest = replace(self.manifest, details=plain(self.details))
                self.manifest.save(self.folder)
        self._is_begun = True

    def _read(self) -> None:
        if not (self.folder / MANIFEST).exists():
            return
        try:
            found = read_manifest(self.folder, self.kind)
        except DamagedError as error:
            if not self.kind.is_cache:
                raise
            logger.warning("%s; making all files again", error)
            return
        check_key(found.key, self._key, self.folder, self.kind)
        if found.complete and self._lock is not None:  # its writer was killed before it removed them
            remove_journals(self.folder)
        self._take(found)
        self.details, self._recorded = dict(found.details), found.details
        self._is_begun = True

    def _take(self, found: Manifest) -> None:
        is_numbered = not found.complete  # the files of an updated folder are in another order
        self.manifest = found
        self.files = {
            self.kind.number(file.file) if is_numbered else place: file for place, file in enumerate(found.files)
        }

    def _alone(self, patience: float | None = None) -> AbstractContextManager[None]:
        """What only one process of this run may do at a time."""
        return nullcontext() if self.world_size == 1 else entrance(self.folder, patience)

    def _acquire(self) -> None:
        if self._lock is None and self.world_size > 1:
            self._lock = lock_rank(self.folder, self.rank, self.world_size)
        elif self._lock is None:
            self._lock = lock_alone(self.folder)
            remove_temporary(self.folder)

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None


def is_intact(folder: Path, file: StoredFile, kind: FolderKind) -> bool:
    """Whether a finished file is as it was written; warns if it is not."""
    try:
        check_file(folder, file, kind)
    except DamagedError as error:
        logger.warning("%s; making the file again", error)
        return False
    return True


def _end(records: list[dict[str, Any]]) -> list[int] | None:
    """The world size and the rows that a process counted at its end; None if it was interrupted or is at work."""
    return records[-1].get(_DONE) if records else None


def _is_complete(folder: Path, kind: FolderKind) -> bool:
    """Whether a folder is complete, and no journal is left to be removed."""
    try:
        return read_manifest(folder, kind).complete and not rank_journals(folder)
    except (FileNotFoundError, DamagedError):
        return False


def lock_alone(folder: Path) -> BaseFileLock:
    """Lock an existing folder for one writer.

    Raises:
        ValueError: Another writer holds a lock.
    """
    lock = lock_folder(folder)
    try:
        _refuse_others(folder, 1)
    except BaseException:
        lock.release()
        raise
    return lock


def lock_rank(folder: Path, rank: int, world_size: int) -> BaseFileLock:
    """Lock an existing folder for one process of a run; the others of the run may lock it too.

    Raises:
        ValueError: A process of another run holds a lock, or this rank of a run of the same size does.
    """
    with entrance(folder):
        _refuse_others(folder, world_size)
        return lock_folder(folder, f"{LOCK}-{rank}-of-{world_size}")


@contextmanager
def entrance(folder: Path, patience: float | None = None) -> Iterator[None]:
    """What one process of a run does at a time.

    Args:
        folder: Locked by `lock_rank`, or about to be.
        patience: Seconds to wait for another process, a few by default; -1 waits without limit.

    Raises:
        ValueError: A writer of another run holds the lock of the folder.
    """
    lock = lock_folder(folder, patience=_PATIENCE if patience is None else patience)
    try:
        yield
    finally:
        lock.release()


def _refuse_others(folder: Path, world_size: int) -> None:
    """Make sure that no process of a run of another size is at work, and remove the locks that such runs left."""
    for path in folder.glob(f"{LOCK}-*-of-*"):
        if not path.name.endswith(f"-of-{world_size}"):
            lock_folder(folder, path.name).release()
            with suppress(OSError):
                path.unlink()
