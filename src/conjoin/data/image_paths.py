"""Which files and URLs the rows of a source may name as their images."""

import os
import shlex
from pathlib import Path
from typing import Any

import datasets
from huggingface_hub.constants import HF_HUB_CACHE

from conjoin.processing.item_urls import check_urls_allowed, is_url

ALLOW_ROOTS = "CONJOIN_ROOTS"
"""The environment variable of further folders of images, separated as in PATH, so that child processes obey it too."""


class OutsideError(ValueError):
    """A row names a file outside of the folders that it may."""


def allow_root(folder: str | os.PathLike[str]) -> None:
    """Let the rows of folders and tables name images in another folder, in this process and those it starts.

    Raises:
        NotADirectoryError: There is no such folder.
    """
    if not Path(folder).is_dir():
        raise NotADirectoryError(f"no folder {str(folder)!r} to read images from")
    os.environ[ALLOW_ROOTS] = os.pathsep.join(dict.fromkeys([*_allowed_roots(), os.path.realpath(folder)]))


def image_folders(source: Any, folder: Path | None) -> tuple[str, ...] | None:  # noqa: ANN401
    """Return the folders that hold all images of a source; None if its rows may name any file.

    The rows of a folder name files inside it, those of a table files beside it or below, and both files in the folders
    of `allow_root`. A table may come from a stranger, and results show its images: naming it on the command line
    allows no other folder. Those of archives and Hub datasets name files in the caches of the libraries. Only a loaded
    dataset may name any file.

    Args:
        source: As for `load_pairs`.
        folder: The folder of its relative image paths, or None.
    """
    if isinstance(source, datasets.Dataset | datasets.IterableDataset):
        return None
    if folder is not None:
        named = Path(source).expanduser()
        return folders_beside(named if named.is_dir() else folder)
    return os.path.realpath(HF_HUB_CACHE), os.path.realpath(datasets.config.HF_DATASETS_CACHE)


def folders_beside(folder: str | Path | None) -> tuple[str, ...]:
    """Return a folder, if there is one, and those of `allow_root`."""
    return *(() if folder is None else (os.path.realpath(folder),)), *_allowed_roots()


def check_image_path(path: str | None, folders: tuple[str, ...] | None, name: str) -> str:
    """Return `path` if an image may be read from it; check this before reading.

    Args:
        path: An absolute path, a URL or a data URI.
        folders: What `image_folders` gives.
        name: The row.

    Raises:
        OutsideError: It leaves the folders, also by a symbolic link.
        ValueError: There is no path; URLs are not allowed; or it is a URL of another kind than http and https.
    """
    if not path:
        raise ValueError(f"{name}: the image is missing")
    label = f"{name}, image {path!r}"
    if is_url(path):
        check_urls_allowed(label)
    elif "://" in path and not path.startswith("data:"):
        raise ValueError(f"{label}: expected a path, or a URL of http or https")
    elif folders is not None and not path.startswith("data:") and not _is_inside(path, folders):
        own = shlex.quote(os.path.dirname(os.path.realpath(path)))
        raise OutsideError(
            f"{label}: the file is outside of the dataset; if you trust the dataset, pass --root {own} (or a folder "
            f"above that holds all its images), call conjoin.data.allow_root() or set {ALLOW_ROOTS}"
        )
    return path


def path_inside(folder: Path, path: str, name: str) -> Path:
    """Return `folder / path`, for a path that a row or an archive names.

    Raises:
        ValueError: It is absolute or goes up; the message starts with `name`.
    """
    if Path(path).is_absolute() or ".." in Path(path).parts:
        raise ValueError(f"{name} {path!r} leaves the folder {str(folder)!r}")
    return folder / path


def _allowed_roots() -> list[str]:
    return [root for root in os.environ.get(ALLOW_ROOTS, "").split(os.pathsep) if root]


def _is_inside(path: str, folders: tuple[str, ...]) -> bool:
    real = Path(os.path.realpath(path))
    return any(real.is_relative_to(folder) for folder in folders)
