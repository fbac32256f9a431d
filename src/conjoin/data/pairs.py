"""Image-text pairs from any source, checked and with the fixed columns `id`, `image` and `text`."""

import json
import logging
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from conjoin.data.columns import (
    COMMON_COLUMNS as COMMON_COLUMNS,
    IMAGE,
    PairColumns,
    as_names,
    choose_columns,
    choose_metadata,
    element_of,
    holds_images,
    image_column,
    is_kind,
    is_list,
    read_number,
    require_columns,
    undecoded as undecoded,
    without_json,
    without_nan,
)
from conjoin.data.csv_files import csv_rows
from conjoin.data.emoji.sample import load_emoji
from conjoin.data.pair_sources import SAMPLE_SOURCE, AnyDataset, PairSource as PairSource, open_source, table_suffix
from conjoin.data.row_checks import check_on_error, counted, id_keys, row_name
from conjoin.data.row_images import PLACEHOLDER, RowImages, check_placeholders, image_folders, listed_images
from conjoin.processing.item_error import ItemError
from conjoin.processing.item_inputs import check_text
from conjoin.storage import row_digest

logger = logging.getLogger(__name__)
_TEXT = datasets.Value("string")
PAIR_FEATURES = datasets.Features({"id": _TEXT, "image": IMAGE, "text": _TEXT})
PAIR_COLUMNS = (*PAIR_FEATURES, "group", "problem", "metadata")
_ROWS_AT_ONCE = 1000
_STREAMED_AT_ONCE = 100
_UNIQUE = (
    'choose a column of unique ids by --id-column (id_column), or row numbers by "", or keep the first row of each by '
    "--on-error skip (only several captions of one image may share an id)"
)
_LOOKED_AT = 100
"""Rows from which the types of a stream that does not know them are read."""


