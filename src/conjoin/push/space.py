"""A collection with its model as the files of a Space that runs the search app."""

from pathlib import Path

import conjoin
from conjoin.push.commit import Upload
from conjoin.push.model import model_upload
from conjoin.retrieval import Collection
from conjoin.retrieval.collection_copy import collection_files, copy_collection
from conjoin.retrieval.search import recorded_model

_BESIDE = Path(conjoin.__file__).parents[2] / "hub_upload" / "space"
SPACE = _BESIDE if _BESIDE.is_dir() else Path(conjoin.__file__).parent / "_space"
"""Folder of the card and the container of a Space: next to the sources, or inside the installed package."""

_SIDE = 512


def space_upload(
    uri: str | Path, repo_id: str, work: str | Path, *, model: str | Path | None = None, license: str | None = None
) -> Upload:
    """Collect the files of a Space: its container, the model, and a copy of the collection with thumbnails.

    Args:
        uri: Of the collection.
        repo_id: The Space, `OWNER/NAME`.
        work: A temporary folder for the copy.
        model: Folder of the model; the one that the collection records if None.
        license: Of what the Space shows.

    Raises:
        FileNotFoundError: There is no such collection, model or picture.
        ValueError: A picture of a row cannot be read.
    """
    collection, copied = Collection(uri), Path(work) / "collection"
    uploaded = model_upload(model if model is not None else recorded_model(collection), repo_id, license=license)
    copy_collection(collection, copied, model_name="model", side=_SIDE, show_progress=True)
    card = (SPACE / "README.md").read_text(encoding="utf-8")
    card = card.replace("title: Search", f"title: {repo_id.split('/')[-1]}")
    if license is not None:
        card = card.replace("pinned: false", f"pinned: false\nlicense: {license}")
    files: dict[str, Path | bytes] = {"README.md": card.encode()}
    files["Dockerfile"] = SPACE / "Dockerfile"
    files |= {f"model/{name}": file for name, file in uploaded.files.items()}
    files |= {f"collection/{name}": file for name, file in collection_files(copied).items()}
    return Upload(repo_id, "space", files, ("Dockerfile", "collection/*", "model/*"), uploaded.left_out)
