"""Columns of a table: which of them are the parts of a row, and what they hold."""

import difflib
import html
import itertools
import json
import logging
import re
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import datasets
import pyarrow as pa
import pyarrow.compute as pc
from PIL import Image

from conjoin.data.cells import as_id, is_missing, read_images
from conjoin.data.row_images import EMBEDDED
from conjoin.processing.item_images import is_url
from conjoin.processing.item_inputs import PICTURE_SUFFIXES

logger = logging.getLogger(__name__)
Source = TypeVar("Source", datasets.Dataset, datasets.IterableDataset)

IMAGE = datasets.Image(decode=False)
_ANY = (datasets.Value("null"), datasets.Json())
_BYTES = [datasets.Value(kind) for kind in ("binary", "large_binary", "binary_view")]

COLUMN_NAMES = {
    "image": """image img jpg jpeg png webp picture photo bild foto image_src image_link main_image main_image_link
        image_path img_path file_name filename file_path filepath image_url img_url picture_url photo_url bild_url
        bildlink bildpfad produktbild hauptbild imagen immagine images image_paths file_names pictures photos bilder
        variant_image thumbnail path url link""",
    "text": """text caption captions txt title name product_name product_title item_name titel bezeichnung produktname
        artikelname artikelbezeichnung titre nom nombre titulo titolo nome alt_text sentence texts sentences
        description short_description product_description beschreibung kurzbeschreibung body_html""",
    "id": """id __key__ key uid uuid item_id variant_sku sku asin variant_id article_id product_id image_id photo_id
        artikelnummer artikelnr artikel_nr artikel_id art_nr artnr article_number item_number product_number
        product_code mpn ean gtin barcode nr number handle""",
    "group": """group group_id item_group_id product_group parent_id parent_sku parent handle product_id product
        style_id produkt_id produkt modell model""",
}
"""Names of columns by role, in order of preference. Case is ignored, and `_` stands for what is no letter or digit."""
_NAMES = {role: names.split() for role, names in COLUMN_NAMES.items()}
QUERY_NAMES = {
    "query": "query anchor question sent0 sentence1",
    "positive": "positive positives pos answer answers passage document sent1 sentence2",
    "negative": "negative negatives neg hard_negative hard_negatives hard_neg",
    "variant": "variant",
    "instruction": "instruction",
    "kind": "kind",
    "id": "id query_id qid",
    "positive_id": "positive_id positive_ids",
    "negative_id": "negative_id negative_ids",
}
"""Likewise of queries with candidates; negatives may also be `NAME_1`, `NAME_2` ..."""
_ITEMS = ("query", "positive", "negative", "variant")
_ENDINGS = {"whole": "", "text": "_text", "image": "_image"}
"""A whole item is a text, an image, or `{"text", "image"}`; of positives and negatives also a list of them."""
_GRADES = ("label", "labels", "score", "scores", "similarity", "relevance")
_SURE_IDS = ("id", "__key__")
"""A column of these names is the id whatever it holds."""
_PAGES = ("path", "url", "link")
"""Columns of these names hold pictures only if their values end like pictures."""
_FIRST_ROWS = 1000
_MOST, _NEARLY_ALL = 0.5, 0.8
_LONG = 200
_ROWS_OF_A_GROUP = 20
_SEVERAL = re.compile(r"\s|[\u0e00-\u0eff\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff]")
"""Part of a text of several words: a blank, or a letter of Thai, Lao, Khmer, Japanese or Chinese, written without."""
_INVISIBLE = dict.fromkeys(map(ord, "\u00ad\u200b\u2060\ufeff"))
"""Soft hyphens and spaces without width, which go."""
_CODE = re.compile(r"(?=.*\d)(?=.*[^\W\d])[\w./#-]+")
ROLES = ("image", "text", "id", "group")
ColumnNames: TypeAlias = Mapping[str, str | Sequence[str]] | Sequence[str]
"""The columns that a caller names, by their roles: `{"image": "photo", "text": ["name", "brand"], "id": "sku"}`, or as
words, `["image=photo", "text=name,brand", "id=sku"]`."""
NUMBER = ":number"
"""Behind the name of a column of metadata, reads its values as numbers."""


