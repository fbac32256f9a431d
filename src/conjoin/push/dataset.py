"""A dataset as Parquet with a card: MERIT, or symmetric triplets."""

import json
from collections.abc import Sequence
from pathlib import Path

import datasets
from datasets.table import embed_table_storage
from huggingface_hub import DatasetCard, DatasetCardData

from conjoin.data import JsonLines, load_triplets
from conjoin.data.triplets import TRIPLET_FEATURES, TRIPLET_ROLES
from conjoin.hub.card import CARDS
from conjoin.push.commit import Upload

_STRING = datasets.Value("string")
_MERIT_QUERIES = datasets.Features(
    {"query": _STRING, "instruction": _STRING}
    | {name: datasets.List(_STRING) for name in ("pos_candidate", "hard_negative")}
)
_TRIPLETS = datasets.Features(TRIPLET_FEATURES | {f"{role}_image": datasets.Image() for role in TRIPLET_ROLES})
"""Whoever loads the file sees pictures."""
MINI_MERIT = "mini_merit.json"
_MERIT_FILES = ("queries-*.json", "ood.json", "captions.jsonl", MINI_MERIT)
_PARTS = ("*.parquet", "data/*.lance/*", *_MERIT_FILES)
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
        FileNotFoundError: One of its files is missing.
        ValueError: There is no such source, it is of no known layout, or has a mistake.
    """
    source, work = Path(source), Path(work)
    queries = sorted(source.glob("queries-*.json"))
    files: dict[str, Path | bytes] = {}
    left_out: list[str] = []
    if source.is_file():
        made = {"triplets/test.parquet": _triplets(source, work)}
    elif queries:
        paths = sorted(path for pattern in (*_MERIT_FILES, "data/*.parquet") for path in source.glob(pattern))
        files = {path.relative_to(source).as_posix(): path for path in paths}
        left_out = sorted(path.name for path in source.iterdir() if path.is_file() and path.name not in files)
        made = {f"queries/{path.stem.removeprefix('queries-')}.parquet": _merit_queries(path) for path in queries}
    else:
        raise ValueError(
            f"{str(source)!r} has no queries-*.json (MERIT); expected this layout or a file of triplets. Push other "
            "data as it is: hf upload"
        )
    for name, rows in made.items():
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        rows.to_parquet(work / name)
        files[name] = work / name
    folders = {"triplets": "triplets"} if source.is_file() else {"products": "data", "queries": "queries"}
    files["README.md"] = _render(folders, repo_id, license, list(languages), MINI_MERIT in files).encode()
    return Upload(repo_id, "dataset", files, _PARTS, tuple(left_out))


def _merit_queries(path: Path) -> datasets.Dataset:
    """Each query as JSON, because its conditions have names of their own."""
    rows = [
        {"query": json.dumps(row["query"]), "instruction": row["query instruction"]}
        | {name: [str(each) for each in row.get(name) or []] for name in ("pos_candidate", "hard_negative")}
        for row in JsonLines(path)
    ]
    return datasets.Dataset.from_list(rows, _MERIT_QUERIES)


def _triplets(path: Path, work: Path) -> datasets.Dataset:
    """Triplets with their images in the rows; only the names of the files stay."""
    rows = load_triplets(path).cast(_TRIPLETS).with_format("arrow")
    work.mkdir(parents=True, exist_ok=True)
    return rows.map(embed_table_storage, batched=True, batch_size=100, cache_file_name=str(work / "embedded.arrow"))


def _render(folders: dict[str, str], repo_id: str, license: str | None, languages: list[str], is_mini: bool) -> str:
    """The card of a dataset whose configurations are `folders` of Parquet files, named by their split."""
    name = repo_id.split("/")[-1]
    data = DatasetCardData(
        pretty_name=name,
        tags=["conjoin", "multimodal-retrieval"],
        configs=[{"config_name": config, "data_dir": folder} for config, folder in folders.items()],
        license=license or (_SAMPLE_LICENSE if is_mini else None),
        language=languages or None,
    )
    template = str(CARDS / "datasets" / ("triplets.md" if "triplets" in folders else "merit.md"))
    return str(DatasetCard.from_template(data, template_path=template, repo_id=repo_id, name=name, mini=is_mini))
