"""Open any source of image-text pairs as a `datasets` dataset with its own columns; `pairs` unifies them."""

import csv
import glob
import gzip
import io
import logging
import tarfile
import zlib
from collections.abc import Iterable, Sequence
from itertools import chain
from os import PathLike
from pathlib import Path
from typing import Any, TypeAlias

import datasets
import pyarrow

from conjoin.data.emoji.sample import load_emoji
from conjoin.data.json_files import check_unpacked, check_utf8, open_bytes, open_json
from conjoin.data.row_images import describe_unreadable, is_picture, is_readable
from conjoin.processing.item_inputs import IMAGE_SUFFIXES

logger = logging.getLogger(__name__)

AnyDataset: TypeAlias = datasets.Dataset | datasets.IterableDataset
PairSource: TypeAlias = str | PathLike[str] | Sequence[str] | AnyDataset

SAMPLE_SOURCE = "emoji"
"""The name of the embedded sample as a source."""

METADATA_FILES = ("metadata.csv", "metadata.jsonl", "metadata.parquet")
_TABLE_LOADERS = {
    ".csv": "csv",
    ".tsv": "csv",
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
    ".parquet": "parquet",
}
_SHARD_SUFFIXES = (".tar", ".tar.gz", ".tgz")
_SAVED_FILES = ("state.json", "dataset_dict.json")
_SPLITS = {word: str(split) for split, words in datasets.data_files.SPLIT_KEYWORDS.items() for word in words}
"""From the names of folders, such as `valid`, to the splits that they hold."""


class SplitError(ValueError):
    """A source has no such split."""

    def __init__(self, split: str, source: str, splits: Iterable[str] = ("train",)) -> None:
        names = [repr(name) for name in splits]
        has = f"has only the split {names[0]}" if len(names) == 1 else f"has the splits {', '.join(names)}"
        super().__init__(f"split is {split!r}; {source} {has}")


def open_source(
    source: PairSource, split: str, streaming: bool, captions: bool = True
) -> tuple[AnyDataset, Path | None]:
    """Open `source` and return it with the folder of its relative image paths, or None.

    Without `captions`, a folder without metadata gives its images alone.

    Raises:
        FileNotFoundError: The path, a shard or the Hub dataset does not exist.
        TypeError: `source` is of an unknown kind.
        ValueError: Unknown split, or the folder or file has no pairs.
    """
    if isinstance(source, datasets.DatasetDict | datasets.IterableDatasetDict):
        raise TypeError(f"source has several splits ({', '.join(map(str, source))}); pass one of them")
    if isinstance(source, datasets.Dataset | datasets.IterableDataset):
        return source, None
    if source == SAMPLE_SOURCE:
        sample = load_emoji(split)
        return (sample.to_iterable_dataset() if streaming else sample), None
    if isinstance(source, list | tuple):
        return _open_files([str(file) for file in source], split, streaming), None
    if not isinstance(source, str | PathLike):
        raise TypeError(
            f"source is a {type(source).__name__}; expected a path, a list of tar or Parquet files, or a dataset"
        )
    if str(source).endswith(_SHARD_SUFFIXES) or "://" in str(source):
        return _open_files([str(source)], split, streaming), None
    path = Path(source).expanduser()
    if path.is_dir():
        return _open_folder(path, split, streaming, captions)
    if _table_suffix(path) in _TABLE_LOADERS:
        return open_table(path, split, streaming), path.parent
    if isinstance(source, PathLike) or path.exists() or source.startswith((".", "/", "~")):
        kinds = ", ".join([*_TABLE_LOADERS, *_SHARD_SUFFIXES]) + " (tables also compressed, as .csv.gz)"
        problem = ValueError if path.exists() else FileNotFoundError
        raise problem(f"source {str(source)!r} is neither a folder nor one of the file kinds {kinds}")
    return _open_hub(source, split, streaming), None


