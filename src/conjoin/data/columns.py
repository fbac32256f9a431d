"""Columns of a table: which of them are the parts of a pair, and how they hold images."""

import difflib
import itertools
import logging
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import datasets
import pyarrow
import pyarrow.compute

from conjoin.data.row_images import listed_images
from conjoin.processing.item_error import ItemError

_MONEY = r"(?:[A-Z]{3}|[$€£¥₹₽₺₩₫₪₴฿])?"
_AMOUNTS = {
    mark: re.compile(
        rf"{_MONEY}\s*([+-]?)([0-9]{{1,3}}(?:[{other}'’\s][0-9]{{3}})+|[0-9]+)(?:[{mark}]([0-9]+))?\s*{_MONEY}"
    )
    for mark, other in ((".", ","), (",", "."))
}
"""Numbers by their decimal mark, perhaps with groups of thousands and a currency."""

logger = logging.getLogger(__name__)
Source = TypeVar("Source", datasets.Dataset, datasets.IterableDataset)

IMAGE = datasets.Image(decode=False)

COMMON_COLUMNS = {
    "image": ("image", "img", "jpg", "jpeg", "png", "webp", "image_path", "img_path", "file_name", "filename",
              "file_path", "filepath", "path", "image_url", "img_url", "url", "images", "image_paths", "file_names"),
    "text": ("text", "caption", "captions", "title", "txt", "description", "alt_text", "sentence", "texts",
             "sentences"),
    "id": ("id", "__key__", "key", "uid", "uuid", "item_id", "product_id", "sku", "asin", "image_id", "photo_id"),
}  # fmt: skip
"""Default column names, in order of preference; case is ignored."""
NUMBERS = {":number": ".", ":decimal-comma": ","}
"""Behind the name of a column of metadata, reads its values as numbers with this decimal mark."""
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
    matches = {
        role: [by_lower_name[name] for name in names if name in by_lower_name]
        for role, names in COMMON_COLUMNS.items()
    }
    if not matches["text"]:
        matches["text"] = [name for name in available if isinstance(features.get(name), datasets.ClassLabel)]
    chosen: dict[str, str | None] = {"group": None}
    for role, column in given.items():
        if column and column not in available:
            raise unknown_column(column, available)
        chosen[role] = column if column is not None else _guess(role, matches.get(role, []), only in (None, role))
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


def _guess(role: str, matches: Sequence[str], is_read: bool) -> str | None:
    """Return the first of the columns `matches`; an id has no order of preference but for `SURE_IDS`."""
    if role == "id" and len(matches) > 1 and matches[0].lower() not in SURE_IDS:
        raise ValueError(
            f"the columns {', '.join(map(repr, matches))} may all be the id; choose one by --id-column (id_column)"
        )
    if len(matches) > 1 and is_read | (role == "id"):
        others = ", ".join(map(repr, matches[1:]))
        logger.warning("the column %r is read as %s, not %s; choose by %s_column", matches[0], role, others, role)
    return next(iter(matches), None)


def choose_metadata(names: Sequence[str], available: Sequence[str], features: Mapping[str, Any]) -> dict[str, str]:
    """Return the columns to keep beside the pairs, and the decimal mark of the numbers of each; "" to keep it as is.

    Args:
        names: The columns; `price:number` reads those of `price` as numbers, `price:decimal-comma` as `1.299,00`.
        available: All columns.
        features: What the columns hold, as far as it is known.

    Raises:
        ValueError: There is no such column, or it holds images, audio or video.
    """
    chosen = {}
    for name in names:
        kind = "" if name in available else next((each for each in NUMBERS if name.endswith(each)), "")
        column = name.removesuffix(kind)
        if column not in available:
            raise unknown_column(column, available)
        if isinstance(features.get(column), datasets.Image | datasets.Audio | datasets.Video):
            raise ValueError(f"the column {column!r} holds {features[column]}; only plain values can be kept")
        chosen[column] = NUMBERS.get(kind, "")
    return chosen


def read_number(value: Any, name: str, column: str, mark: str = ".") -> float | None:  # noqa: ANN401
    """Return a value of a column of metadata as a number; None if it is absent or blank.

    Args:
        value: A number, or a text such as `9.5`, `1e3`, `1,299.00` or `$ 29`.
        name: The row.
        column: Its column.
        mark: The decimal mark of texts; with `","` they are such as `1.299,00 €`.

    Raises:
        ItemError: It is no finite number.
    """
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    try:
        number = math.nan if isinstance(value, bool) else float(_plain_number(value, mark))
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise ItemError(name, f"{column} is {value!r:.80}; expected a number, such as 9{mark}5")
    return number


def _plain_number(value: Any, mark: str) -> Any:  # noqa: ANN401 - of a row
    """Return a text without groups of thousands and currency, with a decimal point; other values as they are."""
    amount = _AMOUNTS[mark].fullmatch(value.strip()) if isinstance(value, str) else None
    if amount is None:
        return value if mark == "." or not isinstance(value, str) else math.nan
    sign, whole, fraction = amount.groups()
    return f"{sign}{re.sub('[^0-9]', '', whole)}.{fraction or 0}"


