"""M-BEIR as Parquet, with the images in the rows, and back into the layout of its files."""

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import datasets

from conjoin.data.json_files import JsonLines
from conjoin.data.mbeir import (
    MBEIR_DATASETS,
    dataset_of,
    find_cells,
    instructions_file,
    qrels_file,
    query_file,
    required,
)
from conjoin.data.row_images import path_inside
from conjoin.storage import write_text

CANDIDATES = "candidates/all.parquet"
INSTRUCTIONS = "instructions/query_instructions.tsv"
_STRING = datasets.Value("string")
_SIDE = {"modality": _STRING, "src_content": _STRING}
_QUERIES = datasets.Features(
    {"qid": _STRING, "cell": _STRING, "query_txt": _STRING, "query_img": datasets.Image(decode=False)}
    | {f"query_{name}": kind for name, kind in _SIDE.items()}
    | {"pos_cand_list": datasets.List(_STRING), "neg_cand_list": datasets.List(_STRING)}
)
_CANDIDATES = datasets.Features(
    {"did": _STRING, "txt": _STRING, "img": datasets.Image(decode=False)} | _SIDE | {"pools": datasets.List(_STRING)}
)


def write_parquet(rows: Callable[[], Iterator[dict[str, Any]]], features: datasets.Features, file: Path) -> int:
    """Write rows to a Parquet file, through a temporary copy beside it; returns how many there are.

    Args:
        rows: Yields the rows; images as a dict with `bytes` and `path`.
        features: The columns; whoever loads the file sees pictures in columns of images.
        file: Where to write.

    Raises:
        FileNotFoundError: As `rows` raises it.
        ValueError: As `rows` raises it.
    """
    features = datasets.Features({n: datasets.Image() if n in images(features) else f for n, f in features.items()})
    file.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=file.parent) as cache:
        try:
            table = datasets.Dataset.from_generator(rows, features=features, cache_dir=cache)
        except datasets.exceptions.DatasetGenerationError as error:
            raise error.__cause__ or error from None  # what is wrong with a row
        table.to_parquet(str(file))
        return len(table)


def images(features: datasets.Features) -> list[str]:
    """Return the names of the columns with images."""
    return [name for name, feature in features.items() if isinstance(feature, datasets.Image)]


def pack_mbeir(folder: Path, out: Path) -> dict[str, int]:
    """Write queries, candidates and instructions of a folder in M-BEIR's layout as Parquet to `out`.

    Returns:
        By the name of each Parquet file its number of rows.

    Raises:
        FileNotFoundError: A file of the layout or an image is missing.
        ValueError: The path of an image leaves the folder.
    """
    counts = {}
    for split in ("train", "val", "test"):
        files = sorted((folder / "query" / split).glob("mbeir_*.jsonl"))
        if split == "train":
            files = [query_file(folder, None, "train")]
        if files and files[0].is_file():
            name = f"queries/{split}.parquet"
            counts[name] = write_parquet(partial(_queries, folder, files, split), _QUERIES, out / name)
    counts[CANDIDATES] = write_parquet(partial(_candidates, folder), _CANDIDATES, out / CANDIDATES)
    return counts


def unpack_mbeir(packed: str | Path, out: str | Path) -> Path:
    """Write the layout of M-BEIR from what `pack_mbeir` wrote, for `conjoin evaluate --benchmark mbeir`.

    Args:
        packed: The folder, as downloaded from the Hub.
        out: The folder to make.

    Raises:
        FileExistsError: `out` is there.
        FileNotFoundError: `packed` lacks a file.
        ValueError: The path of an image, a pool or a query file leaves the folder.
    """
    packed, out = Path(packed), Path(out)
    if out.exists():
        raise FileExistsError(f"{str(out)!r} exists; choose another folder")
    required(packed / CANDIDATES)
    files: dict[Path, list[str]] = {}
    for row in _rows(packed / CANDIDATES):
        line = {"txt": row["txt"], "img_path": _save(row["img"], out), "modality": row["modality"], "did": row["did"]}
        line["src_content"] = row["src_content"]
        for pool in row["pools"]:
            files.setdefault(_inside(out, f"cand_pool/{pool}.jsonl"), []).append(_line(line))
    for split in ("train", "val", "test"):
        if (packed / f"queries/{split}.parquet").is_file():
            for row in _rows(packed / f"queries/{split}.parquet"):
                _add_query(files, out, split, row)
    for file, lines in files.items():
        write_text(_made(file), "".join(f"{line}\n" for line in lines))
    write_text(_made(instructions_file(out)), required(packed / INSTRUCTIONS).read_text(encoding="utf-8"))
    return out


