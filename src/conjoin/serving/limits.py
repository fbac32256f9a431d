"""What a server accepts: the limits, and the checks of items that the app and the endpoint share.

A server never opens a file that a request names: a string is a text, and an image comes as its bytes. Those stay as
they are until the model takes them: here only their headers are read.
"""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

EXPECTED = 'expected a text, or {"text": ..., "image": ...}'


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
    """The images of a request have too many pixels."""


class Picture(NamedTuple):
    """An image file of a request, whose header was read.

    Attributes:
        source: Its bytes, and what error messages call it, as `load_image` takes them.
        pixels: That it has once it is decoded.
    """

    source: dict[str, Any]
    pixels: int


class Items(NamedTuple):
    """Items of a request, as an encoder takes them, and the pixels of their images."""

    items: list[Any]
    pixels: int


@dataclass(frozen=True)
class Limits:
    """The most that a request may hold.

    Attributes:
        body_bytes: Bytes of a request.
        body_seconds: That it may take to arrive.
        held_bytes: Bytes of all requests that are being received or answered; one alone may always be.
        upload_bytes: Bytes of the uploads that the app keeps; the oldest ones make room.
        items: Items of a request.
        images: Images of an item.
        image_bytes: Bytes of an image file.
        image_pixels: Pixels of an image; checked before it is decoded.
        request_pixels: Pixels of all images of a request; likewise.
        text_characters: Characters of a text.
        where_characters: Characters of a condition; a chain of thousands of terms ends the process of the database.
        results: Results of a query.
        waiting: Items that wait for the model at one time; more are refused.
        waiting_pixels: Pixels of their images.
    """

    body_bytes: int = 32 * 2**20
    body_seconds: int = 30
    held_bytes: int = 256 * 2**20
    upload_bytes: int = 2**30
    items: int = 64
    images: int = 8
    image_bytes: int = 10 * 2**20
    image_pixels: int = 25_000_000
    request_pixels: int = 100_000_000
    text_characters: int = 10_000
    where_characters: int = 1000
    results: int = 100
    waiting: int = 1024
    waiting_pixels: int = 400_000_000

    def __post_init__(self) -> None:
        for name, number in vars(self).items():
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise ValueError(f"the limit {name} must be a positive integer, got {number!r}")


def read_items(values: Any, limits: Limits) -> Items:  # noqa: ANN401 - whatever JSON holds
    """Return the items of a request as the encoder takes them.

    Args:
        values: A list of texts or `{"text": ..., "image": ...}`; an image is a `data:image/` URI, a URL if URLs are
            allowed (`conjoin.processing.allow_urls`), or a list of them. `<image>` in a text marks the place of each.
        limits: What is accepted.

    Raises:
        ValueError: No list, an empty one, or one with too many items.
        ItemError: An item cannot be used.
        TooLargeError: Their images have too many pixels together.
    """
    if not isinstance(values, list) or not values:
        raise ValueError(f"items must be a list with at least one item; {EXPECTED}")
    if len(values) > limits.items:
        raise ValueError(f"{len(values)} items; the limit is {limits.items} per request")
    items, pictures = [], []
    for position, value in enumerate(values):
        try:
            item, item_pictures = _read_item(value, limits)
        except ValueError as error:
            raise ItemError(position, str(error)) from error
        items.append(item)
        pictures += item_pictures
    return Items(items, count_pixels(pictures, limits))


def count_pixels(pictures: Sequence[Picture], limits: Limits) -> int:
    """Count the pixels of all images of a request.

    Raises:
        TooLargeError: There are too many.
    """
    pixels = sum(picture.pixels for picture in pictures)
    if pixels > limits.request_pixels:
        raise TooLargeError(
            f"the {len(pictures)} images of the request have {pixels:,} pixels together; the limit is "
            f"{limits.request_pixels:,}: send smaller images, or fewer in a request"
        )
    return pixels


def _read_item(value: Any, limits: Limits) -> tuple[Any, list[Picture]]:  # noqa: ANN401
    if isinstance(value, str):
        return make_item(value, (), limits), []
    if not isinstance(value, Mapping):
        raise ValueError(f"got {_kind(value)}; {EXPECTED}")
    if unknown := sorted(set(value) - {"text", "image"}):
        raise ValueError(f"unknown keys {unknown}; {EXPECTED}")
    text, image = value.get("text"), value.get("image")
    if text is not None and not isinstance(text, str):
        raise ValueError(f'"text" must be a string, got {_kind(text)}')
    sources = image if isinstance(image, list) else [] if image is None else [image]
    check_image_count(len(sources), limits)
    pictures = [_read_source(source, _name(index, len(sources)), limits) for index, source in enumerate(sources)]
    return make_item(text, pictures, limits), pictures


