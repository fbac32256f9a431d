"""A dataset as Parquet with a card: MERIT, or symmetric triplets."""

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import datasets
import pyarrow.parquet as pq
from huggingface_hub import DatasetCard, DatasetCardData

from conjoin.data import load_triplets
from conjoin.data.json_files import JsonLines
from conjoin.data.mbeir import required
from conjoin.data.triplets import TRIPLET_FEATURES, TRIPLET_ROLES
from conjoin.hub.card import CARDS
from conjoin.hub.commit import Upload

_STRING = datasets.Value("string")
_MERIT_QUERIES = datasets.Features(
    {"query": _STRING, "instruction": _STRING}
    | {name: datasets.List(_STRING) for name in ("pos_candidate", "hard_negative")}
)
MINI_MERIT = "mini_merit.json"
_MERIT_FILES = ("queries-*.json", "ood.json", "captions.jsonl", MINI_MERIT)
_PARTS = ("*.parquet", *_MERIT_FILES)
_SAMPLE_LICENSE = "cc-by-sa-4.0"


def dataset_upload(
    source: str | Path, repo_id: str, work: str | Path, *, license: str | None = None, languages: Sequence[str] = ()
) -> Upload:
    """Write a dataset as Parquet to `work` and render its card. The images are in the rows.

    Args:
        source: A folder in the layout of MERIT, or a file of symmetric triplets.
        repo_id: The repository, `OWNER/NAME`.
        work: Folder for the Parquet files, needed until they are pushed.
        license: Licence of the data; that of the emoji sample for the miniature when None.
        languages: Codes of its languages.

    Raises:
        FileNotFoundError: There is no such source, or one of its files is missing.
        ValueError: The source is of no known layout, or has a mistake.
    """
    source, work = Path(source), Path(work)
    kind = _kind(source)
    files: dict[str, Path | bytes] = {}
    if kind == "merit":
        counts = _pack_merit(source, work, files)
    else:
        name, rows = "triplets/test.parquet", partial(map, _embedded, load_triplets(source))
        counts = {name: _write_parquet(rows, TRIPLET_FEATURES, work / name)}
    files |= {name: work / name for name in counts if name not in files}
    mini = (source / MINI_MERIT).is_file()
    license = license or (_SAMPLE_LICENSE if mini else None)
    card = _render(kind, repo_id, counts, mini=mini, license=license, languages=list(languages))
    taken = {file.resolve() for file in files.values() if isinstance(file, Path)}
    beside = [] if kind == "triplets" else [path for path in source.iterdir() if kind == "merit" and path.is_file()]
    left_out = sorted(path.name for path in beside if path.resolve() not in taken)
    return Upload(repo_id, "dataset", files | {"README.md": card.encode()}, tuple(left_out), _PARTS)


def _kind(source: Path) -> str:
    """Return the layout of a source.

    Raises:
        FileNotFoundError: There is no such source.
        ValueError: It is of no known layout.
    """
    if not source.exists():
        raise FileNotFoundError(f"no file or folder {str(source)!r}")
    if source.is_file():
        return "triplets"
    if list(source.glob("queries-*.json")):
        return "merit"
    raise ValueError(
        f"{str(source)!r} has no queries-*.json (MERIT); expected this layout or a file of triplets. Push other "
        "data as it is: hf upload"
    )


def _pack_merit(folder: Path, work: Path, files: dict[str, Path | bytes]) -> dict[str, int]:
    """Take the published files, and write the queries, whose conditions have names of their own, as Parquet."""
    paths = sorted(path for pattern in (*_MERIT_FILES, "data/*.parquet") for path in folder.glob(pattern))
    files |= {path.relative_to(folder).as_posix(): path for path in paths}
    tables = {name: path for name, path in files.items() if isinstance(path, Path) and path.suffix == ".parquet"}
    counts = {name: int(pq.read_metadata(path).num_rows) for name, path in tables.items()}
    for path in sorted(folder.glob("queries-*.json")):
        name = f"queries/{path.stem.removeprefix('queries-')}.parquet"
        counts[name] = _write_parquet(partial(_merit_queries, path), _MERIT_QUERIES, work / name)
    return counts


def _write_parquet(rows: Callable[[], Iterator[dict[str, Any]]], features: datasets.Features, file: Path) -> int:
    """Write rows, whose images are dicts with `bytes` and `path`, to a Parquet file; returns how many there are.

    Whoever loads the file sees pictures in columns of images.
    """
    images = [name for name, feature in features.items() if isinstance(feature, datasets.Image)]
    features = datasets.Features(features | {name: datasets.Image() for name in images})
    file.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=file.parent) as cache:
        try:
            table = datasets.Dataset.from_generator(rows, features=features, cache_dir=cache)
        except datasets.exceptions.DatasetGenerationError as error:
            raise error.__cause__ or error from None  # what is wrong with a row
        table.to_parquet(str(file))
        return len(table)


def _merit_queries(path: Path) -> Iterator[dict[str, Any]]:
    for row in JsonLines(path):
        ids = {name: [str(each) for each in row.get(name) or []] for name in ("pos_candidate", "hard_negative")}
        yield {"query": json.dumps(row["query"]), "instruction": row["query instruction"]} | ids


def _embedded(row: dict[str, Any]) -> dict[str, Any]:
    """Put the images of a triplet into the row; only the names of their files stay."""
    for role in TRIPLET_ROLES:
        image = row[f"{role}_image"]
        if image is not None and image["bytes"] is None:
            path = required(Path(image["path"]))
            row[f"{role}_image"] = {"bytes": path.read_bytes(), "path": path.name}
    return row


def _render(
    kind: str, repo_id: str, counts: dict[str, int], *, mini: bool, license: str | None, languages: list[str]
) -> str:
    name = repo_id.split("/")[-1]
    shards: dict[tuple[str, str], list[str]] = {}
    for file in counts:
        shards.setdefault((_config(file), Path(file).stem.partition("-")[0]), []).append(file)
    parts, configs = [], dict[str, list[dict[str, Any]]]()
    for (config, split), paths in shards.items():
        parts.append({"config": config, "split": split, "rows": f"{sum(counts[path] for path in paths):,}"})
        configs.setdefault(config, []).append({"split": split, "path": paths if len(paths) > 1 else paths[0]})
    listed: list[dict[str, Any]] = [{"config_name": config, "data_files": files} for config, files in configs.items()]
    listed[0]["default"] = True
    data = DatasetCardData(
        pretty_name=name,
        tags=["conjoin", "multimodal-retrieval"],
        configs=listed,
        license=license,
        language=languages or None,
    )
    template = str(CARDS / "datasets" / f"{kind}.md")
    return str(
        DatasetCard.from_template(data, template_path=template, repo_id=repo_id, name=name, parts=parts, mini=mini)
    )


def _config(file: str) -> str:
    return "products" if file.startswith("data/") else file.partition("/")[0]
