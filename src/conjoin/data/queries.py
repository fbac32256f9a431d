"""Queries with positives and negatives from tables of one's own: JSON lines, Parquet, CSV or a Hub dataset."""

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import datasets
from torch.utils.data import ConcatDataset

from conjoin.data.columns import require_columns, undecoded
from conjoin.data.json_files import JsonLines
from conjoin.data.mbeir import MbeirTraining
from conjoin.data.merit import MeritTraining
from conjoin.data.mmeb import MmebTraining
from conjoin.data.nli import load_nli
from conjoin.data.pair_sources import PairSource, SplitError, open_source
from conjoin.data.query_rows import Candidate, QueryDataset, QueryRow
from conjoin.data.row_checks import as_name, check_ids, row_name
from conjoin.data.row_images import RowImages, image_folders, listed_images, row_item
from conjoin.processing.item_error import ItemError
from conjoin.processing.item_inputs import IMAGE_SUFFIXES, check_parts, check_text
from conjoin.progress import progress
from conjoin.storage import row_digest

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
ITEM_ENDINGS = {"whole": "", "text": "_text", "image": "_image"}
"""A whole item is a text, an image, or `{"text", "image"}`; of positives and negatives also a list of them."""
LABELS = ("label", "labels", "score", "scores")
IMAGE_KEYS = ("image", "images")
_ABSENT: tuple[Any, ...] = (None, "", [])


def choose_query_columns(available: Sequence[str], given: Mapping[str, str]) -> dict[str, list[dict[str, str]]]:
    """Choose the columns of each role, for each item its `{"whole"?, "text"?, "image"?}`; `given` comes before names.

    Args:
        available: All columns.
        given: Columns by role: a key of `QUERY_COLUMNS`, or `query_text`, `query_image` and so on.

    Raises:
        ValueError: There is no such role or column, no query or positive, or the rows are labelled pairs.
    """
    endings = {role: ITEM_ENDINGS if role in ITEM_ROLES else {"whole": ""} for role in QUERY_COLUMNS}
    known = [role + ending for role, parts in endings.items() for ending in parts.values()]
    for role in given:
        if role not in known:
            raise ValueError(f"unknown part {role!r} in columns; expected one of {known}")
    require_columns(given.values(), available)
    chosen = {}
    for role, stems in QUERY_COLUMNS.items():
        parts = endings[role]
        items = [{part: given[role + ending] for part, ending in parts.items() if role + ending in given}]
        if not items[0]:
            if role == "negative":  # all names, each with its numbered columns in order
                stems = tuple(each for stem in stems for each in (stem, *_numbered(stem, available)))
            items = [{part: stem + end for part, end in parts.items() if stem + end in available} for stem in stems]
        items = [columns for columns in items if columns]
        chosen[role] = items if role == "negative" else items[:1]
        if role in ("query", "positive"):
            if not items:
                raise ValueError(
                    f"found no {role} column among {', '.join(map(repr, available))}; name it in columns, or one of "
                    f"{', '.join(stems)} (also with _text or _image behind)"
                )
            if len(items) > 1:
                others = ", ".join(repr(column) for columns in items[1:] for column in columns.values())
                logger.warning("%s is read as the %s, not %s; choose by columns", _names(items[0]), role, others)
    labels = [name for name in LABELS if name in available and name not in given.values()]
    if labels and not chosen["negative"]:
        raise ValueError(
            f"the column {labels[0]!r} grades pairs; expected rows of a query, its positives and its negatives (of "
            'mine_hard_negatives in sentence-transformers: output_format="triplet" or "n-tuple")'
        )
    return chosen


def _numbered(stem: str, available: Sequence[str]) -> list[str]:
    matches = [re.fullmatch(rf"({stem}_(\d+))(_text|_image)?", name) for name in available]
    return [name for _, name in sorted({(int(match[2]), match[1]) for match in matches if match})]


def _parts(value: Any, name: str) -> dict[str, Any]:
    """Return the text and the image or images of a cell."""
    if isinstance(value, str):
        if value.lower().endswith(IMAGE_SUFFIXES) and not any(map(str.isspace, value)):
            raise ItemError(
                name, f'{value!r} is ambiguous; expected {{"image": {value!r}}} or, if it is a text, {{"text": ...}}'
            )
        return {"text": value}
    if isinstance(value, bytes) or (isinstance(value, Mapping) and {"bytes", "path"} == set(value)):
        return {"image": value}
    if not isinstance(value, Mapping) or not set(value) <= {"text", *IMAGE_KEYS}:
        wanted = 'a text, an image, or {"text": ..., "image": ...} with one of them or both'
        raise ItemError(name, f"got {value!r:.80}; expected {wanted}")
    images = [value[key] for key in IMAGE_KEYS if value.get(key) is not None]
    if len(images) > 1:
        raise ItemError(name, f"it has both of {' and '.join(IMAGE_KEYS)}; expected one")
    text = {} if value.get("text") is None else {"text": value["text"]}
    return check_parts(text | ({"image": images[0]} if images else {}), name)


