"""Image-text pairs from any source, checked and with the fixed columns `id`, `image` and `text`."""

import json
import logging
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from conjoin.data.cells import as_ids, clean_texts, decimal_mark, read_images, read_number
from conjoin.data.columns import (
    IMAGE,
    ColumnNames,
    PairColumns,
    cast_images,
    choose_columns,
    choose_metadata,
    element_of,
    holds_images,
    image_paths,
    is_list,
    texts_of,
    undecoded as undecoded,
    values_of,
)
from conjoin.data.csv_files import csv_rows
from conjoin.data.emoji.sample import load_emoji
from conjoin.data.pair_sources import SAMPLE_SOURCE, AnyDataset, PairSource as PairSource, open_source, table_suffix
from conjoin.data.row_checks import check_on_error, counted, row_name
from conjoin.data.row_images import PLACEHOLDER, RowImages, check_image_path, check_placeholders, image_folders
from conjoin.processing.item_error import ItemError, MissingFileError

logger = logging.getLogger(__name__)
_TEXT = datasets.Value("string")
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
    dataset, folder = open_source(source, split, streaming, captions=only != "image")
    dataset = undecoded(dataset)
    sample: Any = dataset if isinstance(dataset, datasets.Dataset) else list(dataset.take(_LOOKED_AT))
    if not len(sample):
        raise ValueError("the dataset is empty: it has no rows")
    first = sample[0]
    if dataset.features is None:
        dataset = undecoded(dataset.cast(datasets.Dataset.from_list(sample).features))
    rows = {name: [row[name] for row in sample] for name in first} if isinstance(sample, list) else sample
    chosen = choose_columns(rows, columns, dataset.features, None if only == "both" else only)
    metadata = choose_metadata(keep, list(first), dataset.features)
    pictures = dataset.features[chosen.picture] if chosen.picture else None
    numbers = [name for name, is_number in metadata.items() if is_number]
    marks = {name: decimal_mark(row[name] for row in dataset.select_columns(name)) for name in numbers}
    has_bytes = holds_images(pictures)
    has_lists = element_of(pictures) is not None or isinstance(read_images(first.get(chosen.picture)), list)
    images = RowImages(folder, image_folders(source, folder))
    reader = PairReader(chosen, images, has_bytes, has_lists, skip, metadata, marks, source, only is None)
    dataset = dataset.select_columns(reader.names)
    if has_bytes:
        dataset = cast_images(dataset, str(chosen.picture))
    if isinstance(dataset, datasets.IterableDataset):
        return reader.stream(dataset)
    pairs = reader.collect(dataset)
    return pairs.to_iterable_dataset() if streaming else pairs


def load_training_pairs(source: PairSource, *, split: str = "train", **options: Any) -> AnyDataset:
    """Load rows with both parts as `load_pairs` does; the emoji also have second names, and concepts as `group`.

    Args:
        source: As for `load_pairs`.
        split: As for `load_pairs`.
        options: Further arguments of `load_pairs`; the embedded sample has its own columns.
    """
    if source == SAMPLE_SOURCE:
        return load_emoji(split).rename_column("concept", "group")
    pairs = load_pairs(source, split=split, only="both", **options)
    if isinstance(pairs, datasets.Dataset) and "group" not in pairs.column_names:
        texts = pairs.data["text"]
        repeated = len(texts) - pc.count_distinct(texts).as_py()
        if repeated:
            logger.warning(
                "%d of %d rows of %.200s repeat the text of another row, and are negatives of it in training; name "
                "what they share by columns, group=COLUMN",
                repeated, len(texts), source,
            )  # fmt: skip
    return pairs


