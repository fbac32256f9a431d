"""Image-text pairs from any source, checked and with the fixed columns `id`, `image` and `text`."""

import json
import logging
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

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
    dataset, first, reader = open_pairs(**locals())
    if isinstance(dataset, datasets.IterableDataset):
        return reader.stream(dataset, first)
    pairs = reader.collect(dataset)
    return pairs.to_iterable_dataset() if streaming else pairs


def open_pairs(
    source: PairSource,
    *,
    split: str = "train",
    streaming: bool = False,
    only: Literal["image", "text"] | None = None,
    on_error: Literal["raise", "skip"] = "raise",
    keep: Sequence[str] = (),
    text_column: str | Sequence[str] | None = None,
    **columns: str | None,
) -> "tuple[AnyDataset, dict[str, Any], PairReader]":
    """Open a source; returns its rows as they are, undecoded, the first of them, and what reads them as pairs.

    Arguments and errors are those of `load_pairs`.
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
    given = {role: columns.get(f"{role}_column") for role in ("image", "id", "group")} | {"text": text}
    chosen = choose_columns(list(first), given, dataset.features, only)
    chosen = chosen._replace(joined=tuple(joined) if chosen.text else ())
    metadata = choose_metadata(keep, list(first), dataset.features)
    is_csv = isinstance(source, str | Path) and table_suffix(Path(source)) in (".csv", ".tsv")
    reader = PairReader(chosen, RowImages(folder, image_folders(source, folder)), skip, metadata)
    reader.csv = Path(str(source)).expanduser() if is_csv else None
    return dataset, first, reader


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


def _joined(cells: Sequence[pa.Array], columns: PairColumns) -> pa.Array:
    """Return the texts of several columns as one for each row; a missing text leaves no space."""
    for name, each in zip((columns.text, *columns.joined), cells, strict=True):
        if not (is_kind(each.type, "string") or pa.types.is_null(each.type)):
            raise ValueError(f"column {name!r} holds {each.type}; several text columns are joined, which hold strings")
    rows = zip(*(each.to_pylist() for each in cells), strict=True)
    return pa.array([" ".join(filter(None, row)) or None for row in rows], pa.string())


class _Block(NamedTuple):
    """Some rows that are read and checked.

    Attributes:
        ids: Of each row.
        files: The image files of each row as one text; None where an image has bytes or no path.
        images: A list of images of each row; None if they are not read or have their bytes in the table.
        groups: Of each row; None without.
        metadata: The kept columns.
        owners: The row of each pair, ascending.
        texts: Of each pair; None if they are not read.
        problems: Why rows cannot be used.
    """

    ids: list[str]
    files: list[str | None]
    images: pa.Array | None
    groups: pa.Array | None
    metadata: dict[str, pa.Array]
    owners: np.ndarray
    texts: pa.Array | None
    problems: dict[int, ItemError]


class PairReader:
    """Reads rows as pairs.

    Args:
        columns: What to read.
        images: Checks the images.
        skip: Whether a row that cannot be used is marked by its `problem`, instead of raising.
        metadata: Further columns, as `choose_metadata` gives them.

    Attributes:
        csv: The CSV file of the rows, if they are of one.
    """

    def __init__(self, columns: PairColumns, images: RowImages, skip: bool, metadata: Mapping[str, str]) -> None:
        self.columns, self.images, self.skip, self.metadata = columns, images, skip, metadata
        self.csv: Path | None = None
        self._odd: Counter[str] = Counter()

    @property
    def names(self) -> list[str]:
        """The columns that are read."""
        columns = self.columns
        read = (columns.picture, columns.text, *columns.joined, columns.id, columns.group, *self.metadata)
        return list(dict.fromkeys(name for name in read if name is not None))

    def read(self, table: pa.Table, number: Callable[[int], int | str]) -> _Block:
        """Read and check rows.

        Args:
            table: With the columns `names`.
            number: The number of a row by its place.

        """
        columns, count = self.columns, len(table)
        cells = {name: _combined(table[name]) for name in self.names}
        if columns.text and columns.text not in self.metadata:
            cells[columns.text] = without_json(cells[columns.text])
        problems: dict[int, ItemError] = {}
        ids = [str(number(row)) for row in range(count)]
        if columns.id:
            for row, row_id in enumerate(as_names(cells[columns.id], columns.id).to_pylist()):
                ids[row] = row_id or f"row {number(row)}"
                if row_id is None:
                    problems[row] = ItemError(f"row {number(row)}", "the id is missing")

        def attempt(row: int, check: Callable[[str], Any]) -> Any:
            try:
                return check(row_name(number(row), ids[row]))
            except ItemError as error:
                problems.setdefault(row, error)
                return None

        metadata = {name: self._kept(name, mark, cells[name], attempt) for name, mark in self.metadata.items()}
        owners, texts, groups = np.arange(count), None, None
        if columns.text:
            if columns.joined:
                cells[columns.text] = _joined([cells[name] for name in (columns.text, *columns.joined)], columns)
            owners, texts = self._texts(cells[columns.text], attempt)
        images, counts, files = self._images(cells, attempt, count)
        if columns.group:
            groups = self._class_names(cells[columns.group]) if columns.group == columns.text else cells[columns.group]
            groups = as_names(groups, columns.group)
        elif columns.text and _is_list(cells[columns.text]):
            groups = pa.array(ids)
        if texts is not None and counts and pc.any(pc.match_substring(texts, PLACEHOLDER)).as_py():
            for row, text in zip(owners.tolist(), texts.to_pylist(), strict=True):
                if row in counts and text is not None and PLACEHOLDER in text:
                    attempt(row, partial(check_placeholders, text, counts[row]))
        if problems:  # one pair for a row that cannot be used
            kept = (np.diff(owners, prepend=-1) > 0) | ~np.isin(owners, list(problems))
            owners, texts = owners[kept], texts if texts is None else texts.filter(pa.array(kept))
        return _Block(ids, files, images, groups, metadata, owners, texts, problems)

    def _texts(self, cells: pa.Array, attempt: "_Attempt") -> tuple[np.ndarray, pa.Array]:
        """Return the row and the text of each pair."""
        owners = np.arange(len(cells))
        if _is_list(cells):
            lengths = pc.fill_null(pc.list_value_length(cells), 0).to_numpy()
            for row in np.flatnonzero(lengths == 0).tolist():
                attempt(row, partial(_refuse, "the list of texts is empty"))
            owners = np.repeat(owners, np.maximum(lengths, 1))
            is_empty = lengths[owners] == 0
            places = np.zeros(len(owners), dtype=np.int64)
            places[~is_empty] = np.arange(lengths.sum())
            cells = pc.list_flatten(cells).take(pa.array(places, mask=is_empty))
        texts = self._class_names(cells)
        is_bad = pa.array([True] * len(texts))
        if is_kind(texts.type, "string"):
            texts = texts.cast(pa.string())
            is_bad = pc.or_kleene(pc.is_null(texts), pc.equal(pc.utf8_trim_whitespace(texts), ""))
        for place in np.flatnonzero(is_bad).tolist():
            text = texts[place].as_py()
            check = partial(_refuse, "the text is missing") if text is None else partial(check_text, text)
            attempt(int(owners[place]), check)
        return owners, texts if texts.type == pa.string() else pa.nulls(len(texts), pa.string())

    def _class_names(self, cells: pa.Array) -> pa.Array:
        """Return the names of classes in place of their numbers; null for -1."""
        if self.columns.label is None or not pa.types.is_integer(cells.type):
            return cells
        return pa.array(self.columns.label.names).take(pc.if_else(pc.less(cells, 0), None, cells))

    def _images(
        self, table: Mapping[str, pa.Array], attempt: "_Attempt", count: int
    ) -> tuple[pa.Array | None, dict[int, int], list[str | None]]:
        """Check images.

        Returns:
            Structs of bytes and path, or lists of them, or None; how many images the rows with a list have; and the
            files of each row as one text, None where an image has bytes or no path.
        """
        columns = self.columns
        files: list[str | None] = [None] * count
        if columns.picture is None:
            return None, {}, files
        cells = without_json(table[columns.picture])
        is_list = _is_list(cells)
        flat = pc.list_flatten(cells) if is_list else cells
        if not (pa.types.is_struct(flat.type) or is_kind(flat.type, "binary") or is_kind(flat.type, "string")):
            if columns.image is None or pa.types.is_null(flat.type):
                flat = pa.nulls(len(flat), pa.string())
            else:
                kind = datasets.Features.from_arrow_schema(pa.schema({"x": cells.type}))["x"]
                raise ValueError(
                    f"column {columns.picture!r} holds {kind}; expected images, image bytes, paths or URLs"
                )
        if is_kind(flat.type, "binary"):
            flat = pa.StructArray.from_arrays(
                [flat.cast(pa.binary()), pa.nulls(len(flat), pa.string())], ["bytes", "path"]
            )
        if not pa.types.is_struct(flat.type):
            return self._paths(cells.to_pylist(), is_list, attempt)
        data = flat.field("bytes")
        has_bytes = pc.and_(flat.is_valid(), data.is_valid())
        paths = pc.if_else(has_bytes, None, flat.field("path"))
        ends = np.cumsum(pc.fill_null(pc.list_value_length(cells), 0)) if is_list else np.arange(1, count + 1)
        starts = np.concatenate([[0], ends[:-1]]).astype(np.int64)
        for row in np.flatnonzero(starts == ends).tolist() if columns.image else ():
            attempt(row, partial(self.images.check, None))
        unread = np.flatnonzero(pc.invert(has_bytes))
        for place, row in zip(unread.tolist(), np.searchsorted(ends, unread, "right").tolist(), strict=True):
            if columns.image:
                attempt(row, partial(self.images.check, {"bytes": None, "path": paths[place].as_py()}))
            if starts[row] == place and (names := paths[place : ends[row]].to_pylist()) and all(names):
                files[row] = "\n".join(map(self.images.absolute, names))
        images = pa.StructArray.from_arrays([data.cast(pa.binary()), paths], ["bytes", "path"])
        if is_list:
            offsets = pa.array(np.concatenate([[0], ends]), pa.int32())
            images = pa.ListArray.from_arrays(offsets, images, mask=pc.is_null(cells))
        lengths = dict(enumerate((ends - starts).tolist())) if is_list else {}
        return images if columns.image else None, lengths, files

    def _paths(
        self, cells: Sequence[Any], is_list: bool, attempt: "_Attempt"
    ) -> tuple[pa.Array | None, dict[int, int], list[str | None]]:
        """Check images by their paths and URLs, as `_images`."""
        files: list[str | None] = []
        images: list[Any] = []
        counts: dict[int, int] = {}
        for row, cell in enumerate(cells):
            listed = listed_images(cell)
            several = listed if isinstance(listed, list) else [listed]
            if isinstance(listed, list):
                counts[row] = len(listed)
            files.append("\n".join(map(self.images.absolute, several)) if several and all(several) else None)
            checked = attempt(row, partial(self.images.check, listed)) if self.columns.image else None
            several = checked if isinstance(checked, list) else [checked]
            images.append(None if checked is None else [{"bytes": None, "path": path} for path in several])
        if self.columns.image is None:
            return None, {}, files
        if not is_list and not counts:
            images = [None if each is None else each[0] for each in images]
        return pa.array(images, _IMAGES if is_list or counts else _IMAGE), counts, files

    def _kept(self, name: str, mark: str, cells: pa.Array, attempt: "_Attempt") -> pa.Array:
        """Return the values of a kept column."""
        if not mark:
            return without_nan(cells)
        numbers: list[float | None] = []
        for row, value in enumerate(cells.to_pylist()):
            try:
                numbers.append(read_number(value, f"row {row}", name, mark))
            except ItemError as error:
                numbers.append(None)
                if self.skip:
                    self._odd[name] += 1
                    if self._odd[name] == 1:
                        logger.warning("%s; it is no value, and so are others that are no numbers", error.message)
                else:
                    attempt(row, partial(_refuse, error.message))
        return pa.array(numbers, pa.float64())

    def collect(self, dataset: datasets.Dataset) -> datasets.Dataset:
        """Read all rows, and join what was read with the texts and images that stay unchanged on disk.

        Raises:
            ItemError: Rows cannot be used, and such rows are not skipped; it is that of the first.
        """
        columns, count = self.columns, len(dataset)
        stays = columns.text is not None and not columns.joined and dataset.features[columns.text] == _TEXT
        has_images = columns.image is not None and holds_images(dataset.features[columns.image])
        table = dataset.select_columns(self.names).with_format("arrow")
        problems: dict[int, ItemError] = {}
        keys, file_keys, pairs = [], [], []
        chunks: dict[str, list[pa.Array]] = {name: [] for name in ("ids", "groups", "images", "texts")}
        for start in range(0, count, _ROWS_AT_ONCE):
            rows = range(start, min(start + _ROWS_AT_ONCE, count))
            block = self.read(table[rows.start : rows.stop], rows.__getitem__)
            problems |= {start + row: error for row, error in block.problems.items()}
            keys.append(id_keys(block.ids))
            if columns.picture:
                named = zip(block.ids, block.files, strict=True)
                file_keys.append(id_keys(row_id if file is None else f"file {file}" for row_id, file in named))
            pairs.append(start + block.owners)
            read = {"ids": pa.array(block.ids, pa.string()), "groups": block.groups}
            read |= {f"kept {name}": values for name, values in block.metadata.items()}
            read |= {"images": None if has_images else block.images, "texts": None if stays else block.texts}
            for name, values in read.items():
                if values is not None:
                    chunks.setdefault(name, []).append(values)
        found = {name: pa.chunked_array(parts) for name, parts in _alike(chunks).items() if parts}
        owners = np.concatenate(pairs)
        repeats = _repeats(np.concatenate(keys))
        copies = _same_images(dataset, columns.picture, repeats)
        if repeats:
            ids = found["ids"].to_pylist()
            self._check_repeats({row: first for row, first in repeats.items() if row not in copies}, ids, problems)
            found["ids"] = pa.chunked_array([pa.array(ids)])
            if columns.text is None:
                owners = owners[~np.isin(owners, list(copies))]
        if problems and not self.skip:
            raise counted([problems[row] for row in sorted(problems)], count)
        if "groups" not in found and columns.picture:
            _, first, places = np.unique(np.concatenate(file_keys), return_index=True, return_inverse=True)
            if len(np.unique(places[owners])) < len(owners):
                found["groups"] = found["ids"].take(pa.array(first[places]))
        is_plain = len(owners) == count
        made = {
            name: values if is_plain or name == "texts" else values.take(pa.array(owners))
            for name, values in found.items()
        }
        ids = made["ids"]
        if not is_plain or len(copies):
            ids = pa.array(number_pairs(ids.to_pylist()))
            if len(_repeats(id_keys(ids.to_pylist()))):
                raise ItemError("the data", "an id is that of another row with # and a number; ids must be unique")
        result = self._dataset({**made, "ids": ids}, owners, problems, dataset.features)
        if stays:
            result = _beside(result, dataset.select_columns(columns.text).rename_columns({columns.text: "text"}))
        if has_images:
            images = image_column(dataset, str(columns.image))
            result = _beside(result, images) if is_plain else join_pairs(images, owners, result)
        return result.select_columns([name for name in PAIR_COLUMNS if name in result.column_names])

    def _dataset(
        self, made: dict[str, Any], owners: np.ndarray, problems: Mapping[int, ItemError], known: Mapping[str, Any]
    ) -> datasets.Dataset:
        """Return what was read of the pairs as a dataset."""
        own = {part: made[f"{part}s"] for part in ("id", "image", "text", "group") if f"{part}s" in made}
        if self.skip:
            own["problem"] = pa.array(
                [str(problems[row]) if row in problems else None for row in owners.tolist()], pa.string()
            )
        features = {name: IMAGE if name == "image" else _TEXT for name in own}
        if "image" in own and _is_list(own["image"]):
            features["image"] = datasets.List(IMAGE)
        if self.metadata:
            kept = [_combined(made[f"kept {name}"]) for name in self.metadata]
            own["metadata"] = pa.StructArray.from_arrays(kept, [*self.metadata])
            features["metadata"] = self._kept_features(known)
        info = datasets.DatasetInfo(features=datasets.Features(features))
        return datasets.Dataset(datasets.table.InMemoryTable(pa.table(own)), info=info)

    def _kept_features(self, known: Mapping[str, Any]) -> dict[str, Any]:
        return {name: datasets.Value("float64") if mark else known[name] for name, mark in self.metadata.items()}

    def _check_repeats(self, repeats: Mapping[int, int], ids: list[str], problems: dict[int, ItemError]) -> None:
        """Note the rows that repeat the id of an earlier one with another image, and give them ids of their own."""
        lines = [line for line, _ in csv_rows(self.csv)][1:] if self.csv and repeats else None
        for row, first in repeats.items():
            where = f"rows {first} and {row}" if lines is None else f"lines {lines[first]} and {lines[row]}"
            problems[row] = ItemError(
                f"row {row}",
                f"the id {ids[row]!r} occurs twice, in {where}; {'the first is kept' if self.skip else _UNIQUE}",
            )
            ids[row] = f"{ids[row]}#{row}"

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
        wanted = columns._asdict() | {"id": True, "group": columns.group or several["text"], "problem": self.skip}
        features = dict.fromkeys((name for name in PAIR_COLUMNS if wanted.get(name)), _TEXT)
        if columns.image:
            features["image"] = datasets.List(IMAGE) if several["image"] else IMAGE
        if self.metadata:
            features["metadata"] = self._kept_features(known)
        schema = datasets.Features(features).arrow_schema

        types = dataset.select_columns(self.names).features.arrow_schema

        def read(batch: Mapping[str, list[Any]], numbers: list[int]) -> dict[str, list[Any]]:
            table = pa.table([_typed(batch[field.name], field.type) for field in types], schema=types)
            block = self.read(table, numbers.__getitem__)
            if block.problems and not self.skip:
                raise block.problems[min(block.problems)]
            if len(block.owners) > len(table) and not several["text"]:
                row = int(block.owners[np.flatnonzero(np.diff(block.owners) == 0)[0]])
                raise ValueError(f"row {numbers[row]}: several texts, but the rows before have one each")
            return self._table(block, schema).to_pydict()

        rows = dataset.select_columns(self.names)
        return rows.map(
            read, with_indices=True, batched=True, batch_size=_STREAMED_AT_ONCE, remove_columns=self.names,
            features=datasets.Features(features),
        )  # fmt: skip

    def _table(self, block: _Block, schema: pa.Schema) -> pa.Table:
        """Return the pairs of a block."""
        rows, owners = block.owners.tolist(), pa.array(block.owners)
        columns: dict[str, Any] = {"id": pa.array(number_pairs([block.ids[row] for row in rows], rows), pa.string())}
        columns["text"] = block.texts
        columns["group"] = pa.nulls(len(rows), pa.string()) if block.groups is None else block.groups.take(owners)
        reasons = (str(block.problems[row]) if row in block.problems else None for row in rows)
        columns["problem"] = pa.array(reasons, pa.string())
        if block.images is not None:
            is_list = pa.types.is_list(schema.field("image").type)
            if _is_list(block.images) and not is_list:
                raise ValueError("a row has several images, but the first row has one")
            columns["image"] = (_as_lists(block.images) if is_list else block.images).take(owners)
        if self.metadata:
            kept = pa.StructArray.from_arrays([*block.metadata.values()], [*block.metadata])
            columns["metadata"] = kept.take(owners)
        return pa.Table.from_arrays([columns[name] for name in schema.names], schema.names).cast(schema)


_Attempt: TypeAlias = Callable[[int, Callable[[str], Any]], Any]
_IMAGE = pa.struct({"bytes": pa.binary(), "path": pa.string()})
_IMAGES = pa.list_(_IMAGE)


def _typed(values: list[Any], kind: pa.DataType) -> pa.Array:
    """Return the values of a stream as a column of its type."""
    if isinstance(kind, pa.BaseExtensionType):  # JSON
        texts = [None if value is None else json.dumps(value) for value in values]
        return pa.ExtensionArray.from_storage(kind, pa.array(texts, kind.storage_type))
    return pa.array(values, kind)


def _refuse(message: str, name: str) -> None:
    raise ItemError(name, message)


def _combined(column: Any) -> pa.Array:
    chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    return chunks[0] if len(chunks) == 1 else column.combine_chunks()


def _is_list(cells: Any) -> bool:
    return pa.types.is_list(cells.type) or pa.types.is_large_list(cells.type)


def _as_lists(images: pa.Array) -> pa.Array:
    """Return images as lists of one; null for none."""
    if _is_list(images):
        return images
    offsets = pa.array(range(len(images) + 1), pa.int32())
    return pa.ListArray.from_arrays(offsets, images, mask=pc.is_null(images))


def _alike(chunks: dict[str, list[pa.Array]]) -> dict[str, list[pa.Array]]:
    """Make all images lists if some are."""
    if any(map(_is_list, chunks["images"])):
        chunks["images"] = [_as_lists(images) for images in chunks["images"]]
    return chunks


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
