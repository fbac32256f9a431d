"""Checks and normalisation of what users pass to a processor: the items, and the options of its call.

An item is a string, an image (PIL, array or tensor), a path to an image, `{"text": ..., "image": ...}`, or a chat
message (or a list of messages) whose content interleaves texts and images: exactly what sentence-transformers accepts.
Everything else raises an error that names the item.

Every saved checkpoint contains this file, so it imports nothing of this package outside its folder.
"""

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from .item_error import ItemError, MissingFileError
from .item_images import decode_base64, describe, is_url, load_image

logger = logging.get_logger(__name__)
_file_names = itertools.count(1)
_cut_texts: WeakKeyDictionary[PreTrainedTokenizerBase, int] = WeakKeyDictionary()
EMPTY_TEXTS = ("error", "embed")
"""What to do with an empty text; see `parse_item`."""
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".gif", ".bmp", ".tiff", ".tif", ".webp")
"""Of a bare string that is an image file, not a text."""
PICTURE_SUFFIXES = (
    *IMAGE_SUFFIXES,
    ".apng", ".avif", ".avifs", ".dds", ".ico", ".j2k", ".jfif", ".jp2", ".jpe", ".jpx", ".jxl", ".pbm",
    ".pgm", ".pnm", ".ppm", ".psd", ".qoi", ".svg", ".svgz", ".tga", ".heic", ".heif", ".hif",
    ".arw", ".cr2", ".cr3", ".dng", ".nef", ".orf", ".raf", ".rw2",
)  # fmt: skip
"""How the names of picture files end, of formats that Pillow reads or not."""
VIDEO_SUFFIXES = (".avi", ".m4v", ".mkv", ".mov", ".mp4", ".webm")
_NO_VIDEO = "videos cannot be read; pass some of the frames as images"
MAX_TEXT_CHARACTERS = 1_000_000
"""Longer texts are cut before they are tokenised, unless the tokenizer's limit calls for more."""
_CHARACTERS_PER_TOKEN = 16
_NO_LIMIT = 10**9
"""Tokenizers without a limit have a huge one, which their own code cannot read."""
_EXPECTED = (
    'a string, an image (PIL, array or tensor), an image path, {"text": ..., "image": ...}, a chat message '
    '{"role": ..., "content": ...} or a list of chat messages'
)
Parts = TypeVar("Parts", list[Any], dict[str, Any])
OFF = (False, "do_not_pad", "do_not_truncate")
"""Values of `padding` and `truncation` that switch them off; all others leave them to the processor."""


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


class ImageSource(NamedTuple):
    """An image of an item, not read yet."""

    source: Any


def parse_items(
    values: Sequence[Any],
    ids: Sequence[str | int] | None = None,
    empty_text: str = "error",
    read: Callable[[Any, str], Any] = load_image,
) -> list[Item]:
    """Check and normalise a list of items.

    Args:
        values: The items, as the user passed them.
        ids: Names to report in error messages instead of positions.
        empty_text: As for `parse_item`.
        read: Called with the source of each image and the item's name. What it returns is the image of the item, so
            that a batch need not hold all images at their full size.

    Raises:
        TypeError: `values` is a single item rather than a list.
        ItemError: An item is empty, ambiguous, of an unknown kind, or holds an unreadable image.
        MissingFileError: An image path does not exist. A bare string without white space that ends like an image
            file counts as a path; pass it as `{"text": ...}` if it is a text.
    """
    check_list(values)
    names = item_names(len(values), ids)
    return [parse_item(value, name, empty_text, read) for value, name in zip(values, names, strict=True)]


def item_names(count: int, ids: Sequence[str | int] | None = None) -> list[str]:
    """Return what messages call items: `item 'a'` by their ids, else `item 0`."""
    return [f"item {each!r}" for each in (range(count) if ids is None else ids)]


