"""Queries with positives and negatives from tables of one's own: JSON lines, Parquet, CSV or a Hub dataset."""

import bisect
import itertools
import logging
import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import torch
from torch.utils.data import Dataset

from conjoin.data.columns import require_columns, undecoded
from conjoin.data.json_files import JsonLines
from conjoin.data.mbeir import MbeirTraining
from conjoin.data.merit import MeritTraining
from conjoin.data.mmeb import MmebTraining
from conjoin.data.nli import load_nli
from conjoin.data.pair_sources import PairSource, SplitError, open_source
from conjoin.data.row_checks import as_name, check_ids, read_id, read_rows, row_name
from conjoin.data.row_images import RowImages, image_folders, listed_images, row_item
from conjoin.data.training_rows import Candidate, check_negatives, query_row
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
LABELS = ("label", "labels", "score", "scores")
IMAGE_KEYS = ("image", "images")
_ABSENT: tuple[Any, ...] = (None, "", [])


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
    for role in given:
        if role not in known:
            raise ValueError(f"unknown part {role!r} in columns; expected one of {known}")
    require_columns(given.values(), available)
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
    single = {
        role: given.get(role) or next((name for name in QUERY_COLUMNS[role] if name in available), None)
        for role in QUERY_COLUMNS
        if role not in ITEM_ROLES
    }
    return QueryColumns(items["query"][0], items["positive"][0], tuple(items["negative"]), **single)


def _item_columns(role: str, available: Sequence[str], given: Mapping[str, str]) -> Iterator[ItemColumns]:
    """Yield the columns of a role: those that are given, else those of the first name, numbered ones in order."""
    parts = {"whole": role, "text": f"{role}_text", "image": f"{role}_image"}
    if any(name in given for name in parts.values()):
        yield ItemColumns(**{part: given.get(name) for part, name in parts.items()})
        return
    matches = [columns for name in QUERY_COLUMNS[role] for columns in _named(name, role, available)]
    if role == "negative":
        yield from matches
    elif matches:
        if len(matches) > 1:
            others = ", ".join(repr(column) for columns in matches[1:] for column in columns if column)
            logger.warning("%r is read as the %s, not %s; choose by columns", matches[0], role, others)
        yield matches[0]


def _named(name: str, role: str, available: Sequence[str]) -> Iterator[ItemColumns]:
    """Yield the columns of one name: `NAME`, `NAME_text`, `NAME_image`, and for negatives those of `NAME_1` and on."""
    numbered = re.compile(rf"({name}_\d+)(_text|_image)?")
    stems = [match[1] for match in map(numbered.fullmatch, available) if match] if role == "negative" else []
    for stem in [name, *sorted(set(stems), key=lambda stem: int(stem.rpartition("_")[2]))]:
        candidates = (stem, f"{stem}_text", f"{stem}_image")
        columns = [column if column in available else None for column in candidates]
        if any(columns):
            yield ItemColumns(*columns)


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


class _Row(NamedTuple):
    """A row that is read and checked."""

    id: str
    query: Candidate
    positives: list[Candidate]
    negatives: list[Candidate]
    instruction: str | None