def load_pairs(
    source: PairSource,
    *,
    image_column: str | None = None,
    text_column: str | Sequence[str] | None = None,
    id_column: str | None = None,
    group_column: str | None = None,
    split: str = "train",
    streaming: bool = False,
    only: Literal["image", "text"] | None = None,
    on_error: Literal["raise", "skip"] = "raise",
    keep: Sequence[str] = (),
) -> AnyDataset:
    """Load image-text pairs with the columns `id` (string), `image` (undecoded) and `text` (string).

    Without streaming, this function checks every id and text and the existence of every image file; images are read
    on access. With streaming, each row is checked when it is read, and duplicate ids are not detected. A row that
    cannot be used raises an error that names it; no row is skipped.

    A row with a list of captions becomes a pair for each caption, with the ids `ID#0`, `ID#1` ...; so do rows of one
    id and one image. Pairs of one image share a `group`, a fourth column that exists where it is needed (with
    streaming, images of several rows are not compared). A row with a list of images is one item with all of them. In
    its text, `<image>` marks the place of the next image; without it, the images precede the text. A cell of a CSV
    holds a list as JSON, `["a.png", "b.png"]`, or as `a.png|b.png` (also with `;` or a comma). If no column is a text,
    but one is a `datasets.ClassLabel`, its names are the texts and the groups.

    Ids are texts: the number 1001.0 is `1001`. NaN and an empty cell of a CSV are no value.

    Args:
        source: One of

            * a folder with `metadata.csv`, `.jsonl` or `.parquet` (columns `file_name` and `text`), with a `.txt`
              caption next to each image, or with a folder of images per label; or such folders below `train`, `test`;
            * a folder that `save_to_disk` of `datasets` wrote;
            * a CSV, TSV, JSON-lines or Parquet file, image paths relative to its folder (or absolute, or embedded, or
              URLs, if they are allowed: see `conjoin.processing.allow_urls`);
            * webdataset tar shards: a path, a glob, a list or a URL that fsspec knows;
            * Parquet files on object storage: a URL that fsspec knows (`s3://bucket/shards/*.parquet`), or a list of
              URLs or paths; images are embedded or URLs;
            * `"emoji"`, the embedded sample;
            * a `datasets` dataset, already loaded, or the id of a dataset on the Hub.
        image_column: Column of the images. When None, the first match in `COMMON_COLUMNS`, as for the next two.
        text_column: Column of the captions; or several, whose texts are one text, with a space between them.
        id_column: Column of unique row names. When None, that of `SURE_IDS`, else the only other match, else row
            numbers; "" for row numbers.
        group_column: Column of what a row shows: rows of one group are not each other's negatives.
        split: The split, for sources with several.
        streaming: Return an `IterableDataset` that reads rows on access.
        only: Load this part only: the source may lack the other, and the result has no column for it.
        on_error: "skip" marks a row whose image, text or id cannot be used, by the reason in a further column
            `problem` (null for the others): encoding and training skip it, and list it. Of rows of one id, the first
            is kept. A kept value that should be a number and is none becomes null, with a warning.
        keep: Further columns of the source; their values are in the column `metadata`, under their own names. Those of
            a CSV file are texts; `"price:number"` reads the column `price` as numbers such as `1,299.00 USD`,
            `"price:decimal-comma"` as such as `1.299,00 €`. `N/A`, `-`, `null` and blanks are no value.

    Raises:
        FileNotFoundError: The source or a listed image does not exist.
        ValueError: A column is missing, the source is empty, an id occurs twice, a text or image is missing, an image
            is a URL and URLs are not allowed, an image lies outside of a folder, archive or Hub dataset, or `only` or
            `on_error` is unknown.
    """
    if only not in (None, "image", "text"):
        raise ValueError(f"only={only!r}; expected None, 'image' or 'text'")
    skip = check_on_error(on_error)
    dataset, folder = open_source(source, split, streaming, captions=only != "image")
    dataset = undecoded(dataset)
    if dataset.features is None:
        sample = list(dataset.take(_LOOKED_AT))
        dataset = undecoded(dataset.cast(datasets.Dataset.from_list(sample).features)) if sample else dataset
    first = next(iter(dataset), None)
    if first is None:
        raise ValueError("the dataset is empty: it has no rows")
    named = [text_column] if isinstance(text_column, str) else [*(text_column or ())]
    text, joined = next(iter(named), None), named[1:]
    require_columns(joined, list(first))
    given = {"image": image_column, "text": text, "id": id_column, "group": group_column}
    chosen = choose_columns(list(first), given, dataset.features, only)
    chosen = chosen._replace(joined=tuple(joined) if chosen.text else ())
    metadata = choose_metadata(keep, list(first), dataset.features)
    is_csv = isinstance(source, str | Path) and table_suffix(Path(source)) in (".csv", ".tsv")
    csv = Path(str(source)).expanduser() if is_csv else None
    reader = PairReader(chosen, RowImages(folder, image_folders(source, folder)), skip, metadata, csv)
    if isinstance(dataset, datasets.IterableDataset):
        return reader.stream(dataset, first)
    pairs = reader.collect(dataset)
    return pairs.to_iterable_dataset() if streaming else pairs


def load_training_pairs(source: PairSource, *, split: str = "train", **options: Any) -> AnyDataset:
    """Load pairs as `load_pairs` does; the embedded sample also has second names, and concepts as `group`.

    Args:
        source: As for `load_pairs`.
        split: As for `load_pairs`.
        options: Further arguments of `load_pairs`; the embedded sample has its own columns.
    """
    if source == SAMPLE_SOURCE:
        return load_emoji(split).rename_column("concept", "group")
    pairs = load_pairs(source, split=split, **options)
    if isinstance(pairs, datasets.Dataset) and "text" in pairs.column_names and "group" not in pairs.column_names:
        texts = pairs.data["text"]
        repeated = len(texts) - pc.count_distinct(texts).as_py()
        if repeated:
            logger.warning(
                "%d of %d rows of %.200s repeat the text of another row, and are negatives of it in training; name "
                "what they share by group_column",
                repeated, len(texts), source,
            )  # fmt: skip
    return pairs


