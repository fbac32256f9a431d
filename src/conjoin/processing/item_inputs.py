"""Checks and normalisation of the items that users pass.

An item is a string, a PIL image, a path to an image, `{"text": ..., "image": ...}`, or a chat message (or a list of
messages) whose content interleaves texts and images: exactly what sentence-transformers accepts. Everything else
raises an error that names the item.

Every saved checkpoint contains this file, so it imports nothing of this package.
"""

import base64
import binascii
import http.client
import io
import os
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

EMPTY_TEXTS = ("error", "embed")
"""What to do with an empty text; see `parse_item`."""

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".gif", ".bmp", ".tiff", ".tif", ".webp")
VIDEO_SUFFIXES = (".avi", ".m4v", ".mkv", ".mov", ".mp4", ".webm")
_NO_VIDEO = "videos cannot be read; pass some of the frames as images"
MAX_IMAGE_PIXELS = 89_478_485
"""Images with more pixels raise an error before decoding (Pillow's own decompression-bomb limit)."""

_ORIENTATION = 0x0112
"""The EXIF tag of the orientation; 1 is upright."""

_FETCH_SECONDS = 30

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


def parse_items(values: Sequence[Any], ids: Sequence[str] | None = None, empty_text: str = "error") -> list[Item]:
    """Check and normalise a list of items.

    Args:
        values: The items, as the user passed them.
        ids: Names to report in error messages beside the position.
        empty_text: As for `parse_item`.

    Raises:
        TypeError: `values` is a single item rather than a list.
        ValueError: An item is empty, ambiguous, of an unknown kind, or holds an unreadable image.
        FileNotFoundError: An image path does not exist. A bare string without white space that ends like an image
            file counts as a path; pass it as `{"text": ...}` if it is a text.
    """
    if isinstance(values, str | bytes | Mapping | Image.Image):
        raise TypeError(f"expected a list of items, got one {type(values).__name__}; wrap it in a list")
    return [
        parse_item(value, f"item {index}" + (f" (id {ids[index]!r})" if ids is not None else ""), empty_text)
        for index, value in enumerate(values)
    ]


def parse_item(value: Any, name: str = "item", empty_text: str = "error") -> Item:  # noqa: ANN401
    """Check and normalise one item.

    Args:
        value: The item, as the user passed it.
        name: Start of every error message.
        empty_text: `"error"` rejects an item with an empty text. `"embed"` drops empty texts beside other parts and
            keeps one of an item that has nothing else.
    """
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
        parts = [load_image(value, name) if _names_an_image(value, name) else _check_unicode(value, name)]
    elif isinstance(value, Image.Image | os.PathLike):
        parts = [load_image(value, name)]
    else:
        raise ValueError(f"{name}: {_describe(value)} is not an item; expected {_EXPECTED}")
    is_chat = isinstance(value, list | tuple) or (isinstance(value, Mapping) and "role" in value)
    parts = _without_blanks(parts, name, empty_text, is_chat)
    if not parts:
        raise ValueError(f"{name}: {_describe(value)} has neither text nor image")
    return Item(tuple(parts))


def _without_blanks(
    parts: list[str | Image.Image], name: str, empty_text: str, is_chat: bool
) -> list[str | Image.Image]:
    """Apply `empty_text` of `parse_item`; chat messages may hold empty strings beside other parts."""
    if empty_text == "embed":
        filled = [part for part in parts if not isinstance(part, str) or part.strip()]
        return filled or [""] * bool(parts)
    for part in parts:
        if isinstance(part, str) and not (is_chat and part == ""):
            check_text(part, name)
    return [part for part in parts if part != ""]


def check_text(text: Any, name: str = "item") -> str:  # noqa: ANN401
    """Return `text` if it can be embedded.

    Raises:
        ValueError: Not a string, empty, only white space, or not valid Unicode (a lone surrogate).
    """
    if not _check_unicode(text, name).strip():
        raise ValueError(f"{name}: text is empty or only white space ({text[:20]!r}); leave it out instead")
    return text