@dataclass
class PairReader:
    """Reads rows as pairs.

    Attributes:
        columns: What to read.
        images: Checks the images.
        has_bytes: Whether the column of images has the type `IMAGE`, or lists of it; else it has paths.
        has_lists: Whether a row has a list of images.
        skip: Whether a row that cannot be used is marked by its `problem`, instead of raising.
        metadata: Further columns, as `choose_metadata` gives them.
        marks: The decimal marks of those that are read as numbers.
        source: Of the rows; those of a CSV file are named by their lines.
        may_lack: Whether a row may lack its image or its text.
        lost: Of rows with a text, why there is no image, by their numbers.
        warned: What was warned of: columns of metadata that hold what is no number, and images of a stream.
    """

    columns: PairColumns
    images: RowImages
    has_bytes: bool
    has_lists: bool
    skip: bool
    metadata: Mapping[str, bool]
    marks: Mapping[str, str | None]
    source: PairSource
    may_lack: bool
    lost: dict[int, ItemError] = field(default_factory=dict)
    warned: set[str] = field(default_factory=set)

    @property
    def names(self) -> list[str]:
        """The columns that are read."""
        columns = self.columns
        read = (columns.picture, columns.text, *columns.joined, columns.id, columns.group, *self.metadata)
        return list(dict.fromkeys(name for name in read if name is not None))

    def read(self, table: pa.Table, numbers: Sequence[int]) -> tuple[pa.Table, dict[int, ItemError]]:
        """Read and check rows.

        Args:
            table: With the columns `names`.
            numbers: Of the rows in the data.

        Returns:
            A row for each pair, with the number of its `row`, its `id` and the hash of it as `key`, and where they are
            read `text`, `group`, `metadata`, `file`, the hash of the paths of the images (null for images with bytes),
            and `image`, the list of the images that are paths; and why rows cannot be used, by their numbers.
        """
        columns = self.columns
        cells = {name: _combined(table[name]) for name in self.names}
        problems: dict[int, ItemError] = {}
        ids = [str(number) for number in numbers]
        if columns.id:
            known = as_ids(values_of(cells[columns.id]), columns.id)
            ids = [id_ or f"row {number}" for id_, number in zip(known, numbers, strict=True)]
            without = [number for id_, number in zip(known, numbers, strict=True) if id_ is None]
            problems = {number: ItemError(f"row {number}", "the id is missing") for number in without}

        def attempt(row: int, check: Callable[..., Any], *values: Any) -> Any:
            """Return what `check(*values, name of the row)` returns, or None after a problem."""
            try:
                return check(*values, row_name(numbers[row], ids[row]))
            except ItemError as error:
                problems.setdefault(numbers[row], error)
                return None

        rows: dict[str, pa.Array] = {"row": pa.array(numbers, pa.int64()), "id": pa.array(ids, pa.string())}
        rows["key"] = pa.array(map(hash, ids), pa.int64())
        if self.metadata:
            kept = [self._kept(name, cells[name], attempt) for name in self.metadata]
            rows["metadata"] = pa.StructArray.from_arrays(kept, [*self.metadata])
        if columns.label and columns.text:  # classes are read by their names
            classes = cells[columns.text]
            cells[columns.text] = pa.array(columns.label.names).take(pc.if_else(pc.less(classes, 0), None, classes))
        if columns.group:
            rows["group"] = pa.array(as_ids(values_of(cells[columns.group]), columns.group), pa.string())
        no_text, no_image = set[int](), set[int]()
        wrong: dict[int, ItemError] = {}
        owners, texts = pa.array(range(len(ids))), None
        if columns.text:
            owners, texts, no_text = self._texts([cells[name] for name in (columns.text, *columns.joined)], attempt)
        if columns.picture:
            images, counts, wrong = self._images(cells[columns.picture], lambda row: row_name(numbers[row], ids[row]))
            rows |= images
            no_image = {row for row, count in enumerate(counts) if not count and row not in wrong}
            if self.has_lists and counts and texts is not None:
                places = np.flatnonzero(pc.match_substring(texts, PLACEHOLDER).fill_null(False))
                for row, text in zip(owners.take(places).to_pylist(), texts.take(places).to_pylist(), strict=True):
                    if counts[row]:
                        attempt(row, check_placeholders, text, counts[row])
        for row, error in self._lacking(no_image, no_text, wrong, numbers):
            attempt(row, _refuse, error)
        pairs = pa.table(rows)
        if texts is not None:
            pairs = pairs.take(owners).append_column("text", texts)
        if problems and len(pairs) > len(table):  # one pair for a row that cannot be used
            read = pairs["row"].to_numpy()
            pairs = pairs.filter(pa.array((np.diff(read, prepend=-1) != 0) | ~np.isin(read, list(problems))))
        return pairs, problems

    def _lacking(
        self, no_image: set[int], no_text: set[int], wrong: Mapping[int, ItemError], numbers: Sequence[int]
    ) -> Iterator[tuple[int, ItemError | str]]:
        """Yield the rows without what they need, and why; those that are read by their text alone are `lost`."""
        may_lack = self.may_lack and self.columns.text and self.columns.image
        for row, error in wrong.items():
            if may_lack and row not in no_text and isinstance(error, MissingFileError):
                self.lost[numbers[row]] = error
            else:
                yield row, error
        if may_lack:
            yield from ((row, "the image and the text are missing") for row in no_image & no_text)
        else:
            yield from ((row, "the image is missing") for row in no_image)
            yield from ((row, "the text is missing") for row in no_text)

    def _texts(self, columns: Sequence[pa.Array], attempt: Callable[..., Any]) -> tuple[pa.Array, pa.Array, set[int]]:
        """Return the row and the text of each pair, and the rows without any; texts of several columns are one."""
        texts, count = columns[0], len(columns[0])
        if len(columns) > 1:
            parts = []
            for values in map(texts_of, columns):
                for row in [row for row, value in enumerate(values) if isinstance(value, list)]:
                    attempt(row, _refuse, "a list of texts in one of several text columns; expected one text in each")
                    values[row] = None
                parts.append(clean_texts(pa.array(values, pa.string())).to_pylist())
            texts = pa.array([" ".join(filter(None, each)) for each in zip(*parts, strict=True)], pa.string())
        elif isinstance(texts.type, pa.BaseExtensionType):  # mixed JSON
            lists = [value if isinstance(value, list) else [value] for value in texts_of(texts)]
            texts = pa.array(lists, pa.list_(pa.string()))
        owners = pa.array(range(count))
        if is_list(texts):
            owners, texts = pc.list_parent_indices(texts), pc.list_flatten(texts)
        texts = clean_texts(texts)
        owners, texts = owners.filter(pc.is_valid(texts)), texts.drop_null()
        lacking = np.setdiff1d(np.arange(count), owners)
        rows = np.concatenate([owners, lacking])
        order = pa.array(np.argsort(rows, kind="stable"))
        texts = pa.concat_arrays([texts, pa.nulls(len(lacking), pa.string())])
        return pa.array(rows).take(order), texts.take(order), {*lacking.tolist()}

    def _images(
        self, cells: pa.Array, name: Callable[[int], str]
    ) -> tuple[dict[str, pa.Array], list[int], dict[int, ItemError]]:
        """Check the images of rows.

        Args:
            cells: Of the rows.
            name: Gives what messages call a row.

        Returns:
            The `file` and the `image` of each row, as `read`; how many images it has, if they are read; and why those
            of rows cannot be used.
        """
        read = [read_images(cell) for cell in image_paths(cells)]
        lists = [image if isinstance(image, list) else [image] if image else [] for image in read]
        files = [*map(self.images.file_key, lists)]
        images: list[list[dict[str, str]]] = []
        wrong: dict[int, ItemError] = {}
        for row, paths in enumerate(lists if self.columns.image else ()):
            try:
                if self.has_bytes:
                    checked = [check_image_path(path, self.images.folders, name(row)) for path in paths]
                else:
                    checked = [self.images.resolve(path, name(row)) for path in paths]
                images.append([{"path": path} for path in checked])
            except ItemError as error:
                wrong[row], files[row] = error, None
                images.append([])
        rows = {"file": pa.array(files, pa.int64())}
        if self.columns.image and not self.has_bytes:
            rows["image"] = pa.array([image or None for image in images], pa.list_(IMAGE.pa_type))
        self.has_lists |= bool(images) and any(isinstance(image, list) for image in read)
        return rows, [*map(len, images)], wrong

    def _kept(self, name: str, cells: pa.Array, attempt: Callable[..., Any]) -> pa.Array:
        """Return the values of a kept column."""
        if not self.metadata[name]:
            if pa.types.is_string(cells.type) or pa.types.is_large_string(cells.type):
                return clean_texts(cells).cast(cells.type)
            return pc.if_else(pc.is_nan(cells), None, cells) if pa.types.is_floating(cells.type) else cells
        numbers: list[float | None] = []
        for row, value in enumerate(values_of(cells)):
            try:
                numbers.append(read_number(value, "", name, self.marks[name]))
            except ItemError as error:
                numbers.append(None)
                if not self.skip:
                    attempt(row, _refuse, error.message)
                elif name not in self.warned:
                    self.warned.add(name)
                    logger.warning("%s; it is no value, and so are others that are no numbers", error.message)
        return pa.array(numbers, pa.float64())

    def collect(self, dataset: datasets.Dataset) -> datasets.Dataset:
        """Read all rows, and join what was read with the texts and images that stay unchanged on disk.

        Raises:
            ItemError: Rows cannot be used, and such rows are not skipped; it is that of the first.
        """
        columns, count = self.columns, len(dataset)
        stored = {"image": columns.image} if columns.image and self.has_bytes else {}
        table = dataset.with_format("arrow")
        problems: dict[int, ItemError] = {}
        blocks = []
        for start in range(0, count, _ROWS_AT_ONCE):
            numbers = range(start, min(start + _ROWS_AT_ONCE, count))
            block, found = self.read(table[start : numbers.stop], numbers)
            problems |= found
            blocks.append(block)
        pairs = pa.concat_tables(blocks)
        if len(self.lost) > 1 and pairs["image"].null_count == len(pairs):
            problems |= self.lost
        elif self.lost:
            logger.warning(
                "%d of %d rows name an image that does not exist, and are read by their text; %s",
                len(self.lost), count, self.lost[min(self.lost)],
            )  # fmt: skip
        owners, first = pairs["row"].to_numpy(), _first_places(pairs["key"])
        if (owners[first] != owners).any():
            pairs = self._without_repeats(dataset, pairs, first, problems)
            owners, first = pairs["row"].to_numpy(), _first_places(pairs["key"])
        if problems and not self.skip:
            raise counted([problems[row] for row in sorted(problems)], count)
        made = {name: pairs[name] for name in pairs.column_names}
        same = first
        if columns.picture:
            same = np.where(pc.is_null(pairs["file"]), first, _first_places(pairs["file"]))
        if not columns.group and (same != np.arange(len(same))).any():
            made["group"] = pairs["id"].take(pa.array(same))
        if (first != np.arange(len(first))).any():
            ids = number_pairs(pairs["id"].to_pylist())
            name, occurrences = Counter(ids).most_common(1)[0]
            if occurrences > 1:
                raise ItemError(
                    "the data", f"the id {name!r} is that of a row and of one of several captions; ids must be unique"
                )
            made["id"] = pa.array(ids)
        features = self._features([*made, *(["problem"] if self.skip else [])], dataset.features)
        table = datasets.table.InMemoryTable(self._result(made, problems, features))
        result = datasets.Dataset(table, info=datasets.DatasetInfo(features=features))
        for name, column in stored.items():
            kept = dataset.select_columns(column).rename_columns({column: name})
            if len(owners) == count:
                result = datasets.concatenate_datasets([result, kept], axis=1)
            else:
                result = join_pairs(kept, owners, result)
        return result.select_columns([name for name in PAIR_COLUMNS if name in result.column_names])

    def _without_repeats(
        self, dataset: datasets.Dataset, pairs: pa.Table, first: np.ndarray, problems: dict[int, ItemError]
    ) -> pa.Table:
        """Return pairs whose rows share an id only if they show one image; without texts, only the first of such rows.

        Args:
            dataset: The rows.
            pairs: As they were read.
            first: For each pair, the first one of its id.
            problems: Of rows; those with the id of another image are added, and get an id of their own.
        """
        owners = pairs["row"].to_pylist()
        ids = pairs["id"].to_pylist()
        copies = []
        unit, places = "rows", [*range(len(dataset))]
        if isinstance(self.source, str | Path) and table_suffix(Path(self.source)) in (".csv", ".tsv"):
            unit, places = "lines", [line for line, _ in csv_rows(Path(self.source).expanduser())][1:]
        repeats = [(pair, before) for pair, before in enumerate(first.tolist()) if owners[pair] != owners[before]]
        images: list[Any] = owners
        picture = self.columns.picture
        if picture:
            images = pairs["file"].to_pylist()
            unnamed = [pair for repeat in repeats for pair in repeat if images[pair] is None]
            rows = sorted({owners[pair] for pair in unnamed})
            cells = dataset.select_columns(picture).select(rows)
            contents = {row: _content(cell[picture]) for row, cell in zip(rows, cells, strict=True)}
            for pair in unnamed:
                images[pair] = contents[owners[pair]]
        for pair, before in repeats:
            row, earlier = owners[pair], owners[before]
            if images[pair] == images[before]:
                copies.append(pair)
                continue
            remedy = "the first is kept" if self.skip else _UNIQUE
            where = f"{unit} {places[earlier]} and {places[row]}"
            problems[row] = ItemError(f"row {row}", f"the id {ids[pair]!r} occurs twice, in {where}; {remedy}")
            ids[pair] += f"#row {row}"
        pairs = pairs.set_column(pairs.column_names.index("id"), "id", pa.array(ids))
        pairs = pairs.set_column(pairs.column_names.index("key"), "key", pa.array(map(hash, ids), pa.int64()))
        return pairs if self.columns.text else pairs.take(np.delete(np.arange(len(pairs)), copies))

    def stream(self, dataset: datasets.IterableDataset) -> datasets.IterableDataset:
        """Read rows when they are used."""
        columns, known = self.columns, dataset.features
        has_captions = columns.text and (element_of(known[columns.text]) or known[columns.text] == datasets.Json())
        has_groups = columns.group or has_captions
        wanted = columns._asdict() | {"id": True, "group": has_groups, "problem": self.skip, "metadata": self.metadata}
        features = self._features([name for name in wanted if wanted[name]], known)
        types = known.arrow_schema

        def read(batch: Mapping[str, list[Any]], numbers: list[int]) -> dict[str, list[Any]]:
            cells = {name: _written(batch[name], known[name]) for name in batch}
            table = pa.Table.from_pydict(cells, types)
            pairs, problems = self.read(table, numbers)
            if problems and not self.skip:
                raise problems[min(problems)]
            if self.lost and "image" not in self.warned:
                self.warned.add("image")
                logger.warning("%s; it and others like it are read by their text", self.lost[min(self.lost)])
            self.lost.clear()
            if self.has_lists and features.get("image") == IMAGE:
                raise ValueError("a row has several images, but the first row has one")
            owners = pairs["row"].to_pylist()
            made = {"group": pairs["id"]} | {name: pairs[name] for name in pairs.column_names}
            made["id"] = pa.array(number_pairs(pairs["id"].to_pylist(), owners), pa.string())
            if columns.image and self.has_bytes:
                made["image"] = table[columns.image].take(pa.array(np.searchsorted(numbers, owners)))
            return self._result(made, problems, features).to_pydict()

        return dataset.map(
            read, with_indices=True, batched=True, batch_size=_STREAMED_AT_ONCE, remove_columns=self.names,
            features=features,
        )  # fmt: skip

    def _features(self, names: Iterable[str], known: Mapping[str, Any]) -> datasets.Features:
        """Return the columns of the result of the given names."""
        special: dict[str, Any] = {"image": datasets.List(IMAGE) if self.has_lists else IMAGE}
        special["metadata"] = {
            name: datasets.Value("float64") if is_number else known[name] for name, is_number in self.metadata.items()
        }
        wanted = set(names)
        return datasets.Features({name: special.get(name, _TEXT) for name in PAIR_COLUMNS if name in wanted})

    def _result(
        self, made: Mapping[str, Any], problems: Mapping[int, ItemError], features: datasets.Features
    ) -> pa.Table:
        """Return the columns of the result."""
        columns = dict(made)
        if "problem" in features:
            reasons = {row: str(problem) for row, problem in problems.items()}
            columns["problem"] = pa.array(map(reasons.get, made["row"].to_pylist()), pa.string())
        if features.get("image") == IMAGE and not self.has_bytes:
            columns["image"] = pc.list_element(made["image"], 0)
        return pa.table({name: columns[name] for name in features}).cast(features.arrow_schema)


def _content(picture: Any) -> int:
    """Return a hash of the images of a row: of their bytes, not of the names beside them."""
    images = picture if isinstance(picture, list) else [picture]
    return hash(tuple(image["bytes"] or image["path"] if isinstance(image, Mapping) else image for image in images))


def _refuse(problem: str | ItemError, name: str) -> None:
    raise ItemError(name, problem) if isinstance(problem, str) else problem


def _written(values: list[Any], feature: Any) -> list[Any]:
    """Return the values of a stream; those of mixed JSON as JSON."""
    if feature != datasets.Json():
        return values
    return [None if value is None else json.dumps(value) for value in values]


def _combined(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _first_places(keys: pa.ChunkedArray) -> np.ndarray:
    """Return for each key the place of the first that equals it."""
    ordered = np.sort(keys.fill_null(0).to_numpy())
    if (ordered[1:] != ordered[:-1]).all():
        return np.arange(len(keys))
    _, first, inverse = np.unique(keys.fill_null(0).to_numpy(), return_index=True, return_inverse=True)
    return first[inverse]


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
