"""Columns of a table: which of them are the parts of a row, and what they hold."""

import difflib
import itertools
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import datasets
import pyarrow as pa
import pyarrow.compute as pc

from conjoin.data.row_images import EMBEDDED

logger = logging.getLogger(__name__)
Source = TypeVar("Source", datasets.Dataset, datasets.IterableDataset)

IMAGE = datasets.Image(decode=False)
_BYTES = [datasets.Value(kind) for kind in ("binary", "large_binary", "binary_view")]

COMMON_COLUMNS = {
    "image": ("image", "img", "jpg", "jpeg", "png", "webp", "image_path", "img_path", "file_name", "filename",
              "file_path", "filepath", "path", "image_url", "img_url", "url", "images", "image_paths", "file_names"),
    "text": ("text", "caption", "captions", "title", "txt", "description", "alt_text", "sentence", "texts",
             "sentences"),
    "id": ("id", "__key__", "key", "uid", "uuid", "item_id", "product_id", "sku", "asin", "image_id", "photo_id"),
}  # fmt: skip
"""Default column names, in order of preference; case is ignored."""
ROLES = ("image", "text", "id", "group")
ColumnNames: TypeAlias = Mapping[str, str | Sequence[str]] | Sequence[str]
"""The columns that a caller names, by their roles: `{"image": "photo", "text": ["name", "brand"], "id": "sku"}`, or as
words, `["image=photo", "text=name,brand", "id=sku"]`."""
NUMBER = ":number"
"""Behind the name of a column of metadata, reads its values as numbers."""
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
        joined: Further columns of the text, which are read behind it.
    """

    image: str | None
    text: str | None
    id: str | None
    group: str | None
    label: datasets.ClassLabel | None
    picture: str | None
    joined: tuple[str, ...] = ()


def matching(names: Iterable[str], available: Sequence[str]) -> list[str]:
    """Return the columns with one of some names, in the order of the names; case is ignored."""
    known = {name.lower(): name for name in reversed(available)}
    return [known[name] for name in names if name in known]


def require_columns(names: Iterable[str | None], available: Sequence[str]) -> None:
    """Refuse names that no column has; None and "" name none.

    Raises:
        ValueError: It lists the columns and suggests the nearest name.
    """
    for name in names:
        if name and name not in available:
            nearest = difflib.get_close_matches(name, available, n=1, cutoff=0.4)
            hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
            raise ValueError(f"no column {name!r}; the columns are {', '.join(map(repr, available))}{hint}")


def columns_by_role(columns: ColumnNames | None) -> dict[str, str | Sequence[str]]:
    """Return columns as a dictionary, also those that are words.

    Raises:
        ValueError: A word is no `ROLE=COLUMN`.
    """
    if columns is None or isinstance(columns, Mapping):
        return dict(columns or {})
    words = [columns] if isinstance(columns, str) else columns
    for word in words:
        if not isinstance(word, str) or "=" not in word:
            raise ValueError(f"columns: {word!r}; expected ROLE=COLUMN, such as image=photo")
    return dict(word.split("=", 1) for word in words)


def named_columns(
    columns: ColumnNames | None, available: Sequence[str], roles: Sequence[str] = ROLES
) -> dict[str, list[str]]:
    """Return the columns that a caller names, by their roles; none for a role that is named by "".

    Args:
        columns: As the caller gives them; commas may stand between several columns of a role.
        available: All columns.
        roles: The known ones.

    Raises:
        ValueError: A word is no `ROLE=COLUMN`, or there is no such role or column.
    """
    named: dict[str, list[str]] = {}
    for role, names in columns_by_role(columns).items():
        if role not in roles:
            raise ValueError(f"columns: unknown role {role!r}; expected one of {', '.join(roles)}")
        if isinstance(names, str):
            names = [names] if names in available else names.split(",")
        named[role] = [name for name in names if name]
        require_columns(named[role], available)
        if len(named[role]) > 1 and role != "text":
            raise ValueError(f"columns: {role}={','.join(named[role])}; expected one column, several only of text")
    return named


def choose_columns(
    available: Sequence[str], columns: ColumnNames | None, features: Mapping[str, Any], only: str | None
) -> PairColumns:
    """Choose the columns that are not given by their names.

    Args:
        available: All columns.
        columns: Those that are given.
        features: What the columns hold, as far as it is known.
        only: The part to read, `"image"` or `"text"`; None for both.

    Raises:
        ValueError: There is no such column, several may be the id, or those of images or texts hold something else.
    """
    named = named_columns(columns, available)
    given = {role: next(iter(named[role]), "") if role in named else None for role in ROLES}
    joined = named.get("text", [])[1:]
    matches = {role: matching(names, available) for role, names in COMMON_COLUMNS.items()}
    if not matches["text"]:
        matches["text"] = [name for name in available if isinstance(features.get(name), datasets.ClassLabel)]
    chosen: dict[str, str | None] = {}
    for role, column in given.items():
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
                f"name it by columns, {role}=COLUMN, or call it one of {', '.join(COMMON_COLUMNS[role])}{alone}"
            )
    label = features.get(chosen["text"] or "")
    if not isinstance(label, datasets.ClassLabel):
        label = None
    elif given["text"] is None:
        logger.warning("there are no texts; the names of the classes in %r are read as text", chosen["text"])
    group = chosen["group"] or (chosen["text"] if label is not None else None)
    columns = PairColumns(chosen["image"], chosen["text"], chosen["id"] or None, group, label, picture)
    return _check_kinds(columns._replace(joined=tuple(joined) if columns.text else ()), features)


def _guess(role: str, matches: Sequence[str], is_read: bool) -> str | None:
    """Return the first of the columns `matches`; an id has no order of preference but for `SURE_IDS`."""
    if role == "id" and len(matches) > 1 and matches[0].lower() not in SURE_IDS:
        raise ValueError(
            f"the columns {', '.join(map(repr, matches))} may all be the id; choose one by columns, id=COLUMN"
        )
    if len(matches) > 1 and is_read | (role == "id"):
        others = ", ".join(map(repr, matches[1:]))
        logger.warning(
            "the column %r is read as %s, not %s; choose by columns, %s=COLUMN", matches[0], role, others, role
        )
    return next(iter(matches), None)


def choose_metadata(names: Sequence[str], available: Sequence[str], features: Mapping[str, Any]) -> dict[str, bool]:
    """Return the columns to keep beside the pairs, and of each whether its values are read as numbers.

    Args:
        names: The columns; `price:number` reads those of `price` as numbers.
        available: All columns.
        features: What the columns hold, as far as it is known.

    Raises:
        ValueError: There is no such column, or it holds images, audio or video.
    """
    chosen = {}
    for name in names:
        column = name if name in available else name.removesuffix(NUMBER)
        require_columns([column], available)
        if isinstance(features.get(column), datasets.Image | datasets.Audio | datasets.Video):
            raise ValueError(f"the column {column!r} holds {features[column]}; only plain values can be kept")
        chosen[column] = column != name
    return chosen


def values_of(cells: pa.Array) -> list[Any]:
    """Return the values of a column, also of one of mixed JSON."""
    if not isinstance(cells.type, pa.BaseExtensionType):
        return list(cells.to_pylist())
    return [None if value is None else _parsed(value) for value in cells.storage.to_pylist()]


def _parsed(value: str) -> Any:
    try:
        return json.loads(value)
    except ValueError:  # `datasets` writes some texts, such as "-", without quotes
        return value


def texts_of(cells: pa.Array) -> list[Any]:
    """Return the values of a column; those of mixed JSON are texts or lists of texts."""
    values = values_of(cells)
    if not isinstance(cells.type, pa.BaseExtensionType):
        return values
    return [[*map(_as_text, value)] if isinstance(value, list) else _as_text(value) for value in values]


def _as_text(value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def undecoded(dataset: Source) -> Source:
    """Return the dataset as plain rows, with images at any depth as bytes or paths."""
    dataset = dataset.with_format(None)
    for name, feature in (dataset.features or {}).items():
        plain = _undecoded(feature)
        if plain != feature:
            dataset = dataset.cast_column(name, plain)
    return dataset


def _undecoded(feature: Any) -> Any:
    if isinstance(feature, datasets.Image):
        return IMAGE
    if isinstance(feature, datasets.List | datasets.LargeList):
        return type(feature)(_undecoded(feature.feature))
    return {name: _undecoded(part) for name, part in feature.items()} if isinstance(feature, dict) else feature


def is_list(cells: Any) -> bool:
    """Whether a column of Arrow holds lists."""
    return pa.types.is_list(cells.type) or pa.types.is_large_list(cells.type)


def element_of(feature: Any) -> Any:
    """Return what a list holds; None if the feature is no list."""
    return feature.feature if isinstance(feature, datasets.List | datasets.LargeList) else None


def is_text(feature: Any) -> bool:
    """Whether a feature is text."""
    return feature in [datasets.Value(kind) for kind in ("string", "large_string", "string_view")]


def holds_images(feature: Any) -> bool:
    """Whether a feature is of images with their bytes or paths, or of lists of them."""
    kind = element_of(feature) or feature
    return isinstance(kind, datasets.Image | dict) or kind in _BYTES


def _check_kinds(columns: PairColumns, features: Mapping[str, Any]) -> PairColumns:
    """Return the columns without a `picture` that holds no images; it may if images are not read.

    Raises:
        ValueError: The columns of images or of texts hold something else.
    """
    other = (datasets.Value("null"), datasets.Json())
    for name in (columns.text, *columns.joined):
        kind = features.get(name or "")
        is_label = name == columns.text and columns.label is not None
        kind = kind if columns.joined else element_of(kind) or kind
        if name and not (is_label or is_text(kind) or kind in other):
            raise ValueError(f"column {name!r} holds {features[name]}; expected texts")
    pictures = features.get(columns.picture or "")
    kind = element_of(pictures) or pictures
    if is_text(kind) or kind in other or holds_images(pictures):
        return columns
    if columns.image:
        raise ValueError(f"column {columns.image!r} holds {pictures}; expected images, image bytes, paths or URLs")
    return columns._replace(picture=None)


def cast_images(dataset: Source, column: str) -> Source:
    """Return the dataset with a column that `holds_images` as `IMAGE`, or as lists of it."""
    element = element_of(dataset.features[column])
    kinds = [IMAGE] if (element or dataset.features[column]) not in _BYTES[1:] else [_BYTES[0], IMAGE]
    for kind in kinds:
        feature = kind if element is None else datasets.List(kind)
        if dataset.features[column] != feature:
            dataset = dataset.cast_column(column, feature)
    return dataset


def image_paths(cells: pa.Array) -> list[Any]:
    """Return the path of each row's image, or a list of paths; `EMBEDDED` for one with bytes, which stay unread."""
    if is_list(cells):
        paths = iter(image_paths(pc.list_flatten(cells)))
        lengths = pc.fill_null(pc.list_value_length(cells), 0).to_pylist()
        return [[*itertools.islice(paths, length)] for length in lengths]
    if pa.types.is_struct(cells.type):
        has_bytes = pc.is_valid(pc.struct_field(cells, "bytes"))
        cells = pc.if_else(has_bytes, EMBEDDED, pc.struct_field(cells, "path"))
    return texts_of(cells)
