"""Rows with several images: `<image>` in the text marks the place of the next image of the list, as in MERIT."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from conjoin.processing.item_error import ItemError

PLACEHOLDER = "<image>"
"""Stands for an image in the text of a row with a list of images."""


def interleave(text: str, images: Sequence[Any], name: str = "item") -> list[dict[str, Any]]:
    """Return a text with a placeholder for each of its images as a chat message.

    Args:
        text: The text; white space around a placeholder is dropped.
        images: As many as there are placeholders.
        name: Start of the error message.

    Raises:
        ItemError: There are fewer placeholders than images, or more.
    """
    check_placeholders(text, len(images), name)
    first, *others = (piece.strip() for piece in text.split(PLACEHOLDER))
    parts: list[dict[str, Any]] = [{"type": "text", "text": first}]
    for image, piece in zip(images, others, strict=True):
        parts += [{"type": "image_url", "image_url": {"url": image}}, {"type": "text", "text": piece}]
    return [{"role": "user", "content": [part for part in parts if part.get("text") != ""]}]


def check_placeholders(text: str, count: int, name: str = "item") -> None:
    """Refuse a text with another number of placeholders than there are images.

    Raises:
        ItemError: It has.
    """
    placeholders = text.count(PLACEHOLDER)
    if placeholders != count:
        raise ItemError(
            name,
            f"{placeholders} placeholders {PLACEHOLDER} in the text, but {count} images; expected one for each image "
            "(or none: then the images come first)",
        )


def row_item(parts: Mapping[str, Any], name: str = "item") -> Any:  # noqa: ANN401 - an item
    """Return the image and the text of a row as an item: interleaved, if there are a list of images and placeholders.

    Raises:
        ItemError: As `interleave`.
    """
    image, text = parts.get("image"), parts.get("text")
    if is_interleaved(image, text):
        return interleave(str(text), image or (), name)
    return {part: value for part, value in parts.items() if value is not None}


def is_interleaved(image: Any, text: Any) -> bool:  # noqa: ANN401 - parts of a row
    """Whether a row has a list of images and a text with placeholders."""
    return isinstance(image, list | tuple) and isinstance(text, str) and PLACEHOLDER in text


def plain_text(image: Any, text: str) -> str:  # noqa: ANN401 - parts of a row
    """Return the text of a row without its placeholders."""
    return " ".join(text.replace(PLACEHOLDER, " ").split()) if is_interleaved(image, text) else text


def map_images(change: Callable[[Any], Any], image: Any) -> Any:  # noqa: ANN401 - an image or several
    """Return what `change` makes of the image of a row, or of each of its list of images."""
    return [change(each) for each in image] if isinstance(image, list | tuple) else change(image)


def listed_images(cell: Any) -> Any:  # noqa: ANN401 - a cell of a table
    """Return the list of paths that a cell of a CSV holds as JSON, `["a.png", "b.png"]`; else the cell."""
    if not isinstance(cell, str) or not cell.startswith("["):
        return cell
    try:
        paths = json.loads(cell)
    except ValueError:  # a file name may start with a bracket
        return cell
    return paths if all(isinstance(path, str) for path in paths) else cell
