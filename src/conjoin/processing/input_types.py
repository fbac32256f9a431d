"""The input types of an item with several images, for all encoders: `seq`, `cat` and `avg` (MERIT, Table 2).

* `seq`: the images and texts in their order, for models that take interleaved items.
* `cat`: the images concatenated into one picture, with the texts joined.
* `avg`: an item for each image with its text; the mean of their embeddings is the embedding.

An item of at most one image is the same under each of them. The paper does not say how images are concatenated.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby, takewhile, zip_longest
from typing import Any

from conjoin.processing.item_images import MAX_HEIGHT, concatenate_images, load_image
from conjoin.processing.item_inputs import ImageSource, item_parts

INPUT_TYPES = ("seq", "cat", "avg")


def check_input_type(input_type: str) -> str:
    """Return `input_type` if it is one of `INPUT_TYPES`.

    Raises:
        ValueError: It is not.
    """
    if input_type not in INPUT_TYPES:
        raise ValueError(f"input_type={input_type!r}; expected one of {INPUT_TYPES}")
    return input_type


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
    if check_input_type(input_type) == "seq" or (isinstance(rest, list) and not rest):
        return [value]
    parts = item_parts(rest, name)
    sources = [part.source for part in parts if isinstance(part, ImageSource)]
    if len(sources) < 2:
        return [value]
    is_chat = isinstance(value, list | tuple) or "role" in value
    if input_type == "avg":
        return [_item(some, is_chat, system) for some in _one_image_each(parts)]
    texts = [part for part in parts if isinstance(part, str) and not (is_chat and part == "")]
    picture = concatenate_images([load_image(source, name, MAX_HEIGHT) for source in sources])
    joined = [" ".join(texts)] if texts and all(map(str.strip, texts)) else texts  # the processor judges empty texts
    return [_item([ImageSource(picture), *joined], is_chat, system)]


def count_images(value: Any, name: str = "item") -> int:  # noqa: ANN401
    """Return the number of images of an item, without reading them; raises as `item_parts` for unknown kinds."""
    return sum(isinstance(part, ImageSource) for part in item_parts(value, name))


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
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": part.source}
        for part in parts
    ]
    return [*system, {"role": "user", "content": content}]
