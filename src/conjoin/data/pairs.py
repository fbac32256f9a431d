"""Image-text pairs from any source, checked and with the fixed columns `id`, `image` and `text`."""

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import datasets

from conjoin.data.columns import (
    COMMON_COLUMNS as COMMON_COLUMNS,
    IMAGE,
    PairColumns,
    choose_columns,
    choose_metadata,
    element_of,
    image_column,
    is_text,
    metadata_column,
    read_number,
    strings,
    undecoded,
    with_lists,
    without_bytes,
)
from conjoin.data.emoji.sample import load_emoji
from conjoin.data.pair_sources import SAMPLE_SOURCE, AnyDataset, PairSource, open_source
from conjoin.data.row_checks import check_ids, check_on_error, read_id, read_rows, row_name
from conjoin.data.row_images import RowImages, check_placeholders, image_folders, is_interleaved
from conjoin.processing.item_error import ItemError
from conjoin.processing.item_inputs import check_text
from conjoin.storage import row_digest

PAIR_FEATURES = datasets.Features({"id": datasets.Value("string"), "image": IMAGE, "text": datasets.Value("string")})
PAIR_COLUMNS = (*PAIR_FEATURES, "group", "problem", "metadata")


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
        on_error: "skip" marks a row whose image or text cannot be used, by the reason in a further column `problem`
            (null for the others): encoding and training skip it, and list it.
        keep: Further columns of the source; their values are in the column `metadata`, under their own names. Those of
            a CSV file are texts; `"price:number"` reads the column `price` as numbers such as `1,299.00 USD`,
            `"price:decimal-comma"` as such as `1.299,00 €`.

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
    on_error: Literal["raise", "skip"] = "raise",
    keep: Sequence[str] = (),
) -> "tuple[AnyDataset, dict[str, Any], PairReader]":
    """Open a source; returns its rows as they are, undecoded, the first of them, and what reads them as pairs.

    Arguments and errors are those of `load_pairs`.
    """
    if only not in (None, "image", "text"):
        raise ValueError(f"only={only!r}; expected None, 'image' or 'text'")
    skip = check_on_error(on_error)
    dataset, folder = open_source(source, split, streaming, captions=only != "image")
    dataset = undecoded(dataset)
    first = next(iter(dataset), None)
    if first is None:
        raise ValueError("the dataset is empty: it has no rows")
    given = {"image": image_column, "text": text_column, "id": id_column, "group": group_column}
    columns = choose_columns(list(first), given, dataset.features or {}, only)
    dataset = with_lists(dataset, columns.picture, first)
    metadata = choose_metadata(keep, list(first), dataset.features or {})
    images = RowImages(folder, image_folders(source, folder))
    return dataset, first, PairReader(columns, images, skip, metadata)


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


