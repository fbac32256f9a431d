"""Image-text pairs from any source, checked and with the fixed columns `id`, `image` and `text`."""

import difflib
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import datasets
import pyarrow.compute

from conjoin.data.emoji.sample import load_emoji
from conjoin.data.image_paths import check_image_path, image_folders
from conjoin.data.pair_sources import SAMPLE_SOURCE, AnyDataset, PairSource, open_source
from conjoin.processing.item_inputs import check_text

logger = logging.getLogger(__name__)

Source = TypeVar("Source", datasets.Dataset, datasets.IterableDataset)

PAIR_FEATURES = datasets.Features(
    {"id": datasets.Value("string"), "image": datasets.Image(decode=False), "text": datasets.Value("string")}
)

COMMON_COLUMNS = {
    "image": ("image", "img", "jpg", "jpeg", "png", "webp", "image_path", "img_path", "file_name", "filename",
              "file_path", "filepath", "path", "image_url", "img_url", "url"),
    "text": ("text", "caption", "captions", "title", "txt", "description", "alt_text", "sentence"),
    "id": ("id", "key", "__key__", "item_id", "uid"),
}  # fmt: skip
"""Default column names, in order of preference; case is ignored."""


class _Columns(NamedTuple):
    image: str | None
    text: str | None
    id: str | None

    @property
    def features(self) -> datasets.Features:
        chosen = self._asdict() | {"id": True}  # there are always ids
        return datasets.Features({name: feature for name, feature in PAIR_FEATURES.items() if chosen[name]})


def load_pairs(
    source: PairSource,
    *,
    image_column: str | None = None,
    text_column: str | None = None,
    id_column: str | None = None,
    split: str = "train",
    streaming: bool = False,
    only: Literal["image", "text"] | None = None,
) -> AnyDataset:
    """Load image-text pairs with the columns `id` (string), `image` (undecoded) and `text` (string).

    Without streaming, this function checks every id and text and the existence of every image file; images are read
    on access. With streaming, each row is checked when it is read, and duplicate ids are not detected. A row that
    cannot be used raises an error that names it; no row is skipped.

    Args:
        source: One of

            * a folder with `metadata.csv`, `.jsonl` or `.parquet` (columns `file_name` and `text`), or with a `.txt`
              caption next to each image;
            * a CSV, TSV, JSON-lines or Parquet file, image paths relative to its folder (or absolute, or embedded, or
              URLs, if they are allowed: see `conjoin.processing.allow_urls`);
            * webdataset tar shards: a path, a glob or a list;
            * `"emoji"`, the embedded sample;
            * a `datasets` dataset, already loaded, or the id of a dataset on the Hub.
        image_column: Column of the images. When None, the first match in `COMMON_COLUMNS`, as for the next two.
        text_column: Column of the captions.
        id_column: Column of unique row names; row numbers when there is no such column.
        split: The split, for sources with several.
        streaming: Return an `IterableDataset` that reads rows on access.
        only: Load this part only: the source may lack the other, and the result has no column for it.

    Raises:
        FileNotFoundError: The source or a listed image does not exist.
        ValueError: A column is missing, the source is empty, an id occurs twice, a text or image is missing, an image
            is a URL and URLs are not allowed, an image lies outside of a folder, archive or Hub dataset, or `only` is
            unknown.
    """
    if only not in (None, "image", "text"):
        raise ValueError(f"only={only!r}; expected None, 'image' or 'text'")
    dataset, folder = open_source(source, split, streaming, captions=only != "image")
    dataset = undecoded(dataset)
    folders = image_folders(source, folder)
    available = _column_names(dataset)
    columns = _choose_columns(available, {"image": image_column, "text": text_column, "id": id_column}, only)
    if isinstance(dataset, datasets.IterableDataset):
        return _stream_pairs(dataset, available, columns, folder, folders)
    pairs = _collect_pairs(dataset, columns, folder, folders)
    return pairs.to_iterable_dataset() if streaming else pairs


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


def check_ids(ids: Sequence[str]) -> None:
    """Reject duplicate ids.

    Raises:
        ValueError: An id occurs twice; the message gives the first few.
    """
    duplicates = [f"{name!r} ({count} times)" for name, count in Counter(ids).items() if count > 1]
    if duplicates:
        raise ValueError(f"{len(duplicates)} ids occur more than once: {', '.join(duplicates[:3])}")


def row_name(index: int, row_id: str) -> str:
    """Return the name of a row for error messages."""
    return f"row {index} (id {row_id!r})"


def resolve_image_path(
    path: str | None, folder: Path | None, name: str, folders: tuple[str, ...] | None = None
) -> str:
    """Resolve a path against `folder` and check that the file exists; URLs and data URIs are returned as is.

    Raises:
        FileNotFoundError: No such file.
        ValueError: The path is missing, or `check_image_path` refuses it.
    """
    if not path:
        raise ValueError(f"{name}: the image is missing")
    if "://" in path or path.startswith("data:"):
        check_image_path(path, folders, name)
        return path
    file = ((folder or Path()) / path).absolute()
    check_image_path(str(file), folders, name)
    if not file.is_file():
        raise FileNotFoundError(f"{name}, image {str(file)!r}: no such file")
    return str(file)


def unknown_column(column: str, available: Iterable[str]) -> ValueError:
    """Return the error for a missing column: it lists the columns and suggests the nearest name."""
    available = list(available)
    nearest = difflib.get_close_matches(column, available, n=1, cutoff=0.4)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
    return ValueError(f"no column {column!r}; the columns are {', '.join(map(repr, available))}{hint}")


