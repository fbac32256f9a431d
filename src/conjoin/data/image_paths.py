"""Which files and URLs the rows of a source may name as their images."""

import os
from pathlib import Path
from typing import Any

import datasets
from huggingface_hub.constants import HF_HUB_CACHE

from conjoin.processing.item_urls import check_urls_allowed, is_url


def image_folders(source: Any, folder: Path | None) -> tuple[str, ...] | None:  # noqa: ANN401
    """Return the folders that hold all images of a source; None if its rows may name any file.

    The rows of a folder name files inside it, those of archives and Hub datasets files in the caches of the libraries.
    Only a table that the user names, or a loaded dataset, may name other files.

    Args:
        source: As for `load_pairs`.
        folder: The folder of its relative image paths, or None.
    """
    if isinstance(source, datasets.Dataset | datasets.IterableDataset):
        return None
    if folder is not None:
        named = Path(source).expanduser()
        return (os.path.realpath(named),) if named.is_dir() else None
    return os.path.realpath(HF_HUB_CACHE), os.path.realpath(datasets.config.HF_DATASETS_CACHE)


def check_image_path(path: str | None, folders: tuple[str, ...] | None, name: str) -> str:
    """Return `path` if an image may be read from it; check this before reading.

    Args:
        path: An absolute path, a URL or a data URI.
        folders: What `image_folders` gives.
        name: The row.

    Raises:
        ValueError: There is no path; it leaves the folders, also by a symbolic link; URLs are not allowed; or it is a
            URL of another kind than http and https.
    """
    if not path:
        raise ValueError(f"{name}: the image is missing")
    label = f"{name}, image {path!r}"
    if is_url(path):
        check_urls_allowed(label)
    elif "://" in path and not path.startswith("data:"):
        raise ValueError(f"{label}: expected a path, or a URL of http or https")
    elif folders is not None and not path.startswith("data:") and not _is_inside(path, folders):
        raise ValueError(
            f"{label}: the file is outside of the dataset; only a table that you name yourself may list such files"
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


def _is_inside(path: str, folders: tuple[str, ...]) -> bool:
    real = Path(os.path.realpath(path))
    return any(real.is_relative_to(folder) for folder in folders)