def open_table(path: Path, split: str = "train", streaming: bool = False) -> AnyDataset:
    """Open a CSV, TSV, JSON, JSON-lines or Parquet file, also compressed (`.csv.gz`).

    Every column of a CSV is text: the id `007` stays `007`.

    Raises:
        FileNotFoundError: No such file.
        ValueError: The file has no rows, cannot be read, or `split` is not `train`.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no such file: {str(path)!r}")
    if path.stat().st_size == 0:
        raise ValueError(f"{str(path)!r} has zero bytes")
    if split != "train":
        raise SplitError(split, f"the table {str(path)!r}")
    kind = _TABLE_LOADERS[_table_suffix(path)]
    try:
        check_unpacked(path)
        if kind == "csv":
            check_utf8(path)
        table = open_json(path) if kind == "json" else _read_table(path, split, streaming)
    except datasets.exceptions.DatasetGenerationError as error:
        raise ValueError(f"{str(path)!r} cannot be read: {error.__cause__ or error}") from error
    except (ValueError, EOFError, csv.Error, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{str(path)!r} cannot be read: {error}") from error
    if table is None:
        raise ValueError(f"{str(path)!r} is empty: it has no rows")
    return table.to_iterable_dataset() if streaming and isinstance(table, datasets.Dataset) else table


def _table_suffix(path: Path) -> str:
    """Return the suffix of a file, without that of its compression: `.csv` of `a.csv.gz`."""
    return Path(path.name.lower().removesuffix(".gz")).suffix


def _read_table(path: Path, split: str, streaming: bool) -> AnyDataset | None:
    loader = _TABLE_LOADERS[_table_suffix(path)]
    options: dict[str, Any] = {}
    if loader == "csv":
        separator = "\t" if _table_suffix(path) == ".tsv" else _separator(path)
        names = _read_header(path, separator)
        strings = datasets.Features({name: datasets.Value("string") for name in names})
        options = {"features": strings, "sep": separator, "na_filter": False}  # the caption "null" is a caption
    options |= {"data_files": glob.escape(str(path)), "split": split}
    stream = datasets.load_dataset(loader, streaming=True, **options)
    if next(iter(stream), None) is None:
        return None
    return stream if streaming else datasets.load_dataset(loader, **options)


def _separator(path: Path) -> str:
    """Return what separates the columns of a CSV file: a comma, or a semicolon where the header has no comma."""
    with open_bytes(path) as file:
        header = file.readline()
    return ";" if b";" in header and b"," not in header else ","


def _read_header(path: Path, separator: str) -> list[str]:
    """Return the names of a table's columns, after a look at what `datasets` would read otherwise without a word."""
    with io.TextIOWrapper(open_bytes(path), encoding="utf-8-sig", newline="") as file:
        rows = csv.reader(file, delimiter=separator)
        header = next(rows)
        if len(header) == 1 and any(other in header[0] for other in ",;\t|"):
            raise ValueError(f"its one column is {header[0]!r}; expected columns separated by {separator!r}")
        first = next(filter(None, rows), [])
        if len(first) > len(header):  # pandas would take the first of them as its index, and shift the others
            raise ValueError(
                f"line {rows.line_num} has {len(first)} fields, the header {len(header)}; put a text that holds "
                f"{separator!r} in double quotes"
            )
        for row in chain([first], rows) if separator == "\t" else ():
            if any("\t" in cell and "\n" in cell for cell in row):
                raise ValueError(
                    f"the lines up to {rows.line_num} are one cell, because it begins with a double quote; write it "
                    'as """ and end the cell with "'
                )
    names = [name or f"Unnamed: {index}" for index, name in enumerate(header)]  # as pandas names its own index
    repeated = [name for name in names if names.count(name) > 1]
    if repeated:
        raise ValueError(f"two of its columns are named {repeated[0]!r}; expected a name for each")
    return names


def _open_hub(name: str, split: str, streaming: bool) -> AnyDataset:
    try:
        return datasets.load_dataset(name, split=split, streaming=streaming)
    except (FileNotFoundError, ConnectionError) as error:
        raise FileNotFoundError(f"there is no file or folder {name!r}, and no such dataset: {error}") from error


