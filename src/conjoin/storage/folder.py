"""Folders of files under a manifest: resumed after an interruption, verified on reading, replaced in one step.

A folder is written in one of three ways. `FolderWriter` adds numbered shards, one after the other, and resumes.
`FolderUpdate` (`update.py`) adds shards to a folder that is read meanwhile. `replace_folder` writes all files at once
beside the old ones. All end by replacing the manifest, so a reader finds the old state or the new one.
"""

import json
import logging
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from filelock import BaseFileLock, FileLock, Timeout
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from .atomic import TEMPORARY, commit, remove_temporary, temporary_path
from .manifest import (
    MANIFEST,
    DamagedError,
    FolderKind,
    Manifest,
    StoredFile,
    check_file,
    check_key,
    file_digest,
    file_record,
    manifest_journal,
    read_manifest,
)

logger = logging.getLogger(__name__)

LOCK = ".lock"
Result = TypeVar("Result")


class StoredFolder:
    """A complete folder, opened for reading.

    Opening it compares the sizes of all files with the manifest. The checksum of a file is compared when the file is
    first used, once in a process.

    Args:
        folder: Where it was written.
        kind: What it must hold.
        verify: Whether to compare checksums.

    Raises:
        FileNotFoundError: There is none.
        ValueError: It is unfinished, damaged, or of another kind or version.
    """

    def __init__(self, folder: str | Path, kind: FolderKind, verify: bool = True) -> None:
        self.folder, self.kind, self.verify = Path(folder), kind, verify
        self.manifest = read_manifest(self.folder, kind)
        if not self.manifest.complete:
            raise ValueError(
                f"the {kind.name} in {str(folder)!r} is unfinished ({self.manifest.rows} rows so far); "
                f"{kind.remedy} again, it resumes"
            )
        for file in self.manifest.files:
            check_file(self.folder, file, kind, verify=False)

    @property
    def rows(self) -> int:
        """Rows in all files."""
        return self.manifest.rows

    def path(self, number: int) -> Path:
        """The path of a file that is intact.

        Raises:
            DamagedError: It is not.
        """
        return check_file(self.folder, self.manifest.files[number], self.kind, self.verify)

    def shard(self, number: int) -> Any:  # noqa: ANN401 - safetensors has no types
        """Open a safetensors file, memory-mapped.

        Raises:
            DamagedError: It is damaged.
        """
        path = self.path(number)
        try:
            return safe_open(path, "pt")
        except (SafetensorError, OSError) as error:
            raise DamagedError(f"the file {str(path)!r} is damaged ({error}); {self.kind.remedy} again") from error


def read_folder(folder: str | Path, kind: FolderKind, read: Callable[[StoredFolder], Result]) -> Result:
    """Return what `read` makes of a folder; reads again if another process replaced the folder meanwhile.

    Raises:
        FileNotFoundError: There is none.
        ValueError: As `StoredFolder`.
    """
    while True:
        before = read_manifest(Path(folder), kind)
        try:
            return read(StoredFolder(folder, kind))
        except DamagedError:
            if read_manifest(Path(folder), kind) == before:
                raise


def is_current(folder: Path, kind: FolderKind, key: Mapping[str, Any]) -> bool:
    """Whether a folder is complete, intact and made from `key`; warns if it is damaged.

    Raises:
        ValueError: It is of another kind or version.
    """
    if not (folder / MANIFEST).exists():
        return False
    try:
        manifest = read_manifest(folder, kind)
        if not manifest.complete or manifest.key != plain(key):
            return False
        for file in manifest.files:
            check_file(folder, file, kind)
    except DamagedError as error:
        logger.warning("%s; making it again", error)
        return False
    return True


class FolderWriter:
    """Writes numbered shards into a folder, or resumes; a context manager.

    From entering to leaving, the folder is locked; a complete one only from the first write on.

    Args:
        folder: Made if needed.
        kind: What it holds.
        key: What the shards are made from, each part under a name that an error message can use.

    Attributes:
        details: What else the manifest records; those of the run that began the folder until they are changed.

    Raises:
        ValueError: On entering: the folder was made from another key (the message names what differs), another
            process writes into it, or it holds something else. A damaged manifest of a cache is replaced.
    """

    def __init__(self, folder: str | Path, kind: FolderKind, key: Mapping[str, Any]) -> None:
        self.folder, self.kind, self._key = Path(folder), kind, plain(key)
        self._lock: BaseFileLock | None = None
        self.manifest = Manifest(kind.name, kind.version, False, self._key, {})
        self.details: dict[str, Any] = {}
        self._is_begun = False  # whether an unfinished manifest is on the disk, to which a journal adds
        self._journal = manifest_journal(self.folder)

    def __enter__(self) -> Self:
        check_place(self.folder, self.kind, rf"{re.escape(self.kind.prefix)}-\d{{5,}}\.safetensors")
        self.folder.mkdir(parents=True, exist_ok=True)
        if not _is_complete(self.folder, self.kind):
            self._acquire()
        try:
            self._read()
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
        if number >= len(self.manifest.files):
            return False
        try:
            check_file(self.folder, self.manifest.files[number], self.kind)
        except DamagedError as error:
            logger.warning("%s; making the file again", error)
            return False
        return True

    def write(self, number: int, tensors: Mapping[str, Tensor], rows: int) -> None:
        """Write a shard, the next one or one that is damaged.

        Raises:
            OSError: The disk is full or fails; the message says what is safe.
        """
        self._acquire()
        path = self.folder / self.kind.file(number)
        content = save({name: tensor.contiguous() for name, tensor in tensors.items()})
        try:
            stored = write_file(path, rows, lambda temporary: temporary.write_bytes(content), named_by_content=False)
            details = plain(self.details)
            manifest = replace(self.manifest.with_file(number, stored), details=details)
            if self._is_begun:
                self._journal.append(file_record(number, stored, self.manifest.details, details))
            else:
                manifest.save(self.folder)
        except OSError as error:
            done = f"{self.manifest.rows} rows in {len(self.manifest.files)} shards are safe"
            raise OSError(
                error.errno,
                f"{error.strerror or error} while writing {str(path)!r}: {done}; "
                "make room and run the same again, it resumes after them",
            ) from error
        self.manifest = manifest
        self._is_begun = not manifest.complete

    def finish(self) -> None:
        """Mark the folder as complete."""
        if not self.manifest.complete:
            self.manifest = replace(self.manifest, complete=True, details=plain(self.details))
            self.manifest.save(self.folder)
            self._is_begun = False

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
        self.manifest, self.details = found, dict(found.details)
        self._is_begun = not found.complete

    def _acquire(self) -> None:
        if self._lock is None:
            self._lock = lock_folder(self.folder)
            remove_temporary(self.folder)

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None