def _check_unicode(text: Any, name: str) -> str:  # noqa: ANN401
    if not isinstance(text, str):
        raise ValueError(f"{name}: text must be a string, got {_describe(text)}")
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
        name: Start of every error message.

    Raises:
        FileNotFoundError: The path does not exist.
        ValueError: Unreadable, truncated, or larger than `MAX_IMAGE_PIXELS`.
    """
    data, label = _find_image(source, name)
    try:
        image = data if isinstance(data, Image.Image) else Image.open(io.BytesIO(data))
        width, height = image.size
        rgb = to_rgb(image) if 0 < width * height <= MAX_IMAGE_PIXELS else None
    except UnidentifiedImageError as error:
        raise ValueError(f"{label}: cannot read the image, its format is unknown") from error
    except Image.DecompressionBombError as error:
        raise ValueError(f"{label}: image is over the limit of {MAX_IMAGE_PIXELS} pixels") from error
    except Exception as error:  # decoders raise many kinds on damaged files
        raise ValueError(f"{label}: cannot read the image, it is truncated or damaged ({error})") from error
    if rgb is None:
        raise ValueError(
            f"{label}: image of {width} x {height} pixels is empty, or over the limit of {MAX_IMAGE_PIXELS} pixels "
            "(a decompression bomb?)"
        )
    return rgb


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert any PIL image to RGB as a viewer would show it.

    Takes the first frame of an animation and applies the EXIF orientation. Transparent pixels become white; 16-bit and
    float greyscale is scaled to 8 bits rather than clipped.
    """
    image.seek(0)
    if image.mode == "RGB" and not image.has_transparency_data and image.getexif().get(_ORIENTATION, 1) == 1:
        image.load()
        return image
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith(("I", "F")):
        return _to_8_bit(image).convert("RGB")
    if not image.has_transparency_data:
        return image.convert("RGB")
    rgba = image.convert("LA" if image.mode == "La" else "RGBA").convert("RGBA")
    white = Image.new("RGBA", rgba.size, "white")
    white.alpha_composite(rgba)
    return white.convert("RGB")


def _to_8_bit(image: Image.Image) -> Image.Image:
    """Scale greyscale of more than 8 bits to 0..255, transparent pixels to 255.

    The full range is 16 bits in mode I;16, 8 or 16 bits in mode I, and 0..1 or 0..255 for floats: the smallest that
    holds all values, or their maximum.
    """
    values = np.asarray(image).astype(np.float64)
    peak = values.max()
    if not np.isfinite(values).all():
        raise ValueError("pixel values are not finite")
    limits = (65535,) if image.mode.startswith("I;16") else (255, 65535) if image.mode == "I" else (1, 255)
    full = next((limit for limit in limits if peak <= limit), peak)
    levels = np.clip(np.rint(values * (255 / full)), 0, 255)
    levels[values == image.info.get("transparency", np.nan)] = 255
    return Image.fromarray(levels.astype(np.uint8))


def _find_image(source: Any, name: str) -> tuple[Image.Image | bytes, str]:  # noqa: ANN401
    """Return the image or its encoded bytes, and the name for error messages."""
    if isinstance(source, Mapping):
        data, path = source.get("bytes"), source.get("path")
        if data is None:
            return _find_image(path, name)
        source, name = data, f"{name}, image {path!r}" if path else name
    if isinstance(source, Image.Image):
        return source, name
    if isinstance(source, bytes):
        data = source
    elif isinstance(source, str) and source.startswith("data:image/"):
        data = _decode_base64(source.partition(",")[2], name)
    elif isinstance(source, str | os.PathLike):
        name = f"{name}, image {os.fspath(source)!r}"
        data = _fetch(str(source), name) if _is_url(source) else _read_file(source, name)
    else:
        raise ValueError(f"{name}: {_describe(source)} is not an image; expected a PIL image, a path, a URL or bytes")
    if not data:
        raise ValueError(f"{name}: the image has zero bytes")
    return data, name


def _decode_base64(text: str, name: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"{name}: the image is not valid base64 ({error})") from error


def _read_file(path: str | os.PathLike[str], name: str) -> bytes:
    if not os.path.isfile(path):
        raise FileNotFoundError(f"{name}: no such file")
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"{name}: cannot read the file ({error})") from error


def _is_url(source: str | os.PathLike[str]) -> bool:
    return isinstance(source, str) and source.startswith(("http://", "https://"))


