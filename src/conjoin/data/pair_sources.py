"""Open any source of image-text pairs as a `datasets` dataset with its own columns; `pairs` unifies them."""

import glob
import logging
from collections.abc import Iterable, Sequence
from os import PathLike
from pathlib import Path
from typing import TypeAlias

import datasets

from conjoin.data.columns import clean_names
from conjoin.data.csv_files import open_csv
from conjoin.data.emoji.sample import load_emoji
from conjoin.data.json_files import text_problem
from conjoin.data.row_images import is_picture
from conjoin.processing.item_inputs import IMAGE_SUFFIXES
from conjoin.storage import reading, writing

logger = logging.getLogger(__name__)

AnyDataset: TypeAlias = datasets.Dataset | datasets.IterableDataset
PairSource: TypeAlias = str | PathLike[str] | Sequence[str] | AnyDataset

SAMPLE_SOURCE = "emoji"
"""The name of the embedded sample as a source."""

METADATA_FILES = ("metadata.csv", "metadata.jsonl", "metadata.parquet")
_TABLES = {".csv": "csv", ".tsv": "csv", ".json": "json", ".jsonl": "json", ".ndjson": "json", ".parquet": "parquet"}
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
    source: PairSource, split: str, streaming: bool, only: str | None = None
) -> tuple[AnyDataset, Path | None]:
    """Open `source`, with `clean_names`, and return it with the folder of its relative image paths, or None.

    A folder's captions are not read if `only` is `"image"`, and must be there if it is `"both"` or `"text"`. With
    `streaming`, CSV and Parquet files, shards and datasets of the Hub are read on access.

    Raises:
        FileNotFoundError: The path, a shard or the Hub dataset does not exist.
        TypeError: `source` is of an unknown kind.
        ValueError: Unknown split, or the folder or file has no pairs.
    """
    dataset, folder = _open(source, split, streaming, only)
    return clean_names(dataset), folder


def _open(source: PairSource, split: str, streaming: bool, only: str | None) -> tuple[AnyDataset, Path | None]:
    if isinstance(source, datasets.Dataset | datasets.IterableDataset):
        return source, None
    if isinstance(source, str) and source == SAMPLE_SOURCE:
        return load_emoji(split), None
    if isinstance(source, list | tuple):
        return _open_files([str(file) for file in source], split, streaming), None
    if not isinstance(source, str | PathLike):
        raise TypeError(
            f"source is a {type(source).__name__}; expected a path, a list of files, or a dataset of one split"
        )
    if str(source).endswith(_SHARD_SUFFIXES) or "://" in str(source):
        return _open_files([str(source)], split, streaming), None
    path = Path(source).expanduser()
    if path.is_dir():
        return _open_folder(path, split, streaming, only)
    if table_suffix(path) in _TABLES:
        return open_table(path, split, streaming), path.parent
    if isinstance(source, PathLike) or path.exists() or source.startswith((".", "/", "~")):
        kinds = ", ".join([*_TABLES, *_SHARD_SUFFIXES]) + " (tables also compressed, as .csv.gz)"
        problem = ValueError if path.exists() else FileNotFoundError
        raise problem(f"source {str(source)!r} is neither a folder nor one of the file kinds {kinds}")
    try:
        return datasets.load_dataset(source, split=split, streaming=streaming), None
    except (FileNotFoundError, ConnectionError) as error:
        raise FileNotFoundError(f"there is no file or folder {source!r}, and no such dataset: {error}") from error


