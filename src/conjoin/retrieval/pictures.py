"""The pictures of rows: thumbnails that a collection keeps, or the files that it names.

A collection may come from a stranger, and what shows its pictures publishes them. So its rows may name files of its
own folder, and of the folders that the user allowed (`conjoin.data.allow_root`, `--root`).
"""

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from PIL import Image

from conjoin.data.row_images import check_image_path, folders_beside, map_images
from conjoin.processing.item_images import concatenate_images, load_image

_QUALITY = 85


def load_picture(image: Any, name: str = "item") -> Image.Image:  # noqa: ANN401 - an image or several
    """Read an image; several are shown as one, as input type `cat` makes it.

    Raises:
        FileNotFoundError: As `load_image`.
        ValueError: As `load_image`.
    """
    several = image if isinstance(image, list | tuple) else [image]
    pictures = [load_image(single, name) for single in several]
    return pictures[0] if len(pictures) == 1 else concatenate_images(pictures)


def picture_folders(uri: str | Path) -> tuple[str, ...]:
    """The folders whose files the rows of the collection at `uri` may name as their pictures."""
    return folders_beside(None if "://" in str(uri) else uri)


def check_pictures(image: Any, folders: tuple[str, ...], name: str) -> None:  # noqa: ANN401 - an image or several
    """Make sure that a row names files of some folders, or URLs where these are allowed.

    Raises:
        OutsideError: It names another file; the message starts with `name`.
        ValueError: It names a URL, and URLs are not allowed.
    """
    map_images(lambda path: check_image_path(path, folders, name), image)


def make_thumbnail(image: Any, side: int, name: str) -> bytes:  # noqa: ANN401 - an image or several
    """A JPEG file of an image or of several, at most `side` pixels wide and high."""
    picture = load_picture(image, name).convert("RGB")
    picture.thumbnail((side, side))
    file = io.BytesIO()
    picture.save(file, "JPEG", quality=_QUALITY)
    return file.getvalue()


def has_picture(row: Mapping[str, Any]) -> bool:
    """Whether a row of a collection has a picture or names one."""
    return bool(row.get("picture") or row.get("image"))


def read_picture(row: Mapping[str, Any], folders: tuple[str, ...], name: str = "item") -> Image.Image:
    """The picture of a row that `Collection.rows` gave: its thumbnail if it has one, else the files that it names.

    Args:
        row: With `"picture"` or `"image"`.
        folders: Where these files may be; see `picture_folders`.
        name: Start of every error message.

    Raises:
        FileNotFoundError: As `load_image`.
        ValueError: As `load_image`, or a file is in none of the folders.
    """
    if thumbnail := row.get("picture"):
        return load_picture(thumbnail, name)
    check_pictures(row["image"], folders, name)
    return load_picture(row["image"], name)