def check_list(values: Any) -> None:  # noqa: ANN401
    """Refuse a single item where a list of items is expected.

    Raises:
        TypeError: `values` is a single item.
    """
    is_array = isinstance(values, Tensor) or (isinstance(values, np.ndarray) and values.dtype.kind in "buif")
    if is_array or isinstance(values, str | bytes | Mapping | Image.Image):
        raise TypeError(f"expected a list of items, got one {type(values).__name__}; wrap it in a list")


def parse_item(
    value: Any,  # noqa: ANN401
    name: str = "item",
    empty_text: str = "error",
    read: Callable[[Any, str], Any] = load_image,
) -> Item:
    """Check and normalise one item.

    Args:
        value: The item, as the user passed it.
        name: Start of every error message.
        empty_text: `"error"` rejects an item with an empty text. `"embed"` drops empty texts beside other parts and
            keeps one of an item that has nothing else.
        read: As for `parse_items`.
    """
    parts = item_parts(value, name)
    is_chat = isinstance(value, list | tuple) or (isinstance(value, Mapping) and "role" in value)
    parts = _without_blanks(parts, name, empty_text, is_chat)
    check_parts(parts, name)
    return Item(tuple(read(part.source, name) if isinstance(part, ImageSource) else part for part in parts))


def check_parts(parts: Parts, name: str) -> Parts:
    """Return the parts of an item, if it has any.

    Raises:
        ItemError: It has neither text nor image.
    """
    if not parts:
        raise ItemError(name, "the item has neither text nor image")
    return parts


def item_parts(value: Any, name: str = "item") -> list[str | ImageSource]:  # noqa: ANN401
    """Return the texts and the images of an item in their order: images unread, empty texts included.

    Raises:
        ValueError: The item is ambiguous or of an unknown kind; the message starts with `name`.
        FileNotFoundError: As for `parse_items`.
    """
    if isinstance(value, str):
        return [ImageSource(value) if _names_an_image(value, name) else check_unicode(value, name)]
    if isinstance(value, Mapping):
        if "role" in value:
            return _message_parts(value, name)
        return [ImageSource(value)] if "bytes" in value or "path" in value else _dict_parts(value, name)
    if isinstance(value, list | tuple):
        return _messages_parts(value, name)
    if isinstance(value, Image.Image | os.PathLike | np.ndarray | Tensor):
        return [ImageSource(value)]
    raise ItemError(name, f"{describe(value)} is not an item; expected {_EXPECTED}")


def _without_blanks(
    parts: list[str | ImageSource], name: str, empty_text: str, is_chat: bool
) -> list[str | ImageSource]:
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
    if not check_unicode(text, name).strip():
        raise ItemError(name, f"text is empty or only white space ({text[:20]!r}); leave it out instead")
    return text


def check_unicode(text: Any, name: str) -> str:  # noqa: ANN401
    """Return `text` if it is valid Unicode.

    Raises:
        ValueError: Not a string, or it holds a lone surrogate.
    """
    if not isinstance(text, str):
        raise ItemError(name, f"text must be a string, got {describe(text)}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ItemError(
            name, f"text holds a lone surrogate {text[error.start]!r} at position {error.start}: not valid Unicode"
        ) from error
    return text


def cut_text(text: str, tokenizer: PreTrainedTokenizerBase, limit: int, name: str = "item") -> str:
    """Drop the end of a long text, far behind its first `limit` tokens, so that it need not be tokenised.

    The text that is left has at least `2 * limit` tokens, so the first `limit` stay as they are. Only a text over
    `MAX_TEXT_CHARACTERS` may be left with fewer, if it hardly has tokens; a warning says so.
    """
    size = _CHARACTERS_PER_TOKEN * limit
    most = max(size, MAX_TEXT_CHARACTERS)
    while size < len(text):
        start = text[: min(size, most)]
        if len(tokenizer(start, add_special_tokens=False, verbose=False)["input_ids"]) >= 2 * limit:
            return start
        if size >= most:
            logger.warning("text cut to %d characters: %s", most, name)
            return start
        size *= 16
    return text


def text_limit(tokenizer: PreTrainedTokenizerBase, wanted: int | None) -> int | None:
    """Return the most tokens of a text: `wanted` or the tokenizer's limit, the smaller; None if there is neither."""
    limits = (wanted, tokenizer.model_max_length)
    return min((limit for limit in limits if limit and limit < _NO_LIMIT), default=None)