def open_table(path: Path, split: str = "train", streaming: bool = False) -> AnyDataset:
    """Open a CSV, TSV, JSON, JSON-lines or Parquet file, also compressed (`.csv.gz`).

    Every cell of a CSV is a text, an empty one is null: the id `007` stays `007`.

    Raises:
        FileNotFoundError: No such file.
        ValueError: The file has no rows, cannot be read, or `split` is not `train`.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no such file: {str(path)!r}")
    if split != "train":
        raise SplitError(split, f"the table {str(path)!r}")
    kind = _TABLES[table_suffix(path)]
    with writing(datasets.config.HF_DATASETS_CACHE), reading(path):
        if kind == "json" and (problem := text_problem(path)):
            raise ValueError(problem)
        if kind == "csv":
            builder = open_csv(path)
        else:
            builder = datasets.load_dataset_builder(kind, data_files=glob.escape(str(path)))
        if streaming and kind != "json":  # JSON says its types at the end
            table: AnyDataset = builder.as_streaming_dataset(split="train")
            next(iter(table))
            return table
        builder.download_and_prepare()
        if not builder.info.splits["train"].num_examples:
            raise ValueError("it has no rows")
        return builder.as_dataset(split="train")


def table_suffix(path: Path) -> str:
    """Return the suffix of a file, without that of its compression: `.csv` of `a.csv.gz`."""
    return Path(path.name.lower().removesuffix(".gz")).suffix


def _open_files(files: list[str], split: str, streaming: bool) -> AnyDataset:
    """Open tar shards or Parquet files, by path or by a URL that fsspec knows, such as `s3://bucket/*.parquet`."""
    is_parquet = all(file.endswith(".parquet") for file in files)
    if not files or not (is_parquet or all(file.endswith(_SHARD_SUFFIXES) for file in files)):
        raise ValueError(f"expected files ending in .parquet, or in {', '.join(_SHARD_SUFFIXES)}; got {files[:3]}")
    for file in files:
        if "://" not in file and not glob.glob(file, recursive=True):
            raise FileNotFoundError(f"no such file: {file!r}")
    kind = "parquet" if is_parquet else "webdataset"
    with reading(f"{files[:3]}", f"expected {kind}", (FileNotFoundError,)):
        return datasets.load_dataset(kind, data_files=files, split=split, streaming=streaming)


def _open_saved(folder: Path, split: str) -> datasets.Dataset:
    """Open what `save_to_disk` of `datasets` wrote."""
    with reading(f"the saved dataset in {str(folder)!r}"):
        saved = datasets.load_from_disk(str(folder))
    if isinstance(saved, datasets.DatasetDict):
        if split not in saved:
            raise SplitError(split, repr(str(folder)), saved)
        saved = saved[split]
    elif split not in ("train", str(saved.split)):
        raise SplitError(split, f"the dataset {str(folder)!r}")
    return saved


def _open_folder(folder: Path, split: str, streaming: bool, only: str | None) -> tuple[AnyDataset, Path]:
    """Open a folder of pictures; returns also the folder of its relative image paths, that of the split."""
    if any((folder / name).is_file() for name in _SAVED_FILES):
        return _open_saved(folder, split), folder
    pictures = sorted(path for path in folder.rglob("*") if is_picture(path))
    pictures = [path for path in pictures if not any(part[0] == "." for part in path.relative_to(folder).parts)]
    for name in METADATA_FILES:
        if (folder / name).is_file():
            table = open_table(folder / name, split, streaming)
            if isinstance(table, datasets.Dataset) and len(table) < len(pictures):  # a file may list a subset
                logger.warning("%s lists %d of the %d images in its folder", folder / name, len(table), len(pictures))
            return table, folder
    split_folder = _split_folder(folder, pictures, split)
    if split_folder is not None:
        return _open_folder(split_folder, "train", streaming, only)
    if split != "train":
        raise SplitError(split, "a folder of images and captions")
    if not pictures:
        raise ValueError(f"the folder {str(folder)!r} holds no images; expected {', '.join(IMAGE_SUFFIXES)}")
    names = [_utf8(path.relative_to(folder).as_posix()) for path in pictures]
    labels = [_utf8(path.parent.name) for path in pictures]
    pairs = datasets.Dataset.from_dict({"id": names, "file_name": names})
    captioned = {path for path in pictures if only != "image" and path.with_suffix(".txt").is_file()}
    if captioned:
        texts = [_read_caption(path.with_suffix(".txt")) if path in captioned else None for path in pictures]
        pairs = pairs.add_column("text", texts)
    elif only != "image" and {path.parent.parent for path in pictures} == {folder} and len({*labels}) > 1:
        pairs = pairs.add_column("label", labels).cast_column("label", datasets.ClassLabel(names=sorted({*labels})))
    elif only in ("both", "text"):
        raise ValueError(
            f"no image in {str(folder)!r} has a caption; expected a .txt of the same name beside each, or one of "
            f"{', '.join(METADATA_FILES)} with the columns file_name and text, or one folder per label"
        )
    return pairs, folder


def _utf8(name: str) -> str:
    """Return the name of a file; one that is not UTF-8 is written out, so that no file has it and the row is named."""
    return name.encode(errors="backslashreplace").decode()


def _read_caption(path: Path) -> str:
    with reading(f"the caption {str(path)!r}", "save it as UTF-8"):
        return path.read_text(encoding="utf-8-sig").strip()


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
