"""Folders of files under a manifest: resumed after an interruption, verified on reading, replaced in one step.

A folder is written in one of three ways. `FolderWriter` (`writer.py`) adds numbered shards and resumes. `FolderUpdate`
(`update.py`) adds shards to a folder that is read meanwhile. `replace_folder` writes all files at once beside the old
ones. All end by replacing the manifest, so a reader finds the old state or the new one.
"""

import logging
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from .atomic import TEMPORARY, commit, remove_temporary, temporary_path
from .cache import plain
from .checksums import DamagedError, file_digest
from .locks import lock_folder
from .manifest import MANIFEST, FolderKind, Manifest, StoredFile, check_file, read_manifest

logger = logging.getLogger(__name__)

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


def replace_folder(
    folder: str | Path,
    kind: FolderKind,
    key: Mapping[str, Any],
    files: Mapping[str, Callable[[Path], object]],
    details: Mapping[str, Any] | None = None,
    *,
    is_locked: bool = False,
    replaces: Manifest | None = None,
) -> Manifest:
    """Write all files of a folder; whatever happens, it holds the old files or the new ones.

    The name of a file holds a digest of its content, so no file that the old manifest names is overwritten.

    Args:
        folder: Made if needed; what it holds of the same kind is replaced.
        kind: What it holds.
        key: What the files are made from.
        files: By name, such as `"vectors.faiss"`, the function that writes the file to a path.
        details: What else to record.
        is_locked: Whether the caller holds the folder's lock, and has checked what it holds.
        replaces: What the folder must hold, if it holds anything.

    Returns:
        What it holds now.

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
                found = read_manifest(folder, kind)
            except DamagedError as error:
                logger.warning("%s; replacing it", error)
            else:
                if replaces not in (None, found):
                    raise ValueError(
                        f"the {kind.name} in {str(folder)!r} was changed since it was loaded; load it again"
                    )
                before = {file.file for file in found.files}
        remove_temporary(folder)
        stored = tuple(write_file(folder / name, 0, write, named_by_content=True) for name, write in files.items())
        written = Manifest(kind.name, kind.version, True, plain(key), plain(details or {}), stored)
        written.save(folder)
        _remove_replaced(folder, list(files), before, {file.file for file in stored})
    finally:
        if lock is not None:
            lock.release()
    return written


def check_place(folder: str | Path, kind: FolderKind, own: str = "") -> None:
    """Refuse to write into a folder that holds something else.

    Args:
        folder: Absent, empty, or with a manifest.
        kind: What is to be written.
        own: Pattern of the names of files that an interrupted writer leaves before the manifest.

    Raises:
        ValueError: It is a file, has other files (the message names one), or a manifest of another kind or version.
    """
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{str(folder)!r} is a file; choose a folder for the {kind.name}")
    if not folder.is_dir():
        return
    names = sorted(path.name for path in folder.iterdir())  # first: another process of the same run may just begin
    if (folder / MANIFEST).exists():
        with suppress(DamagedError):  # its writer decides
            read_manifest(folder, kind)
        return
    for name in names:
        if not name.startswith(".") and not name.endswith(TEMPORARY) and not re.fullmatch(own, name):
            raise ValueError(
                f"{str(folder)!r} is not empty and not an earlier {kind.name}: it has {name!r}; choose an empty or "
                "new folder"
            )


def check_places(folder: str | Path, kind: FolderKind) -> None:
    """Refuse to remove a folder of folders that has something else; hidden files do not count.

    Raises:
        ValueError: As `check_place` for each of them.
    """
    for path in sorted(Path(folder).glob("[!.]*")):
        check_place(path, kind, rf"{re.escape(kind.prefix)}-\d{{5,}}\.safetensors")


def write_file(path: Path, rows: int, write: Callable[[Path], object], named_by_content: bool) -> StoredFile:
    """Write a file atomically; `named_by_content` adds a digest to its name."""
    with temporary_path(path) as temporary:
        write(temporary)
        size, digest = temporary.stat().st_size, file_digest(temporary)
        if named_by_content:
            path = path.with_name(f"{path.stem}-{digest[:16]}{path.suffix}")
        commit(temporary, path)
    return StoredFile(path.name, rows, size, digest)


def write_shard(folder: Path, kind: FolderKind, number: int, tensors: Mapping[str, Tensor], rows: int) -> StoredFile:
    """Write a numbered file of tensors atomically."""
    content = save({name: tensor.contiguous() for name, tensor in tensors.items()})
    path = folder / kind.file(number)
    return write_file(path, rows, lambda temporary: temporary.write_bytes(content), named_by_content=False)


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
