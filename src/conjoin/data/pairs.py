"""Image-text pairs from any source, checked and with the fixed columns `id`, `image` and `text`."""

from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import datasets

from conjoin.data.emoji.sample import load_emoji
from conjoin.data.image_columns import (
    IMAGE,
    element_of,
    image_column,
    image_files,
    is_text,
    list_lengths,
    strings,
    undecoded,
    unread_images,
    with_lists,
)
from conjoin.data.image_paths import check_image_path, image_folders
from conjoin.data.interleaved import PLACEHOLDER, check_placeholders, row_item
from conjoin.data.pair_columns import (
    COMMON_COLUMNS as COMMON_COLUMNS,
    PairColumns,
    choose_columns,
    choose_kept,
    kept_columns,
    read_number,
)
from conjoin.data.pair_groups import group_rows, join_pairs, number_pairs
from conjoin.data.pair_sources import SAMPLE_SOURCE, AnyDataset, PairSource, open_source
from conjoin.data.picture_files import is_readable, remedy
from conjoin.data.row_checks import RowChecks, check_ids, check_same_images, row_name
from conjoin.processing.item_inputs import check_text

PAIR_FEATURES = datasets.Features({"id": datasets.Value("string"), "image": IMAGE, "text": datasets.Value("string")})
PAIR_COLUMNS = (*PAIR_FEATURES, "group", "problem", "kept")


