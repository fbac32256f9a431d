"""Which columns of a table are the query, the positives and the negatives, and the names and instructions of rows."""

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from conjoin.data.pair_columns import unknown_column

logger = logging.getLogger(__name__)

QUERY_COLUMNS = {
    "query": ("query", "anchor", "question"),
    "positive": ("positive", "positives", "pos", "answer", "answers", "passage", "document"),
    "negative": ("negative", "negatives", "neg", "hard_negative", "hard_negatives"),
    "instruction": ("instruction",),
    "id": ("id", "query_id", "qid"),
    "positive_id": ("positive_id", "positive_ids"),
    "negative_id": ("negative_id", "negative_ids"),
}
"""Default names, in order of preference. Items may also have `NAME_text` and `NAME_image`; negatives, `NAME_1` ..."""

ITEM_ROLES = ("query", "positive", "negative")
LABELS = ("label", "labels", "score", "scores")


class ItemColumns(NamedTuple):
    """The columns of an item, or of a list of items.

    Attributes:
        whole: Holds items: texts, images, or `{"text", "image"}`; of positives and negatives also lists of them.
        text: Holds the text of one item.
        image: Holds the image or the images of one item.
    """

    whole: str | None = None
    text: str | None = None
    image: str | None = None


class QueryColumns(NamedTuple):
    """The columns to read.

    Attributes:
        query: Of the query.
        positive: Of the positives.
        negatives: Of the negatives, one entry for each of `negative_1`, `negative_2` ...
        instruction: None without instructions, likewise the ids.
        id: Of the row, for messages.
        positive_id: Of the positives.
        negative_id: Of the negatives.
    """

    query: ItemColumns
    positive: ItemColumns
    negatives: tuple[ItemColumns, ...]
    instruction: str | None
    id: str | None
    positive_id: str | None
    negative_id: str | None


def choose_query_columns(available: Sequence[str], given: Mapping[str, str]) -> QueryColumns:
    """Choose the columns that are not given by their names.

    Args:
        available: All columns.
        given: Columns by role: a key of `QUERY_COLUMNS`, or `query_text`, `query_image` and so on.

    Raises:
        ValueError: There is no such role or column, no query or positive, or the rows are labelled pairs.
    """
    known = [*QUERY_COLUMNS, *(f"{role}_{part}" for role in ITEM_ROLES for part in ("text", "image"))]
    for role, column in given.items():
        if role not in known:
            raise ValueError(f"unknown part {role!r} in columns; expected one of {known}")
        if column not in available:
            raise unknown_column(column, available)
    items = {role: list(_item_columns(role, available, given)) for role in ITEM_ROLES}
    for role in ("query", "positive"):
        if not items[role]:
            raise ValueError(
                f"found no {role} column among {', '.join(map(repr, available))}; name it in columns, or one of "
                f"{', '.join(QUERY_COLUMNS[role])} (also with _text or _image behind)"
            )
    labels = [name for name in LABELS if name in available and name not in given.values()]
    if labels and not items["negative"]:
        raise ValueError(
            f"the column {labels[0]!r} grades pairs; expected rows of a query, its positives and its negatives (of "
            'mine_hard_negatives in sentence-transformers: output_format="triplet" or "n-tuple")'
        )
    single = {role: given.get(role) or _first(role, available) for role in QUERY_COLUMNS if role not in ITEM_ROLES}
    return QueryColumns(items["query"][0], items["positive"][0], tuple(items["negative"]), **single)


def _item_columns(role: str, available: Sequence[str], given: Mapping[str, str]) -> Iterator[ItemColumns]:
    """Yield the columns of a role: those that are given, else those of the first name, numbered ones in order."""
    parts = {"whole": role, "text": f"{role}_text", "image": f"{role}_image"}
    if any(name in given for name in parts.values()):
        yield ItemColumns(**{part: given.get(name) for part, name in parts.items()})
        return
    found = [columns for name in QUERY_COLUMNS[role] for columns in _named(name, role, available)]
    if role == "negative":
        yield from found
    elif found:
        if len(found) > 1:
            others = ", ".join(repr(column) for columns in found[1:] for column in columns if column)
            logger.warning("%r is read as the %s, not %s; choose by columns", found[0], role, others)
        yield found[0]


def _named(name: str, role: str, available: Sequence[str]) -> Iterator[ItemColumns]:
    """Yield the columns of one name: `NAME`, `NAME_text`, `NAME_image`, and for negatives those of `NAME_1` and on."""
    numbered = re.compile(rf"({name}_\d+)(_text|_image)?")
    stems = [match[1] for match in map(numbered.fullmatch, available) if match] if role == "negative" else []
    for stem in [name, *sorted(set(stems), key=lambda stem: int(stem.rpartition("_")[2]))]:
        candidates = (stem, f"{stem}_text", f"{stem}_image")
        columns = [column if column in available else None for column in candidates]
        if any(columns):
            yield ItemColumns(*columns)


def _first(role: str, available: Sequence[str]) -> str | None:
    return next((name for name in QUERY_COLUMNS[role] if name in available), None)