def _fetch(url: str, name: str) -> bytes:
    request = urllib.request.Request(url, headers={"User-Agent": "Mozilla/5.0 (compatible; conjoin)"})
    try:
        with urllib.request.urlopen(request, timeout=_FETCH_SECONDS) as response:
            return response.read()
    except (OSError, http.client.HTTPException) as error:
        raise ValueError(f"{name}: cannot fetch the image ({error})") from error


def _names_an_image(text: str, name: str) -> bool:
    """Whether a bare string is an image: a data URI, or a URL or existing file that ends like an image file.

    Raises:
        FileNotFoundError: It looks like a file name, but there is no such file.
        ValueError: It looks like a video.
    """
    if text.startswith("data:image/"):
        return True
    is_one_word = len(text.split()) == 1
    if text.startswith("data:video/") or (is_one_word and text.lower().endswith(VIDEO_SUFFIXES)):
        raise ValueError(f'{name}: {_describe(text)} is a video: {_NO_VIDEO}; if this is a text, pass {{"text": ...}}')
    if not text.lower().endswith(IMAGE_SUFFIXES):
        return False
    if _is_url(text) or os.path.isfile(text):
        return True
    if is_one_word:
        raise FileNotFoundError(f'{name}: no such file: {text!r}; if this is a text, not a path, pass {{"text": ...}}')
    return False


def _dict_parts(value: Mapping[Any, Any], name: str) -> list[str | Image.Image]:
    if "video" in value:
        raise ValueError(f"{name}: {_NO_VIDEO}")
    unknown = sorted(str(key) for key in value if key not in ("text", "image"))
    if unknown:
        raise ValueError(f'{name}: unknown keys {unknown}; expected "text" and/or "image"')
    parts: list[str | Image.Image] = []
    for key in value:  # the order of keys is the order of parts
        entries = value[key] if isinstance(value[key], list | tuple) else [value[key]]
        for entry in entries:
            if entry is not None:
                parts.append(load_image(entry, name) if key == "image" else _check_unicode(entry, name))
    return parts


def _messages_parts(value: Sequence[Any], name: str) -> list[str | Image.Image]:
    if not value or not all(isinstance(message, Mapping) and "role" in message for message in value):
        raise ValueError(
            f"{name}: a bare list is ambiguous (a pair? an interleaved item?): {_describe(value)}; "
            f"expected {_EXPECTED}"
        )
    return [part for message in value for part in _message_parts(message, name)]


def _message_parts(message: Mapping[Any, Any], name: str) -> list[str | Image.Image]:
    content = message.get("content")
    if isinstance(content, str):
        return [_check_unicode(content, name)]
    if not isinstance(content, list | tuple):
        raise ValueError(f"{name}: message content must be a string or a list of parts, got {_describe(content)}")
    return [part for entry in content for part in _content_parts(entry, name)]


def _content_parts(entry: Any, name: str) -> list[str | Image.Image]:  # noqa: ANN401
    if isinstance(entry, str):
        return [_check_unicode(entry, name)]
    kind = entry.get("type") if isinstance(entry, Mapping) else None
    if kind == "text":
        return [] if entry.get("text") is None else [_check_unicode(entry["text"], name)]
    if kind == "image":
        is_absent = "image" in entry and entry["image"] is None  # `{"image": None}` in sentence-transformers
        return [] if is_absent else [_content_image(entry, name)]
    if kind == "image_url":
        url = entry.get("image_url")
        return [load_image(url.get("url") if isinstance(url, Mapping) else url, name)]
    if kind in ("video", "video_url"):
        raise ValueError(f"{name}: {_NO_VIDEO}")
    raise ValueError(f'{name}: unknown message part {_describe(entry)}; expected type "text" or "image"')


def _content_image(entry: Mapping[Any, Any], name: str) -> Image.Image:
    for key in ("image", "url", "path"):
        if entry.get(key) is not None:
            return load_image(entry[key], name)
    if entry.get("base64") is not None:
        return load_image(_decode_base64(entry["base64"].rpartition(",")[2], name), name)
    raise ValueError(f'{name}: a message part of type "image" has no "image", "url", "path" or "base64"')


def _describe(value: Any) -> str:  # noqa: ANN401
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 80 else text[:77] + '...'}"