def without_special_words(ids: Tensor, special_tokens_mask: Tensor, tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """Replace special tokens in ids `(N, T)` that come from the text itself by the unknown token.

    A Unigram vocabulary (XLM-R, SigLIP) holds its special tokens as ordinary pieces, so splitting does not help.
    """
    if tokenizer.unk_token_id is None:
        return ids
    from_text = torch.isin(ids, torch.tensor(tokenizer.all_special_ids)) & (special_tokens_mask == 0)
    return ids.masked_fill(from_text, tokenizer.unk_token_id)


def warn_of_cuts(names: Sequence[str], limit: int, tokenizer: PreTrainedTokenizerBase) -> None:
    """Log in one line whose texts were cut: the first time, and when the tokenizer's count of them doubles."""
    before = _cut_texts.get(tokenizer, 0)
    count = _cut_texts[tokenizer] = before + len(names)
    if count.bit_length() == before.bit_length():
        return
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    so_far = f"; {count} texts so far" if before else ""
    logger.warning("text cut to fit %d tokens: %s%s%s", limit, ", ".join(names[:3]), more, so_far)


def _names_an_image(text: str, name: str) -> bool:
    """Whether a bare string is an image: a data URI, or a URL or existing file that ends like an image file.

    Raises:
        FileNotFoundError: It looks like a file name, but there is no such file.
        ValueError: It looks like a video.
    """
    if text.startswith("data:image/"):
        return True
    is_one_word = len(text.split(maxsplit=1)) == 1
    if text.startswith("data:video/") or (is_one_word and text.lower().endswith(VIDEO_SUFFIXES)):
        raise ItemError(name, f'{describe(text)} is a video: {_NO_VIDEO}; if this is a text, pass {{"text": ...}}')
    if not text.lower().endswith(PICTURE_SUFFIXES):
        return False
    is_known = text.lower().endswith(IMAGE_SUFFIXES)
    if is_known and (is_url(text) or os.path.isfile(text)):
        return True
    if is_known and is_one_word:
        raise MissingFileError(name, f'no such file: {text!r}; if this is a text, not a path, pass {{"text": ...}}')
    number = next(_file_names)
    if number & (number - 1) == 0:  # 1, 2, 4, 8 ...
        message = '%s: %r is embedded as a text (%d like it so far); if it is a file, pass {"image": ...}'
        logger.warning(message, name, text[:200], number)
    return False


def _dict_parts(value: Mapping[Any, Any], name: str) -> list[str | ImageSource]:
    if "video" in value:
        raise ItemError(name, f"{_NO_VIDEO}")
    unknown = sorted(str(key) for key in value if key not in ("text", "image"))
    if unknown:
        raise ItemError(name, f'unknown keys {unknown}; expected "text" and/or "image"')
    parts: list[str | ImageSource] = []
    for key in value:  # the order of keys is the order of parts
        entries = value[key] if isinstance(value[key], list | tuple) else [value[key]]
        for entry in entries:
            if entry is not None:
                parts.append(ImageSource(entry) if key == "image" else check_unicode(entry, name))
    return parts


def _messages_parts(value: Sequence[Any], name: str) -> list[str | ImageSource]:
    if not value or not all(isinstance(message, Mapping) and "role" in message for message in value):
        raise ItemError(
            name, f"a bare list is ambiguous (a pair? an interleaved item?): {describe(value)}; expected {_EXPECTED}"
        )
    return [part for message in value for part in _message_parts(message, name)]


def _message_parts(message: Mapping[Any, Any], name: str) -> list[str | ImageSource]:
    content = message.get("content")
    if isinstance(content, str):
        return [check_unicode(content, name)]
    if not isinstance(content, list | tuple):
        raise ItemError(name, f"message content must be a string or a list of parts, got {describe(content)}")
    return [part for entry in content for part in _content_parts(entry, name)]


def _content_parts(entry: Any, name: str) -> list[str | ImageSource]:  # noqa: ANN401
    if isinstance(entry, str):
        return [check_unicode(entry, name)]
    kind = entry.get("type") if isinstance(entry, Mapping) else None
    if kind in ("text", "image") and isinstance(entry.get(kind), list):  # as sentence-transformers 6.0 writes several
        return [part for value in entry[kind] for part in _typed_parts(kind, {**entry, kind: value}, name)]
    return _typed_parts(kind, entry, name)


def _typed_parts(kind: Any, entry: Any, name: str) -> list[str | ImageSource]:  # noqa: ANN401
    """Return what a message part of a type holds: one text or one image, or nothing."""
    if kind == "text":
        return [] if entry.get("text") is None else [check_unicode(entry["text"], name)]
    if kind == "image":
        is_absent = "image" in entry and entry["image"] is None  # `{"image": None}` in sentence-transformers
        return [] if is_absent else [_content_image(entry, name)]
    if kind == "image_url":
        url = entry.get("image_url")
        return [ImageSource(url.get("url") if isinstance(url, Mapping) else url)]
    if kind in ("video", "video_url"):
        raise ItemError(name, f"{_NO_VIDEO}")
    raise ItemError(name, f'unknown message part {describe(entry)}; expected type "text" or "image"')


def _content_image(entry: Mapping[Any, Any], name: str) -> ImageSource:
    for key in ("image", "url", "path"):
        if entry.get(key) is not None:
            return ImageSource(entry[key])
    encoded = entry.get("base64")
    if isinstance(encoded, str):
        return ImageSource(decode_base64(encoded.rpartition(",")[2], name))
    if encoded is not None:
        raise ItemError(name, f'"base64" must be a string, got {describe(encoded)}')
    raise ItemError(name, 'a message part of type "image" has no "image", "url", "path" or "base64"')


def chat_options(kwargs: Mapping[str, Any], processor_kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return `max_length`, `padding` and `truncation` among the arguments of `apply_chat_template`.

    Sentence-transformers passes them as `processor_kwargs["text_kwargs"]`. It renders short texts with `padding=False`
    to find the tokens that end each prompt, and writes these tokens over the end of each truncated text.
    """
    given = {**kwargs, **(processor_kwargs or {}).get("text_kwargs", {})}
    return {name: given[name] for name in ("max_length", "padding", "truncation") if name in given}


def conversations(conversation: Sequence[Any]) -> list[Any]:
    """Return one conversation or a batch of them as a batch.

    Where a batch of sentence-transformers mixes conversations with other items, each conversation is the only part of
    a message (`{"type": "message", "message": [...]}`); it is put in the place of that message.
    """
    batch = [conversation] if conversation and isinstance(conversation[0], Mapping) else conversation
    return [
        [inner for message in messages for inner in _unwrapped(message)] if isinstance(messages, list) else messages
        for messages in batch
    ]


def _unwrapped(message: Any) -> list[Any]:  # noqa: ANN401
    content = message.get("content") if isinstance(message, Mapping) else None
    part = content[0] if isinstance(content, list) and len(content) == 1 else None
    if not isinstance(part, Mapping) or part.get("type") != "message":
        return [message]
    return part["message"] if isinstance(part.get("message"), list) else [part.get("message")]


def instructions_of(instruction: str | Sequence[str | None] | None, count: int) -> list[str | None]:
    """Return the instruction of each of `count` items: one for all, or one for each.

    Raises:
        ValueError: There is another number of them.
    """
    given = [instruction] * count if instruction is None or isinstance(instruction, str) else list(instruction)
    if len(given) != count:
        raise ValueError(f"{len(given)} instructions for {count} items; pass one for all, or one for each")
    return given


def check_return_tensors(return_tensors: str | None) -> None:
    """Accept PyTorch tensors only.

    Raises:
        ValueError: Tensors of another library are asked for.
    """
    if return_tensors not in ("pt", None):
        raise ValueError(f'return_tensors={return_tensors!r}; expected "pt": a batch holds PyTorch tensors')
