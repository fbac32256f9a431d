"""The images of a row: which files and URLs it may name, which Pillow can read, and their places in its text.

In a row with several images, `<image>` in the text marks the place of the next image of the list, as in MERIT.
"""

import os
import shlex
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

import datasets
from huggingface_hub.constants import HF_HUB_CACHE
from PIL import Image

from conjoin.data.cells import read_images
from conjoin.processing.item_error import ItemError, MissingFileError
from conjoin.processing.item_images import is_url
from conjoin.processing.item_inputs import PICTURE_SUFFIXES
from conjoin.processing.urls import check_urls_allowed

_HEIF_SUFFIXES = (".heic", ".heif", ".hif")
ALLOW_ROOTS = "CONJOIN_ROOTS"
"""The environment variable of further folders of images, separated as in PATH, so that child processes obey it too."""
EMBEDDED = "data:"
"""Stands for the path of an image that has its bytes."""
PLACEHOLDER = "<image>"
"""Stands for an image in the text of a row with a list of images."""


try:
    from pillow_heif import register_heif_opener
except ImportError:
    pass  # HEIC files are then reported as unreadable
else:
    register_heif_opener()


class OutsideError(ItemError):
    """A row names a file outside of the folders that it may."""


def allow_root(folder: str | os.PathLike[str]) -> None:
    """Let the rows of folders and tables name images in another folder, in this process and those it starts.

    Raises:
        NotADirectoryError: There is no such folder.
    """
    if not Path(folder).is_dir():
        raise NotADirectoryError(f"no folder {str(folder)!r} to read images from")
    os.environ[ALLOW_ROOTS] = os.pathsep.join(dict.fromkeys([*_allowed_roots(), os.path.realpath(folder)]))


def image_folders(source: Any, folder: Path | None) -> tuple[str, ...] | None:
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


class RowImages(NamedTuple):
    """Checks the images of rows as far as possible without reading them.

    Attributes:
        folder: Of relative paths; None for the current folder.
        folders: Of all images, as `image_folders` gives them.
    """

    folder: Path | None
    folders: tuple[str, ...] | None

    def check(self, cell: Any, name: str) -> Any:
        """Return the image of a cell, or its list of images, as `read_images`, with absolute paths.

        Raises:
            ItemError: There is none, its path may not be read, or Pillow does not read files of this kind.
            MissingFileError: There is no such file.
        """
        return map_images(lambda image: self.check_one(image, name), read_images(cell))

    def check_one(self, image: Any, name: str) -> Any:
        """As `check`, of one image that `read_images` gave."""
        if not isinstance(image, str | None):
            return image
        path = image and self.absolute(image)
        if path and not (is_uri(path) or os.path.isfile(path)):
            path = next(filter(os.path.isfile, map(self.absolute, _spellings(str(image)))), path)
        file = check_image_path(path, self.folders, name)
        if is_uri(file):
            return file
        if not os.path.isfile(file):
            raise MissingFileError(name, f"image {file!r:.300}: no such file")
        suffix = Path(file).suffix.lower()
        if suffix in PICTURE_SUFFIXES and Image.registered_extensions().get(suffix) not in Image.OPEN:
            heic = ', or `pip install "conjoin[heif]"` to read HEIC' if suffix in _HEIF_SUFFIXES else ""
            raise ItemError(name, f"image {file!r}: cannot be read; convert them to PNG or JPEG{heic}")
        return file

    def absolute(self, path: str) -> str:
        """Return the absolute path of a file; URLs and data URIs stay as they are."""
        return path if is_uri(path) else str(((self.folder or Path()) / path).absolute())

    def file_key(self, paths: Sequence[str | None]) -> int | None:
        """Return a hash of the files of a row's images; None if an image has no path, or its bytes."""
        if not paths or not all(paths) or EMBEDDED in paths:
            return None
        return hash(tuple(self.absolute(str(path)) for path in paths))


def _spellings(path: str) -> Iterator[str]:
    """Yield what the file of a row may be called here.

    With the slashes of Windows turned, below the folder as in exports of Magento, as the path of a URL, and with
    letters such as ü in one sign or, as macOS writes them, in two.
    """
    plain = path.replace("\\", "/").lstrip("/")
    for each in (plain, unquote(plain.partition("?")[0])):
        yield from (each, unicodedata.normalize("NFC", each), unicodedata.normalize("NFD", each))