class QueryTable(QueryDataset):
    """Rows `{query, positive(s), negative(s), instruction?, ids?}` of one table, see `QueryDataset`.

    The query, each positive and each negative is a text, `{"text": ..., "image": ...}` with one of them or both, or
    with a list of images (then `<image>` in the text marks their places, see `load_pairs`). In a JSON-lines file a
    string is always a text. In Parquet and Hub datasets a column may hold images. `query_image` and `query_text` may
    be columns of their own, likewise for positives and negatives.

    Every row is checked here; images are opened when a row is used. Candidates without ids are known by their content.

    Args:
        source: A JSON-lines, Parquet or CSV file, a dataset of `datasets`, or the id of a dataset on the Hub.
        columns: Columns by role, where they differ from `QUERY_COLUMNS`.
        split: The split, for sources with several.
        hard_negatives: Number of negatives per row at most; none is repeated.
        instruction: For the rows that have none.
        name: Of the rows, as `one_dataset_per_batch` counts datasets; the source by default.
        show_progress: Show a progress bar while rows are checked.

    Raises:
        FileNotFoundError: The source or an image does not exist.
        ValueError: A column is missing, the table is empty, or a row cannot be used (it is named).
    """

    repeats_negatives = False

    def __init__(
        self,
        source: PairSource,
        *,
        columns: Mapping[str, str] | None = None,
        split: str = "train",
        hard_negatives: int = 0,
        instruction: str | None = None,
        name: str | None = None,
        show_progress: bool = False,
    ) -> None:
        super().__init__(hard_negatives)
        self.rows, folder = _open(source, split)
        self.columns = choose_query_columns(_column_names(self.rows), columns or {})
        self.images, self.instruction = RowImages(folder, image_folders(source, folder)), instruction
        ids, has_negatives = [], False
        shown = progress(self.rows, desc="checking rows", unit="row", total=len(self.rows), show=show_progress)
        for index, row in enumerate(shown):
            read = self._read(row, index)
            ids.append(read.id)
            has_negatives |= bool(read.negatives)
            self.positives.append(tuple(positive.id for positive in read.positives))
        if self.columns["id"]:
            check_ids(ids)
        self.sources = [name or str(source)[:200]] * len(self.positives)
        if has_negatives and not hard_negatives:
            logger.warning("the rows of %.200s have negatives, but hard_negatives=0 leaves them out", source)

    def read(self, index: int) -> QueryRow:
        """Read and check a row."""
        return self._read(self.rows[index], index)

    def _read(self, row: Mapping[str, Any], index: int) -> QueryRow:
        columns = self.columns
        plain = [role for role in columns if role not in ITEM_ROLES]
        cells = {role: [row.get(each["whole"]) for each in columns[role]] for role in plain}
        row_id = as_name(cells["id"][0]) if cells["id"] else str(index)
        if row_id is None:
            raise ItemError(f"row {index}", "the id is missing")
        name = row_name(index, row_id)
        items = {
            role: [item for each in columns[role] for item in self._items(row, each, f"{name}, {role}")]
            for role in ITEM_ROLES
        }
        if len(items["query"]) != 1:
            raise ItemError(name, f"{len(items['query'])} queries; expected one, in {_names(columns['query'][0])}")
        if not items["positive"]:
            raise ItemError(name, f"no positive in {_names(columns['positive'][0])}")
        for role in ("positive", "negative"):
            if cells[f"{role}_id"]:
                cell, column = cells[f"{role}_id"][0], columns[f"{role}_id"][0]["whole"]
                ids = [as_name(each) for each in (cell if isinstance(cell, list) else [cell])]
                if len(ids) != len(items[role]) or None in ids:
                    problem = f"{len(items[role])} items, but {column!r} is {cell!r:.80}; expected one id for each"
                    raise ItemError(f"{name}, {role}", problem)
                items[role] = [item._replace(id=str(each)) for item, each in zip(items[role], ids, strict=True)]
        if items["negative"] and bool(cells["positive_id"]) != bool(cells["negative_id"]):
            raise ItemError(name, "ids for its positives or for its negatives; expected both or neither")
        same = {positive.id for positive in items["positive"]} & {negative.id for negative in items["negative"]}
        if same:
            raise ItemError(name, f"a negative is also a positive (id {min(same)!r})")
        instruction = cells["instruction"][0] if cells["instruction"] else None
        if instruction is not None and not isinstance(instruction, str):
            raise ItemError(name, f"the instruction is {instruction!r:.80}; expected a text")
        query = items["query"][0].item
        return QueryRow(row_id, query, items["positive"], items["negative"], instruction or self.instruction)

    def _items(self, row: Mapping[str, Any], columns: Mapping[str, str], name: str) -> list[Candidate]:
        """Return the items of some columns: none, one, or those of a list.

        Raises:
            ItemError: A cell is no item, or an image or a text cannot be used; the item starts with `name`.
            MissingFileError: The file of an image does not exist.
        """
        parts = {part: row.get(column) for part, column in columns.items()}
        whole, parts = parts.pop("whole", None), {part: cell for part, cell in parts.items() if cell not in _ABSENT}
        if isinstance(whole, list):
            if parts:
                others = ", ".join(repr(column) for part, column in columns.items() if part != "whole")
                raise ItemError(name, f"a list in {columns['whole']!r} beside {others}")
            named = [(f"{name} {index}", each) for index, each in enumerate(whole)]
            return [self._item(_parts(each, own_name), own_name) for own_name, each in named]
        own = {} if whole in _ABSENT else _parts(whole, name)
        if both := parts.keys() & own.keys():
            raise ItemError(name, f"both {columns['whole']!r} and another column give its {min(both)}")
        return [self._item(own | parts, name)] if own or parts else []

    def _item(self, parts: dict[str, Any], name: str) -> Candidate:
        if "text" in parts:
            check_text(parts["text"], name)
        if "image" in parts:
            parts["image"] = self.images.check(listed_images(parts["image"]), name)
        modality = ",".join(part for part in ("image", "text") if part in parts)
        return Candidate(f"{row_digest(parts):x}", row_item(parts, name), modality)


