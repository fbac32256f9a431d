"""Cells of a table as items: texts, images, both, or several images interleaved with a text."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from conjoin.data.image_paths import check_image_path
from conjoin.data.interleaved import listed_images, map_images, row_item
from conjoin.data.pairs import resolve_image_path
from conjoin.data.queries.columns import ItemColumns
from conjoin.processing.item_inputs import IMAGE_SUFFIXES, check_text
from conjoin.storage import row_digest

IMAGE_KEYS = ("image", "images")


class Named(NamedTuple):
    """An item with its name.

    Attributes:
        id: Equal for equal items.
        item: As processors take it.
        modality: `text`, `image` or `image,text`.
    """

    id: str
    item: Any
    modality: str


class CellReader(NamedTuple):
    """Reads items from rows.

    Attributes:
        folder: Of relative image paths; None for the current folder.
        folders: Of all images, as `image_folders` gives them.
    """

    folder: Path | None
    folders: tuple[str, ...] | None

    def items(self, row: Mapping[str, Any], columns: ItemColumns, name: str) -> list[Named]:
        """Return the items of some columns: none, one, or those of a list.

        Raises:
            ValueError: A cell is no item, or an image or a text cannot be used; the message starts with `name`.
            FileNotFoundError: An image does not exist.
        """
        cells = {part: row.get(column) for part, column in columns._asdict().items() if column}
        whole, flat = cells.pop("whole", None), {part: cell for part, cell in cells.items() if not _is_absent(cell)}
        if isinstance(whole, list):
            if flat:
                raise ValueError(f"{name}: a list in {columns.whole!r} beside {', '.join(map(repr, columns[1:]))}")
            return [self._item(_parts(one, f"{name} {place}"), f"{name} {place}") for place, one in enumerate(whole)]
        parts = {} if _is_absent(whole) else _parts(whole, name)
        if parts.keys() & flat.keys():
            raise ValueError(f"{name}: both {columns.whole!r} and another column give its {min(parts.keys() & flat)}")
        parts |= flat
        return [self._item(parts, name)] if parts else []

    def _item(self, parts: dict[str, Any], name: str) -> Named:
        if "text" in parts:
            check_text(parts["text"], name)
        if "image" in parts:
            parts["image"] = self._images(listed_images(parts["image"]), name)
        modality = ",".join(part for part in ("image", "text") if part in parts)
        return Named(f"{row_digest(parts):x}", row_item(parts, name), modality)

    def _images(self, images: Any, name: str) -> Any:  # noqa: ANN401 - an image or several
        if isinstance(images, list) and (not images or any(isinstance(one, list) for one in images)):
            raise ValueError(f"{name}: an empty or nested list of images; expected an image or a list of them")
        return map_images(lambda one: self._image(one, name), images)

    def _image(self, image: Any, name: str) -> Any:  # noqa: ANN401 - as a table holds it
        if isinstance(image, str) or not image:
            return resolve_image_path(image or None, self.folder, name, self.folders)
        if isinstance(image, Mapping) and image.get("bytes") is None:
            path = image.get("path")
            return check_image_path(path, self.folders, name)
        return image


def _is_absent(cell: Any) -> bool:  # noqa: ANN401
    """Whether a cell holds nothing; a CSV has an empty text there."""
    return cell is None or (isinstance(cell, str | list) and not cell)


def _parts(value: Any, name: str) -> dict[str, Any]:  # noqa: ANN401 - a cell of a table
    """Return the text and the image or images of a cell."""
    if isinstance(value, str):
        if value.lower().endswith(IMAGE_SUFFIXES) and not any(map(str.isspace, value)):
            raise ValueError(
                f'{name} is {value!r}; expected {{"image": {value!r}}} or, if it is a text, {{"text": ...}}'
            )
        return {"text": value}
    if isinstance(value, bytes) or (isinstance(value, Mapping) and {"bytes", "path"} == set(value)):
        return {"image": value}
    wanted = 'a text, an image, or {"text": ..., "image": ...} with one of them or both'
    if not isinstance(value, Mapping) or not set(value) <= {"text", *IMAGE_KEYS}:
        raise ValueError(f"{name} is {value!r:.80}; expected {wanted}")
    images = [value[key] for key in IMAGE_KEYS if value.get(key) is not None]
    if len(images) > 1:
        raise ValueError(f"{name} has both of {' and '.join(IMAGE_KEYS)}; expected one")
    text = {} if value.get("text") is None else {"text": value["text"]}
    parts = text | ({"image": images[0]} if images else {})
    if not parts:
        raise ValueError(f"{name} has neither text nor image; expected {wanted}")
    return parts
