"""Image-text pairs from any source, checked and with the fixed columns `id`, `image` and `text`."""

import json
import logging
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, starmap
from typing import Any, Literal

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from conjoin.data.cells import as_ids, clean_texts, decimal_mark, read_images, read_number, texts_of
from conjoin.data.columns import (
    IMAGE,
    ColumnNames,
    TableColumns,
    cast_images,
    cells_of,
    choose_columns,
    choose_metadata,
    element_of,
    holds_images,
    image_cells,
    is_text,
    undecoded,
)
from conjoin.data.pair_sources import AnyDataset, PairSource as PairSource, open_source
from conjoin.data.row_checks import check_on_error, counted, row_name
from conjoin.data.row_images import PLACEHOLDER, RowImages, check_image_path, check_placeholders, image_folders
from conjoin.processing.item_error import ItemError, MissingFileError

logger = logging.getLogger(__name__)
_TEXT, _STRING = datasets.Value("string"), pa.string()
PAIR_FEATURES = datasets.Features({"id": _TEXT, "image": IMAGE, "text": _TEXT})
PAIR_COLUMNS = (*PAIR_FEATURES, "group", "problem", "metadata")
_ROWS_AT_ONCE = 1000
_STREAMED_AT_ONCE = 100
_UNIQUE = (
    "choose a column of unique ids by columns, id=COLUMN, or row numbers by id=, or keep the first row of each by "
    "--on-error skip (only several captions of one image may share an id)"
)
_LOOKED_AT = 100
"""Rows of a stream from which its columns are guessed, and their types, where it does not know them."""


def load_pairs(
    source: PairSource,
    *,
    columns: ColumnNames | None = None,
    split: str = "train",
    streaming: bool = False,
    only: Literal["image", "text", "both"] | None = None,
    on_error: Literal["raise", "skip"] = "raise",
    keep: Sequence[str] = (),
) -> AnyDataset:
    """Load rows with the columns `id` (string), `image` (undecoded) and `text` (string), of which a row may lack one.

    This function checks every id and text and the existence of every image file; images are read on access. With
    streaming, the rows of CSV and Parquet files, shards, datasets of the Hub and an `IterableDataset` are read and
    checked on access, and duplicate ids are not detected. A row that cannot be used raises an error that names it; no
    row is skipped. A row with a text whose image file does not exist is read by its text, with a warning that counts
    such rows; where no image of several is found, the folder is wrong, and that is an error.

    A row with a list of captions becomes a pair for each caption, with the ids `ID#0`, `ID#1` ...; so do rows of one
    id and one image. Pairs of one image share a `group`, a fourth column that exists where it is needed (with
    streaming, images of several rows are not compared). A row with a list of images is one item with all of them. In
    its text, `<image>` marks the place of the next image; without it, the images precede the text. If no column is a
    text, but one is a `datasets.ClassLabel`, its names are the texts and the groups.

    A cell names an image by its path, its URL (also `//host/a.jpg`), a data URI, base64, `{"src": ...}` or
    `{"url": ...}`; several as a list, also in JSON, or as `a.png|b.png` (with `;`, a comma or, between URLs, a space).
    Ids are texts: the number 1001.0 is `1001`. Blanks, NaN, `N/A`, `null` and `-` are no value. Texts lose their outer
    spaces and what they have of HTML.

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
        columns: Columns by role, where `guess_columns` does not find them: `{"image": "photo", "text":
            ["name", "brand"], "id": "sku", "group": "product"}`. The texts of several columns are one text, with a
            space between them. Without an id, or with `"id": ""`, the row number is the id. Rows of one group show the
            same thing, and are not each other's negatives.
        split: The split, for sources with several.
        streaming: Return an `IterableDataset` that reads rows on access.
        only: "image" or "text": load this part only; the source may lack the other, and the result has no column for
            it. "both": a row that lacks one of them cannot be used, as for training.
        on_error: "skip" marks a row whose image, text or id cannot be used, by the reason in a further column
            `problem` (null for the others): encoding and training skip it, and list it. Of rows of one id, the first
            is kept. A kept value that should be a number and is none becomes null, with a warning.
        keep: Further columns of the source; their values are in the column `metadata`, under their own names. Those of
            a CSV file are texts; `"price:number"` reads the column `price` as numbers and prices, such as `9.5`,
            `US$ 1,299.00`, `1.299,00 €` or `₹1,29,900`.

    Raises:
        FileNotFoundError: The source or a listed image does not exist.
        ValueError: A column is missing, the source is empty, an id occurs twice, a row has nothing to read, an image
            is a URL and URLs are not allowed, an image lies outside of a folder, archive or Hub dataset, or `only` or
            `on_error` is unknown.
    """
    if only not in (None, "image", "text", "both"):
        raise ValueError(f"only={only!r}; expected None, 'image', 'text' or 'both'")
    skip = check_on_error(on_error)
    dataset, folder = open_source(source, split, streaming, only)
    dataset = undecoded(dataset)
    sample: Any = dataset if isinstance(dataset, datasets.Dataset) else list(dataset.take(_LOOKED_AT))
    if not len(sample):
        raise ValueError("the dataset is empty: it has no rows")
    if dataset.features is None:
        dataset = undecoded(dataset.cast(datasets.Dataset.from_list(sample).features))
    rows = {name: [row[name] for row in sample] for name in sample[0]} if isinstance(sample, list) else sample
    chosen = choose_columns(rows, columns, dataset.features, only)
    metadata = choose_metadata(keep, dataset.column_names, dataset.features)
    marks = {
        name: decimal_mark(row[name] for row in dataset.select_columns(name)) for name in metadata if metadata[name]
    }
    pictures = dataset.features[chosen.image] if chosen.image else None
    has_lists = element_of(pictures) is not None
    if isinstance(sample, list) and chosen.image:
        has_lists |= any(isinstance(read_images(cell), list) for cell in rows[chosen.image])
    reader = PairReader(
        chosen, only, RowImages(folder, image_folders(source, folder)), skip, metadata, marks, dict(dataset.features),
        holds_images(pictures), has_lists, isinstance(sample, list),
    )  # fmt: skip
    dataset = dataset.select_columns(reader.names)
    if reader.has_bytes:
        dataset = cast_images(dataset, str(chosen.image))
        reader.features = dict(dataset.features)
    if isinstance(dataset, datasets.IterableDataset):
        return reader.stream(dataset)
    pairs = reader.collect(dataset)
    return pairs.to_iterable_dataset() if streaming else pairs