class QueryMix(ConcatDataset[dict[str, Any]]):
    """The rows of several tables; an id names the same candidate in all of them.

    Args:
        tables: The tables.
        weights: How many times the rows of each table are used in an epoch: 2 for twice, 0.5 for a random half.

    Attributes:
        positives: The ids of each row's positives.
        sources: The name of each row's table.
        repeats: The weight of each row's table.

    Raises:
        ValueError: No table, two tables of one name, or a weight that is not positive.
    """

    def __init__(self, tables: Sequence[QueryTable], weights: Sequence[float]) -> None:
        names = [table.sources[0] for table in tables]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"expected sources of different names, got {names}; give each a name")
        for name, weight in zip(names, weights, strict=True):
            if not 0 < weight < float("inf"):
                raise ValueError(f"the weight of {name!r} is {weight}; expected a positive number")
        super().__init__(tables)
        self.positives = [ids for table in tables for ids in table.positives]
        self.sources = [name for table in tables for name in table.sources]
        self.repeats = [weight for table, weight in zip(tables, weights, strict=True) for _ in range(len(table))]


def _open(source: PairSource, split: str) -> tuple[Any, Path | None]:
    """Open a table; rows of a JSON-lines file may differ in their types, so they are not read by `datasets`."""
    path = Path(source).expanduser() if isinstance(source, str | Path) else None
    if path is not None and path.suffix.lower() in (".jsonl", ".ndjson"):
        if split != "train":
            raise SplitError(split, f"the table {str(path)!r}")
        return JsonLines(path), path.parent
    table, folder = open_source(source, split, streaming=False, captions=False)
    if not isinstance(table, datasets.Dataset):
        raise ValueError(f"expected a dataset with a length, got {type(table).__name__}")
    if not len(table):
        raise ValueError(f"{source!r:.200} is empty: it has no rows")
    return undecoded(table), folder


def _column_names(rows: Any) -> list[str]:
    if isinstance(rows, datasets.Dataset):
        return list(rows.column_names)
    return list(dict.fromkeys(name for row in rows for name in row))


def _names(columns: Mapping[str, str]) -> str:
    return " or ".join(map(repr, columns.values()))


class QueryFormat(NamedTuple):
    """How to read one format.

    Args:
        load: Takes `source`, `split`, `hard_negatives` and the options; returns rows for `RetrievalCollator`.
        options: Fields of the section `data` that only some formats have.
    """

    load: Callable[..., Any]
    options: tuple[str, ...] = ()


QUERY_FORMATS = {
    "nli": QueryFormat(load_nli, ("columns",)),
    "mbeir": QueryFormat(MbeirTraining, ("datasets", "instructions")),
    "merit": QueryFormat(MeritTraining, ("ood",)),
    "mmeb": QueryFormat(MmebTraining, ("datasets",)),
}
