"""Folders that another library wrote: a manifest, added when they are whole, tells them from parts of one."""

from pathlib import Path

from .atomic import flush
from .folder import StoredFolder
from .manifest import FolderKind, Manifest, StoredFile, file_digest


def seal_folder(folder: Path, kind: FolderKind) -> None:
    """Flush the files of a folder to the disk and record their checksums; subfolders are left as they are."""
    files = []
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.name[0].isalnum():
            flush(path)
            files.append(StoredFile(path.name, 0, path.stat().st_size, file_digest(path)))
    Manifest(kind.name, kind.version, True, {}, {}, tuple(files)).save(folder)


def check_sealed(folder: Path, kind: FolderKind) -> None:
    """Compare the files of a sealed folder with their checksums.

    Raises:
        FileNotFoundError: It was not sealed.
        ValueError: It is of another kind, or a file is missing, truncated or changed; the message names it.
    """
    sealed = StoredFolder(folder, kind)
    for number in range(len(sealed.manifest.files)):
        sealed.path(number)