class TableColumns(NamedTuple):
    """Which columns of a table are the parts of its rows.

    Attributes:
        image: The column of the images; None without one.
        text: The columns of the text, whose texts are joined; empty without one.
        id: The column of the ids; None for row numbers.
        group: The column with one value for all rows that show the same thing; None without one.
        others: By role, further columns that might have it.
    """

    image: str | None
    text: tuple[str, ...]
    id: str | None
    group: str | None
    others: Mapping[str, Sequence[str]]


def plain_name(name: str) -> str:
    """Return a name in small letters, with `_` between its words: `Price (incl. VAT)` as `price_incl_vat`."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|[^\w]+", "_", name)
    return words.strip("_").lower() if name[:2] != "__" else name.lower()


def clean_name(name: str) -> str:
    """Return the name of a column without outer spaces and entities of HTML; one that Lance has no names for is plain.

    Lance takes no dot and no backtick: `Price (incl. VAT)` becomes `price_incl_vat`.
    """
    name = " ".join(html.unescape(name).translate(_INVISIBLE).split())
    return plain_name(name.lower()) if {".", "`"} & {*name} else name


def clean_names(dataset: Source) -> Source:
    """Return a dataset whose columns have clean names; a line of the log says which are renamed."""
    names = dataset.column_names or []
    cleaned = [clean_name(name) for name in names]
    new = {
        old: name
        for old, name in zip(names, cleaned, strict=True)
        if name and name not in names and cleaned.count(name) == 1
    }
    if new:
        logger.warning("columns are renamed: %s", ", ".join(f"{old!r} is {name!r}" for old, name in new.items()))
    return dataset.rename_columns(new) if new else dataset


def matching(names: Iterable[str], available: Collection[str]) -> list[str]:
    """Return the columns with one of some names, in the order of the names; case is ignored, and so are brackets.

    `SKU (internal)` is a column of the name `sku`, unless another one is.
    """
    backwards = [*reversed([*available])]
    known = {plain_name(re.sub(r"\(.*?\)", " ", name)): name for name in backwards}
    known |= {plain_name(name): name for name in backwards}
    return [known[name] for name in names if name in known]


def grade_columns(available: Collection[str]) -> list[str]:
    """Return the columns that are named as if they graded pairs."""
    return matching(_GRADES, available)


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


def columns_by_role(columns: ColumnNames | None) -> dict[str, Any]:
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
            names = [names] if {names, clean_name(names)} & {*available} else names.split(",")
        named[role] = [name if name in available else clean_name(name) for name in names if name]
        require_columns(named[role], available)
        if len(named[role]) > 1 and role != "text":
            raise ValueError(f"columns: {role}={','.join(named[role])}; expected one column, several only of text")
    return named


def guess_columns(
    rows: Any, columns: ColumnNames | None = None, features: Mapping[str, Any] | None = None
) -> TableColumns:
    """Choose the columns of a table by their names and values; every reader of tables asks this function.

    * image: named like one, and most values are pictures, paths or URLs of them; else any such column.
    * text: named like a text, a title before a description, and texts of more than 200 letters last; else a column of
      class labels; else one whose values are several words and mostly differ.
    * id: named like one, and nearly each row has a value of its own (rows of one image may share it); else a column of
      different codes, such as A-1001; else row numbers.
    * group: named like one, and its values are repeated in a few rows each.

    Args:
        rows: A dataset, undecoded, or the values of some rows by column: `{"image": [...], "title": [...]}`.
        columns: The columns that the caller names, which are not guessed.
        features: What the columns hold, as far as it is known; by default those of the dataset.

    Raises:
        ValueError: There is no such column or role.
    """
    table = _Table(rows, features)
    named = named_columns(columns, table.names)
    taken = {name for role in named.values() for name in role}
    chosen: dict[str, list[str]] = {}
    others: dict[str, Sequence[str]] = {}
    for role, find in (("image", table.images), ("text", table.texts), ("id", table.ids), ("group", table.groups)):
        found = [name for name in ([] if role in named else find(chosen)) if name not in taken]
        chosen[role] = named.get(role, found[:1])
        others[role] = found[1:]
        taken |= {*chosen[role]}
    image, id_, group = (next(iter(chosen[role]), None) for role in ("image", "id", "group"))
    return TableColumns(image, tuple(chosen["text"]), id_, group, others)


class _Table:
    """A table whose columns are guessed: for each role, the columns that may have it, the best first."""

    def __init__(self, rows: Any, features: Mapping[str, Any] | None) -> None:
        self.rows = rows
        self.features = features or getattr(rows, "features", None) or {}
        self.names: list[str] = getattr(rows, "column_names", None) or [*rows]
        self._first: dict[str, list[Any]] = {}

    def first(self, name: str) -> list[Any]:
        """The values in the first rows, those of lists one by one, without what is no value."""
        if name not in self._first:
            cells = [cell if isinstance(cell, list | tuple) else [cell] for cell in self.rows[name][:_FIRST_ROWS]]
            self._first[name] = [value for cell in cells for value in cell if not is_missing(value)]
        return self._first[name]

    def images(self, _chosen: Any) -> list[str]:
        matches = matching(_NAMES["image"], self.names)
        sure = [name for name in matches if plain_name(name) not in _PAGES]
        elsewhere = {name for role in ("text", "id", "group") for name in matching(_NAMES[role], self.names)}
        free = [name for name in self.names if name not in elsewhere]
        found = [name for name in dict.fromkeys([*matches, *free]) if self._is_of_images(name, name in sure)]
        return found or [name for name in sure if is_text(self._kind(name)) or self._kind(name) is None]

    def _kind(self, name: str) -> Any:
        feature = self.features.get(name)
        return element_of(feature) or feature

    def _is_of_images(self, name: str, is_named: bool) -> bool:
        kind = self._kind(name)
        if isinstance(kind, datasets.Image) or kind in _BYTES:
            return True
        if not (kind is None or kind in _ANY or is_text(kind) or isinstance(kind, dict)):
            return False
        return _share(self.first(name), lambda value: _is_picture(value, is_named)) > _MOST

    def _is_of_texts(self, name: str) -> bool:
        kind = self._kind(name)
        values = self.first(name) if kind is None or kind in _ANY else []
        return is_text(kind) or any(isinstance(value, str) for value in values) or kind == datasets.Value("null")

    def texts(self, chosen: Mapping[str, Sequence[str]]) -> list[str]:
        free = [name for name in self.names if self._is_of_texts(name) and name not in chosen["image"]]
        matches = matching(_NAMES["text"], free)
        words = [name for name in matches if _share(self.first(name), _is_words) > _MOST]
        words.sort(key=lambda name: statistics.median(len(str(value)) for value in self.first(name)) > _LONG)
        if words or matches:
            return words or matches
        labels = [name for name in self.names if isinstance(self.features.get(name), datasets.ClassLabel)]
        return labels or [
            name
            for name in free
            if _share(self.first(name), lambda value: _is_words(value) and _SEVERAL.search(value.strip())) > _MOST
            and len({*map(str, self.first(name))}) > _MOST * len(self.first(name))
        ]

    def ids(self, chosen: Mapping[str, Sequence[str]]) -> list[str]:
        free = [name for name in self.names if name not in (*chosen["image"], *chosen["text"])]
        matches = matching(_NAMES["id"], free)
        sure = [name for name in matches if name.lower() in _SURE_IDS]
        found = [name for name in matches if name in sure or self._is_unique(name, chosen)]
        return found or [
            name
            for name in free
            if name not in matches
            and _share(self.first(name), lambda value: isinstance(value, str) and _CODE.fullmatch(value)) == 1
            and not any(_is_picture(value, False) for value in self.first(name))
            and self._is_unique(name, chosen, 1.0)
        ]

    def _is_unique(self, name: str, chosen: Mapping[str, Sequence[str]], share: float = _NEARLY_ALL) -> bool:
        """Whether at least a share of the rows has a value of its own; rows of one image count once.

        A row without a value and without a text is no row of its own: shops export a product's further images so.
        """
        feature = self.features.get(name)
        if not (feature is None or is_text(feature) or feature in _ANY or "int" in getattr(feature, "dtype", "")):
            return False
        cells: list[Any] = [*self.rows[name][:]]
        if not all(isinstance(value, str | int | None) or is_missing(value) for value in cells):
            return False
        ids = [*map(as_id, cells)]
        named = [image for image in chosen["image"] if is_text(self.features.get(image)) and share < 1]
        pictures = self.rows[named[0]][:] if named else range(len(ids))
        texts = self.rows[chosen["text"][0]][:] if chosen["text"] else pictures
        rows = {
            (id_, picture or row)
            for row, (id_, picture, text) in enumerate(zip(ids, pictures, texts, strict=True))
            if not (id_ is None and is_missing(text))
        }
        return len({*ids} - {None}) >= share * len(rows)

    def groups(self, chosen: Mapping[str, Sequence[str]]) -> list[str]:
        return [
            name
            for name in matching(_NAMES["group"], self.names)
            if name not in chosen["id"]
            and (values := [value for value in self.first(name) if isinstance(value, str | int)])
            and 1 < len({*values}) < len(values) <= _ROWS_OF_A_GROUP * len({*values})
        ]


def _is_picture(value: Any, is_named: bool) -> bool:
    """Whether a cell holds or names a picture, or a list of them; in a column that is named like one any URL does."""
    read = read_images(value)
    return read is not None and all(
        isinstance(image, bytes | Mapping | Image.Image)
        or (isinstance(image, str) and image.partition("?")[0].lower().endswith(PICTURE_SUFFIXES))
        or str(image).startswith("data:image/")
        or (is_named and is_url(image))
        for image in (read if isinstance(read, list) else [read])
    )


def _is_words(value: Any) -> bool:
    """Whether a value is a text, and neither a picture nor a page, nor a code or a number."""
    return isinstance(value, str) and not (
        _is_picture(value, True) or _CODE.fullmatch(value) or not re.search(r"[^\W\d_]", value)
    )


def _share(values: Sequence[Any], test: Callable[[Any], object]) -> float:
    return sum(bool(test(value)) for value in values) / len(values) if values else 0.0


def query_items(available: Sequence[str], named: Mapping[str, str] | None = None) -> dict[str, list[dict[str, str]]]:
    """Return the columns of the query, the positive and the negatives, `{"whole"?, "text"?, "image"?}`, best first.

    Args:
        available: All columns.
        named: Those that the caller names, by role.

    Raises:
        ValueError: A column grades pairs, and the rows have no negatives.
    """
    named, known = named or {}, {plain_name(name): name for name in reversed(available)}
    items: dict[str, list[dict[str, str]]] = {}
    for role in _ITEMS:
        stems = QUERY_NAMES[role].split()
        if role == "negative":
            pattern = rf"(({'|'.join(stems)})(?:_(\d+))?)(?:_text|_image)?"
            matches = [match for name in known if (match := re.fullmatch(pattern, name))]
            order = {match[1]: (stems.index(match[2]), int(match[3] or 0)) for match in matches}
            stems = sorted(order, key=order.__getitem__)
        found = [{part: known[stem + end] for part, end in _ENDINGS.items() if stem + end in known} for stem in stems]
        given = {part: named[role + end] for part, end in _ENDINGS.items() if role + end in named}
        items[role] = [given] if given else [item for item in found if item]
    for name in grade_columns(available):
        if name not in named.values() and not items["negative"]:
            raise ValueError(
                f"the column {name!r} grades pairs, and InfoNCE takes every pair as a match: keep those that match, "
                f"rows.filter(lambda row: row[{name!r}] > 0.5), and remove the column; or give negatives, as "
                'mine_hard_negatives in sentence-transformers does with output_format="triplet" or "n-tuple"'
            )
    return items


def guess_query_columns(
    available: Sequence[str], columns: ColumnNames | None = None
) -> tuple[dict[str, list[dict[str, str]]], dict[str, str]]:
    """Choose the columns of a table of queries by their names, see `QUERY_NAMES`.

    Args:
        available: All columns.
        columns: Those that the caller names, by role: `query`, `query_text`, `positive_image`, `instruction` ...

    Returns:
        As `query_items`, with one query and one positive; and the others.

    Raises:
        ValueError: There is no such role or column, no query or positive, or the rows are labelled pairs.
    """
    roles = [role + end for role in QUERY_NAMES for end in (_ENDINGS.values() if role in _ITEMS else [""])]
    named = {role: names[0] for role, names in named_columns(columns, available, roles).items() if names}
    items = query_items(available, named)
    for role in ("query", "positive"):
        if not items[role]:
            raise ValueError(
                f"found no {role} column among {', '.join(map(repr, available))}; name it in columns, or one of "
                f"{', '.join(QUERY_NAMES[role].split())} (also with _text or _image behind)"
            )
        for other in items[role][1:]:
            logger.warning(
                "%s is read as the %s, not %s; choose by columns", [*items[role][0].values()], role, [*other.values()]
            )
        del items[role][1:]
    others = {
        role: [named[role]] if role in named else matching(QUERY_NAMES[role].split(), available)
        for role in QUERY_NAMES
        if role not in _ITEMS
    }
    return items, {role: names[0] for role, names in others.items() if names}


def choose_columns(
    rows: Any, columns: ColumnNames | None, features: Mapping[str, Any], only: str | None
) -> TableColumns:
    """Choose the columns of pairs, see `guess_columns`.

    Args:
        rows: As for `guess_columns`.
        columns: Those that are given.
        features: What the columns hold.
        only: As for `load_pairs`. For `"text"` the images are named if they are, because they tell which rows are one.

    Raises:
        ValueError: There is no such column, or those of images or texts hold something else.
    """
    found = guess_columns(rows, columns, features)
    given = columns_by_role(columns)
    if only == "image":
        found = found._replace(text=())
    parts = [part for part in ("image", "text") if only in (None, "both", part)]
    lacking = [part for part in parts if not getattr(found, part)]
    if lacking and (only or len(lacking) == 2):
        raise ValueError(
            f"found no {' or '.join(lacking)} column among {', '.join(map(repr, features))}; name it by columns, "
            f"{lacking[0]}=COLUMN, or call it such as {', '.join(_NAMES[lacking[0]][:12])}"
        )
    if lacking and lacking[0] not in given:
        logger.warning("there is no %s column; name one by columns, %s=COLUMN", lacking[0], lacking[0])
    for role, names in (("image", [found.image]), ("text", found.text), ("id", [found.id])):
        if (role in parts or role == "id") and any(names) and found.others[role]:
            others = ", ".join(map(repr, found.others[role]))
            logger.warning(
                "the column %r is read as %s, not %s; choose by columns, %s=COLUMN", names[0], role, others, role
            )
    is_class = len(found.text) == 1 and isinstance(features[found.text[0]], datasets.ClassLabel)
    if is_class and "text" not in given:
        logger.warning("there are no texts; the names of the classes in %r are read as text", found.text[0])
    if found.group and "group" not in given:
        logger.warning("rows with the same %r are of one group; columns, group= makes none", found.group)
    for name in found.text:
        kind = (element_of(features[name]) if len(found.text) == 1 else None) or features[name]
        if not (is_class or is_text(kind) or kind in _ANY):
            raise ValueError(f"column {name!r} holds {features[name]}; expected texts")
    pictures = features.get(found.image or "")
    kind = element_of(pictures) or pictures
    if not (is_text(kind) or kind in _ANY or isinstance(kind, dict) or holds_images(pictures)):
        if found.image and only != "text":
            raise ValueError(f"column {found.image!r} holds {pictures}; expected images, image bytes, paths or URLs")
        found = found._replace(image=None)
    return found._replace(group=found.text[0]) if is_class and not found.group else found


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
        is_number = column != name
        column = column if column in available else clean_name(column)
        require_columns([column], available)
        if isinstance(features.get(column), datasets.Image | datasets.Audio | datasets.Video):
            raise ValueError(f"the column {column!r} holds {features[column]}; only plain values can be kept")
        chosen[column] = is_number
    return chosen


def cells_of(column: pa.ChunkedArray, feature: Any) -> list[Any]:
    """Return the values of a column; those of classes by their names."""
    if isinstance(column.type, pa.BaseExtensionType):  # mixed JSON
        storage = column.combine_chunks().storage.to_pylist()
        return [None if value is None else _parsed(value) for value in storage]
    cells: list[Any] = column.to_pylist()
    if not isinstance(feature, datasets.ClassLabel):
        return cells
    return [None if cell is None or cell < 0 else feature.names[cell] for cell in cells]


def _parsed(value: str) -> Any:
    try:
        return json.loads(value)
    except ValueError:  # `datasets` writes some texts, such as "-", without quotes
        return value


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


def element_of(feature: Any) -> Any:
    """Return what a list holds; None if the feature is no list."""
    return feature.feature if isinstance(feature, datasets.List | datasets.LargeList) else None


def is_text(feature: Any) -> bool:
    """Whether a feature is text."""
    return feature in [datasets.Value(kind) for kind in ("string", "large_string", "string_view")]


def holds_images(feature: Any) -> bool:
    """Whether a feature is of images that may have their bytes, or of lists of them."""
    kind = element_of(feature) or feature
    return isinstance(kind, datasets.Image) or kind in _BYTES or (isinstance(kind, dict) and "bytes" in kind)


def cast_images(dataset: Source, column: str) -> Source:
    """Return the dataset with a column that `holds_images` as `IMAGE`, or as lists of it."""
    element = element_of(dataset.features[column])
    kinds = [IMAGE] if (element or dataset.features[column]) not in _BYTES[1:] else [_BYTES[0], IMAGE]
    for kind in kinds:
        feature = kind if element is None else datasets.List(kind)
        if dataset.features[column] != feature:
            dataset = dataset.cast_column(column, feature)
    return dataset


def image_cells(column: pa.ChunkedArray) -> list[Any]:
    """Return the cells of each row's image or images; `EMBEDDED` for one with bytes, which stay unread."""
    cells = column.combine_chunks()
    if pa.types.is_list(cells.type) or pa.types.is_large_list(cells.type):
        paths = iter(image_cells(pa.chunked_array([pc.list_flatten(cells)])))
        lengths = pc.fill_null(pc.list_value_length(cells), 0).to_pylist()
        return [[*itertools.islice(paths, length)] for length in lengths]
    if pa.types.is_struct(cells.type) and cells.type.get_field_index("bytes") >= 0:
        has_bytes = pc.is_valid(pc.struct_field(cells, "bytes"))
        return pc.if_else(has_bytes, EMBEDDED, pc.struct_field(cells, "path")).to_pylist()
    return cells_of(column, None)
