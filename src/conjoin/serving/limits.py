"""What a server accepts: the limits, and the checks of items that the app and the endpoint share.

A server never opens a file that a request names: a string is a text, and an image comes as its bytes. Those stay as
they are until the model takes them: here only their headers are read.
"""

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from PIL import Image, UnidentifiedImageError

from conjoin.data.row_images import row_item
from conjoin.processing.item_images import decode_base64, is_url
from conjoin.processing.item_inputs import check_text
from conjoin.processing.urls import fetch

COMMON_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""Formats of images that a server reads."""
_TOKENS = re.compile(r"""'(?:[^']|'')*'|"(?:[^"]|"")*"|`[^`]*`|\w+|\S""")
_BEFORE_PARENTHESES = frozenset(
    "abs and array_has between case cast ceil coalesce contains date else floor ilike in is length like lower not or "
    "round starts_with substr then trim try_cast upper when".split()
)


class ItemError(ValueError):
    """An item of a request cannot be used.

    Attributes:
        item: Its position in the request.
        problem: What is wrong with it.
    """

    def __init__(self, item: int, problem: str) -> None:
        super().__init__(f"item {item}: {problem}")
        self.item, self.problem = item, problem


class TooLargeError(ValueError):
    """A request is too large."""


@dataclass(frozen=True)
class Limits:
    """The most that a request may hold.

    Attributes:
        body_bytes: Bytes of a request.
        body_seconds: Until a request is received.
        held_bytes: Bytes of all requests that are being received or answered; one alone may always be.
        requests: That are being answered at one time.
        items: Items of a request.
        images: Images of an item.
        image_bytes: Bytes of an image file.
        image_pixels: Pixels of an image; checked before it is decoded.
        request_pixels: Pixels of all images of a request; likewise.
        text_characters: Characters of a text.
        where_characters: Characters of a condition.
        results: Results of a query.
        depth: The last rank that a query may ask for.
        waiting: Items that wait for the model at one time; more are refused.
    """

    body_bytes: int = 32 * 2**20
    body_seconds: float = 60
    held_bytes: int = 256 * 2**20
    requests: int = 256
    items: int = 64
    images: int = 8
    image_bytes: int = 10 * 2**20
    image_pixels: int = 25_000_000
    request_pixels: int = 50_000_000
    text_characters: int = 10_000
    where_characters: int = 1000
    results: int = 100
    depth: int = 10_000
    waiting: int = 1024


def check_json(body: bytes, limits: Limits) -> None:
    """Refuse JSON whose structure is larger than the items of a request need.

    A body of a few bytes for each number or key would take a hundred times as much memory as objects.

    Raises:
        TooLargeError: It is.
        ValueError: It is not UTF-8: in UTF-16 other characters have the byte of a quote.
    """
    most = 1024 + 256 * limits.items
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")  # every quote left begins or ends a string
    if plain.count(b'"') > 2 * most or sum(map(len, plain.split(b'"')[::2])) > most:
        raise TooLargeError(f"the JSON has over {most:,} bytes besides its strings, the limit")
    if b"\0" in body:
        raise ValueError("the body is no JSON in UTF-8")


