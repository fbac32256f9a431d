"""Updating a folder of shards while others read it: new shards beside the old ones, then one new manifest."""

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from filelock import BaseFileLock
from torch import Tensor

from .atomic import remove_temporary
from .cache import plain
from .checksums import DamagedError
from .folder import write_file, write_shard
from .journal import Journal
from .manifest import FolderKind, Manifest, StoredFile, check_file, read_manifest, remove_journals
from .writer import lock_alone

logger = logging.getLogger(__name__)

_JOURNAL = "update.jsonl"
_BESIDE = re.compile(r"\w+-[0-9a-f]{16}\.safetensors")


class FolderUpdate:
    """Adds shards to a folder and takes others out, in one step; a context manager that locks the folder.

    Until `commit`, readers see the folder as it was. Killed before it, the folder stays as it was, and the next update
    finds the finished shards in `pending`. Files that `commit` takes out stay until the next one, for readers of the
    state before.

    Args:
        folder: Complete, or unfinished.
        kind: What it holds.

    Attributes:
        manifest: The state before.
        pending: The intact shards of an update that did not end.

    Raises:
        FileNotFoundError: On entering: there is no such folder.
        ValueError: On entering: it is damaged or of another kind, or another process writes into it.
    """

    def __init__(self, folder: str | Path, kind: FolderKind) -> None:
        self.folder, self.kind = Path(folder), kind
        self.manifest = Manifest(kind.name, kind.version, False, {}, {})
        self.pending: tuple[StoredFile, ...] = ()
        self._journal = Journal(self.folder / _JOURNAL)
        self._shard = re.compile(rf"{re.escape(kind.prefix)}-(\d{{5,}})\.safetensors")
        self._lock: BaseFileLock | None = None
        self._next = 0

    def __enter__(self) -> Self:
        read_manifest(self.folder, self.kind)  # before a lock file is made
        self._lock = lock_alone(self.folder)
        try:
            self.manifest = read_manifest(self.folder, self.kind)
            remove_temporary(self.folder)
            if self.manifest.complete:  # its writer was killed before it removed them
                remove_journals(self.folder)
            known = {file.file for file in self.manifest.files}  # an update may end before its journal is removed
            written = [StoredFile(**record) for record in self._journal.read() if record["file"] not in known]
            if not written:  # of an update that ended
                self._journal.remove()
            self.pending = tuple(self._intact(written))
            numbers = [int(found[1]) for path in self.folder.iterdir() if (found := self._shard.fullmatch(path.name))]
            self._next = max(numbers, default=-1) + 1
        except BaseException:
            self._lock.release()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._lock is not None:
            self._lock.release()

    def write(self, tensors: Mapping[str, Tensor], rows: int) -> StoredFile:
        """Write a new shard, which the folder holds from `commit` on.

        Raises:
            OSError: The disk is full or fails.
        """
        path = self.folder / self.kind.file(self._next)
        try:
            stored = write_shard(self.folder, self.kind, self._next, tensors, rows)
            self._journal.append(asdict(stored))
        except OSError as error:
            raise OSError(
                error.errno,
                f"{error.strerror or error} while writing {str(path)!r}: the {self.kind.name} is as it was before; "
                "make room and run the same again, it resumes",
            ) from error
        self._next += 1
        return stored

    def write_beside(self, name: str, write: Callable[[Path], object]) -> StoredFile:
        """Write a safetensors file that is no shard; its name gets a digest of its content."""
        return write_file(self.folder / name, 0, write, named_by_content=True)

    def commit(
        self,
        files: Sequence[StoredFile],
        key: Mapping[str, Any],
        details: Mapping[str, Any],
        beside: Sequence[StoredFile] = (),
    ) -> None:
        """Replace the manifest, and remove the files that neither it nor the one before needs.

        Args:
            files: The shards from now on, in order.
            key: What they were made from.
            details: What else to record.
            beside: Files of `write_beside` that the details name.
        """
        new = replace(self.manifest, complete=True, key=plain(key), details=plain(details), files=tuple(files))
        new.save(self.folder)
        self._journal.remove()
        kept = {file.file for file in (*self.manifest.files, *files, *beside)}
        kept |= {
            value["file"] for value in self.manifest.details.values() if isinstance(value, dict) and "file" in value
        }
        for path in list(self.folder.iterdir()):
            is_own = self._shard.fullmatch(path.name) or _BESIDE.fullmatch(path.name)
            if is_own and path.name not in kept:
                path.unlink(missing_ok=True)
        self.manifest, self.pending = new, ()

    def _intact(self, files: Sequence[StoredFile]) -> Iterator[StoredFile]:
        for file in files:
            try:
                check_file(self.folder, file, self.kind)
            except DamagedError as error:
                logger.warning("%s; making its rows again", error)
            else:
                yield file