class PairReader:
    """Reads rows as pairs.

    Args:
        columns: What to read.
        images: Checks the images.
        skip: Whether a row that cannot be used is marked by its `problem`, instead of raising.
        metadata: Further columns, as `choose_metadata` gives them.
    """

    def __init__(self, columns: PairColumns, images: RowImages, skip: bool, metadata: Mapping[str, str]) -> None:
        self.columns, self.images, self.skip, self.metadata = columns, images, skip, metadata

    @property
    def names(self) -> list[str]:
        """The columns that `pairs` reads."""
        columns = self.columns
        read = (columns.image, columns.text, columns.id, columns.group, *self.metadata)
        return list(dict.fromkeys(name for name in read if name is not None))

    def collect(self, dataset: datasets.Dataset) -> datasets.Dataset:
        """Read all rows, and join what was read with the image column, which stays unchanged on disk."""
        columns = self.columns
        images, cells = self._images(dataset)
        read = read_rows(self._rows(dataset, cells), self._read)
        ids = [pairs[0]["id"] for pairs in read]
        owners: Sequence[int] = range(len(read))
        if any(len(pairs) > 1 for pairs in read):
            owners = [row for row, pairs in enumerate(read) for _ in pairs]
        if len(set(ids)) < len(ids):
            _check_same_images(dataset, columns.picture, ids)
            if columns.text is None:
                first: dict[str, int] = {}
                owners = [row for row, row_id in enumerate(ids) if first.setdefault(row_id, row) == row]
        joined: dict[str, list[Any]] = {"id": number_pairs([ids[row] for row in owners])}
        check_ids(joined["id"])
        if columns.text:
            joined["text"] = [pair["text"] for pairs in read for pair in pairs]
        groups = self._groups(read, cells, owners)
        if groups is not None:
            joined["group"] = [groups[row] for row in owners]
        if self.skip:
            joined["problem"] = [read[row][0].get("problem") for row in owners]
        if columns.image and images is None:  # paths
            several = element_of(dataset.features[columns.image]) is not None
            paths = strings({"image": [pairs[0].get("image") for pairs in read]}, several)
            images = paths.cast_column("image", datasets.List(IMAGE) if several else IMAGE)
        table = join_pairs(images, owners, joined) if columns.image and images is not None else strings(joined)
        if self.metadata:
            values = [read[row][0]["metadata"] for row in owners]
            table = datasets.concatenate_datasets(
                [table, metadata_column(dataset, self.metadata, values, owners)], axis=1
            )
        return table.select_columns([name for name in PAIR_COLUMNS if name in table.column_names])

    def _images(self, dataset: datasets.Dataset) -> tuple[datasets.Dataset | None, list[Any]]:
        """Return the column `image`, None for one of paths, and its cells without the bytes of images."""
        column = self.columns.picture
        if column is None:
            return None, [None] * len(dataset)
        feature = dataset.features[column]
        if is_text(element_of(feature) or feature):
            return None, dataset[column][:]
        images = image_column(dataset, column)
        if images is not None:
            return images, list(without_bytes(images))
        if self.columns.image is not None:
            raise ValueError(f"column {column!r} holds {feature}; expected images, image bytes, paths or URLs")
        return None, [None] * len(dataset)

    def _rows(self, dataset: datasets.Dataset, cells: Sequence[Any]) -> Iterator[dict[str, Any]]:
        """Yield the cells of each row that are read, images without their bytes."""
        numbers = [name for name, mark in self.metadata.items() if mark]
        names = (self.columns.id, self.columns.text, self.columns.group, *numbers)
        columns = {name: dataset[name][:] for name in names if name is not None}
        if self.columns.image:
            columns[self.columns.image] = cells
        for index in range(len(dataset)):
            yield {name: values[index] for name, values in columns.items()}

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
        features["metadata"] = {name: number if mark else known.get(name) for name, mark in self.metadata.items()}
        chosen = columns._asdict() | {"id": True, "group": columns.group or several["text"], "problem": self.skip}
        chosen["metadata"] = bool(self.metadata)
        features = datasets.Features(
            {name: features.get(name, datasets.Value("string")) for name in PAIR_COLUMNS if chosen[name]}
        )

        def read(batch: Mapping[str, list[Any]], indices: list[int]) -> dict[str, list[Any]]:
            pairs = self.pairs({name: values[0] for name, values in batch.items()}, indices[0])
            if len(pairs) > 1 and not several["text"]:
                raise ValueError(f"row {indices[0]}: {len(pairs)} texts, but the rows before have one each")
            return {name: [pair.get(name) for pair in pairs] for name in features}

        known_features = features if known.keys() >= set(self.metadata) else None  # JSON lines do not know their types
        return dataset.map(
            read, with_indices=True, batched=True, batch_size=1, remove_columns=list(first), features=known_features
        )

    def pairs(self, row: Mapping[str, Any], index: int | str) -> list[dict[str, Any]]:
        """Return the pairs of a row of a stream.

        Args:
            row: As `open_pairs` gives it.
            index: Its number; its id, if it has none of its own.

        Raises:
            ItemError: It cannot be used, and such rows are not skipped.
        """
        pairs = self._read(row, index)
        for pair, pair_id in zip(pairs, number_pairs([pair["id"] for pair in pairs]), strict=True):
            pair["id"] = pair_id
            image = pair.get("image")
            if image is not None:
                pair["image"] = [_encode(each) for each in image] if isinstance(image, list) else _encode(image)
        return pairs

    def _read(self, row: Mapping[str, Any], index: int | str) -> list[dict[str, Any]]:
        """Return the pairs of a row, all under its id, with the image as `RowImages.check` returns it."""
        columns = self.columns
        row_id = read_id(row[columns.id] if columns.id else index, index)
        name = row_name(index, row_id)
        pair: dict[str, Any] = {"id": row_id, "metadata": dict.fromkeys(self.metadata)}
        texts: list[str | None] = [None]
        try:
            for column, mark in self.metadata.items():
                value = row.get(column)
                pair["metadata"][column] = read_number(value, name, column, mark) if mark else value
            if columns.text:
                texts = [*self._texts(row[columns.text], name)]
            if columns.image:
                pair["image"] = self.images.check(row[columns.image], name)
            for text in texts:
                if is_interleaved(pair.get("image"), text):
                    check_placeholders(str(text), len(pair["image"]), name)
        except ItemError as error:
            if not self.skip:
                raise
            pair["problem"] = str(error)
        if columns.group:
            pair["group"] = self._group(row[columns.group])
        elif columns.text and isinstance(row[columns.text], list):
            pair["group"] = row_id
        return [pair | {"text": text} for text in texts]

    def _texts(self, value: Any, name: str) -> list[str]:  # noqa: ANN401
        """Check a text or a list of texts."""
        values = value if isinstance(value, list) else [value]
        if not values:
            raise ItemError(name, "the list of texts is empty")
        return [check_text(self._class_name(text), name) for text in values]

    def _class_name(self, value: Any) -> Any:  # noqa: ANN401
        """Return the name of a class in place of its number."""
        if self.columns.label is None or not isinstance(value, int):
            return value
        return self.columns.label.int2str(value) if value >= 0 else None  # -1: it has none

    def _group(self, value: Any) -> str | None:  # noqa: ANN401
        value = self._class_name(value) if self.columns.group == self.columns.text else value
        return None if value is None or value == "" else str(value)

    def _groups(
        self, read: Sequence[list[dict[str, Any]]], cells: Sequence[Any], owners: Sequence[int]
    ) -> Sequence[str | None] | None:
        """Return the group of each row: that of the column, else the id of the first row with the same image files."""
        if self.columns.group is not None:
            return [pairs[0]["group"] for pairs in read]
        first: dict[Hashable, str] = {}
        ids = [pairs[0]["id"] for pairs in read]
        groups = [
            first.setdefault(self._files(cell) or row_id, row_id) for row_id, cell in zip(ids, cells, strict=True)
        ]
        return groups if len({groups[row] for row in owners}) < len(owners) else None

    def _files(self, cell: Any) -> tuple[str, ...]:  # noqa: ANN401 - an image or several
        """Return the paths or URLs of images; none if one of them has bytes or no path."""
        images = cell if isinstance(cell, list) else [cell]
        paths = [
            (image["path"] if image["bytes"] is None else None) if isinstance(image, Mapping) else image
            for image in images
        ]
        return tuple(self.images.absolute(path) for path in paths if path) if all(paths) else ()


