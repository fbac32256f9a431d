"""What a user may pass as an item, checked and brought to one form.

An item is a string, a PIL image, a path to an image, `{"text": ..., "image": ...}`, or a chat message (or a list of
messages) whose content interleaves texts and images: exactly what sentence-transformers accepts. Everything else is
an error that names the item.

This file travels with every saved checkpoint, so it imports nothing of this package.
"""

import base64
import binascii
import io
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image, ImageOps, UnidentifiedImageError


IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".gif", ".bmp", ".tiff", ".tif", ".webp")
MAX_IMAGE_PIXELS = 89_478_485
"""Images with more pixels than this are refused before they are decoded (Pillow's own decompression-bomb limit)."""

_EXPECTED = (
    'a string, a PIL image, an image path, {"text": ..., "image": ...}, a chat message {"role": ..., "content": ...} '
    "or a list of chat messages"
)


class Item(NamedTuple):
    """One normalised item: its parts in reading order, each a non-empty string or an RGB image."""

    parts: tuple[str | Image.Image, ...]

    @property
    def images(self) -> list[Image.Image]:
        """The images, in order."""
        return [part for part in self.parts if not isinstance(part, str)]

    @property
    def texts(self) -> list[str]:
        """The texts, in order."""
        return [part for part in self.parts if isinstance(part, str)]

    @property
    def modality(self) -> str:
        """`"text"`, `"image"` or `"image,text"`, the names that M-BEIR uses."""
        return ",".join(name for name, found in (("image", self.images), ("text", self.texts)) if found)


def parse_items(values: Sequence[Any], ids: Sequence[str] | None = None) -> list[Item]:
    """Check and normalise a list of items.

    Args:
        values: The items, as the user passed them.
        ids: Names to report in error messages beside the position.

    Raises:
        TypeError: `values` is a single item rather than a list.
        ValueError: An item is empty, ambiguous, of an unknown kind, or holds an unreadable image.
        FileNotFoundError: An image path does not exist.
    """
    if isinstance(values, str | bytes | Mapping | Image.Image):
        raise TypeError(f"expected a list of items, got one {type(values).__name__}; wrap it in a list")
    return [
        parse_item(value, f"item {index}" + (f" (id {ids[index]!r})" if ids is not None else ""))
        for index, value in enumerate(values)
    ]


def parse_item(value: Any, name: str = "item") -> Item:  # noqa: ANN401 - anything may be passed, that is the point
    """Check and normalise one item; `name` stands in front of every error message."""
    if isinstance(value, Mapping):
        if "role" in value:
            parts = _message_parts(value, name)
        elif "bytes" in value or "path" in value:
            parts = [load_image(value, name)]
        else:
            parts = _dict_parts(value, name)
    elif isinstance(value, list | tuple):
        parts = _messages_parts(value, name)
    elif isinstance(value, str):
        parts = [load_image(value, name) if _names_an_image(value) else check_text(value, name)]
    elif isinstance(value, Image.Image | os.PathLike):
        parts = [load_image(value, name)]
    else:
        raise ValueError(f"{name}: {_describe(value)} is not an item; expected {_EXPECTED}")
    if not parts:
        raise ValueError(f"{name}: {_describe(value)} has neither text nor image")
    return Item(tuple(parts))


def check_text(text: Any, name: str = "item") -> str:  # noqa: ANN401
    """Return `text` if it can be embedded.

    Raises:
        ValueError: Not a string, empty, only white space, or not valid Unicode (a lone surrogate).
    """
    if not isinstance(text, str):
        raise ValueError(f"{name}: text must be a string, got {_describe(text)}")
    if not text.strip():
        raise ValueError(f"{name}: text is empty or only white space ({text[:20]!r}); leave it out instead")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name}: text holds a lone surrogate {text[error.start]!r} at position {error.start}: not valid Unicode"
        ) from error
    return text