def replace_folder(
    folder: str | Path,
    kind: FolderKind,
    key: Mapping[str, Any],
    files: Mapping[str, Callable[[Path], object]],
    details: Mapping[str, Any] | None = None,
    *,
    is_locked: bool = False,
) -> None:
    """Write all files of a folder; whatever happens, it holds the old files or the new ones.

    The name of a file holds a digest of its content, so no file that the old manifest names is overwritten.

    Args:
        folder: Made if needed; what it holds of the same kind is replaced.
        kind: What it holds.
        key: What the files are made from.
        files: By name, such as `"vectors.faiss"`, the function that writes the file to a path.
        details: What else to record.
        is_locked: Whether the caller holds the folder's lock, and has checked what it holds.

    Raises:
        ValueError: The folder holds something else, or another process writes into it.
    """
    folder = Path(folder)
    if not is_locked:
        check_place(folder, kind, _versions(list(files)))
        folder.mkdir(parents=True, exist_ok=True)
    lock = None if is_locked else lock_folder(folder)
    try:
        before: set[str] = set()
        if (folder / MANIFEST).exists():
            try:
                before = {file.file for file in read_manifest(folder, kind).files}
            except DamagedError as error:
                logger.warning("%s; replacing it", error)
        remove_temporary(folder)
        stored = tuple(write_file(folder / name, 0, write, named_by_content=True) for name, write in files.items())
        Manifest(kind.name, kind.version, True, plain(key), plain(details or {}), stored).save(folder)
        _remove_replaced(folder, list(files), before, {file.file for file in stored})
    finally:
        if lock is not None:
            lock.release()


def check_place(folder: str | Path, kind: FolderKind, own: str = "") -> None:
    """Refuse to write into a folder that holds something else.

    Args:
        folder: Absent, empty, or with a manifest.
        kind: What is to be written.
        own: Pattern of the names of files that an interrupted writer leaves before the manifest.

    Raises:
        ValueError: It has other files (the message names one), or a manifest of another kind or version.
    """
    folder = Path(folder)
    if not folder.is_dir():
        return
    if (folder / MANIFEST).exists():
        with suppress(DamagedError):  # its writer decides
            read_manifest(folder, kind)
        return
    for name in sorted(path.name for path in folder.iterdir()):
        if not name.startswith(".") and not name.endswith(TEMPORARY) and not re.fullmatch(own, name):
            raise ValueError(
                f"{str(folder)!r} is not empty and not an earlier {kind.name}: it has {name!r}; choose an empty or "
                "new folder"
            )


def lock_folder(folder: Path) -> BaseFileLock:
    """Lock an existing folder for writing, until `release` or the end of the process.

    The operating system holds the lock, so a killed process leaves none behind.

    Raises:
        ValueError: Another writer holds the lock.
    """
    lock = FileLock(folder / LOCK, blocking=False, thread_local=False)
    try:
        lock.acquire()
    except Timeout as error:
        raise ValueError(
            f"another process is writing into {str(folder)!r}; wait until it ends, or choose another folder"
        ) from error
    return lock


def _is_complete(folder: Path, kind: FolderKind) -> bool:
    try:
        return read_manifest(folder, kind).complete
    except (FileNotFoundError, DamagedError):
        return False


def write_file(path: Path, rows: int, write: Callable[[Path], object], named_by_content: bool) -> StoredFile:
    """Write a file atomically; `named_by_content` adds a digest to its name."""
    with temporary_path(path) as temporary:
        write(temporary)
        size, digest = temporary.stat().st_size, file_digest(temporary)
        if named_by_content:
            path = path.with_name(f"{path.stem}-{digest[:16]}{path.suffix}")
        commit(temporary, path)
    return StoredFile(path.name, rows, size, digest)


def _remove_replaced(folder: Path, names: list[str], before: set[str], kept: set[str]) -> None:
    """Remove the files `before` and other earlier versions of the files `names`, whatever their suffix."""
    earlier = re.compile(_versions(names))
    for path in folder.iterdir():
        is_earlier = path.name in before or (earlier.fullmatch(path.name) and not path.name.endswith(TEMPORARY))
        if is_earlier and path.name not in kept:
            try:
                path.unlink(missing_ok=True)
            except PermissionError:  # Windows: another process has it open
                continue


def _versions(names: list[str]) -> str:
    """The pattern of all versions of the files `names`, whatever their suffix."""
    stems = "|".join(re.escape(Path(name).stem) for name in names)
    return rf"({stems})-[0-9a-f]{{16}}\.\w+"


def plain(key: Mapping[str, Any]) -> dict[str, Any]:
    """A key as it is read back from JSON."""
    return dict(json.loads(json.dumps(key)))
