"""Queries with positives and negatives from tables of one's own: JSON lines, Parquet, CSV or a Hub dataset."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
from torch.utils.data import ConcatDataset

from conjoin.data.cells import as_id
from conjoin.data.columns import ColumnNames, guess_query_columns
from conjoin.data.mbeir import MbeirTraining
from conjoin.data.merit import MeritTraining
from conjoin.data.mmeb import TRAINING_COLUMNS, find_subsets, mmeb_item, mmeb_modality
from conjoin.data.pair_sources import PairSource
from conjoin.data.query_rows import Candidate, QueryDataset, QueryRow, open_rows
from conjoin.data.row_checks import check_ids, row_name
from conjoin.data.row_images import RowImages, image_folders, row_item
from conjoin.processing.item_error import ItemError
from conjoin.processing.item_inputs import IMAGE_SUFFIXES, check_parts, check_text
from conjoin.progress import progress
from conjoin.storage import row_digest

logger = logging.getLogger(__name__)
_TEXT = datasets.Value("string")
_ABSENT: tuple[Any, ...] = (None, "", [])


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
    if not isinstance(value, Mapping) or not set(value) <= {"text", "image", "images"}:
        wanted = 'a text, an image, or {"text": ..., "image": ...} with one of them or both'
        raise ItemError(name, f"got {value!r:.80}; expected {wanted}")
    given = {part: cell for part, cell in value.items() if cell is not None}
    if {"image", "images"} <= given.keys():
        raise ItemError(name, "it has both of image and images; expected one")
    return check_parts({part.removesuffix("s"): cell for part, cell in given.items()}, name)


class QueryTable(QueryDataset):
    """Rows `{query, positive(s), negative(s), instruction?, ids?}` of one table, see `QueryDataset`.

    The query, each positive and each negative is a text, `{"text": ..., "image": ...}` with one of them or both, or
    with a list of images (then `<image>` in the text marks their places, see `load_pairs`). In a JSON-lines file a
    string is always a text. In Parquet and Hub datasets a column may hold images. `query_image` and `query_text` may
    be columns of their own, likewise for positives and negatives.

    Every row is checked here; images are opened when a row is used. Candidates without ids are known by their content;
    one that is a positive and a negative is a positive.

    Args:
        source: A JSON-lines, Parquet or CSV file, a dataset of `datasets`, or the id of a dataset on the Hub.
        columns: Columns by role, where `guess_query_columns` does not find them: `{"query": "sentence"}`.
        split: The split, for sources with several.
        hard_negatives: Number of negatives per row at most; none is repeated.
        instruction: For the rows that have none.
        name: Of the rows, as `one_dataset_per_batch` counts datasets; the source by default.

    Raises:
        FileNotFoundError: The source or an image does not exist.
        ValueError: A column is missing, the table is empty, or a row cannot be used (it is named).
    """

    repeats_negatives = False

    def __init__(
        self,
        source: PairSource,
        *,
        columns: ColumnNames | None = None,
        split: str = "train",
        hard_negatives: int = 0,
        instruction: str | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(hard_negatives)
        self.name = name
        self.rows, folder = open_rows(source, split)
        self.columns, self.others = guess_query_columns(self.rows.column_names, columns)
        self.images, self.instruction = RowImages(folder, image_folders(source, folder)), instruction
        ids = []
        for index, row in enumerate(progress(self.rows, desc="checking rows", unit="row", total=len(self.rows))):
            read = self._read(row, index)
            ids.append(read.id)
            self.positives.append(tuple(positive.id for positive in read.positives))
        check_ids(ids)
        self.sources = [name or str(source)[:200]] * len(self.positives)
        if self.columns["negative"] and not hard_negatives:
            logger.warning("the rows of %.200s have negatives, but hard_negatives=0 leaves them out", source)

    def texts(self) -> datasets.Dataset | None:
        """Return the rows as columns of texts; None if a row has an image, or draws one of several candidates."""
        table = []
        for index in range(len(self)):
            read = self.read(index)
            row = self.draw(read, index)
            items = [row["query"], row["positive"], *row["negatives"]]
            is_drawn = len(read.positives) > 1 or 0 < self.hard_negatives < len(read.negatives)
            if is_drawn or not all(isinstance(item, dict) and [*item] == ["text"] for item in items):
                return None
            query, positive, *others = (item["text"] for item in items)
            table.append(row | {"query": query, "positive": positive, "negatives": others})
        kinds = {name: datasets.List(_TEXT) if isinstance(value, list) else _TEXT for name, value in table[0].items()}
        return datasets.Dataset.from_list(table, features=datasets.Features(kinds))

    def read(self, index: int) -> QueryRow:
        """Read and check a row."""
        return self._read(self.rows[index], index)

    def _read(self, row: Mapping[str, Any], index: int) -> QueryRow:
        cells = {role: row.get(column) for role, column in self.others.items()}
        row_id = as_id(cells.get("id", index))
        if row_id is None:
            raise ItemError(f"row {index}", "the id is missing")
        name = ", ".join(filter(None, [self.name, row_name(index, row_id)]))
        items = {
            role: [item for each in columns for item in self._items(row, each, f"{name}, {role}")]
            for role, columns in self.columns.items()
        }
        for role, least, most in (("query", 1, 1), ("positive", 1, math.inf), ("variant", 0, 1)):
            if not least <= len(items[role]) <= most:
                columns = " or ".join(map(repr, self.columns[role][0].values()))
                raise ItemError(name, f"{len(items[role])} items in {columns}; expected {least} {role}")
        for role in ("positive", "negative"):
            if f"{role}_id" in cells:
                cell = cells[f"{role}_id"]
                ids = [as_id(each) for each in (cell if isinstance(cell, list) else [cell])]
                if len(ids) != len(items[role]) or None in ids:
                    problem = f"{len(items[role])} items, but {self.others[f'{role}_id']!r} is {cell!r:.80}"
                    raise ItemError(f"{name}, {role}", f"{problem}; expected one id for each")
                items[role] = [item._replace(id=str(each)) for item, each in zip(items[role], ids, strict=True)]
        if items["negative"] and ("positive_id" in cells) != ("negative_id" in cells):
            raise ItemError(name, "ids for its positives or for its negatives; expected both or neither")
        right = {positive.id for positive in items["positive"]}
        items["negative"] = [negative for negative in items["negative"] if negative.id not in right]
        instruction = cells.get("instruction") or self.instruction
        if not isinstance(instruction, str | None):
            raise ItemError(name, f"the instruction is {instruction!r:.80}; expected a text")
        variant = items["variant"][0].item if items["variant"] else None
        more = (instruction, variant, cells.get("kind"))
        return QueryRow(row_id, items["query"][0].item, items["positive"], items["negative"], *more)

    def _items(self, row: Mapping[str, Any], columns: Mapping[str, str], name: str) -> list[Candidate]:
        """Return the items of some columns: none, one, or those of a list.

        Raises:
            ItemError: A cell is no item, or an image or a text cannot be used; the item starts with `name`.
            MissingFileError: The file of an image does not exist.
        """
        parts = {part: row[column] for part, column in columns.items() if row.get(column) not in _ABSENT}
        whole = parts.pop("whole", None)
        if isinstance(whole, list) and not parts:
            named = [(f"{name} {index}", each) for index, each in enumerate(whole)]
            return [self._item(_parts(each, own_name), own_name) for own_name, each in named]
        own = {} if whole is None else _parts(whole, name)
        if both := parts.keys() & own.keys():
            raise ItemError(name, f"both {columns['whole']!r} and another column give its {min(both)}")
        return [self._item(own | parts, name)] if own or parts else []

    def _item(self, parts: dict[str, Any], name: str) -> Candidate:
        if "text" in parts:
            check_text(parts["text"], name)
        if "image" in parts:
            parts["image"] = self.images.check(parts["image"], name)
        modality = ",".join(part for part in ("image", "text") if part in parts)
        return Candidate(f"{row_digest(parts):x}", row_item(parts, name), modality)


class QueryMix(ConcatDataset[dict[str, Any]]):
    """The rows of several tables; an id names the same candidate in all of them.

    Args:
        tables: The tables.
        weights: How many times the rows of each table are used in an epoch: 2 for twice, 0.5 for a random half.
            Tables of one name are one data set for `one_dataset_per_batch`.

    Attributes:
        positives: The ids of each row's positives.
        sources: The name of each row's table.
        repeats: The weight of each row's table.
    """

    def __init__(self, tables: Sequence[QueryTable], weights: Sequence[float]) -> None:
        super().__init__(tables)
        self.positives = [ids for table in tables for ids in table.positives]
        self.sources = [name for table in tables for name in table.sources]
        self.repeats = [weight for table, weight in zip(tables, weights, strict=True) for _ in range(len(table))]


def mmeb_training(
    folder: str | Path, *, hard_negatives: int = 0, split: str = "train", datasets: Sequence[str] = ()
) -> QueryMix:
    """Read the training queries of MMEB.

    A row of the published files has a query, its instruction included, one positive and at most one negative, each a
    text, an image or both. Candidates of equal content are one. A candidate whose text is one of `IMAGE_INSTRUCTIONS`
    keeps it, as in the evaluation; its modality is image.

    Args:
        folder: The root: `NAME/original-*.parquet` for each subset, and the images under the paths of the rows.
        hard_negatives: 1 adds the negative of a row, if it has one.
        split: `"train"` is the published `"original"`; `"diverse_instruction"` has other instructions.
        datasets: The subsets; all when empty.

    Raises:
        FileNotFoundError: The folder has no subset, or an image does not exist.
        ValueError: A malformed row (it is named), a negative `hard_negatives`, or an unknown subset.
    """
    files = find_subsets(folder, datasets or None, "original" if split == "train" else split)
    tables = [_MmebTable(path, Path(folder), name, hard_negatives) for name, path in files.items()]
    return QueryMix(tables, [1.0] * len(tables))


class _MmebTable(QueryTable):
    """The rows of a subset of MMEB, whose images lie in the folder of all subsets."""

    def __init__(self, path: Path, folder: Path, name: str, hard_negatives: int) -> None:
        self.folder = folder
        known = open_rows(path)[0].column_names
        columns = {role: each for role, each in TRAINING_COLUMNS.items() if each in known or role[:8] != "negative"}
        super().__init__(path, columns=columns, hard_negatives=hard_negatives, name=name)

    def _item(self, parts: dict[str, Any], name: str) -> Candidate:
        item = mmeb_item(parts.get("text"), parts.get("image"), self.folder, name)
        return Candidate(f"{row_digest(item):x}", item, mmeb_modality(item))


QUERY_FORMATS: dict[str, Callable[..., Any]] = {"mbeir": MbeirTraining, "merit": MeritTraining, "mmeb": mmeb_training}
"""What reads each published set of queries, as rows for `RetrievalCollator`."""