def load_image(source: Any, name: str = "item") -> Image.Image:  # noqa: ANN401
    """Open `source` and return it as an upright RGB image on white.

    Args:
        source: A PIL image, a path, a URL, a `data:image/` URI, raw bytes, or `{"bytes": ..., "path": ...}` as
            `datasets.Image(decode=False)` gives.
        name: Stands in front of every error message.

    Raises:
        FileNotFoundError: The path does not exist.
        ValueError: Unreadable, truncated, or larger than `MAX_IMAGE_PIXELS`.
    """
    label = name
    try:
        image, label = _open_image(source, name)
        width, height = image.size
        if width * height > MAX_IMAGE_PIXELS:
            raise ValueError(
                f"{label}: image of {width} x {height} pixels is over the limit of {MAX_IMAGE_PIXELS} pixels "
                "(decompression bomb?); resize it first"
            )
        return to_rgb(image)
    except UnidentifiedImageError as error:
        raise ValueError(f"{label}: cannot read the image, its content is of no known image format") from error
    except Image.DecompressionBombError as error:
        raise ValueError(f"{label}: image is over the limit of {MAX_IMAGE_PIXELS} pixels: {error}") from error
    except (OSError, SyntaxError, EOFError) as error:
        if isinstance(error, FileNotFoundError):
            raise
        raise ValueError(f"{label}: cannot read the image, it is truncated or damaged ({error})") from error


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert any PIL image to RGB as a viewer would show it.

    The first frame of an animation, turned upright by its EXIF orientation; transparent pixels become white;
    16-bit and float greyscale is scaled to 8 bits rather than clipped.
    """
    if image.mode == "RGB" and "transparency" not in image.info and not image.getexif():
        image.load()
        return image
    if getattr(image, "is_animated", False):
        image.seek(0)
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I") or image.mode == "F":
        image = _to_8_bit(image)
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        rgba = image.convert("RGBA")
        image = Image.new("RGBA", rgba.size, "white")
        image.alpha_composite(rgba)
    return image.convert("RGB")


def _to_8_bit(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I;16"):
        image = image.convert("I")
    low, high = image.getextrema()
    peak = float(high)  # type: ignore[arg-type]
    # An "I" image is 16-bit data in 32-bit cells; floats are taken as 0..1 unless they go above it.
    full = (65535.0 if peak > 255 else 255.0) if image.mode == "I" else (1.0 if peak <= 1 else 255.0)
    if not math.isfinite(peak) or not math.isfinite(float(low)):  # type: ignore[arg-type]
        raise OSError("pixel values are not finite")
    return image.point(lambda value: value * (255.0 / full)).convert("L")


def _open_image(source: Any, name: str) -> tuple[Image.Image, str]:  # noqa: ANN401
    """Open without decoding; returns the image and the name to report."""
    if isinstance(source, Mapping):
        data, path = source.get("bytes"), source.get("path")
        source = data if data is not None else path
        name = f"{name}, image {path!r}" if path and data is not None else name
    if isinstance(source, Image.Image):
        return source, name
    if isinstance(source, bytes):
        if not source:
            raise ValueError(f"{name}: the image has zero bytes")
        return Image.open(io.BytesIO(source)), name
    if isinstance(source, str) and source.startswith("data:image/"):
        try:
            return Image.open(io.BytesIO(base64.b64decode(source.partition(",")[2], validate=True))), name
        except binascii.Error as error:
            raise ValueError(f"{name}: the data URI is not valid base64") from error
    if isinstance(source, str) and source.startswith(("http://", "https://")):
        from transformers.image_utils import load_image as fetch_image

        return fetch_image(source), f"{name}, image {source!r}"
    if isinstance(source, str | os.PathLike):
        path = Path(source)
        label = f"{name}, image {str(path)!r}"
        if not path.exists():
            raise FileNotFoundError(f"{label}: no such file")
        if path.is_file() and path.stat().st_size == 0:
            raise ValueError(f"{label}: the file has zero bytes")
        return Image.open(path), label
    raise ValueError(f"{name}: {_describe(source)} is not an image; expected a PIL image, a path, a URL or bytes")


def _names_an_image(text: str) -> bool:
    """Whether a bare string is an image, by the rule of sentence-transformers: a URL or existing file with a suffix."""
    if text.startswith("data:image/"):
        return True
    if len(text) > 4096 or not text.lower().endswith(IMAGE_SUFFIXES):
        return False
    return text.startswith(("http://", "https://")) or os.path.isfile(text)


def _dict_parts(value: Mapping[Any, Any], name: str) -> list[str | Image.Image]:
    unknown = sorted(str(key) for key in value if key not in ("text", "image"))
    if unknown:
        raise ValueError(f'{name}: unknown keys {unknown}; expected "text" and/or "image"')
    parts: list[str | Image.Image] = []
    for key in value:  # the order of the keys is the order of the parts
        entries = value[key] if isinstance(value[key], list | tuple) else [value[key]]
        for entry in entries:
            if entry is not None:
                parts.append(load_image(entry, name) if key == "image" else check_text(entry, name))
    return parts


def _messages_parts(value: Sequence[Any], name: str) -> list[str | Image.Image]:
    if not value or not all(isinstance(message, Mapping) and "role" in message for message in value):
        raise ValueError(
            f"{name}: a bare list is ambiguous (a pair? an interleaved item?): {_describe(value)}; expected {_EXPECTED}"
        )
    return [part for message in value for part in _message_parts(message, name)]


def _message_parts(message: Mapping[Any, Any], name: str) -> list[str | Image.Image]:
    content = message.get("content")
    if isinstance(content, str):
        return [check_text(content, name)] if content else []
    if not isinstance(content, list | tuple):
        raise ValueError(f"{name}: message content must be a string or a list of parts, got {_describe(content)}")
    return [part for entry in content for part in _content_parts(entry, name)]


def _content_parts(entry: Any, name: str) -> list[str | Image.Image]:  # noqa: ANN401
    if isinstance(entry, str):
        return [check_text(entry, name)] if entry else []
    kind = entry.get("type") if isinstance(entry, Mapping) else None
    if kind == "text":
        return [check_text(entry["text"], name)] if entry.get("text") else []
    if kind == "image":
        for key in ("image", "url", "path", "base64"):
            if entry.get(key) is not None:
                return [load_image(entry[key], name)]
        raise ValueError(f'{name}: a message part of type "image" has no "image", "url" or "path"')
    if kind == "image_url":
        url = entry["image_url"]
        return [load_image(url["url"] if isinstance(url, Mapping) else url, name)]
    raise ValueError(f'{name}: unknown message part {_describe(entry)}; expected type "text" or "image"')


def _describe(value: Any) -> str:  # noqa: ANN401
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 80 else text[:77] + '...'}"
