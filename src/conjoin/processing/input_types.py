"""The input types of an item with several images, for all encoders: `seq`, `cat` and `avg` (MERIT, Table 2).

* `seq`: the images and texts in their order, for models that take interleaved items.
* `cat`: the images concatenated into one picture, with the texts joined.
* `avg`: an item for each image with its text; the mean of their embeddings is the embedding.

An item of at most one image is the same under each of them. The paper does not say how images are concatenated.
"""

from collections.abc import Sequence
from itertools import groupby, takewhile, zip_longest
from typing import Any

from conjoin.processing.item_inputs import ImageSource, SystemText, as_one_picture, is_chat, item_parts

INPUT_TYPES = ("seq", "cat", "avg")


def check_input_type(input_type: str) -> str:
    """Return `input_type` if it is one of `INPUT_TYPES`.

    Raises:
        ValueError: It is not.
    """
    if input_type not in INPUT_TYPES:
        raise ValueError(f"input_type={input_type!r}; expected one of {INPUT_TYPES}")
    return input_type


def apply_input_type(value: Any, input_type: str, name: str = "item") -> list[Any]:
    """Return the items to embed in place of an item; the mean of their embeddings is its embedding.

    Under `cat`, the picture precedes the text, which is all texts joined by a space. Under `avg`, the text of an image
    is what follows it up to the next image; images without a text between them share it, and the text before the first
    image belongs to all. System messages stay as they are.

    Args:
        value: The item, as the user passed it.
        input_type: One of `INPUT_TYPES`.
        name: Start of every error message.

    Raises:
        ValueError: The input type is unknown, the item cannot be used, or an image to be concatenated cannot be read.
        FileNotFoundError: An image to be concatenated does not exist.
    """
    if check_input_type(input_type) == "seq":
        return [value]
    parts = item_parts(value, name)
    if sum(isinstance(part, ImageSource) for part in parts) < 2:
        return [value]
    several = [as_one_picture(parts, name)] if input_type == "cat" else _one_image_each(parts)
    return [_item(some, is_chat(value)) for some in several]


def _one_image_each(parts: Sequence[Any]) -> list[list[Any]]:
    """Return the parts of an item for each image."""
    lead = list(takewhile(_is_text, parts))
    groups = [list(group) for _, group in groupby(parts[len(lead) :], _is_text)]
    no_texts: list[Any] = []
    pairs = zip_longest(groups[::2], groups[1::2], fillvalue=no_texts)
    return [[*lead, image, *texts] for images, texts in pairs for image in images]


def _is_text(part: Any) -> bool:
    return isinstance(part, str)


def _item(parts: Sequence[Any], is_conversation: bool) -> Any:
    """Return parts as a conversation, or as `{"image", "text"}` in the order of the parts."""
    values: dict[str, list[Any]] = {}
    contents: dict[str, list[Any]] = {}
    for part in parts:
        kind, entry = ("text", part) if isinstance(part, str) else ("image", part.source)
        values.setdefault(kind, []).append(entry)
        role = "system" if isinstance(part, SystemText) else "user"
        contents.setdefault(role, []).append({"type": kind, kind: entry})
    return [{"role": role, "content": contents[role]} for role in sorted(contents)] if is_conversation else values