def make_item(text: str | None, pictures: Sequence[Picture], limits: Limits) -> Any:  # noqa: ANN401
    """Return a text and images as one item for an encoder: interleaved, if `<image>` is in the text.

    Args:
        text: May be absent beside an image.
        pictures: Images that `read_picture` returned.
        limits: What is accepted.

    Raises:
        ValueError: Nothing is left, the text is too long, blank or no valid Unicode, or there is another number of
            `<image>` than of images.
    """
    from conjoin.data.row_images import row_item
    from conjoin.processing.item_inputs import check_text

    check_image_count(len(pictures), limits)
    images = [picture.source for picture in pictures]
    if text is None and not images:
        raise ValueError(f"it has neither text nor image; {EXPECTED}")
    parts: dict[str, Any] = {}
    if images:
        parts["image"] = images[0] if len(images) == 1 and "<image>" not in (text or "") else images
    if text is not None:
        check_length(text, limits, "the text")
        parts["text"] = check_text(text, "the item")
    return row_item(parts, "the text")


def read_picture(data: bytes, name: str, limits: Limits) -> Picture:
    """Read the header of an image file, and make sure that it is within the limits.

    Other formats than the common ones are refused: Pillow reads them with hardly tested decoders.

    Args:
        data: Its bytes.
        name: What error messages call it.
        limits: What is accepted.

    Raises:
        ValueError: Too many bytes or pixels, none of the `COMMON_FORMATS`, or its header is damaged; the message
            starts with `name`.
    """
    from PIL import Image, UnidentifiedImageError

    from conjoin.processing.item_images import COMMON_FORMATS

    if not data:
        raise ValueError(f"{name}: the file is empty")
    if len(data) > limits.image_bytes:
        raise ValueError(f"{name}: {len(data):,} bytes; the limit is {limits.image_bytes:,}")
    most = f"the limit is {limits.image_pixels:,} pixels"
    try:
        image = Image.open(io.BytesIO(data), formats=COMMON_FORMATS)
    except UnidentifiedImageError as error:
        raise ValueError(f"{name}: this is no image; expected one of {', '.join(COMMON_FORMATS)}") from error
    except Image.DecompressionBombError as error:
        raise ValueError(f"{name}: the image is too large; {most}") from error
    except Exception as error:  # readers of headers raise many kinds on damaged files
        raise ValueError(f"{name}: cannot read the image, it is damaged ({error})") from error
    pixels = image.width * image.height
    if pixels > limits.image_pixels:
        raise ValueError(f"{name}: {image.width} x {image.height} pixels; {most}")
    return Picture({"bytes": data, "path": name}, pixels)


def check_length(text: str, limits: Limits, name: str) -> str:
    """Return a text that is not too long.

    Raises:
        ValueError: It is.
    """
    if len(text) > limits.text_characters:
        raise ValueError(f"{name} has {len(text):,} characters; the limit is {limits.text_characters:,}")
    return text


def check_where(where: str, limits: Limits) -> str:
    """Return a condition that is not too long.

    Raises:
        ValueError: It is.
    """
    if len(where) > limits.where_characters:
        raise ValueError(f"the condition has {len(where):,} characters; the limit is {limits.where_characters:,}")
    return where


def check_results(k: Any, limits: Limits) -> int:  # noqa: ANN401 - whatever JSON holds
    """Return a number of results.

    Raises:
        ValueError: It is no integer, below 1, or over the limit.
    """
    if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= limits.results:
        raise ValueError(f"k must be an integer from 1 to {limits.results}, got {k!r:.40}")
    return k


def check_image_count(count: int, limits: Limits) -> None:
    """Refuse an item of too many images.

    Raises:
        ValueError: There are more than the limit.
    """
    if count > limits.images:
        raise ValueError(f"{count} images; the limit is {limits.images} for one item")


def _read_source(source: Any, name: str, limits: Limits) -> Picture:  # noqa: ANN401
    """Read a data URI or what a URL holds."""
    from conjoin.processing.item_images import decode_base64, fetch, is_url

    if isinstance(source, str) and is_url(source):
        return read_picture(fetch(source, name, limits.image_bytes), name, limits)
    head, comma, body = source.partition(",") if isinstance(source, str) else ("", "", "")
    if not comma or not head.startswith("data:image/") or not head.endswith(";base64"):
        raise ValueError(f"{name}: expected a data:image/...;base64 URI, got {_kind(source)}; files are not opened")
    if len(body) > limits.image_bytes * 4 // 3 + 4:
        raise ValueError(f"{name}: over {limits.image_bytes:,} bytes, the limit")
    return read_picture(decode_base64(body, name), name, limits)


def _name(index: int, count: int) -> str:
    return "the image" if count == 1 else f"image {index}"


def _kind(value: Any) -> str:  # noqa: ANN401
    names = {str: "a text", dict: "an object", list: "a list", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