def _encode(image: Any) -> dict[str, Any]:  # noqa: ANN401 - of one row
    """Encode an image for `datasets`, which would prefer a file of the path to the bytes, if there is one."""
    if isinstance(image, Mapping) and image.get("bytes") is not None:
        return {"bytes": image["bytes"], "path": None}
    return IMAGE.encode_example(image)


def _check_same_images(dataset: datasets.Dataset, picture: str | None, ids: Sequence[str]) -> None:
    """Refuse rows of one id whose images differ."""
    counts = Counter(ids)
    rows = [row for row, row_id in enumerate(ids) if counts[row_id] > 1]
    if picture is not None:
        digests: dict[str, int] = {}
        repeated = dataset.select_columns(picture).select(rows)
        row_digests = (row_digest({"image": row[picture]}) for row in repeated)
        if all(digests.setdefault(ids[row], digest) == digest for row, digest in zip(rows, row_digests, strict=True)):
            return
    try:
        check_ids(ids)
    except ItemError as error:
        hint = 'choose a column of unique ids by --id-column (id_column), or row numbers by ""'
        several = "only several captions of one image may share an id"
        raise ItemError(error.item, f"{error.message}; {hint} ({several})") from error


def number_pairs(ids: Iterable[str]) -> list[str]:
    """Number the pairs that share an id, from 0: `a`, `b#0`, `b#1`."""
    ids = list(ids)
    if len(set(ids)) == len(ids):
        return ids
    counts, seen = Counter(ids), Counter[str]()
    numbered = []
    for name in ids:
        numbered.append(name if counts[name] == 1 else f"{name}#{seen[name]}")
        seen[name] += 1
    return numbered


def join_pairs(
    images: datasets.Dataset, owners: Sequence[int], columns: Mapping[str, Sequence[str | None]]
) -> datasets.Dataset:
    """Join the columns of pairs with the images of their rows, which are read from where they lie, never repeated.

    Args:
        images: The column `image` of N rows.
        owners: The row of each of M pairs.
        columns: Of the pairs, M values each.
    """
    if isinstance(owners, range):  # a pair for each row
        return _beside(strings(columns), images)
    seen = Counter[int]()
    layers: list[datasets.Dataset] = []
    indices = [0] * len(owners)
    start = 0
    rounds: list[list[int]] = []
    for pair, row in enumerate(owners):
        if seen[row] == len(rounds):
            rounds.append([])
        rounds[seen[row]].append(pair)
        seen[row] += 1
    for pairs in rounds:  # the first pairs of all rows, the second pairs ...
        rows: Sequence[int] = [owners[pair] for pair in pairs]
        chosen = images
        if 2 * len(rows) < len(images):
            chosen, rows = images.select(rows), range(len(rows))
        cells: dict[str, list[str | None]] = {name: [None] * len(chosen) for name in columns}
        for pair, row in zip(pairs, rows, strict=True):
            indices[pair] = start + row
            for name, values in columns.items():
                cells[name][row] = values[pair]
        layers.append(_beside(strings(cells), chosen))
        start += len(chosen)
    return datasets.concatenate_datasets(layers).select(indices)


def _beside(left: datasets.Dataset, right: datasets.Dataset) -> datasets.Dataset:
    return datasets.concatenate_datasets([left, right], axis=1)
