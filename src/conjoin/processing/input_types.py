"""The input types of an item with several images: `seq`, `cat` and `avg` (MERIT, Table 2).

* `seq`: the images and texts in their order, for models that take interleaved items.
* `cat`: the images concatenated into one picture, with the texts joined.
* `avg`: an item for each image with its text; the mean of their embeddings is the embedding.

An item of at most one image is the same under each of them. The paper does not say how images are concatenated.
Every saved checkpoint contains this file, so it imports nothing of this package outside its folder.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby, takewhile, zip_longest
from math import isqrt
from typing import Any

from PIL import Image

from .item_error import ItemError
from .item_images import CONCATENATED, load_image
from .item_inputs import ImageSource, Item, check_list, item_names, item_parts

INPUT_TYPES = ("seq", "cat", "avg")

MAX_HEIGHT = 2048
"""Images of a concatenation have at most this height in pixels."""

MAX_PIXELS = 2**24
"""A concatenation has at most this many pixels (48 MiB)."""


def check_input_type(input_type: str) -> str:
    """Return `input_type` if it is one of `INPUT_TYPES`.

    Raises:
        ValueError: It is not.
    """
    if input_type not in INPUT_TYPES:
        raise ValueError(f"input_type={input_type!r}; expected one of {INPUT_TYPES}")
    return input_type


def check_processor_type(input_type: str) -> str:
    """Return `input_type` if a processor can apply it: each of its items becomes one.

    Raises:
        ValueError: It is not `"seq"` or `"cat"`.
    """
    if input_type not in ("seq", "cat"):
        raise ValueError(
            f'input_type={input_type!r}; a processor takes "seq" or "cat"; "avg" averages embeddings, so only an '
            "encoder (load_encoder) takes it"
        )
    return input_type


def concatenated(values: Sequence[Any], input_type: str, ids: Sequence[str | int] | None = None) -> Sequence[Any]:
    """Return the items of a processor: under `cat`, with the images of each as one picture.

    Raises:
        TypeError: `values` is a single item rather than a list.
        ValueError: As `apply_input_type`.
        FileNotFoundError: As `apply_input_type`.
    """
    if input_type != "cat":
        return values
    check_list(values)
    names = item_names(len(values), ids)
    return [apply_input_type(value, "cat", name)[0] for value, name in zip(values, names, strict=True)]


def apply_input_type(value: Any, input_type: str, name: str = "item") -> list[Any]:  # noqa: ANN401
    """Return the items to embed in place of an item; the mean of their embeddings is its embedding.

    Under `cat`, the picture precedes the text, which is all texts joined by a space. Under `avg`, the text of an image
    is what follows it up to the next image; images without a text between them share it, and the text before the first
    image belongs to all. System messages stay as they are.

    Args:
        value: The item, as the user passed it.
        input_type: One of `INPUT_TYPES`.
        name: Start of every error message.

    Raises:
        ValueError: The input type is unknown, the item is ambiguous or of an unknown kind, or an image to be
            concatenated cannot be read.
        FileNotFoundError: An image to be concatenated does not exist.
    """
    system, rest = _without_system(value)
    if check_input_type(input_type) == "seq" or rest == []:
        return [value]
    parts = item_parts(rest, name)
    sources = [part.source for part in parts if isinstance(part, ImageSource)]
    if len(sources) < 2:
        return [value]
    is_chat = isinstance(value, list | tuple) or "role" in value
    texts = [part for part in parts if isinstance(part, str) and not (is_chat and part == "")]
    if input_type == "avg":
        return [_item(some, is_chat, system) for some in _one_image_each(parts)]
    picture = concatenate_images([load_image(source, name, MAX_HEIGHT) for source in sources])
    joined = [" ".join(texts)] if texts and all(map(str.strip, texts)) else texts  # the processor judges empty texts
    return [_item([ImageSource(picture), *joined], is_chat, system)]


def count_images(value: Any, name: str = "item") -> int:  # noqa: ANN401
    """Return the number of images of an item, without reading them; raises as `parse_item` for unknown kinds."""
    return sum(isinstance(part, ImageSource) for part in item_parts(value, name))


def only_image(item: Item, name: str) -> Any:  # noqa: ANN401 - an image as it was read
    """Return the image of an item for a model of one image per item; None if it has none.

    Raises:
        ValueError: It has several.
    """
    if len(item.images) > 1:
        raise ItemError(
            name,
            f"{len(item.images)} images, but this model takes one image per item; choose input type cat "
            "(the images as one picture) or avg (the mean of their embeddings): --input cat, load_encoder(..., "
            'input_type="cat"), or input_type="cat" of the processor; or use an MLLM retriever',
        )
    return next(iter(item.images), None)


def concatenate_images(images: Sequence[Image.Image]) -> Image.Image:
    """Return RGB images as one: in rows of ceil(sqrt(n)), from left to right, scaled to one height, on white.

    The height is that of the tallest image, within `MAX_HEIGHT` and `MAX_PIXELS`.
    """
    columns = isqrt(len(images) - 1) + 1
    rows = [images[start : start + columns] for start in range(0, len(images), columns)]
    ratios = [[image.width / image.height for image in row] for row in rows]
    widest = max(map(sum, ratios))
    limit = int((MAX_PIXELS / (widest * len(rows))) ** 0.5)
    height = max(1, min(max(image.height for image in images), MAX_HEIGHT, limit))
    widths = [[max(1, round(height * ratio)) for ratio in some] for some in ratios]
    canvas = Image.new("RGB", (max(map(sum, widths)), height * len(rows)), "white")
    for number, (row, some) in enumerate(zip(rows, widths, strict=True)):
        for column, (image, width) in enumerate(zip(row, some, strict=True)):
            scaled = image if image.size == (width, height) else image.resize((width, height))
            canvas.paste(scaled, (sum(some[:column]), number * height))
    canvas.info[CONCATENATED] = True
    return canvas


def _one_image_each(parts: Sequence[str | ImageSource]) -> list[list[str | ImageSource]]:
    """Return the parts of an item for each image."""
    lead = list(takewhile(_is_text, parts))
    groups = [list(group) for _, group in groupby(parts[len(lead) :], _is_text)]
    no_texts: list[str | ImageSource] = []
    pairs = zip_longest(groups[::2], groups[1::2], fillvalue=no_texts)
    return [[*lead, image, *texts] for images, texts in pairs for image in images]


def _is_text(part: str | ImageSource) -> bool:
    return isinstance(part, str)


def _without_system(value: Any) -> tuple[list[Any], Any]:  # noqa: ANN401
    """Return the system messages of a conversation, and the rest of it."""
    if not isinstance(value, list | tuple):
        return [], value
    system: list[Any] = []
    rest: list[Any] = []
    for message in value:
        is_system = isinstance(message, Mapping) and message.get("role") == "system"
        (system if is_system else rest).append(message)
    return (system, rest) if system else ([], value)


def _item(parts: Sequence[str | ImageSource], is_chat: bool, system: Sequence[Any]) -> Any:  # noqa: ANN401
    """Return parts as a conversation, or as `{"image", "text"}` in the order of the parts."""
    if not is_chat:
        values: dict[str, list[Any]] = {}
        for part in parts:
            kind, entry = ("text", part) if isinstance(part, str) else ("image", part.source)
            values.setdefault(kind, []).append(entry)
        return values
    content = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": part.source}}
        for part in parts
    ]
    return [*system, {"role": "user", "content": content}]


__all__ = [
    "INPUT_TYPES",
    "apply_input_type",
    "check_input_type",
    "check_processor_type",
    "concatenate_images",
    "concatenated",
    "count_images",
    "only_image",
]
