"""Open any source of image-text pairs as a `datasets` dataset with its own columns; `pairs` unifies them."""

import csv
import glob
import logging
import tarfile
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any, TypeAlias

import datasets

from conjoin.data.emoji.sample import load_emoji
from conjoin.data.json_lines import check_nesting
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
        return _open_shards([str(shard) for shard in source], split, streaming), None
    if not isinstance(source, str | PathLike):
        raise TypeError(f"source is a {type(source).__name__}; expected a path, a list of tar shards or a dataset")
    if str(source).endswith(_SHARD_SUFFIXES):
        return _open_shards([str(source)], split, streaming), None
    path = Path(source).expanduser()
    if path.is_dir():
        return _open_folder(path, split, streaming, captions), path
    if path.suffix.lower() in _TABLE_LOADERS:
        return open_table(path, split, streaming), path.parent
    if isinstance(source, PathLike) or path.exists() or source.startswith((".", "/", "~")):
        kinds = ", ".join([*_TABLE_LOADERS, *_SHARD_SUFFIXES])
        problem = ValueError if path.exists() else FileNotFoundError
        raise problem(f"source {str(source)!r} is neither a folder nor one of the file kinds {kinds}")
    return _open_hub(source, split, streaming), None


def open_table(path: Path, split: str = "train", streaming: bool = False) -> AnyDataset:
    """Open a CSV, TSV, JSON, JSON-lines or Parquet file. Every column of a CSV is text: the id `007` stays `007`.

    Raises:
        FileNotFoundError: No such file.
        ValueError: The file has no rows, cannot be read, or `split` is not `train`.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no such file: {str(path)!r}")
    if path.stat().st_size == 0:
        raise ValueError(f"{str(path)!r} has zero bytes")
    if split != "train":
        raise ValueError(f"split is {split!r}; the table {str(path)!r} has only the split 'train'")
    try:
        if _TABLE_LOADERS[path.suffix.lower()] == "json":
            check_nesting(path)
        table = _read_table(path, split, streaming)
    except (ValueError, datasets.exceptions.DatasetGenerationError) as error:
        cause = error.__cause__ or error
        hint = "; save it as UTF-8" if isinstance(cause, UnicodeDecodeError) else ""
        raise ValueError(f"{str(path)!r} cannot be read: {cause}{hint}") from error
    if table is None:
        raise ValueError(f"{str(path)!r} is empty: it has no rows")
    return table


def _read_table(path: Path, split: str, streaming: bool) -> AnyDataset | None:
    loader = _TABLE_LOADERS[path.suffix.lower()]
    options: dict[str, Any] = {}
    if loader == "csv":
        separator = "\t" if path.suffix.lower() == ".tsv" else ","
        with path.open(encoding="utf-8-sig", newline="") as file:
            header = next(csv.reader(file, delimiter=separator))
        if len(header) == 1 and any(other in header[0] for other in ",;\t|"):
            raise ValueError(f"its one column is {header[0]!r}; expected columns separated by {separator!r}")
        strings = datasets.Features({name: datasets.Value("string") for name in header})
        options = {"features": strings, "sep": separator, "na_filter": False}  # the caption "null" is a caption
    options |= {"data_files": glob.escape(str(path)), "split": split}
    stream = datasets.load_dataset(loader, streaming=True, **options)
    if next(iter(stream), None) is None:
        return None
    return stream if streaming else datasets.load_dataset(loader, **options)


def _open_hub(name: str, split: str, streaming: bool) -> AnyDataset:
    try:
        return datasets.load_dataset(name, split=split, streaming=streaming)
    except (FileNotFoundError, ConnectionError) as error:
        raise FileNotFoundError(f"there is no file or folder {name!r}, and no such dataset: {error}") from error


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


def _open_folder(folder: Path, split: str, streaming: bool, captions: bool) -> AnyDataset:
    images = sorted(path for path in folder.rglob("*") if path.suffix.lower() in IMAGE_SUFFIXES)
    for name in METADATA_FILES:
        if (folder / name).is_file():
            table = open_table(folder / name, split, streaming)
            _warn_of_unlisted(folder / name, table, images)
            return table
    if not images:
        raise ValueError(f"the folder {str(folder)!r} holds no images ({', '.join(IMAGE_SUFFIXES)})")
    uncaptioned = [image for image in images if captions and not image.with_suffix(".txt").is_file()]
    if uncaptioned:
        raise ValueError(
            f"{len(uncaptioned)} of {len(images)} images in {str(folder)!r} have no caption, such as "
            f"{uncaptioned[0].name!r}; expected a .txt of the same name beside each, or one of "
            f"{', '.join(METADATA_FILES)} with the columns file_name and text"
        )
    if split != "train":
        raise ValueError(f"split is {split!r}; a folder of images and captions has only the split 'train'")
    names = [image.relative_to(folder).as_posix() for image in images]
    columns = {"id": names, "file_name": names}
    if captions:
        columns["text"] = [image.with_suffix(".txt").read_text(encoding="utf-8").strip() for image in images]
    pairs = datasets.Dataset.from_dict(columns)
    return pairs.to_iterable_dataset() if streaming else pairs


def _warn_of_unlisted(metadata: Path, table: AnyDataset, images: list[Path]) -> None:
    """Log how many images of the folder the metadata omits (no error, since a file may list a subset)."""
    if isinstance(table, datasets.Dataset) and 0 < len(table) < len(images):
        logger.warning("%s lists %d of the %d images in its folder", metadata, len(table), len(images))