def load_pairs(
    source: PairSource,
    *,
    image_column: str | None = None,
    text_column: str | None = None,
    id_column: str | None = None,
    group_column: str | None = None,
    split: str = "train",
    streaming: bool = False,
    only: Literal["image", "text"] | None = None,
    on_error: Literal["raise", "keep"] = "raise",
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
    holds a list as JSON: `["a.png", "b.png"]`. If no column is a text, but one is a `datasets.ClassLabel`, its names
    are the texts and the groups.

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
        text_column: Column of the captions.
        id_column: Column of unique row names. When None, that of `SURE_IDS`, else the only other match, else row
            numbers; "" for row numbers.
        group_column: Column of what a row shows: rows of one group are not each other's negatives.
        split: The split, for sources with several.
        streaming: Return an `IterableDataset` that reads rows on access.
        only: Load this part only: the source may lack the other, and the result has no column for it.
        on_error: "keep" leaves a row whose image or text cannot be used in its place, with the reason in a further
            column `problem` (null for the others).
        keep: Further columns of the source; their values are in the column `kept`, under their own names. Those of a
            CSV file are texts; `"price:number"` reads the column `price` as numbers.

    Raises:
        FileNotFoundError: The source or a listed image does not exist.
        ValueError: A column is missing, the source is empty, an id occurs twice, a text or image is missing, an image
            is a URL and URLs are not allowed, an image lies outside of a folder, archive or Hub dataset, or `only` or
            `on_error` is unknown.
    """
    dataset, first, reader = open_pairs(
        source,
        image_column=image_column,
        text_column=text_column,
        id_column=id_column,
        group_column=group_column,
        split=split,
        streaming=streaming,
        only=only,
        on_error=on_error,
        keep=keep,
    )
    if isinstance(dataset, datasets.IterableDataset):
        return reader.stream(dataset, first)
    pairs = reader.collect(dataset)
    return pairs.to_iterable_dataset() if streaming else pairs


def open_pairs(
    source: PairSource,
    *,
    image_column: str | None = None,
    text_column: str | None = None,
    id_column: str | None = None,
    group_column: str | None = None,
    split: str = "train",
    streaming: bool = False,
    only: Literal["image", "text"] | None = None,
    on_error: Literal["raise", "keep"] = "raise",
    keep: Sequence[str] = (),
) -> "tuple[AnyDataset, dict[str, Any], PairReader]":
    """Open a source; returns its rows as they are, undecoded, the first of them, and what reads them as pairs.

    Arguments and errors are those of `load_pairs`.
    """
    if only not in (None, "image", "text"):
        raise ValueError(f"only={only!r}; expected None, 'image' or 'text'")
    if on_error not in ("raise", "keep"):
        raise ValueError(f"on_error={on_error!r}; expected 'raise' or 'keep'")
    dataset, folder = open_source(source, split, streaming, captions=only != "image")
    dataset = undecoded(dataset)
    first = _first_row(dataset)
    given = {"image": image_column, "text": text_column, "id": id_column, "group": group_column}
    columns = choose_columns(list(first), given, dataset.features or {}, only)
    dataset = with_lists(dataset, columns.picture, first)
    kept = choose_kept(keep, list(first), dataset.features or {})
    return dataset, first, PairReader(columns, folder, image_folders(source, folder), on_error == "keep", kept)


def load_training_pairs(source: PairSource, *, split: str = "train", **options: Any) -> AnyDataset:  # noqa: ANN401
    """Load pairs as `load_pairs` does; the embedded sample also has second names, and concepts as `group`.

    Args:
        source: As for `load_pairs`.
        split: As for `load_pairs`.
        options: Further arguments of `load_pairs`; the embedded sample has its own columns.
    """
    if source == SAMPLE_SOURCE:
        return load_emoji(split).rename_column("concept", "group")
    return load_pairs(source, split=split, **options)


def resolve_image_path(
    path: str | None, folder: Path | None, name: str, folders: tuple[str, ...] | None = None
) -> str:
    """Resolve a path against `folder` and check that the file exists; URLs and data URIs are returned as is.

    Raises:
        FileNotFoundError: No such file.
        ValueError: `check_image_path` refuses the path, or Pillow does not read files of this kind.
    """
    if not path or _is_uri(path):
        return check_image_path(path, folders, name)
    file = _absolute(path, folder)
    check_image_path(str(file), folders, name)
    if not file.is_file():
        raise FileNotFoundError(f"{name}, image {str(file)!r}: no such file")
    if not is_readable(file):
        raise ValueError(f"{name}, image {str(file)!r}: cannot be read; {remedy(file.suffix.lower())}")
    return str(file)


def _is_uri(path: str) -> bool:
    return "://" in path or path.startswith("data:")


def _absolute(path: str, folder: Path | None) -> Path:
    return ((folder or Path()) / path).absolute()


def _first_row(dataset: AnyDataset) -> dict[str, Any]:
    first = next(iter(dataset), None)
    if first is None:
        raise ValueError("the dataset is empty: it has no rows")
    return dict(first)


class PairReader:
    """Reads rows as pairs.

    Args:
        columns: What to read.
        folder: Of relative paths.
        folders: Of all images, as `image_folders` gives them.
        keep: Whether rows that cannot be used stay, with the reason.
        kept: Further columns, and whether their values are read as numbers.
    """

    def __init__(
        self,
        columns: PairColumns,
        folder: Path | None,
        folders: tuple[str, ...] | None,
        keep: bool,
        kept: Mapping[str, bool],
    ) -> None:
        self.columns, self.folder, self.folders, self.keep, self.kept = columns, folder, folders, keep, kept

    @property
    def names(self) -> list[str]:
        """The columns that `pairs` reads."""
        columns = self.columns
        read = (columns.image, columns.text, columns.id, columns.group, *self.kept)
        return list(dict.fromkeys(name for name in read if name is not None))

    def collect(self, dataset: datasets.Dataset) -> datasets.Dataset:
        """Check ids and texts and join them with the image column, which stays unchanged on disk."""
        columns = self.columns
        given_ids = dataset[columns.id][:] if columns.id else range(len(dataset))
        ids = [_check_id(index, value) for index, value in enumerate(given_ids)]
        checks = RowChecks([row_name(index, row_id) for index, row_id in enumerate(ids)], self.keep)
        owners: Sequence[int] = range(len(dataset))
        pairs: dict[str, list[Any]] = {}
        if columns.text and element_of(dataset.features[columns.text]) is None:
            pairs["text"] = checks.run(self._text, dataset[columns.text][:])
        elif columns.text:
            found: list[list[Any]] = [texts or [None] for texts in checks.run(self._texts, dataset[columns.text][:])]
            pairs["text"] = [text for texts in found for text in texts]
            owners = [row for row, texts in enumerate(found) for _ in texts]
        images = self._collect_images(dataset, checks) if columns.image else None
        if columns.text and images is not None:
            self._check_places(dataset, checks, pairs["text"], owners)
        if len(set(ids)) < len(ids):
            check_same_images(dataset, columns.picture, ids)
            if columns.text is None:
                first: dict[str, int] = {}
                owners = [row for row, row_id in enumerate(ids) if first.setdefault(row_id, row) == row]
        pairs["id"] = number_pairs([ids[row] for row in owners])
        check_ids(pairs["id"])
        groups = self._groups(dataset, images, ids, owners)
        if groups is not None:
            pairs["group"] = [groups[row] for row in owners]
        numbers = self._numbers(dataset, checks)
        if self.keep:
            pairs["problem"] = [checks.problems.get(row) for row in owners]
        joined = strings(pairs) if images is None else join_pairs(images, owners, pairs)
        if self.kept:
            joined = datasets.concatenate_datasets([joined, kept_columns(dataset, self.kept, numbers, owners)], axis=1)
        return joined.select_columns([name for name in PAIR_COLUMNS if name in joined.column_names])

    def _numbers(self, dataset: datasets.Dataset, checks: RowChecks) -> dict[str, list[float | None]]:
        """The values of the kept columns that are read as numbers."""
        found = {}
        for column, is_number in self.kept.items():
            if is_number:
                values = checks.run(partial(read_number, column=column), dataset[column][:])
                found[column] = values
        return found

    def _check_places(
        self, dataset: datasets.Dataset, checks: RowChecks, texts: Sequence[Any], owners: Sequence[int]
    ) -> None:
        """Compare the placeholders in texts with the number of images, in rows with a list of images."""
        column = self.columns.image or ""
        if element_of(dataset.features[column]) is None:
            return
        counts = list_lengths(dataset, column)
        for text, row in zip(texts, owners, strict=True):
            try:
                if text is not None and PLACEHOLDER in text:
                    check_placeholders(text, counts[row], checks.names[row])
            except ValueError as error:
                checks.fail(row, error)

    def stream(self, dataset: datasets.IterableDataset, first: Mapping[str, Any]) -> datasets.IterableDataset:
        """Read each row when it is used.

        Args:
            dataset: The rows.
            first: The first of them.
        """
        columns, known = self.columns, dataset.features or {}
        several = {
            part: isinstance(first.get(name or ""), list) or element_of(known.get(name or "")) is not None
            for part, name in (("image", columns.image), ("text", columns.text))
        }
        features = PAIR_FEATURES | ({"image": datasets.List(IMAGE)} if several["image"] else {})
        number = datasets.Value("float64")
        features["kept"] = {name: number if is_number else known.get(name) for name, is_number in self.kept.items()}
        chosen = columns._asdict() | {"id": True, "group": columns.group or several["text"], "problem": self.keep}
        chosen["kept"] = bool(self.kept)
        features = datasets.Features(
            {name: features.get(name, datasets.Value("string")) for name in PAIR_COLUMNS if chosen[name]}
        )

        def one(row: Mapping[str, Any], index: int) -> dict[str, Any]:
            pairs = self.pairs(row, index)
            if len(pairs) > 1:
                raise ValueError(f"row {index}: {len(pairs)} texts, but the rows before have one each")
            return {name: pairs[0].get(name) for name in features}

        def all_of_one(batch: Mapping[str, list[Any]], indices: list[int]) -> dict[str, list[Any]]:
            pairs = self.pairs({name: values[0] for name, values in batch.items()}, indices[0])
            return {name: [pair.get(name) for pair in pairs] for name in features}

        options: dict[str, Any] = {"with_indices": True, "remove_columns": list(first), "features": features}
        if not known.keys() >= set(self.kept):  # a stream of JSON lines does not know its types
            options["features"] = None
        if several["text"]:
            return dataset.map(all_of_one, batched=True, batch_size=1, **options)
        return dataset.map(one, **options)

    def pairs(self, row: Mapping[str, Any], index: int | str) -> list[dict[str, Any]]:
        """Return the pairs of a row of a stream.

        Args:
            row: As `open_pairs` gives it.
            index: Its place; its id, if it has none of its own.

        Raises:
            ValueError: It cannot be used, and such rows are not kept.
            FileNotFoundError: Its image does not exist, likewise.
        """
        columns = self.columns
        row_id = _check_id(index, row[columns.id] if columns.id else index)
        name = row_name(index, row_id)
        common: dict[str, Any] = {"id": row_id, "kept": dict.fromkeys(self.kept)}
        texts: list[str | None] = [None]
        try:
            for column, is_number in self.kept.items():
                value = row.get(column)
                common["kept"][column] = read_number(value, name, column) if is_number else value
            if columns.image:
                image = self._image(row[columns.image], name)
                encode = IMAGE.encode_example
                common["image"] = list(map(encode, image)) if isinstance(image, list) else encode(image)
            if columns.text:
                texts = [*self._texts(row[columns.text], name)]
            for text in texts:
                row_item({"image": common.get("image"), "text": text}, name)
        except (ValueError, FileNotFoundError) as error:
            if not self.keep:
                raise
            common["problem"] = str(error)
        if columns.group:
            common["group"] = self._group(row[columns.group])
        elif columns.text and isinstance(row[columns.text], list):
            common["group"] = row_id
        ids = number_pairs([row_id] * len(texts))
        return [common | {"id": pair_id, "text": text} for pair_id, text in zip(ids, texts, strict=True)]

    def _text(self, value: Any, name: str) -> str:  # noqa: ANN401
        return check_text(self._class_name(value), name)

    def _texts(self, value: Any, name: str) -> list[str]:  # noqa: ANN401
        """Check a text or a list of texts."""
        values = value if isinstance(value, list) else [value]
        if not values:
            raise ValueError(f"{name}: the list of texts is empty")
        return [self._text(text, name) for text in values]

    def _class_name(self, value: Any) -> Any:  # noqa: ANN401
        """Return the name of a class in place of its number."""
        if self.columns.label is None or not isinstance(value, int):
            return value
        return self.columns.label.int2str(value) if value >= 0 else None  # -1: it has none

    def _image(self, value: Any, name: str) -> Any:  # noqa: ANN401
        """Check the image of a row, or its list of images, as far as possible without reading it."""
        if isinstance(value, list) and value:
            if any(isinstance(one, list) for one in value):
                raise ValueError(
                    f"{name}: a list within the list of images; expected images, image bytes, paths or URLs"
                )
            return [self._image(one, name) for one in value]
        if isinstance(value, str) or not value:
            return resolve_image_path(value or None, self.folder, name, self.folders)
        if isinstance(value, Mapping) and value.get("bytes") is None:
            check_image_path(value.get("path"), self.folders, name)
        elif isinstance(value, Mapping):
            return {"bytes": value["bytes"], "path": None}  # `datasets` reads the path, if such a file exists
        return value

    def _group(self, value: Any) -> str | None:  # noqa: ANN401
        value = self._class_name(value) if self.columns.group == self.columns.text else value
        return None if value is None or value == "" else str(value)

    def _groups(
        self, dataset: datasets.Dataset, images: datasets.Dataset | None, ids: list[str], owners: Sequence[int]
    ) -> Sequence[str | None] | None:
        """Return the group of each row: that of the column, else rows of one image file."""
        if self.columns.group is not None:
            return [self._group(value) for value in dataset[self.columns.group][:]]
        if images is None and self.columns.picture is not None:
            images = image_column(dataset, self.columns.picture)
        pictures: list[Hashable] = list(ids)
        for row, paths in image_files(images).items() if images is not None else ():
            pictures[row] = tuple(path if _is_uri(path) else _absolute(path, self.folder) for path in paths)
        return group_rows(ids, pictures, owners)

    def _collect_images(self, dataset: datasets.Dataset, checks: RowChecks) -> datasets.Dataset:
        """Return the column `image` of the rows."""
        column = self.columns.image or ""
        element = element_of(dataset.features[column])
        if is_text(dataset.features[column] if element is None else element):
            found = {"image": checks.run(self._image, dataset[column][:])}
            target = IMAGE if element is None else datasets.List(IMAGE)
            return strings(found, several=element is not None).cast_column("image", target)
        images = image_column(dataset, column)
        if images is None:
            raise ValueError(
                f"column {column!r} holds {dataset.features[column]}; expected images, image bytes, paths or URLs"
            )
        for row, paths in unread_images(images):
            try:
                for path in paths:
                    check_image_path(path, self.folders, checks.names[row])
            except ValueError as error:
                checks.fail(row, error)
        return images


def _check_id(index: int | str, value: Any) -> str:  # noqa: ANN401
    if value is None or value == "":
        raise ValueError(f"row {index}: the id is missing")
    return str(value)