def read_items(values: Sequence[tuple[str | None, Sequence[str]]], limits: Limits) -> list[Any]:
    """Return the items of a request as the encoder takes them.

    Args:
        values: The text and the images of each; an image is a `data:image/` URI, or a URL if URLs are allowed
            (`conjoin.processing.allow_urls`). `<image>` in a text marks the place of each.
        limits: What is accepted.

    Raises:
        ValueError: There is no item, or there are too many.
        ItemError: An item cannot be used.
        TooLargeError: Their images have too many pixels together.
    """
    if not 1 <= len(values) <= limits.items:
        raise ValueError(f"{len(values)} items; expected 1 to {limits.items} in a request")
    items: list[Any] = []
    pixels: list[int] = []
    for position, (text, sources) in enumerate(values):
        try:
            if text is None and not sources:
                raise ValueError("it has neither text nor image")
            if len(sources) > limits.images:
                raise ValueError(f"{len(sources)} images; the limit is {limits.images} for one item")
            names = ["the image"] if len(sources) == 1 else [f"image {index}" for index in range(len(sources))]
            read = [_read_source(source, name, limits) for source, name in zip(sources, names, strict=True)]
            images = [image for image, _ in read]
            parts: dict[str, Any] = {"image": images} if images else {}
            if len(images) == 1 and "<image>" not in (text or ""):
                parts["image"] = images[0]
            if text is not None:
                parts["text"] = check_text(check_length(text, limits, "the text"), "the item")
            items.append(row_item(parts, "the text"))
        except ValueError as error:
            raise ItemError(position, str(error)) from error
        pixels += [count for _, count in read]
    if sum(pixels) > limits.request_pixels:
        raise TooLargeError(
            f"the {len(pixels)} images of the request have {sum(pixels):,} pixels together; the limit is "
            f"{limits.request_pixels:,}: send smaller images, or fewer in a request"
        )
    return items


def _read_source(source: str, name: str, limits: Limits) -> tuple[dict[str, Any], int]:
    """Read a data URI or what a URL holds, and the header of that image file; other than common formats are refused.

    Pillow reads those with hardly tested decoders.

    Returns:
        The bytes, with what error messages call them, as `load_image` takes them; and the pixels of the decoded image.

    Raises:
        ValueError: Too many bytes or pixels, none of the `COMMON_FORMATS`, or its header is damaged; the message
            starts with `name`.
    """
    head, _, body = source.partition(";base64,")
    if not is_url(source) and not head.startswith("data:image/"):
        raise ValueError(f"{name}: expected a data:image/...;base64 URI, got {source!r:.40}; files are not opened")
    data = fetch(source, name, limits.image_bytes) if is_url(source) else decode_base64(body, name)
    if len(data) > limits.image_bytes:
        raise ValueError(f"{name}: {len(data):,} bytes; the limit is {limits.image_bytes:,}")
    try:
        width, height = Image.open(io.BytesIO(data), formats=COMMON_FORMATS).size
    except UnidentifiedImageError as error:
        raise ValueError(f"{name}: this is no image; expected one of {', '.join(COMMON_FORMATS)}") from error
    except Exception as error:  # readers of headers raise many kinds on damaged files
        raise ValueError(f"{name}: cannot read the image: {error}") from error
    if width * height > limits.image_pixels:
        raise ValueError(f"{name}: {width} x {height} pixels; the limit is {limits.image_pixels:,} pixels")
    return {"bytes": data, "path": name}, width * height


def check_length(text: str, limits: Limits, name: str) -> str:
    """Return a text that is not too long.

    Raises:
        ValueError: It is.
    """
    if len(text) > limits.text_characters:
        raise ValueError(f"{name} has {len(text):,} characters; the limit is {limits.text_characters:,}")
    return text


def check_where(where: str, limits: Limits) -> str:
    """Return a condition of a stranger: comparisons, and functions that cost no more than the rows that they read.

    Raises:
        ValueError: It is too long, calls another function, or has signs that a condition does not need.
    """
    if len(where) > limits.where_characters:
        raise ValueError(f"the condition has {len(where):,} characters; the limit is {limits.where_characters:,}")
    before = ""
    for token in _TOKENS.findall(where):
        if token == "(" and re.match(r"[\w`\"]", before) and before.lower() not in _BEFORE_PARENTHESES:
            raise ValueError(
                f"the condition calls {before!r:.40}; it may compare, and call lower, like, in, length ..."
            )
        if token in ("'", '"', "`", "$", "#", ";") or "\\" in token or before + token in ("--", "/*", "||"):
            raise ValueError(f"the condition has {token!r:.40}, which has no place in one")
        before = token
    return where