def check_image_path(path: str | None, folders: tuple[str, ...] | None, name: str) -> str:
    """Return `path` if an image may be read from it; check this before reading.

    Args:
        path: An absolute path, a URL or a data URI.
        folders: What `image_folders` gives.
        name: The row.

    Raises:
        OutsideError: It leaves the folders, also by a symbolic link.
        ItemError: There is no path; URLs are not allowed; or it is a URL of another kind than http and https.
    """
    if not path:
        raise ItemError(name, "the image is missing")
    if is_url(path):
        check_urls_allowed(path, name)
    elif "://" in path and not path.startswith("data:"):
        raise ItemError(name, f"image {path!r}: expected a path, or a URL of http or https")
    elif folders is not None and not path.startswith("data:") and not is_inside(path, folders):
        folder = shlex.quote(os.path.dirname(os.path.realpath(path)))
        raise OutsideError(
            name,
            f"image {path!r}: the file is outside of the dataset; if you trust the dataset, pass --root {folder} (or "
            f"a folder above that holds all its images), call conjoin.data.allow_root() or set {ALLOW_ROOTS}",
        )
    return path


def path_inside(folder: Path, path: str, name: str) -> Path:
    """Return `folder / path`, for a path that a row or an archive names.

    Raises:
        ItemError: It is absolute or goes up.
    """
    if Path(path).is_absolute() or ".." in Path(path).parts:
        raise ItemError(name, f"the path {path!r} leaves the folder {str(folder)!r}")
    return folder / path


def is_uri(path: str) -> bool:
    """Whether a path is a URL or a data URI."""
    return "://" in path or path.startswith("data:")


def _allowed_roots() -> list[str]:
    return [root for root in os.environ.get(ALLOW_ROOTS, "").split(os.pathsep) if root]


def is_inside(path: str, folders: tuple[str, ...]) -> bool:
    """Whether a file is in some folders, symbolic links followed."""
    real = Path(os.path.realpath(path))
    return any(real.is_relative_to(folder) for folder in folders)


def is_picture(path: Path) -> bool:
    """Whether a file is a picture by its name."""
    return path.suffix.lower() in PICTURE_SUFFIXES


def interleave(text: str, images: Sequence[Any], name: str = "item") -> list[dict[str, Any]]:
    """Return a text with a placeholder for each of its images as a chat message.

    Args:
        text: The text; white space around a placeholder is dropped.
        images: As many as there are placeholders.
        name: Start of the error message.

    Raises:
        ItemError: There are fewer placeholders than images, or more.
    """
    check_placeholders(text, len(images), name)
    first, *others = (piece.strip() for piece in text.split(PLACEHOLDER))
    parts: list[dict[str, Any]] = [{"type": "text", "text": first}]
    for image, piece in zip(images, others, strict=True):
        parts += [{"type": "image_url", "image_url": {"url": image}}, {"type": "text", "text": piece}]
    return [{"role": "user", "content": [part for part in parts if part.get("text") != ""]}]


def check_placeholders(text: str, count: int, name: str = "item") -> None:
    """Refuse a text with another number of placeholders than there are images.

    Raises:
        ItemError: It has.
    """
    placeholders = text.count(PLACEHOLDER)
    if placeholders != count:
        raise ItemError(
            name,
            f"{placeholders} placeholders {PLACEHOLDER} in the text, but {count} images; expected one for each image "
            "(or none: then the images come first)",
        )


def row_item(parts: Mapping[str, Any], name: str = "item") -> Any:
    """Return the image and the text of a row, in this order, as an item.

    It is interleaved if there are a list of images and placeholders.

    Raises:
        ItemError: As `interleave`.
    """
    image, text = parts.get("image"), parts.get("text")
    if is_interleaved(image, text):
        return interleave(str(text), image or (), name)
    return {part: value for part, value in sorted(parts.items()) if value is not None}


def is_interleaved(image: Any, text: Any) -> bool:
    """Whether a row has a list of images and a text with placeholders."""
    return isinstance(image, list | tuple) and isinstance(text, str) and PLACEHOLDER in text


def plain_text(image: Any, text: str) -> str:
    """Return the text of a row without its placeholders."""
    return " ".join(text.replace(PLACEHOLDER, " ").split()) if is_interleaved(image, text) else text


def map_images(change: Callable[[Any], Any], image: Any) -> Any:
    """Return what `change` makes of the image of a row, or of each of its list of images."""
    return [change(each) for each in image] if isinstance(image, list | tuple) else change(image)