def _open_files(files: list[str], split: str, streaming: bool) -> AnyDataset:
    """Open tar shards or Parquet files, on the disk or by URLs."""
    remote = [file for file in files if "://" in file and not file.endswith(_SHARD_SUFFIXES)]
    is_parquet = remote or (files and all(file.endswith(".parquet") for file in files))
    return (_open_parquet if is_parquet else _open_shards)(files, split, streaming)


def _open_parquet(files: list[str], split: str, streaming: bool) -> AnyDataset:
    """Open Parquet files by path or by a URL that fsspec knows, such as `s3://bucket/shards/*.parquet`."""
    wrong = [file for file in files if not file.endswith(".parquet")]
    if wrong or not files:
        raise ValueError(
            f"expected files ending in .parquet or {', '.join(_SHARD_SUFFIXES)} on object storage, got {wrong[:3]}"
        )
    if split != "train":
        raise SplitError(split, "a list of Parquet files")
    try:
        return datasets.load_dataset("parquet", data_files=files, split=split, streaming=streaming)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"no such file: {files[:3]}: {error}") from error
    except ImportError as error:
        raise ImportError(f"{files[0]!r} needs another package: {error}") from error
    except (ValueError, pyarrow.ArrowException, datasets.exceptions.DatasetGenerationError) as error:
        raise ValueError(f"{files[:3]} cannot be read as Parquet: {error.__cause__ or error}") from error


def _open_shards(shards: list[str], split: str, streaming: bool) -> AnyDataset:
    wrong = [shard for shard in shards if not shard.endswith(_SHARD_SUFFIXES)]
    if wrong or not shards:
        raise ValueError(f"expected webdataset shards ending in {', '.join(_SHARD_SUFFIXES)}, got {wrong[:3]}")
    for shard in shards:
        if "://" not in shard and not glob.glob(shard, recursive=True):
            raise FileNotFoundError(f"no such file: {shard!r}")
    try:
        return datasets.load_dataset("webdataset", data_files=shards, split=split, streaming=streaming)
    except (ValueError, IndexError, tarfile.TarError, datasets.exceptions.DatasetGenerationError) as error:
        raise ValueError(f"{shards[:3]} cannot be read as webdataset shards: {error.__cause__ or error}") from error


def _open_saved(folder: Path, split: str, streaming: bool) -> AnyDataset:
    """Open what `save_to_disk` of `datasets` wrote."""
    try:
        saved = datasets.load_from_disk(str(folder))
    except (ValueError, OSError, KeyError, TypeError, pyarrow.ArrowException) as error:
        raise ValueError(f"the saved dataset in {str(folder)!r} cannot be read: {error}") from error
    if isinstance(saved, datasets.DatasetDict):
        if split not in saved:
            raise SplitError(split, repr(str(folder)), saved)
        saved = saved[split]
    elif split not in ("train", str(saved.split)):
        raise SplitError(split, f"the dataset {str(folder)!r}", [str(saved.split or "train")])
    return saved.to_iterable_dataset() if streaming else saved


def _open_folder(folder: Path, split: str, streaming: bool, captions: bool) -> tuple[AnyDataset, Path]:
    """Open a folder of pictures; returns also the folder of its relative image paths, that of the split."""
    if any((folder / name).is_file() for name in _SAVED_FILES):
        return _open_saved(folder, split, streaming), folder
    pictures = sorted(path for path in folder.rglob("*") if is_picture(path))
    pictures = [path for path in pictures if not any(part[0] == "." for part in path.relative_to(folder).parts)]
    for name in METADATA_FILES:
        if (folder / name).is_file():
            table = open_table(folder / name, split, streaming)
            _warn_of_unlisted(folder / name, table, pictures)
            return table, folder
    split_folder = _split_folder(folder, pictures, split)
    if split_folder is not None:
        return _open_folder(split_folder, "train", streaming, captions)
    if split != "train":
        raise SplitError(split, "a folder of images and captions")
    captioned = [path for path in pictures if path.with_suffix(".txt").is_file()]
    labelled = captions and not captioned and _are_labelled(folder, pictures)
    images = _readable(folder, pictures, pictures if labelled else captioned)
    names = [image.relative_to(folder).as_posix() for image in images]
    columns = {"id": names, "file_name": names}
    if labelled:
        columns["label"] = [image.parent.name for image in images]
    elif captions:
        _check_captions(folder, images, captioned)
        columns["text"] = [_read_caption(image.with_suffix(".txt")) for image in images]
    pairs = datasets.Dataset.from_dict(columns)
    if labelled:
        pairs = pairs.cast_column("label", datasets.ClassLabel(names=sorted(set(columns["label"]))))
    return (pairs.to_iterable_dataset() if streaming else pairs), folder


