"""Which columns of a table are the image, the text, the id and the group of a pair."""

import difflib
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import datasets
import pyarrow

logger = logging.getLogger(__name__)

COMMON_COLUMNS = {
    "image": ("image", "img", "jpg", "jpeg", "png", "webp", "image_path", "img_path", "file_name", "filename",
              "file_path", "filepath", "path", "image_url", "img_url", "url", "images", "image_paths", "file_names"),
    "text": ("text", "caption", "captions", "title", "txt", "description", "alt_text", "sentence", "texts",
             "sentences"),
    "id": ("id", "__key__", "key", "uid", "uuid", "item_id", "product_id", "sku", "asin", "image_id", "photo_id"),
}  # fmt: skip
"""Default column names, in order of preference; case is ignored."""
NUMBER = ":number"
"""Behind the name of a kept column, reads its values as numbers."""
SURE_IDS = ("id", "__key__")
"""A column of these names is the id whichever others of `COMMON_COLUMNS` there are; of the rest there may be one."""


class PairColumns(NamedTuple):
    """The columns to read.

    Attributes:
        image: Of the images; None if they are not read.
        text: Likewise.
        id: None for row numbers.
        group: None without groups.
        label: The classes whose names are the texts; None if the texts are texts.
        picture: As `image`, also if images are not read.
    """

    image: str | None
    text: str | None
    id: str | None
    group: str | None
    label: datasets.ClassLabel | None
    picture: str | None


def choose_columns(
    available: Sequence[str], given: Mapping[str, str | None], features: Mapping[str, Any], only: str | None
) -> PairColumns:
    """Choose the columns that are not given by their names.

    Args:
        available: All columns.
        given: The column of `image`, `text`, `id` and `group`, or None.
        features: What the columns hold, as far as it is known.
        only: The part to read, `"image"` or `"text"`; None for both.

    Raises:
        ValueError: There is no such column, or several may be the id.
    """
    by_lower_name = {name.lower(): name for name in reversed(available)}
    found = {
        role: [by_lower_name[name] for name in names if name in by_lower_name]
        for role, names in COMMON_COLUMNS.items()
    }
    if not found["text"]:
        found["text"] = [name for name in available if isinstance(features.get(name), datasets.ClassLabel)]
    chosen: dict[str, str | None] = {"group": None}
    for role, column in given.items():
        if column and column not in available:
            raise unknown_column(column, available)
        chosen[role] = column if column is not None else _guess(role, found.get(role, []), only in (None, role))
    picture = chosen["image"]
    for role in ("image", "text"):
        if only not in (None, role):
            chosen[role] = None
        elif chosen[role] is None:
            other = {"image": "text", "text": "image"}[role]
            alone = f"; or encode the {other} alone with only={other!r}" if only is None else ""
            raise ValueError(
                f"found no {role} column among {', '.join(map(repr, available))}; "
                f"pass {role}_column, or name it one of {', '.join(COMMON_COLUMNS[role])}{alone}"
            )
    label = features.get(chosen["text"] or "")
    if not isinstance(label, datasets.ClassLabel):
        label = None
    elif given["text"] is None:
        logger.warning("there are no texts; the names of the classes in %r are read as text", chosen["text"])
    group = chosen["group"] or (chosen["text"] if label is not None else None)
    return PairColumns(chosen["image"], chosen["text"], chosen["id"] or None, group, label, picture)


def _guess(role: str, found: Sequence[str], is_read: bool) -> str | None:
    """Return the first of the columns `found`; an id has no order of preference but for `SURE_IDS`."""
    if role == "id" and len(found) > 1 and found[0].lower() not in SURE_IDS:
        raise ValueError(
            f"the columns {', '.join(map(repr, found))} may all be the id; choose one by --id-column (id_column)"
        )
    if len(found) > 1 and is_read | (role == "id"):
        others = ", ".join(map(repr, found[1:]))
        logger.warning("the column %r is read as %s, not %s; choose by %s_column", found[0], role, others, role)
    return next(iter(found), None)


def choose_kept(names: Sequence[str], available: Sequence[str], features: Mapping[str, Any]) -> dict[str, bool]:
    """Return the columns to keep beside the pairs, and for each whether its values are read as numbers.

    Args:
        names: The columns; `price:number` reads those of `price` as numbers.
        available: All columns.
        features: What the columns hold, as far as it is known.

    Raises:
        ValueError: There is no such column, or it holds images, audio or video.
    """
    chosen = {}
    for name in names:
        is_number = name not in available and name.endswith(NUMBER)
        column = name.removesuffix(NUMBER) if is_number else name
        if column not in available:
            raise unknown_column(column, available)
        if isinstance(features.get(column), datasets.Image | datasets.Audio | datasets.Video):
            raise ValueError(f"the column {column!r} holds {features[column]}; only plain values can be kept")
        chosen[column] = is_number
    return chosen


def read_number(value: Any, name: str, column: str) -> float | None:  # noqa: ANN401
    """Return a value of a kept column as a number; None if it is absent or blank.

    Raises:
        ValueError: It is no finite number; the message starts with `name`.
    """
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{name}: {column} is {value!r:.80}; expected a number, such as 9.5")
    return number


def kept_columns(
    dataset: datasets.Dataset,
    names: Iterable[str],
    numbers: Mapping[str, Sequence[float | None]],
    owners: Sequence[int],
) -> datasets.Dataset:
    """Make the column `kept`, a struct of columns of the rows.

    Args:
        dataset: The rows.
        names: The columns.
        numbers: The values of those that are read as numbers, for each row.
        owners: The row of each pair.
    """
    table = dataset.select_columns(list(names)).select(owners).with_format("arrow")[:]
    for name, values in numbers.items():
        column = pyarrow.array([values[row] for row in owners], pyarrow.float64())
        table = table.set_column(table.column_names.index(name), name, column)
    return datasets.Dataset(datasets.table.InMemoryTable(pyarrow.table({"kept": table.to_struct_array()})))


def unknown_column(column: str, available: Iterable[str]) -> ValueError:
    """Return the error for a missing column: it lists the columns and suggests the nearest name."""
    available = list(available)
    nearest = difflib.get_close_matches(column, available, n=1, cutoff=0.4)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
    return ValueError(f"no column {column!r}; the columns are {', '.join(map(repr, available))}{hint}")
