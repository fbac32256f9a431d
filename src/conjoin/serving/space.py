"""An index with its model and pictures as the files of a Space that runs the search app."""

from pathlib import Path

import conjoin
from conjoin.hub import model_upload
from conjoin.hub.commit import Upload
from conjoin.progress import progress
from conjoin.retrieval import load_index
from conjoin.retrieval.encoder import ModelIdentity
from conjoin.retrieval.index.rows import IndexRows
from conjoin.retrieval.kept_rows import KeptRows, read_picture
from conjoin.retrieval.load import recorded_model

_BESIDE = Path(conjoin.__file__).parents[2] / "hub_upload" / "space"
SPACE = _BESIDE if _BESIDE.is_dir() else Path(conjoin.__file__).parent / "_space"
"""Folder of the app, its requirements and its card: next to the sources, or inside the installed package."""

_SIDE = 512


def space_upload(
    index: str | Path, repo_id: str, work: str | Path, *, model: str | Path | None = None, license: str | None = None
) -> Upload:
    """Collect the files of a Space: the app, the index, the model, and a small picture of each row.

    Args:
        index: Folder of the index.
        repo_id: The Space, `OWNER/NAME`.
        work: A temporary folder for the pictures and the index that names them.
        model: Folder of the model; the one that the index records if None.
        license: Of what the Space shows.

    Raises:
        FileNotFoundError: There is no such index or model.
        ValueError: A picture of a row cannot be read, or the index lies in a database.
    """
    loaded, work = load_index(index), Path(work)
    if not isinstance(loaded, IndexRows):
        raise ValueError(
            f"a Space needs an index in files, and {str(index)!r} is of kind {loaded.kind!r}: index again"
        )
    uploaded = model_upload(model if model is not None else recorded_model(loaded), repo_id, license=license)
    _write_pictures(loaded, work)
    if loaded.model is not None:
        loaded.model = ModelIdentity("model", *loaded.model[1:])  # without the path on this machine
    loaded.save(work / "index")
    card = (
        (SPACE / "README.md").read_text(encoding="utf-8").replace("title: Search", f"title: {repo_id.split('/')[-1]}")
    )
    if license is not None:
        card = card.replace("pinned: false", f"pinned: false\nlicense: {license}")
    files: dict[str, Path | bytes] = {"README.md": card.encode()}
    files |= {name: SPACE / name for name in ("app.py", "requirements.txt")}
    files |= {f"model/{name}": file for name, file in uploaded.files.items()}
    for folder in ("index", "pictures"):
        found = sorted(path for path in (work / folder).rglob("*") if path.is_file() and path.name != ".lock")
        files |= {str(path.relative_to(work)): path for path in found}
    return Upload(repo_id, "space", files, uploaded.left_out, ("*.py", "index/*", "model/*", "pictures/*"))


def _write_pictures(index: IndexRows, work: Path) -> None:
    """Write a small picture of each row, and let the index name it."""
    rows = index.rows(index.ids)
    (work / "pictures").mkdir(parents=True, exist_ok=True)
    for number, row in enumerate(progress(rows, "pictures", unit="row")):
        if "image" not in row:
            continue
        picture = read_picture(row["image"], f"row {index.ids[number]!r}")
        picture.thumbnail((_SIDE, _SIDE))
        name = f"pictures/{number:07d}.webp"
        picture.save(work / name, quality=85)
        row["image"] = name
    if index.kept is not None:
        index.kept = KeptRows.of(index.ids, rows)