class QueryTable(Dataset[dict[str, Any]]):
    """Rows `{query, positive(s), negative(s), instruction?, ids?}` of one table, for `RetrievalCollator`.

    The query, each positive and each negative is a text, `{"text": ..., "image": ...}` with one of them or both, or
    with a list of images (then `<image>` in the text marks their places, see `load_pairs`). In a JSON-lines file a
    string is always a text. In Parquet and Hub datasets a column may hold images. `query_image` and `query_text` may
    be columns of their own, likewise for positives and negatives.

    Every row is checked here; images are opened when a row is used. Each access draws one of several positives and
    `hard_negatives` of the negatives with torch's generator. Candidates without ids are known by their content.

    Args:
        source: A JSON-lines, Parquet or CSV file, a dataset of `datasets`, or the id of a dataset on the Hub.
        columns: Columns by role, where they differ from `QUERY_COLUMNS`.
        split: The split, for sources with several.
        hard_negatives: Number of negatives per row at most.
        instruction: For the rows that have none.
        name: Of the rows, as `one_dataset_per_batch` counts datasets; the source by default.
        show_progress: Show a progress bar while rows are checked.

    Attributes:
        positives: The ids of each row's positives.
        sources: `name` for each row.

    Raises:
        FileNotFoundError: The source or an image does not exist.
        ValueError: A column is missing, the table is empty, or a row cannot be used (it is named).
    """

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
        self.rows, folder = _open(source, split)
        self.columns = choose_query_columns(_column_names(self.rows), columns or {})
        self.images = RowImages(folder, image_folders(source, folder))
        self.hard_negatives, self.instruction = check_negatives(hard_negatives), instruction
        self._has_negatives = False
        shown = progress(self.rows, desc="checking rows", unit="row", total=len(self.rows), show=show_progress)
        checked = read_rows(shown, self._check)
        self.positives: list[tuple[str, ...]] = [positives for _, positives in checked]
        if self.columns.id:
            check_ids([row_id for row_id, _ in checked])
        self.sources: Sequence[Hashable] = [name or str(source)[:200]] * len(self.positives)
        if self._has_negatives and not hard_negatives:
            logger.warning("the rows of %.200s have negatives, but hard_negatives=0 leaves them out", source)

    def __len__(self) -> int:
        return len(self.positives)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self._read(self.rows[index], index)
        positive = row.positives[int(torch.randint(len(row.positives), (1,)))]
        chosen = torch.randperm(len(row.negatives))[: self.hard_negatives].tolist() if row.negatives else []
        negatives = [row.negatives[index] for index in chosen]
        return query_row(row.id, row.query.item, positive, negatives, self.sources[index], row.instruction)

    def _check(self, row: Mapping[str, Any], index: int) -> tuple[str, tuple[str, ...]]:
        read = self._read(row, index)
        self._has_negatives |= bool(read.negatives)
        return read.id, tuple(positive.id for positive in read.positives)

    def _read(self, row: Mapping[str, Any], index: int) -> _Row:
        columns = self.columns
        row_id = read_id(index if columns.id is None else row.get(columns.id), index)
        name = row_name(index, row_id)
        query = self._items(row, columns.query, f"{name}, query")
        if len(query) != 1:
            raise ItemError(name, f"{len(query)} queries; expected one, in {_names(columns.query)}")
        positives = self._items(row, columns.positive, f"{name}, positive")
        if not positives:
            raise ItemError(name, f"no positive in {_names(columns.positive)}")
        negatives = [item for each in columns.negatives for item in self._items(row, each, f"{name}, negative")]
        positives = _with_ids(positives, row, columns.positive_id, f"{name}, positive")
        negatives = _with_ids(negatives, row, columns.negative_id, f"{name}, negative")
        if negatives and (columns.positive_id is None) != (columns.negative_id is None):
            raise ItemError(name, "ids for its positives or for its negatives; expected both or neither")
        same = {positive.id for positive in positives} & {negative.id for negative in negatives}
        if same:
            raise ItemError(name, f"a negative is also a positive (id {min(same)!r})")
        instruction = row.get(columns.instruction) if columns.instruction else None
        if instruction is not None and not isinstance(instruction, str):
            raise ItemError(name, f"the instruction is {instruction!r:.80}; expected a text")
        return _Row(row_id, query[0], positives, negatives, instruction or self.instruction)

    def _items(self, row: Mapping[str, Any], columns: ItemColumns, name: str) -> list[Candidate]:
        """Return the items of some columns: none, one, or those of a list.

        Raises:
            ItemError: A cell is no item, or an image or a text cannot be used; the item starts with `name`.
            MissingFileError: The file of an image does not exist.
        """
        cells = {part: row.get(column) for part, column in columns._asdict().items() if column}
        whole, flat = cells.pop("whole", None), {part: cell for part, cell in cells.items() if cell not in _ABSENT}
        if isinstance(whole, list):
            if flat:
                others = ", ".join(map(repr, columns[1:]))
                raise ItemError(name, f"a list in {columns.whole!r} beside {others}")
            named = [(f"{name} {index}", each) for index, each in enumerate(whole)]
            return [self._item(_parts(each, own_name), own_name) for own_name, each in named]
        parts = {} if whole in _ABSENT else _parts(whole, name)
        if parts.keys() & flat.keys():
            raise ItemError(name, f"both {columns.whole!r} and another column give its {min(parts.keys() & flat)}")
        parts |= flat
        return [self._item(parts, name)] if parts else []

    def _item(self, parts: dict[str, Any], name: str) -> Candidate:
        if "text" in parts:
            check_text(parts["text"], name)
        if "image" in parts:
            parts["image"] = self.images.check(listed_images(parts["image"]), name)
        modality = ",".join(part for part in ("image", "text") if part in parts)
        return Candidate(f"{row_digest(parts):x}", row_item(parts, name), modality)


class QueryMix(Dataset[dict[str, Any]]):
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
        self.tables = tables
        self.positives = [ids for table in tables for ids in table.positives]
        self.sources = [name for table in tables for name in table.sources]
        self.repeats = [weight for table, weight in zip(tables, weights, strict=True) for _ in range(len(table))]
        self._starts = [0, *itertools.accumulate(map(len, tables))]

    def __len__(self) -> int:
        return len(self.positives)

    def __getitem__(self, index: int) -> dict[str, Any]:
        table = bisect.bisect(self._starts, index) - 1
        return self.tables[table][index - self._starts[table]]


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


def _with_ids(items: list[Candidate], row: Mapping[str, Any], column: str | None, name: str) -> list[Candidate]:
    """Return items under the ids of a column."""
    if column is None:
        return items
    cell = row.get(column)
    ids = [as_name(each) for each in (cell if isinstance(cell, list) else [cell])]
    if len(ids) != len(items) or None in ids:
        raise ItemError(name, f"{len(items)} items, but {column!r} is {cell!r:.80}; expected one id for each")
    return [item._replace(id=str(each)) for item, each in zip(items, ids, strict=True)]


def _names(columns: Sequence[str | None]) -> str:
    return " or ".join(repr(column) for column in columns if column)


class QueryFormat(NamedTuple):
    """How to read one format.

    Args:
        load: Takes `source`, `split`, `hard_negatives` and the options; returns rows for `RetrievalCollator`.
        options: Fields of the section `data` that only some formats have.
        benchmark: Name of the benchmark that evaluates it, where evaluation during training cannot.
    """

    load: Callable[..., Any]
    options: tuple[str, ...] = ()
    benchmark: str | None = None


def _load_mbeir(source: str, *, split: str, datasets: tuple[str, ...], **options: Any) -> MbeirTraining:
    """Load all training queries, or those of some datasets.

    Raises:
        ValueError: Another split is asked for.
    """
    if split != "train":
        raise SplitError(split, "format mbeir")
    return MbeirTraining(source, datasets=datasets or None, **options)


QUERY_FORMATS = {
    "nli": QueryFormat(load_nli, ("columns",)),
    "mbeir": QueryFormat(_load_mbeir, ("datasets", "instructions"), benchmark="mbeir"),
    "merit": QueryFormat(MeritTraining, ("ood",)),
    "mmeb": QueryFormat(MmebTraining, ("datasets",), benchmark="mmeb"),
}
