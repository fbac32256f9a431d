"""Training rows of queries from one table, and from several with weights."""

import itertools
import logging
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import torch
from torch.utils.data import Dataset

from conjoin.data.image_columns import IMAGE
from conjoin.data.image_paths import image_folders
from conjoin.data.json_lines import JsonLines
from conjoin.data.pair_sources import PairSource, open_source
from conjoin.data.row_checks import RowChecks, check_ids, row_name
from conjoin.progress import progress

from .columns import choose_query_columns
from .items import CellReader, Named

logger = logging.getLogger(__name__)


class _Row(NamedTuple):
    """A row that is read and checked."""

    id: str
    query: Named
    positives: list[Named]
    negatives: list[Named]
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
        if hard_negatives < 0:
            raise ValueError(f"hard_negatives={hard_negatives} must not be negative")
        self.rows, folder = _open(source, split)
        self.columns = choose_query_columns(_column_names(self.rows), columns or {})
        self.cells = CellReader(folder, image_folders(source, folder))
        self.hard_negatives, self.instruction = hard_negatives, instruction
        self._has_negatives = False
        shown = progress(self.rows, desc="checking rows", unit="row", total=len(self.rows), show=show_progress)
        checks = RowChecks([str(place) for place in range(len(self.rows))], keep=False)
        checked = [row for row in checks.run(self._check, shown) if row is not None]
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
        negatives = [row.negatives[place] for place in chosen]
        return {
            "id": row.id,
            "query": row.query.item,
            "instruction": row.instruction,
            "positive": positive.item,
            "positive_id": positive.id,
            "negatives": [negative.item for negative in negatives],
            "negative_ids": [negative.id for negative in negatives],
            "target_modality": positive.modality,
            "negative_modalities": [negative.modality for negative in negatives],
            "dataset": self.sources[index],
        }

    def _check(self, row: Mapping[str, Any], place: str) -> tuple[str, tuple[str, ...]]:
        read = self._read(row, int(place))
        self._has_negatives |= bool(read.negatives)
        return read.id, tuple(positive.id for positive in read.positives)

    def _read(self, row: Mapping[str, Any], index: int) -> _Row:
        columns = self.columns
        given = index if columns.id is None else row.get(columns.id)
        if given is None or given == "":
            raise ValueError(f"row {index}: the id is missing")
        row_id = str(given)
        name = row_name(index, row_id)
        query = self.cells.items(row, columns.query, f"{name}, query")
        if len(query) != 1:
            raise ValueError(f"{name} has {len(query)} queries; expected one, in {_names(columns.query)}")
        positives = self.cells.items(row, columns.positive, f"{name}, positive")
        if not positives:
            raise ValueError(f"{name} has no positive in {_names(columns.positive)}")
        negatives = [item for each in columns.negatives for item in self.cells.items(row, each, f"{name}, negative")]
        positives = _with_ids(positives, row, columns.positive_id, f"{name}, positive")
        negatives = _with_ids(negatives, row, columns.negative_id, f"{name}, negative")
        if negatives and (columns.positive_id is None) != (columns.negative_id is None):
            raise ValueError(f"{name} has ids for its positives or for its negatives; expected both or neither")
        same = {positive.id for positive in positives} & {negative.id for negative in negatives}
        if same:
            raise ValueError(f"{name}: a negative is also a positive (id {min(same)!r})")
        instruction = row.get(columns.instruction) if columns.instruction else None
        if instruction is not None and not isinstance(instruction, str):
            raise ValueError(f"{name}: the instruction is {instruction!r:.80}; expected a text")
        return _Row(row_id, query[0], positives, negatives, instruction or self.instruction)


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
        place = next(place for place, start in enumerate(self._starts[1:]) if index < start)
        return self.tables[place][index - self._starts[place]]


def _open(source: PairSource, split: str) -> tuple[Any, Path | None]:
    """Open a table; rows of a JSON-lines file may differ in their types, so they are not read by `datasets`."""
    path = Path(source).expanduser() if isinstance(source, str | Path) else None
    if path is not None and path.suffix.lower() in (".jsonl", ".ndjson"):
        if split != "train":
            raise ValueError(f"split is {split!r}; the table {str(path)!r} has only the split 'train'")
        return JsonLines(path), path.parent
    table, folder = open_source(source, split, streaming=False, captions=False)
    if not isinstance(table, datasets.Dataset):
        raise ValueError(f"expected a dataset with a length, got {type(table).__name__}")
    if not len(table):
        raise ValueError(f"{source!r:.200} is empty: it has no rows")
    features = datasets.Features({name: _undecoded(feature) for name, feature in table.features.items()})
    table = table.with_format(None)
    return (table if features == table.features else table.cast(features)), folder


def _undecoded(feature: Any) -> Any:  # noqa: ANN401 - any feature of `datasets`
    """Return a feature with its images, at any depth, as bytes and paths."""
    if isinstance(feature, datasets.Image):
        return IMAGE
    if isinstance(feature, datasets.List | datasets.LargeList):
        return type(feature)(_undecoded(feature.feature))
    return {name: _undecoded(part) for name, part in feature.items()} if isinstance(feature, dict) else feature


def _column_names(rows: Any) -> list[str]:  # noqa: ANN401 - a table
    if isinstance(rows, datasets.Dataset):
        return list(rows.column_names)
    return list(dict.fromkeys(name for row in rows for name in row))


def _with_ids(items: list[Named], row: Mapping[str, Any], column: str | None, name: str) -> list[Named]:
    """Return items under the ids of a column."""
    if column is None:
        return items
    cell = row.get(column)
    ids: list[Any] = cell if isinstance(cell, list) else [] if cell is None or cell == "" else [cell]
    if len(ids) != len(items) or any(one is None or one == "" for one in ids):
        raise ValueError(f"{name}: {len(items)} items, but {column!r} is {cell!r:.80}; expected one id for each")
    return [item._replace(id=str(one)) for item, one in zip(items, ids, strict=True)]


def _names(columns: Sequence[str | None]) -> str:
    return " or ".join(repr(column) for column in columns if column)