class PairReader:
    """Reads rows as pairs.

    Args:
        columns: What to read.
        images: Checks the images.
        skip: Whether a row that cannot be used is marked by its `problem`, instead of raising.
        metadata: Further columns, as `choose_metadata` gives them.
        csv: The CSV file of the rows, if they are of one.
    """

    def __init__(
        self, columns: PairColumns, images: RowImages, skip: bool, metadata: Mapping[str, str], csv: Path | None
    ) -> None:
        self.columns, self.images, self.skip, self.metadata, self.csv = columns, images, skip, metadata, csv
        self._warned: set[str] = set()

    @property
    def names(self) -> list[str]:
        """The columns that are read."""
        columns = self.columns
        read = (columns.picture, columns.text, *columns.joined, columns.id, columns.group, *self.metadata)
        return list(dict.fromkeys(name for name in read if name is not None))

    def read(
        self, table: pa.Table, numbers: Sequence[int], stored_images: bool = False
    ) -> tuple[pa.Table, dict[int, ItemError]]:
        """Read and check rows.

        Args:
            table: With the columns `names`.
            numbers: Of the rows in the data.
            stored_images: Whether the images stay where they are: the result has none.

        Returns:
            A row for each pair, with the number of its `row`, its `id`, and where they are read `image`, `text`,
            `group`, `metadata`, and `file`, a key that rows of one image file share; and why rows cannot be used, by
            their numbers.
        """
        columns = self.columns
        cells = {name: _combined(table[name]) for name in self.names}
        problems: dict[int, ItemError] = {}
        ids = [str(number) for number in numbers]
        if columns.id:
            known = as_names(cells[columns.id], columns.id)
            ids = [name or f"row {number}" for name, number in zip(known.to_pylist(), numbers, strict=True)]
            missing = [numbers[row] for row in np.flatnonzero(pc.is_null(known)).tolist()]
            problems |= {number: ItemError(f"row {number}", "the id is missing") for number in missing}

        def attempt(row: int, check: Callable[..., Any], *values: Any) -> Any:
            """Return what `check(*values, name of the row)` returns, or None after a problem."""
            try:
                return check(*values, row_name(numbers[row], ids[row]))
            except ItemError as error:
                problems.setdefault(numbers[row], error)
                return None

        rows: dict[str, pa.Array] = {"row": pa.array(numbers, pa.int64()), "id": pa.array(ids, pa.string())}
        if self.metadata:
            kept = [self._kept(name, mark, cells[name], attempt) for name, mark in self.metadata.items()]
            rows["metadata"] = pa.StructArray.from_arrays(kept, [*self.metadata])
        owners, texts = pa.array(range(len(ids))), None
        if columns.text:
            several = [without_json(cells[name]) for name in (columns.text, *columns.joined)]
            written = self._joined(several) if columns.joined else several[0]
            owners, texts = self._texts(written, attempt)
            if is_list(written):
                rows["group"] = rows["id"]
        if columns.group:
            groups = self._class_names(cells[columns.group]) if columns.group == columns.text else cells[columns.group]
            rows["group"] = as_names(groups, columns.group)
        if columns.picture:
            images, files, counts = self._images(without_json(cells[columns.picture]), attempt)
            named = zip(ids, files, strict=True)
            rows["file"] = pa.array(id_keys(row_id if file is None else f"file {file}" for row_id, file in named))
            if columns.image and not stored_images:
                rows["image"] = images
            if counts and texts is not None:
                for place in np.flatnonzero(pc.match_substring(texts, PLACEHOLDER)).tolist():
                    row = owners[place].as_py()
                    attempt(row, check_placeholders, texts[place].as_py(), counts[row])
        if len(owners) > len(table):
            rows = {name: values.take(owners) for name, values in rows.items()}
        pairs = pa.table(rows)
        if texts is not None:
            pairs = pairs.append_column("text", texts)
        if problems and len(pairs) > len(table):  # one pair for a row that cannot be used
            read = pairs["row"].to_numpy()
            pairs = pairs.filter(pa.array((np.diff(read, prepend=-1) != 0) | ~np.isin(read, list(problems))))
        return pairs, problems

    def _joined(self, cells: Sequence[pa.Array]) -> pa.Array:
        """Return the texts of several columns as one for each row; a missing text leaves no space."""
        for name, each in zip((self.columns.text, *self.columns.joined), cells, strict=True):
            if not (is_kind(each.type, "string") or pa.types.is_null(each.type)):
                raise ValueError(
                    f"column {name!r} holds {each.type}; several text columns are joined, which hold strings"
                )
        rows = zip(*(each.to_pylist() for each in cells), strict=True)
        return pa.array([" ".join(filter(None, row)) or None for row in rows], pa.string())

    def _texts(self, cells: pa.Array, attempt: Callable[..., Any]) -> tuple[pa.Array, pa.Array]:
        """Return the row and the text of each pair."""
        owners = pa.array(range(len(cells)))
        if is_list(cells):
            is_empty = pc.equal(pc.fill_null(pc.list_value_length(cells), 0), 0)
            for row in np.flatnonzero(is_empty).tolist():
                attempt(row, _refuse, "the list of texts is empty")
            cells = pc.if_else(is_empty, pa.scalar([None], cells.type), cells)
            owners, cells = pc.list_parent_indices(cells), pc.list_flatten(cells)
        texts = self._class_names(cells)
        is_bad = pa.array([True] * len(texts))
        if is_kind(texts.type, "string"):
            texts = texts.cast(pa.string())
            is_bad = pc.or_kleene(pc.is_null(texts), pc.equal(pc.utf8_trim_whitespace(texts), ""))
        for place in np.flatnonzero(is_bad).tolist():
            text, row = texts[place].as_py(), owners[place].as_py()
            if text is None:
                attempt(row, _refuse, "the text is missing")
            else:
                attempt(row, check_text, text)
        return owners, texts if texts.type == pa.string() else pa.nulls(len(texts), pa.string())

    def _class_names(self, cells: pa.Array) -> pa.Array:
        """Return the names of classes in place of their numbers; null for -1."""
        if self.columns.label is None or not pa.types.is_integer(cells.type):
            return cells
        return pa.array(self.columns.label.names).take(pc.if_else(pc.less(cells, 0), None, cells))

    def _images(
        self, cells: pa.Array, attempt: Callable[..., Any]
    ) -> tuple[pa.Array, list[str | None], Sequence[int]]:
        """Check the images of rows.

        Returns:
            The images, or lists of them if a row has a list; the files of each row as one text, None where an image
            has bytes or no path; and how many images each row has, if there are lists that are read.
        """
        wanted = self.columns.image is not None
        if is_kind(cells.type, "string"):  # a cell of a CSV may hold several
            listed = [listed_images(cell) for cell in cells.to_pylist()]
            if any(isinstance(each, list) for each in listed):
                listed = [each if isinstance(each, list) else [each] for each in listed]
                cells = pa.array(listed, pa.list_(pa.string()))
            else:
                cells = pa.array(listed, pa.string())
        lengths = pc.fill_null(pc.list_value_length(cells), 0).to_numpy() if is_list(cells) else None
        flat = cells if lengths is None else pc.list_flatten(cells)
        count = len(flat)
        check: Callable[..., Any] = self.images.check_path
        if is_kind(flat.type, "string"):
            check, has_bytes, data, paths = self.images.resolve, pa.array([False] * count), pa.nulls(count), flat
        elif is_kind(flat.type, "binary"):
            has_bytes, data, paths = flat.is_valid(), flat, pa.nulls(count)
        elif pa.types.is_struct(flat.type):
            data = flat.field("bytes")
            has_bytes = pc.and_(flat.is_valid(), data.is_valid())
            paths = pc.if_else(has_bytes, None, flat.field("path"))
        elif not wanted or pa.types.is_null(flat.type):
            has_bytes, data, paths = pa.array([False] * count), pa.nulls(count), pa.nulls(count)
        else:
            kind = datasets.Features.from_arrow_schema(pa.schema({"x": cells.type}))["x"]
            raise ValueError(
                f"column {self.columns.picture!r} holds {kind}; expected images, image bytes, paths or URLs"
            )
        ends = np.arange(1, count + 1) if lengths is None else np.cumsum(lengths)
        starts = np.concatenate([[0], ends[:-1]]).astype(np.int64)
        failed = set()
        for row in np.flatnonzero(starts == ends).tolist() if wanted else ():
            attempt(row, check, None)
            failed.add(row)
        names: list[Any] = paths.to_pylist()
        files: list[str | None] = [None] * len(cells)
        unread = np.flatnonzero(pc.invert(has_bytes))
        for place, row in zip(unread.tolist(), np.searchsorted(ends, unread, "right").tolist(), strict=True):
            if starts[row] == place and all(names[place : ends[row]]):
                files[row] = "\n".join(map(self.images.absolute, names[place : ends[row]]))
            if wanted:
                names[place] = attempt(row, check, names[place])
                if names[place] is None:
                    failed.add(row)
        is_null = pa.array(np.isin(np.arange(len(cells)), list(failed)))
        parts = [data.cast(pa.binary()), pa.array(names, pa.string())]
        if lengths is None:
            return pa.StructArray.from_arrays(parts, ["bytes", "path"], mask=is_null), files, ()
        offsets = pa.array(np.concatenate([starts, ends[-1:]]), pa.int32())
        images = pa.StructArray.from_arrays(parts, ["bytes", "path"])
        return pa.ListArray.from_arrays(offsets, images, mask=is_null), files, lengths.tolist() if wanted else ()

    def _kept(self, name: str, mark: str, cells: pa.Array, attempt: Callable[..., Any]) -> pa.Array:
        """Return the values of a kept column."""
        if not mark:
            return without_nan(cells)
        numbers: list[float | None] = []
        for row, value in enumerate(cells.to_pylist()):
            try:
                numbers.append(read_number(value, "", name, mark))
            except ItemError as error:
                numbers.append(None)
                if not self.skip:
                    attempt(row, _refuse, error.message)
                elif name not in self._warned:
                    self._warned.add(name)
                    logger.warning("%s; it is no value, and so are others that are no numbers", error.message)
        return pa.array(numbers, pa.float64())

    def _features(self, names: Iterable[str], known: Mapping[str, Any], several_images: bool) -> datasets.Features:
        """Return the columns of the result."""
        special = {"image": datasets.List(IMAGE) if several_images else IMAGE}
        special["metadata"] = {
            name: datasets.Value("float64") if mark else known[name] for name, mark in self.metadata.items()
        }
        wanted = set(names)
        return datasets.Features({name: special.get(name, _TEXT) for name in PAIR_COLUMNS if name in wanted})

    def collect(self, dataset: datasets.Dataset) -> datasets.Dataset:
        """Read all rows, and join what was read with the texts and images that stay unchanged on disk.

        Raises:
            ItemError: Rows cannot be used, and such rows are not skipped; it is that of the first.
        """
        columns, count = self.columns, len(dataset)
        stored_text = columns.text is not None and not columns.joined and dataset.features[columns.text] == _TEXT
        stored_images = columns.image is not None and holds_images(dataset.features[columns.image])
        table = dataset.select_columns(self.names).with_format("arrow")
        problems: dict[int, ItemError] = {}
        keys, blocks = [], []
        for start in range(0, count, _ROWS_AT_ONCE):
            numbers = range(start, min(start + _ROWS_AT_ONCE, count))
            block, found = self.read(table[start : numbers.stop], numbers, stored_images)
            problems |= found
            is_first = pa.array(np.diff(block["row"].to_numpy(), prepend=-1) != 0)
            keys.append(id_keys(block["id"].filter(is_first).to_pylist()))
            blocks.append(block.drop_columns("text") if stored_text else block)
        several_images = "image" in blocks[0].column_names and any(is_list(each["image"]) for each in blocks)
        if several_images:
            blocks = [_with_lists(block) for block in blocks]
        pairs = pa.concat_tables(blocks, promote_options="default")  # JSON may hold lists of texts in some rows only
        repeats = _repeats(np.concatenate(keys))
        copies = _same_images(dataset, columns.picture, repeats)
        if copies and columns.text is None:
            pairs = pairs.filter(pa.array(~np.isin(pairs["row"], list(copies))))
        owners, ids = pairs["row"].to_numpy(), pairs["id"]
        if repeats:
            ids = self._note_repeats(repeats, copies, owners, ids, problems)
        if problems and not self.skip:
            raise counted([problems[row] for row in sorted(problems)], count)
        made = {name: pairs[name] for name in pairs.column_names if name in PAIR_COLUMNS}
        if "group" in made and not columns.group:
            made["group"] = pairs["id"]
        elif "group" not in made and columns.picture:
            files, first, places = np.unique(pairs["file"], return_index=True, return_inverse=True)
            if len(files) < len(owners):
                made["group"] = ids.take(pa.array(first[places]))
        if len(owners) != count or copies:
            ids = pa.array(number_pairs(ids.to_pylist()))
            if len(pc.unique(ids)) < len(ids):
                raise ItemError("the data", "an id is that of another row with # and a number; ids must be unique")
        made["id"] = ids
        if self.skip:
            made["problem"] = _reasons(problems, owners.tolist())
        features = self._features(made, dataset.features, several_images)
        stored = datasets.table.InMemoryTable(pa.table({name: made[name] for name in features}))
        result = datasets.Dataset(stored, info=datasets.DatasetInfo(features=features))
        if stored_text:
            result = _beside(result, dataset.select_columns(columns.text).rename_columns({columns.text: "text"}))
        if stored_images:
            images = image_column(dataset, str(columns.image))
            result = _beside(result, images) if len(owners) == count else join_pairs(images, owners, result)
        return result.select_columns([name for name in PAIR_COLUMNS if name in result.column_names])

    def _note_repeats(
        self,
        repeats: Mapping[int, int],
        copies: Collection[int],
        owners: np.ndarray,
        ids: pa.ChunkedArray,
        problems: dict[int, ItemError],
    ) -> pa.Array:
        """Note the rows that repeat the id of an earlier one with another image; returns ids of their own for them."""
        named = ids.to_pylist()
        lines = [line for line, _ in csv_rows(self.csv)][1:] if self.csv else None
        for row, first in repeats.items():
            if row not in copies:
                where = f"rows {first} and {row}" if lines is None else f"lines {lines[first]} and {lines[row]}"
                places = range(*np.searchsorted(owners, [row, row + 1]))
                remedy = "the first is kept" if self.skip else _UNIQUE
                problem = f"the id {named[places[0]]!r} occurs twice, in {where}; {remedy}"
                problems[row] = ItemError(f"row {row}", problem)
                for place in places:
                    named[place] += f"#{row}"
        return pa.array(named, pa.string())

    def stream(self, dataset: datasets.IterableDataset, first: Mapping[str, Any]) -> datasets.IterableDataset:
        """Read rows when they are used.

        Args:
            dataset: The rows.
            first: The first of them.
        """
        columns, known = self.columns, dataset.features
        several = {
            part: isinstance(listed_images(first.get(name or "")), list)
            or element_of(known.get(name or "")) is not None
            for part, name in (("image", columns.image), ("text", columns.text))
        }
        wanted = columns._asdict() | {"id": True, "group": columns.group or several["text"]}
        wanted |= {"problem": self.skip, "metadata": self.metadata}
        features = self._features([name for name in wanted if wanted[name]], known, several["image"])
        rows = dataset.select_columns(self.names)
        types = rows.features.arrow_schema

        def read(batch: Mapping[str, list[Any]], numbers: list[int]) -> dict[str, list[Any]]:
            table = pa.table([_typed(batch[field.name], field.type) for field in types], schema=types)
            pairs, problems = self.read(table, numbers)
            if problems and not self.skip:
                raise problems[min(problems)]
            owners = pairs["row"].to_pylist()
            if len(pairs) > len(table) and not several["text"]:
                row = next(row for row, count in Counter(owners).items() if count > 1)
                raise ValueError(f"row {row}: several texts, but the rows before have one each")
            if several["image"]:
                pairs = _with_lists(pairs)
            elif columns.image and is_list(pairs["image"]):
                raise ValueError("a row has several images, but the first row has one")
            made = {name: pairs[name] for name in pairs.column_names}
            made["id"] = pa.array(number_pairs(pairs["id"].to_pylist(), owners), pa.string())
            made["problem"] = _reasons(problems, owners)
            none = pa.nulls(len(pairs))  # no group, as no text of these rows is a list
            return pa.table({name: made.get(name, none) for name in features}).cast(features.arrow_schema).to_pydict()

        return rows.map(
            read, with_indices=True, batched=True, batch_size=_STREAMED_AT_ONCE, remove_columns=self.names,
            features=features,
        )  # fmt: skip