def _queries(folder: Path, files: list[Path], split: str) -> Iterator[dict[str, Any]]:
    for file in files:
        for row in JsonLines(file):
            cell = MBEIR_DATASETS[dataset_of(row["qid"])] if split == "train" else _cell(file, split)
            ids = {name: [_id(each) for each in row.get(name) or []] for name in ("pos_cand_list", "neg_cand_list")}
            image = _image(folder, row.get("query_img_path"))
            text = {name: row.get(name) for name in ("qid", "query_txt", "query_modality", "query_src_content")}
            yield text | ids | {"cell": cell, "query_img": image}


def _candidates(folder: Path) -> Iterator[dict[str, Any]]:
    """Every candidate once, with the names of its pools."""
    pools: dict[str, list[str]] = {}
    files = sorted((folder / "cand_pool").rglob("*.jsonl"))
    for file in files:
        for row in JsonLines(file):
            name = file.relative_to(folder / "cand_pool").with_suffix("").as_posix()
            pools.setdefault(row["did"], []).append(name)
    for file in files:
        for row in JsonLines(file):
            if row["did"] in pools:
                text = {name: row.get(name) for name in ("did", "txt", "modality", "src_content")}
                yield text | {"img": _image(folder, row.get("img_path")), "pools": pools.pop(row["did"])}


def _cell(file: Path, split: str) -> str:
    return file.stem.removeprefix("mbeir_").removesuffix(f"_{split}")


def _id(candidate: Any) -> str:  # noqa: ANN401 - a string, or an object with one
    return str(candidate["did"] if isinstance(candidate, dict) else candidate)


def _image(folder: Path, path: str | None) -> dict[str, Any] | None:
    return None if path is None else {"path": path, "bytes": required(_inside(folder, path)).read_bytes()}


def _rows(file: Path) -> Iterator[dict[str, Any]]:
    with TemporaryDirectory() as cache:
        rows = datasets.Dataset.from_parquet(str(file), cache_dir=cache)
        for name in images(rows.features):
            rows = rows.cast_column(name, datasets.Image(decode=False))
        yield from rows


def _save(image: dict[str, Any] | None, out: Path) -> str | None:
    """Write an image to its path inside `out`."""
    if image is None:
        return None
    target = _inside(out, image["path"])
    if not target.exists():
        _made(target).write_bytes(image["bytes"])
    return str(image["path"])


def _add_query(files: dict[Path, list[str]], out: Path, split: str, row: dict[str, Any]) -> None:
    """Add a query to the files that hold it, and its relevant candidates to the judgements."""
    image = _save(row["query_img"], out)
    whole = {"qid": row["qid"], "query_txt": row["query_txt"], "query_img_path": image}
    rest = ("query_modality", "query_src_content", "pos_cand_list", "neg_cand_list")
    line = _line(whole | {name: row[name] for name in rest})
    if split == "train":
        files.setdefault(_inside(out, f"query/train/mbeir_{row['cell']}_train.jsonl"), []).append(line)
        files.setdefault(query_file(out, None, "train"), []).append(line)
        return
    (cell,) = find_cells([row["cell"]])
    files.setdefault(query_file(out, cell, split), []).append(line)
    judged = [f"{row['qid']} 0 {did} 1 {cell.task}" for did in row["pos_cand_list"]]
    files.setdefault(qrels_file(out, cell, split), []).extend(judged)


def _line(row: dict[str, Any]) -> str:
    return json.dumps(row, ensure_ascii=False)


def _inside(folder: Path, path: str) -> Path:
    """The file that a row names."""
    return path_inside(folder, path, "a row")


def _made(file: Path) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    return file