def undecoded(dataset: Source) -> Source:
    """Return the dataset as plain rows, with images as bytes or paths."""
    dataset = dataset.with_format(None)
    for name, feature in (dataset.features or {}).items():
        if isinstance(feature, datasets.Image):
            dataset = dataset.cast_column(name, datasets.Image(decode=False))
    return dataset


def _column_names(dataset: AnyDataset) -> list[str]:
    first = next(iter(dataset), None)
    if first is None:
        raise ValueError("the dataset is empty: it has no rows")
    return list(first)


def _choose_columns(available: Sequence[str], given: Mapping[str, str | None], only: str | None) -> _Columns:
    chosen: dict[str, str | None] = {}
    by_lower_name = {name.lower(): name for name in reversed(available)}
    for role, column in given.items():
        if only is not None and role not in (only, "id"):
            chosen[role] = None
            continue
        if column is not None and column not in available:
            raise unknown_column(column, available)
        known = [by_lower_name[name] for name in COMMON_COLUMNS[role] if name in by_lower_name]
        chosen[role] = column if column is not None else next(iter(known), None)
        if column is None and len(known) > 1:
            others = ", ".join(map(repr, known[1:]))
            logger.warning("the column %r is read as %s, not %s; choose by %s_column", known[0], role, others, role)
        if chosen[role] is None and role != "id":
            raise ValueError(
                f"found no {role} column among {', '.join(map(repr, available))}; "
                f"pass {role}_column, or name it one of {', '.join(COMMON_COLUMNS[role])}"
            )
    return _Columns(**chosen)


def _collect_pairs(
    dataset: datasets.Dataset, columns: _Columns, folder: Path | None, folders: tuple[str, ...] | None
) -> datasets.Dataset:
    """Check ids and texts and join them with the image column, which stays unchanged on disk."""
    given_ids = dataset[columns.id][:] if columns.id else range(len(dataset))
    ids = [_check_id(index, value) for index, value in enumerate(given_ids)]
    check_ids(ids)
    names = [row_name(index, row_id) for index, row_id in enumerate(ids)]
    cheap = {"id": ids}
    if columns.text:
        cheap["text"] = _check_all(check_text, dataset[columns.text][:], names)
    parts = [datasets.Dataset.from_dict(cheap)]
    if columns.image:
        parts.append(_collect_images(dataset, columns.image, folder, folders, names))
    return datasets.concatenate_datasets(parts, axis=1).select_columns(list(columns.features))


def _collect_images(
    dataset: datasets.Dataset, column: str, folder: Path | None, folders: tuple[str, ...] | None, names: Sequence[str]
) -> datasets.Dataset:
    feature = dataset.features[column]
    if feature in (datasets.Value("string"), datasets.Value("large_string")):
        paths = _check_all(
            lambda path, name: resolve_image_path(path, folder, name, folders), dataset[column][:], names
        )
        return datasets.Dataset.from_dict({"image": paths}).cast_column("image", PAIR_FEATURES["image"])
    if isinstance(feature, datasets.Image | dict) or feature == datasets.Value("binary"):
        images = dataset.select_columns(column).rename_columns({column: "image"})
    else:
        raise ValueError(f"column {column!r} holds {feature}; expected images, image bytes, paths or URLs")
    images = images.cast_column("image", PAIR_FEATURES["image"])
    for index, path in _unread_images(images):
        if path is None:
            raise ValueError(f"{names[index]}: the image is missing")
        check_image_path(path, folders, names[index])
    return images


def _check_all(check: Callable[[Any, str], str], values: Sequence[Any], names: Sequence[str]) -> list[str]:
    """Check every row, then raise the first error with the number of wrong rows."""
    checked: list[str] = []
    wrong: list[ValueError | FileNotFoundError] = []
    for value, name in zip(values, names, strict=True):
        try:
            checked.append(check(value, name))
        except (ValueError, FileNotFoundError) as error:
            wrong.append(error)
    if len(wrong) > 1:
        raise type(wrong[0])(f"{wrong[0]} ({len(wrong)} of {len(names)} rows cannot be used)") from wrong[0]
    if wrong:
        raise wrong[0]
    return checked


def _unread_images(images: datasets.Dataset) -> Iterator[tuple[int, str | None]]:
    """Yield the rows whose image has no bytes, and its path or None, without reading the bytes of the others."""
    start = 0
    for batch in images.with_format("arrow").iter(batch_size=1000):
        data, path = (pyarrow.compute.struct_field(batch["image"], field) for field in ("bytes", "path"))
        unread = zip(data.is_null().to_pylist(), path.to_pylist(), strict=True)
        yield from ((start + offset, value) for offset, (is_unread, value) in enumerate(unread) if is_unread)
        start += len(batch)


def _stream_pairs(
    dataset: datasets.IterableDataset,
    available: list[str],
    columns: _Columns,
    folder: Path | None,
    folders: tuple[str, ...] | None,
) -> datasets.IterableDataset:
    def pair(row: Mapping[str, Any], index: int) -> dict[str, Any]:
        row_id = _check_id(index, row[columns.id] if columns.id else index)
        name = row_name(index, row_id)
        checked: dict[str, Any] = {"id": row_id}
        if columns.image:
            image = row[columns.image]
            if image is None or isinstance(image, str):
                image = resolve_image_path(image, folder, name, folders)
            elif isinstance(image, Mapping) and image.get("bytes") is None and image.get("path"):
                check_image_path(image["path"], folders, name)
            checked["image"] = PAIR_FEATURES["image"].encode_example(image)
        if columns.text:
            checked["text"] = check_text(row[columns.text], name)
        return checked

    return dataset.map(pair, with_indices=True, remove_columns=_column_names(dataset), features=columns.features)


def _check_id(index: int, value: Any) -> str:  # noqa: ANN401
    if value is None or value == "":
        raise ValueError(f"row {index}: the id is missing")
    return str(value)
