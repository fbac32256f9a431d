"""Items: what users pass to a processor, checked and normalised.

An item is a string, an image (PIL, array or tensor), a path to an image, `{"text": ..., "image": ...}`, or a chat
message (or a list of messages) whose content interleaves texts and images: exactly what sentence-transformers accepts.
Everything else raises an error that names the item.

Every saved checkpoint contains this file, so it imports nothing of this package outside its folder.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from PIL import Image
from torch import Tensor

from .item_error import ItemError, MissingFileError
from .item_images import DATA_URIS, MAX_HEIGHT, concatenate_images, decode_base64, describe, is_url, load_image

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".gif", ".bmp", ".tiff", ".tif", ".webp")
"""How the names of image files end, of the common formats."""
PICTURE_SUFFIXES = (
    *IMAGE_SUFFIXES,
    ".apng", ".avif", ".avifs", ".dds", ".ico", ".j2k", ".jfif", ".jp2", ".jpe", ".jpx", ".jxl", ".pbm",
    ".pgm", ".pnm", ".ppm", ".psd", ".qoi", ".svg", ".svgz", ".tga", ".heic", ".heif", ".hif",
    ".arw", ".cr2", ".cr3", ".dng", ".nef", ".orf", ".raf", ".rw2",
)  # fmt: skip
"""How the names of picture files end, of formats that Pillow reads or not."""
_VIDEO_SUFFIXES = (".avi", ".m4v", ".mkv", ".mov", ".mp4", ".webm")
_EXPECTED = (
    'a string, an image (PIL, array or tensor), an image path, {"text": ..., "image": ...}, a chat message '
    '{"role": ..., "content": ...} or a list of chat messages'
)
CHARACTERS_PER_TOKEN, MAX_CHARACTERS = 64, 2**22
"""How much of a text is read: so many characters for each token that a model takes, and never more than these."""
_EXPECTED_PART = 'expected type "text", or type "image" with "image", "url", "path" or "base64"'


class Item(NamedTuple):
    """One normalised item: its parts in reading order, each a non-empty string or an RGB image (or what reads it)."""

    parts: tuple[Any, ...]

    @property
    def images(self) -> list[Any]:
        """The images, in order."""
        return [part for part in self.parts if not isinstance(part, str)]

    @property
    def texts(self) -> list[str]:
        """The texts, in order."""
        return [part for part in self.parts if isinstance(part, str)]

    @property
    def modality(self) -> str:
        """`"text"`, `"image"` or `"image,text"`, the names that M-BEIR uses."""
        return ",".join(name for name, parts in (("image", self.images), ("text", self.texts)) if parts)

    def shortened(self, limit: int | None) -> "Item":
        """Cut the texts to what may become `limit` tokens: a tokenizer takes seconds and gigabytes for long ones."""
        end = MAX_CHARACTERS if limit is None else min(CHARACTERS_PER_TOKEN * limit, MAX_CHARACTERS)
        if all(len(text) <= end for text in self.texts):
            return self
        return Item(tuple(type(part)(part[:end]) if isinstance(part, str) else part for part in self.parts))


class ImageSource(NamedTuple):
    """An image of an item, not read yet."""

    source: Any


class SystemText(str):
    """A text of a system message: the instruction of a model that follows instructions, else a text like others."""


def parse_items(
    values: Sequence[Any],
    ids: Sequence[str | int] | None = None,
    read: Callable[[Any, str], Any] = load_image,
    input_type: str = "seq",
) -> list[Item]:
    """Check and normalise a list of items.

    Args:
        values: The items, as the user passed them.
        ids: Names to report in error messages instead of positions.
        read: Called with the source of each image and the item's name. What it returns is the image of the item, so
            that a batch need not hold all images at their full size.
        input_type: As for `parse_item`.

    Raises:
        TypeError: `values` is a single item rather than a list.
        ItemError: An item is empty, ambiguous, of an unknown kind, or holds an unreadable image.
        MissingFileError: An image path does not exist. A bare string without white space that ends like an image
            file counts as a path; pass it as `{"text": ...}` if it is a text.
    """
    check_list(values)
    names = item_names(len(values), ids)
    return [parse_item(value, name, read, input_type) for value, name in zip(values, names, strict=True)]


def item_names(count: int, ids: Sequence[str | int] | None = None) -> list[str]:
    """Return what messages call items: `item 'a'` by their ids, else `item 0`."""
    return [f"item {each!r}" for each in (range(count) if ids is None else ids)]


def is_one_item(value: Any) -> bool:
    """Whether a value is an item rather than a list of them; a list of chat messages is one conversation."""
    is_array = isinstance(value, Tensor) or (isinstance(value, np.ndarray) and value.dtype.kind in "buif")
    is_conversation = isinstance(value, list) and bool(value) and isinstance(value[0], Mapping) and "role" in value[0]
    return is_array or is_conversation or isinstance(value, str | bytes | Mapping | Image.Image)


def check_list(values: Any) -> None:
    """Refuse a single item, or none, where a list of items is expected.

    Raises:
        TypeError: `values` is a single item.
        ValueError: There are no items.
    """
    if is_one_item(values) and not isinstance(values, list | tuple):
        raise TypeError(f"expected a list of items, got one {type(values).__name__}; wrap it in a list")
    if len(values) == 0:
        raise ValueError("expected a list of items, got an empty one")


def parse_item(
    value: Any, name: str = "item", read: Callable[[Any, str], Any] = load_image, input_type: str = "seq"
) -> Item:
    """Check and normalise one item.

    Args:
        value: The item, as the user passed it, or what this function made of it.
        name: Start of every error message.
        read: As for `parse_items`.
        input_type: `"seq"`: all parts in their order. `"cat"`: as `as_one_picture`.
    """
    if isinstance(value, Item):
        return value
    parts = check_parts(item_parts(value, name), name)
    if input_type == "cat":
        parts = as_one_picture(parts, name)
    return Item(tuple(read(part.source, name) if isinstance(part, ImageSource) else part for part in parts))


def as_one_picture(parts: list[Any], name: str) -> list[Any]:
    """Return the parts of an item with several images as one picture of all, then all texts joined by spaces.

    System messages stay before them.
    """
    sources = [part.source for part in parts if isinstance(part, ImageSource)]
    if len(sources) < 2:
        return parts
    picture = concatenate_images([load_image(source, name, MAX_HEIGHT) for source in sources])
    system = [part for part in parts if isinstance(part, SystemText)]
    texts = [part for part in parts if isinstance(part, str) and not isinstance(part, SystemText)]
    return [*system, ImageSource(picture), *([" ".join(texts)] if texts else [])]


def check_parts(parts: Any, name: str) -> Any:
    """Return the parts of an item, if it has any.

    Raises:
        ItemError: It has neither text nor image.
    """
    if not parts:
        raise ItemError(name, "the item has neither text nor image")
    return parts


def item_parts(value: Any, name: str = "item") -> list[Any]:
    """Return the texts and the images (as `ImageSource`) of an item in their order.

    Raises:
        ItemError: The item is ambiguous or of an unknown kind, or a text cannot be embedded.
        MissingFileError: As for `parse_items`.
    """
    parts: list[Any]
    if isinstance(value, str):
        parts = [ImageSource(value) if _names_an_image(value, name) else value]
    elif is_chat(value):
        parts = _message_parts([value] if isinstance(value, Mapping) else value, name)
    elif isinstance(value, Mapping) and not {"bytes", "path"} & value.keys():
        if unknown := sorted(str(key) for key in value if key not in ("text", "image")):
            raise ItemError(name, f'unknown keys {unknown}; expected "text" and/or "image"')
        parts = [part for key in value for part in _parts_of_kind(key, value[key])]  # in the order of the keys
    elif isinstance(value, Mapping | Image.Image | os.PathLike | np.ndarray | Tensor):
        parts = [ImageSource(value)]
    else:
        raise ItemError(name, f"{describe(value)} is not an item; expected {_EXPECTED}")
    return [part if isinstance(part, ImageSource) else check_text(part, name) for part in parts]


def is_chat(value: Any) -> bool:
    """Whether an item is a chat message or a list of them."""
    return isinstance(value, list | tuple) or (isinstance(value, Mapping) and "role" in value)


def _names_an_image(text: str, name: str) -> bool:
    """Whether a bare string is an image: a data URI, or a URL or existing file that ends like an image (or a video).

    Raises:
        MissingFileError: It looks like a file name, but there is no such file.
    """
    ends_like_one = text.lower().endswith((*PICTURE_SUFFIXES, *_VIDEO_SUFFIXES))
    if text.startswith(DATA_URIS) or (ends_like_one and (is_url(text) or os.path.isfile(text))):
        return True
    if ends_like_one and len(text.split(maxsplit=1)) == 1:
        raise MissingFileError(name, f'no such file: {text!r}; if this is a text, not a path, pass {{"text": ...}}')
    return False


def _parts_of_kind(kind: str, values: Any) -> list[Any]:
    """Return one or several texts or images; what is None is not there."""
    present = [each for each in (values if isinstance(values, list | tuple) else [values]) if each is not None]
    return present if kind == "text" else [ImageSource(each) for each in present]


def _message_parts(messages: Sequence[Any], name: str) -> list[Any]:
    if not messages or not all(isinstance(message, Mapping) and "role" in message for message in messages):
        problem = "a bare list is ambiguous (a pair? an interleaved item?)"
        raise ItemError(name, f"{problem}: {describe(messages)}; expected {_EXPECTED}")
    parts: list[Any] = []
    for message in messages:
        content = message.get("content")
        if not isinstance(content, str | list | tuple):
            raise ItemError(name, f"message content must be a string or a list of parts, got {describe(content)}")
        for entry in [content] if isinstance(content, str) else content:
            for part in [entry] if isinstance(entry, str) else _content_parts(entry, name):
                is_system = message["role"] == "system" and isinstance(part, str)
                parts.append(SystemText(part) if is_system else part)
    return [part for part in parts if part != ""]  # the library's messages may hold empty texts


def _content_parts(entry: Any, name: str) -> list[Any]:
    kind = entry.get("type") if isinstance(entry, Mapping) else None
    if kind == "image_url":
        url = entry.get("image_url")
        return [ImageSource(url.get("url") if isinstance(url, Mapping) else url)]
    if kind == "text" or (kind == "image" and "image" in entry):
        return _parts_of_kind(kind, entry.get(kind))
    for key in ("base64", "url", "path") if kind == "image" else ():
        source = entry.get(key)
        if source:
            return [ImageSource(decode_base64(str(source).rpartition(",")[2], name) if key == "base64" else source)]
    raise ItemError(name, f"message part {describe(entry)}; {_EXPECTED_PART}")


def may_have_image(value: Any) -> bool:
    """Whether reading an item may mean to decode an image."""
    if isinstance(value, str):
        return value.startswith(DATA_URIS) or value.lower().endswith(PICTURE_SUFFIXES)
    return not (isinstance(value, Mapping) and "text" in value and value.get("image") is None)


def check_text(text: Any, name: str = "item") -> str:
    """Return `text` if it can be embedded.

    Raises:
        ItemError: Not a string, empty, only white space, or not valid Unicode (a lone surrogate).
    """
    if not check_unicode(text, name).strip():
        raise ItemError(name, f"text is empty or only white space ({text[:20]!r}); leave it out instead")
    return text


def check_unicode(text: Any, name: str) -> str:
    """Return `text` if it is valid Unicode.

    Raises:
        ItemError: Not a string, or it holds a lone surrogate.
    """
    if not isinstance(text, str):
        raise ItemError(name, f"text must be a string, got {describe(text)}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ItemError(name, f"text is not valid Unicode: {error}") from error
    return text