def _read_caption(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig").strip()
    except UnicodeDecodeError as error:
        raise ValueError(f"the caption {str(path)!r} is not UTF-8 ({error}); save it as UTF-8") from error


def _split_folder(folder: Path, pictures: list[Path], split: str) -> Path | None:
    """Return the subfolder of a split (`train`, `test`, `val` ...), if all pictures lie in such subfolders.

    Raises:
        ValueError: The folder has splits, but not this one, or two folders for it.
    """
    names = sorted({picture.relative_to(folder).parts[0] for picture in pictures})
    if not names or not all(name.lower() in _SPLITS for name in names):
        return None
    same = [name for name in names if _SPLITS[name.lower()] == _SPLITS.get(split.lower(), split)]
    chosen = [split] if split in names else same
    if len(chosen) != 1:
        raise SplitError(split, repr(str(folder)), names)
    return folder / chosen[0]


def _readable(folder: Path, pictures: list[Path], captioned: list[Path]) -> list[Path]:
    """Return the pictures that Pillow reads.

    Raises:
        ValueError: There are none, or one of the others has a caption.
    """
    images = [path for path in pictures if is_readable(path)]
    others = [path for path in pictures if not is_readable(path)]
    lost = sorted(set(others) & set(captioned))
    if lost:
        raise ValueError(
            f"{len(lost)} of {len(pictures)} pictures in {str(folder)!r} have captions but cannot be read: "
            f"{describe_unreadable(lost)}"
        )
    if not images:
        reason = f" that can be read: {describe_unreadable(others)}" if others else f" ({', '.join(IMAGE_SUFFIXES)})"
        raise ValueError(f"the folder {str(folder)!r} holds no images{reason}")
    if others:
        logger.warning(
            "%d of the %d pictures in %r cannot be read and are left out: %s",
            len(others), len(pictures), str(folder), describe_unreadable(others),
        )  # fmt: skip
    return images


def _are_labelled(folder: Path, pictures: list[Path]) -> bool:
    """Whether pictures lie in one folder per label: all exactly one level below `folder`, in several folders."""
    return len({picture.parent for picture in pictures}) > 1 and all(
        picture.parent.parent == folder for picture in pictures
    )


def _check_captions(folder: Path, images: list[Path], captioned: list[Path]) -> None:
    """Refuse images without a caption, and log captions without an image."""
    without = sorted(set(images) - set(captioned))
    if without:
        raise ValueError(
            f"{len(without)} of {len(images)} images in {str(folder)!r} have no caption, such as "
            f"{without[0].name!r}; expected a .txt of the same name beside each, or one of "
            f"{', '.join(METADATA_FILES)} with the columns file_name and text, or one folder per label"
        )
    alone = sorted(set(folder.rglob("*.txt")) - {image.with_suffix(".txt") for image in images})
    if alone:
        logger.warning("%d .txt files in %r have no image, such as %r", len(alone), str(folder), alone[0].name)


def _warn_of_unlisted(metadata: Path, table: AnyDataset, pictures: list[Path]) -> None:
    """Log how many pictures of the folder the metadata omits (no error, since a file may list a subset)."""
    if isinstance(table, datasets.Dataset) and 0 < len(table) < len(pictures):
        logger.warning("%s lists %d of the %d images in its folder", metadata, len(table), len(pictures))
