"""`conjoin copy`: a collection to another place."""

from dataclasses import dataclass
from typing import Any, Literal

from conjoin.cli.options import ImageOptions, option, pick


@dataclass(kw_only=True)
class Options(ImageOptions):
    """Copy COLLECTION with its indexes to URI: a folder, s3://, gs:// or az://.

    Or http://HOST:PORT/NAME, a collection in Milvus (needs pip install "conjoin[milvus]"), which is replaced if it is
    there. Readers of what is there see it until the copy is whole.

    Args:
        collection: Folder that `conjoin encode` wrote, or a URI.
        uri: Where to.
        keep_pictures: Make thumbnails of at most N pixels, if it has none.
        center: kind subtracts from each vector the mean of its kind (image, text, both), and from those of queries: a
            text then finds a picture among texts.
        replace: Replace the collection that is there.

    Example:
        conjoin copy runs/photos s3://bucket/photos; conjoin copy runs/photos http://host:19530/photos
    """

    collection: str
    uri: str
    keep_pictures: int | None = option(least=1)
    center: Literal["kind"] | None = None
    replace: bool = False


def run(options: Options) -> None:
    """Run the command."""
    from conjoin.retrieval import Collection, copy_to_milvus
    from conjoin.retrieval.collection import milvus_address
    from conjoin.retrieval.collection_copy import copy_collection

    collection = Collection(options.collection)
    if milvus_address(options.uri):
        if options.center is not None:
            raise ValueError("--center makes a collection in a folder; copy that one to Milvus")
        copy: Any = copy_to_milvus(collection, options.uri, show_progress=True)
    else:
        how: dict[str, Any] = {"side": options.keep_pictures, **pick(options, "center", "replace")}
        copy = copy_collection(collection, options.uri, show_progress=True, **how)
    print(f"copied {len(copy):,} rows to {options.uri}")