def _typed(values: list[Any], kind: pa.DataType) -> pa.Array:
    """Return the values of a stream as a column of its type."""
    if isinstance(kind, pa.BaseExtensionType):  # JSON
        texts = [None if value is None else json.dumps(value) for value in values]
        return pa.ExtensionArray.from_storage(kind, pa.array(texts, kind.storage_type))
    return pa.array(values, kind)


def _refuse(message: str, name: str) -> None:
    raise ItemError(name, message)


def _reasons(problems: Mapping[int, ItemError], rows: Sequence[int]) -> pa.Array:
    """Return why each of some rows cannot be used, or null."""
    return pa.array([str(problems[row]) if row in problems else None for row in rows], pa.string())


def _combined(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _with_lists(pairs: pa.Table) -> pa.Table:
    """Return pairs whose images are lists; of one image, where a row has one."""
    images = _combined(pairs["image"])
    if is_list(images):
        return pairs
    offsets = pa.array(range(len(images) + 1), pa.int32())
    lists = pa.ListArray.from_arrays(offsets, images, mask=pc.is_null(images))
    return pairs.set_column(pairs.column_names.index("image"), "image", lists)


def _repeats(keys: np.ndarray) -> dict[int, int]:
    """Return the rows whose key an earlier row has, and the first such row of each."""
    order = np.argsort(keys, kind="stable")
    first: dict[int, int] = {}
    for place in np.flatnonzero(keys[order][1:] == keys[order][:-1]).tolist():
        before = int(order[place])
        first[int(order[place + 1])] = first.get(before, before)
    return dict(sorted(first.items()))


def _same_images(dataset: datasets.Dataset, picture: str | None, repeats: Mapping[int, int]) -> set[int]:
    """Return the rows of an id that an earlier row has whose image is that of the earlier row."""
    if picture is None or not repeats:
        return set()
    rows = [*dict.fromkeys([*repeats.values(), *repeats])]
    cells = dataset.select_columns(picture).select(rows)
    digests = {row: row_digest({"image": cell[picture]}) for row, cell in zip(rows, cells, strict=True)}
    return {row for row, first in repeats.items() if digests[row] == digests[first]}


def number_pairs(ids: Sequence[str], owners: Sequence[Hashable] | None = None) -> list[str]:
    """Number the pairs that share an owner, by default an id, from 0: `a`, `b#0`, `b#1`."""
    owners = ids if owners is None else owners
    counts, seen, numbered = Counter(owners), Counter[Hashable](), []
    for name, owner in zip(ids, owners, strict=True):
        numbered.append(name if counts[owner] == 1 else f"{name}#{seen[owner]}")
        seen[owner] += 1
    return numbered


def join_pairs(images: datasets.Dataset, owners: np.ndarray, pairs: datasets.Dataset) -> datasets.Dataset:
    """Join pairs with the images of their rows, which are read from where they lie, never repeated.

    Args:
        images: The column `image` of N rows.
        owners: The row of each of M pairs, ascending.
        pairs: The other columns of the M pairs.
    """
    numbers = np.arange(len(owners)) - np.searchsorted(owners, owners)
    layers, places, start = [], np.zeros(len(owners), dtype=np.int64), 0
    table = pairs.with_format("arrow")[:]
    for number in range(numbers.max() + 1):  # the first pairs of all rows, the second pairs ...
        chosen, rows = images, owners[numbers == number]
        if 2 * len(rows) < len(images):
            chosen, rows = images.select(rows), np.arange(len(rows))
        cells, is_empty = np.zeros(len(chosen), dtype=np.int64), np.ones(len(chosen), dtype=bool)
        cells[rows], is_empty[rows] = np.flatnonzero(numbers == number), False
        layer = datasets.table.InMemoryTable(table.take(pa.array(cells, mask=is_empty)))
        layers.append(_beside(datasets.Dataset(layer, info=pairs.info), chosen))
        places[numbers == number] = start + rows
        start += len(chosen)
    return datasets.concatenate_datasets(layers).select(places)


def _beside(left: datasets.Dataset, right: datasets.Dataset) -> datasets.Dataset:
    return datasets.concatenate_datasets([left, right], axis=1)
