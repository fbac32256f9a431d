"""The files of a collection that are pushed, without paths of this machine, and its card."""

from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import DatasetCard, DatasetCardData

from conjoin.hub.card import CARDS
from conjoin.hub.local_paths import public_name
from conjoin.push.commit import Upload
from conjoin.retrieval import Collection
from conjoin.retrieval.collection import TABLE
from conjoin.retrieval.collection_copy import collection_files, copy_collection
from conjoin.storage import FOLDER_CHECKSUMS

_PARTS = (f"{TABLE}/*", FOLDER_CHECKSUMS, "*.parquet")


def collection_upload(
    uri: str | Path,
    repo_id: str,
    work: str | Path,
    *,
    model: str | None = None,
    side: int | None = None,
    license: str | None = None,
    languages: Sequence[str] = (),
) -> Upload:
    """Copy a collection without paths of this machine, and render its card.

    Args:
        uri: Of the collection.
        repo_id: The repository, `OWNER/NAME`.
        work: Folder for the copy, needed until it is pushed.
        model: Name of its model on the Hub; of a local model the name of its folder when None.
        side: Make thumbnails of at most this many pixels, if the collection has none.
        license: Licence of the data.
        languages: Codes of its languages.

    Raises:
        FileNotFoundError: There is no such collection, or no such picture to make a thumbnail of.
        ValueError: It is unfinished or damaged, or a picture cannot be read.
    """
    collection = Collection(uri)
    model = model or public_name(collection.model.name)
    copy = copy_collection(collection, work, model_name=model, side=side, show_progress=True)
    card = _render(copy, repo_id, license, list(languages))
    return Upload(repo_id, "dataset", collection_files(copy.uri) | {"README.md": card.encode()}, _PARTS)


def _render(collection: Collection, repo_id: str, license: str | None, languages: list[str]) -> str:
    data = DatasetCardData(
        pretty_name=repo_id.split("/")[-1],
        tags=["conjoin", "lance", "multimodal-retrieval"],
        license=license,
        language=languages or None,
    )
    return str(
        DatasetCard.from_template(
            data,
            template_path=str(CARDS / "datasets" / "collection.md"),
            repo_id=repo_id,
            name=repo_id.split("/")[-1],
            model=collection.model.name,
            dimension=collection.dimension,
            dtype=collection.dtype,
            rows=f"{len(collection):,}",
            columns=[(field.name, str(field.type)) for field in collection.table.schema],
            index=collection.metadata["index"],
        )
    )