@dataclass
class PairReader:
    """Reads rows as pairs.

    Attributes:
        columns: What to read.
        only: As for `load_pairs`.
        images: Checks the images.
        skip: Whether a row that cannot be used is marked by its `problem`, instead of raising.
        metadata: Further columns, as `choose_metadata` gives them.
        marks: The decimal marks of those that are read as numbers.
        features: What the columns hold.
        has_bytes: Whether the column of images has the type `IMAGE`, or lists of it; else it has paths.
        has_lists: Whether the result has a list of images in each row.
        is_stream: Whether the rows are read later, so that `has_lists` is certain.
        problems: Why rows cannot be used, by their numbers.
        lost: Of rows with a text, why there is no image, likewise.
        further: The numbers of rows that only hold a further image of their group.
        warned: What was warned of.
    """

    columns: TableColumns
    only: str | None
    images: RowImages
    skip: bool
    metadata: Mapping[str, bool]
    marks: Mapping[str, str | None]
    features: Mapping[str, Any]
    has_bytes: bool
    has_lists: bool
    is_stream: bool
    problems: dict[int, ItemError] = field(default_factory=dict)
    lost: dict[int, ItemError] = field(default_factory=dict)
    further: list[int] = field(default_factory=list)
    warned: set[str] = field(default_factory=set)

    @property
    def names(self) -> list[str]:
        """The columns that are read."""
        image, text, id_, group, _ = self.columns
        return list(dict.fromkeys(name for name in (image, *text, id_, group, *self.metadata) if name is not None))

    @property
    def picture(self) -> str | None:
        """The column of images, if the result has them."""
        return None if self.only == "text" else self.columns.image

    def read(self, table: pa.Table, start: int) -> pa.Table:
        """Read and check rows.

        Args:
            table: With the columns `names`.
            start: The number of the first row in the data.

        Returns:
            A row for each pair: the number of its `row`, its `id`, and what is read of `text`, `group`, `metadata`,
            `file`, the hash of the paths of the images (null for images with bytes), and `image`, the list of its
            images that are paths.
        """
        image, text, id_column, group, _ = self.columns
        named: Any = [name and as_ids(cells_of(table[name], self.features[name]), name) for name in (id_column, group)]
        ids = named[0] or [*map(str, range(start, start + len(table)))]
        groups = named[1] or [None] * len(table)
        pictures = image_cells(table[image]) if image else [None] * len(table)
        texts = zip(*(self._texts(name, table[name]) for name in text), strict=True) if text else [()] * len(table)
        names = [*starmap(row_name, enumerate(ids, start))]
        kept = [self._kept(name, table[name], start, names) for name in self.metadata]
        pairs: list[tuple[Any, ...]] = []
        rows = zip(ids, names, groups, pictures, texts, strict=True)
        for number, (id_, name, of, cell, words) in enumerate(rows, start):
            found = read_images(cell) if cell else None
            paths = found if isinstance(found, list) else [found] if found else []
            if id_ is None and of and paths and text and not any(words):
                self.further.append(number)
                continue
            file, problem = self.images.file_key(paths), self.problems.get(number)
            try:
                if id_ is None:
                    raise ItemError(name, "the id is missing")
                if len(words) > 1 and any(len(each) > 1 for each in words):
                    raise ItemError(name, "a list of texts in one of several text columns; expected one text in each")
                captions = words[0] if len(words) == 1 else [" ".join(chain(*words))] if any(words) else []
                if self.picture:
                    paths = self._images(paths, isinstance(found, list), bool(captions), number, name)
                    file = file if paths else None
                self._check_parts(paths, captions, name)
            except ItemError as error:
                problem = self.problems.setdefault(number, error)
                paths, file, captions = [], None, next(filter(None, words), [])
            for caption in captions[: 1 if problem else None] or [None]:
                pairs.append((number, id_ or name, of, caption, file, [{"path": path} for path in paths] or None))
        kinds = {"row": pa.int64(), "id": _STRING, "group": _STRING, "text": _STRING, "file": pa.int64()}
        kinds["image"] = pa.list_(IMAGE.pa_type)
        columns = zip(*pairs, strict=True) if pairs else [()] * len(kinds)
        read = {name: pa.array(column, kinds[name]) for name, column in zip(kinds, columns, strict=True)}
        if kept:
            read["metadata"] = pa.StructArray.from_arrays(kept, [*self.metadata]).take(pc.subtract(read["row"], start))
        return pa.table(read)

    def _texts(self, name: str, column: pa.ChunkedArray) -> list[list[str]]:
        """Return the texts of each row of a column."""
        if not is_text(self.features[name]):
            return [*map(texts_of, cells_of(column, self.features[name]))]
        return [[] if text is None else [text] for text in clean_texts(column.combine_chunks()).to_pylist()]

    def _images(self, paths: list[Any], is_list: bool, has_text: bool, number: int, name: str) -> list[str]:
        """Check the images of a row; those that are lost are none.

        Raises:
            ItemError: One cannot be used.
        """
        if is_list and not self.has_lists:
            if self.is_stream:
                remedy = "read without streaming, or begin with a row of several"
                first = f"the first {_LOOKED_AT} rows of the stream have one each"
                raise ItemError(name, f"it has {len(paths)} images, but {first}; {remedy}")
            self.has_lists = True
        try:
            if self.has_bytes:
                return [check_image_path(path, self.images.folders, name) for path in paths]
            return [self.images.check_one(path, name) for path in paths]
        except MissingFileError as error:
            if self.only is not None or not has_text:
                raise
            self.lost[number] = error
            return []

    def _check_parts(self, paths: Sequence[str], captions: Sequence[str], name: str) -> None:
        """Refuse a row that lacks what it needs.

        Raises:
            ItemError: It does.
        """
        if not (paths and captions):
            read = (("image", self.picture, paths), ("text", self.columns.text, captions))
            has = [bool(values) for _, column, values in read if column]
            if not (all(has) if self.only == "both" else any(has)):
                lacking = [part for part, column, values in read if column and not values]
                raise ItemError(name, f"the {' and the '.join(lacking)} {'are' if len(lacking) > 1 else 'is'} missing")
        for caption in captions if paths and self.has_lists else ():
            if PLACEHOLDER in caption:
                check_placeholders(caption, len(paths), name)

    def _kept(self, name: str, column: pa.ChunkedArray, start: int, names: Sequence[str]) -> pa.Array:
        """Return the values of a kept column."""
        cells = column.combine_chunks()
        if not self.metadata[name]:
            if pa.types.is_string(cells.type) or pa.types.is_large_string(cells.type):
                return clean_texts(cells).cast(cells.type)
            return pc.if_else(pc.is_nan(cells), None, cells) if pa.types.is_floating(cells.type) else cells
        values: list[float | None] = []
        rows = zip(names, cells_of(column, self.features[name]), strict=True)
        for number, (row, value) in enumerate(rows, start):
            try:
                values.append(read_number(value, row, name, self.marks[name]))
            except ItemError as error:
                values.append(None)
                if not self.skip:
                    self.problems[number] = error
                else:
                    self._warn(name, "%s; it is no value, and so are others that are no numbers", error)
        return pa.array(values, pa.float64())

    def collect(self, dataset: datasets.Dataset) -> datasets.Dataset:
        """Read all rows, and join what was read with the images that stay unchanged on disk.

        Raises:
            ItemError: Rows cannot be used, and such rows are not skipped; it is that of the first.
        """
        count, table = len(dataset), dataset.with_format("arrow")
        starts = range(0, count, _ROWS_AT_ONCE)
        pairs = pa.concat_tables([self.read(table[start : start + _ROWS_AT_ONCE], start) for start in starts])
        if len(self.lost) > 1 and pairs["image"].null_count == len(pairs):
            self.problems |= self.lost
        pairs = self._name_pairs(dataset, pairs)
        if self.problems and not self.skip:
            raise counted([self.problems[row] for row in sorted(self.problems)], count)
        self._tell(count)
        owners, first = pairs["row"].to_numpy(), _first_places(pairs["id"])
        same = first
        if self.columns.image:
            same = np.where(pc.is_null(pairs["file"]), first, _first_places(pairs["file"]))
        groups = self.columns.group is not None or (same != np.arange(len(same))).any()
        if self.columns.group is None:
            pairs = _with(pairs, "group", pairs["id"].take(pa.array(same)))
        pairs = _with(pairs, "id", pa.array(number_pairs(pairs["id"].to_pylist()), pa.string()))
        features = self._features(groups)
        stored = features.pop("image") if self.has_bytes and self.picture else None
        table = datasets.table.InMemoryTable(self._result(pairs, features))
        result = datasets.Dataset(table, info=datasets.DatasetInfo(features=features))
        if stored is not None:
            images = dataset.select_columns([self.picture]).rename_columns({self.picture: "image"})
            result = join_pairs(images, owners, result)
        return result.select_columns([name for name in PAIR_COLUMNS if name in result.column_names])

    def _name_pairs(self, dataset: datasets.Dataset, pairs: pa.Table) -> pa.Table:
        """Return pairs whose rows share an id only if they show one image; without texts, only the first of such rows.

        A row with the id of another image gets a problem, and an id of its own.
        """
        owners, first = pairs["row"].to_pylist(), _first_places(pairs["id"]).tolist()
        repeats = [(pair, before) for pair, before in enumerate(first) if owners[pair] != owners[before]]
        if not repeats:
            return pairs
        ids, images = pairs["id"].to_pylist(), pairs["file"].to_pylist()
        for pair in {pair for repeat in repeats for pair in repeat if images[pair] is None}:
            image = self.columns.image and dataset[owners[pair]][self.columns.image]
            images[pair] = owners[pair] if image is None else _content(image)
        copies = []
        for pair, before in repeats:
            row = owners[pair]
            if images[pair] == images[before]:
                copies.append(pair)
                continue
            remedy = "the first is kept" if self.skip else _UNIQUE
            problem = f"the id {ids[pair]!r} occurs twice, in rows {owners[before]} and {row}; {remedy}"
            self.problems[row] = ItemError(f"row {row}", problem)
            ids[pair] += f"#row {row}"
        pairs = _with(pairs, "id", pa.array(ids))
        return pairs if self.columns.text else pairs.take(np.delete(np.arange(len(pairs)), copies))

    def stream(self, dataset: datasets.IterableDataset) -> datasets.IterableDataset:
        """Read rows when they are used."""
        text, schema = self.columns.text, dataset.features.arrow_schema
        kind = self.features[text[0]] if len(text) == 1 else None
        features = self._features(bool(self.columns.group or kind == datasets.Json() or element_of(kind)))

        def read(batch: Mapping[str, list[Any]], numbers: list[int]) -> dict[str, list[Any]]:
            cells = {name: _written(values, self.features[name]) for name, values in batch.items()}
            table = pa.Table.from_pydict(cells, schema)
            pairs = self.read(table, numbers[0])
            if self.problems and not self.skip:
                raise self.problems[min(self.problems)]
            self._tell()
            owners = pairs["row"].to_pylist()
            if self.columns.group is None:
                pairs = _with(pairs, "group", pairs["id"])
            pairs = _with(pairs, "id", pa.array(number_pairs(pairs["id"].to_pylist(), owners), pa.string()))
            if self.has_bytes and self.picture:
                pairs = _with(pairs, "image", table[self.picture].take(pc.subtract(pairs["row"], numbers[0])))
            made: dict[str, list[Any]] = self._result(pairs, features).to_pydict()
            self.problems.clear()
            return made

        return dataset.map(
            read, with_indices=True, batched=True, batch_size=_STREAMED_AT_ONCE, remove_columns=self.names,
            features=features,
        )  # fmt: skip

    def _tell(self, count: int | None = None) -> None:
        """Say which rows are read by their text alone, and which are left out."""
        lost, further = ("some" if count is None else f"{len(rows)} of {count}" for rows in (self.lost, self.further))
        if self.lost:
            problem = self.lost[min(self.lost)]
            message = "%s rows name an image that does not exist, and are read by their text; %s"
            self._warn("image", message, lost, problem)
        if self.further:
            message = "%s rows, such as row %d, only hold a further image of their %r, and are left out"
            self._warn("further", message, further, self.further[0], self.columns.group)
        self.lost.clear()
        self.further.clear()

    def _warn(self, what: str, message: str, *values: Any) -> None:
        """Warn once of each thing."""
        if what not in self.warned:
            self.warned.add(what)
            logger.warning(message, *values)

    def _features(self, groups: bool) -> datasets.Features:
        """Return the columns of the result."""
        kept = {
            name: datasets.Value("float64") if is_number else self.features[name]
            for name, is_number in self.metadata.items()
        }
        there: dict[str, Any] = {
            "id": _TEXT,
            "image": self.picture and (datasets.List(IMAGE) if self.has_lists else IMAGE),
            "text": self.columns.text and _TEXT,
            "group": groups and _TEXT,
            "problem": self.skip and _TEXT,
            "metadata": kept,
        }
        return datasets.Features({name: feature for name, feature in there.items() if feature})

    def _result(self, pairs: pa.Table, features: datasets.Features) -> pa.Table:
        """Return the columns of the result."""
        columns = {name: pairs[name] for name in pairs.column_names}
        if "problem" in features:
            reasons = {row: str(problem) for row, problem in self.problems.items()}
            columns["problem"] = pa.array(map(reasons.get, pairs["row"].to_pylist()), pa.string())
        if features.get("image") == IMAGE and not self.has_bytes:
            columns["image"] = pc.list_element(pairs["image"], 0)
        return pa.table({name: columns[name] for name in features}).cast(features.arrow_schema)