def metadata_column(
    dataset: datasets.Dataset, names: Mapping[str, str], values: Sequence[Mapping[str, Any]], owners: Sequence[int]
) -> datasets.Dataset:
    """Make the column `metadata`, a struct of columns of the rows.

    Args:
        dataset: The rows.
        names: The columns, and the decimal mark of their numbers, as `choose_metadata` gives them.
        values: Those of each pair.
        owners: The row of each pair.
    """
    table = dataset.select_columns(list(names)).select(owners).with_format("arrow")[:]
    for name in (name for name, mark in names.items() if mark):
        column = pyarrow.array([row[name] for row in values], pyarrow.float64())
        table = table.set_column(table.column_names.index(name), name, column)
    return datasets.Dataset(datasets.table.InMemoryTable(pyarrow.table({"metadata": table.to_struct_array()})))


def unknown_column(column: str, available: Iterable[str]) -> ValueError:
    """Return the error for a missing column: it lists the columns and suggests the nearest name."""
    available = list(available)
    nearest = difflib.get_close_matches(column, available, n=1, cutoff=0.4)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
    return ValueError(f"no column {column!r}; the columns are {', '.join(map(repr, available))}{hint}")


def undecoded(dataset: Source) -> Source:
    """Return the dataset as plain rows, with images as bytes or paths."""
    dataset = dataset.with_format(None)
    for name, feature in (dataset.features or {}).items():
        if isinstance(feature, datasets.Image):
            dataset = dataset.cast_column(name, IMAGE)
        elif isinstance(element_of(feature), datasets.Image):
            dataset = dataset.cast_column(name, datasets.List(IMAGE))
    return dataset


def strings(columns: Mapping[str, Sequence[Any]], several: bool = False) -> datasets.Dataset:
    """Make a dataset of strings or nulls, or with `several` of lists of strings; its columns may be all null."""
    kind = pyarrow.list_(pyarrow.string()) if several else pyarrow.string()
    arrays = {name: pyarrow.array(values, kind) for name, values in columns.items()}
    return datasets.Dataset(datasets.table.InMemoryTable(pyarrow.table(arrays)))


def element_of(feature: Any) -> Any:  # noqa: ANN401 - any feature of `datasets`
    """Return what a list holds; None if the feature is no list."""
    return feature.feature if isinstance(feature, datasets.List | datasets.LargeList) else None


def is_text(feature: Any) -> bool:  # noqa: ANN401 - any feature of `datasets`
    """Whether a feature is text."""
    return feature in [datasets.Value(kind) for kind in ("string", "large_string", "string_view")]


def image_column(dataset: datasets.Dataset, column: str) -> datasets.Dataset | None:
    """Return a column of images, bytes or paths as the undecoded column `image`; None if it holds something else."""
    feature, several = dataset.features[column], element_of(dataset.features[column]) is not None
    kind = element_of(feature) if several else feature
    images = dataset.select_columns(column).rename_columns({column: "image"})
    if kind in (datasets.Value("large_binary"), datasets.Value("binary_view")):
        kind = datasets.Value("binary")
        images = images.cast_column("image", datasets.List(kind) if several else kind)
    if not is_text(kind) and not isinstance(kind, datasets.Image | dict) and kind != datasets.Value("binary"):
        return None
    return images.cast_column("image", datasets.List(IMAGE) if several else IMAGE)


def with_lists(dataset: Source, column: str | None, first: Mapping[str, Any]) -> Source:
    """Return the dataset with lists of paths in a column of texts, if a cell (of a stream, the first) is a JSON list.

    Args:
        dataset: The rows.
        column: Of the images; None leaves the dataset as it is.
        first: The first row.
    """
    if column is None or not isinstance(first[column], str):
        return dataset

    def read(row: Mapping[str, Any]) -> dict[str, Any]:
        images = listed_images(row[column])
        return {column: images if isinstance(images, list) else [images]}

    cells = dataset[column][:] if isinstance(dataset, datasets.Dataset) else [first[column]]
    if not any(isinstance(listed_images(cell), list) for cell in cells):
        return dataset
    lists = [read({column: cell})[column] for cell in cells]
    if isinstance(dataset, datasets.Dataset):
        others, listed = dataset.remove_columns(column), strings({column: lists}, several=True)
        return datasets.concatenate_datasets([others, listed], axis=1) if others.column_names else listed
    features = dataset.features
    if features is not None:
        features = datasets.Features(features | {column: datasets.List(datasets.Value("string"))})
    return dataset.map(read, features=features)


def without_bytes(images: datasets.Dataset) -> Iterator[Any]:
    """Yield the cells of the undecoded column `image`: `{"bytes", "path"}` or a list of them.

    The bytes of an image are not read: they are `b""` where the image has some, else None.
    """
    is_list = element_of(images.features["image"]) is not None
    for batch in images.with_format("arrow").iter(batch_size=1000):
        column = batch["image"].combine_chunks()
        flat = pyarrow.compute.list_flatten(column) if is_list else column
        data, paths = (pyarrow.compute.struct_field(flat, field) for field in ("bytes", "path"))
        pairs = zip(data.is_null().to_pylist(), paths.to_pylist(), strict=True)
        cells = ({"bytes": None if is_unread else b"", "path": path} for is_unread, path in pairs)
        if is_list:
            counts = pyarrow.compute.list_value_length(column).to_pylist()
            yield from (list(itertools.islice(cells, count or 0)) for count in counts)
        else:
            yield from cells
