"""The pictures of rows: thumbnails that a collection keeps, or the files that it names."""

import io
from collections.abc import Mapping
from typing import Any

from PIL import Image

from conjoin.processing.input_types import concatenate_images
from conjoin.processing.item_images import load_image

_QUALITY = 85


def load_picture(image: Any, name: str = "item") -> Image.Image:  # noqa: ANN401 - an image or several
    """Read an image; several are shown as one, as input type `cat` makes it.

    Raises:
        FileNotFoundError: As `load_image`.
        ValueError: As `load_image`.
    """
    several = image if isinstance(image, list | tuple) else [image]
    pictures = [load_image(one, name) for one in several]
    return pictures[0] if len(pictures) == 1 else concatenate_images(pictures)


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


def read_picture(row: Mapping[str, Any], name: str = "item") -> Image.Image:
    """The picture of a row that `Collection.rows` gave: its thumbnail if it has one, else the files that it names.

    Raises:
        FileNotFoundError: As `load_image`.
        ValueError: As `load_image`.
    """
    return load_picture(row.get("picture") or row["image"], name)