def _content(picture: Any) -> int:
    """Return a hash of the images of a row: of their bytes, not of the names beside them."""
    images = picture if isinstance(picture, list) else [picture]
    return hash(tuple(image["bytes"] or image["path"] if isinstance(image, Mapping) else image for image in images))


def _written(values: list[Any], feature: Any) -> list[Any]:
    """Return the values of a stream; those of mixed JSON as JSON."""
    if feature != datasets.Json():
        return values
    return [None if value is None else json.dumps(value) for value in values]


def _with(table: pa.Table, name: str, column: Any) -> pa.Table:
    return table.set_column(table.column_names.index(name), name, column)


def _first_places(values: pa.ChunkedArray) -> np.ndarray:
    """Return for each value the place of the first that equals it."""
    codes = values.dictionary_encode().combine_chunks().indices.fill_null(-1).to_numpy(zero_copy_only=False)
    _, first, inverse = np.unique(codes, return_index=True, return_inverse=True)
    places: np.ndarray = first[inverse]
    return places


def number_pairs(ids: Sequence[str], owners: Sequence[Hashable] | None = None) -> list[str]:
    """Number the pairs that share an owner, by default an id, from 0: `a`, `b#0`, `b#1`."""
    owners = ids if owners is None else owners
    counts, seen, numbered = Counter(owners), Counter[Hashable](), []
    if len(counts) == len(ids):
        return [*ids]
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
    for number in range(numbers.max() + 1):  # the first pairs of all rows, the second pairs ...
        members = np.flatnonzero(numbers == number)
        chosen, rows = images, owners[members]
        if 2 * len(rows) < len(images):
            chosen, rows = images.select(rows), np.arange(len(rows))
        cells = np.full(len(chosen), -1)
        cells[rows], places[members] = members, start + rows
        layer = datasets.table.InMemoryTable(pairs.data.table.take(pa.array(cells, mask=cells < 0)))
        layers.append(datasets.concatenate_datasets([datasets.Dataset(layer, info=pairs.info), chosen], axis=1))
        start += len(chosen)
    return datasets.concatenate_datasets(layers).select(places)
