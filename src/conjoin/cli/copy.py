"""`conjoin copy`: a collection to another place."""

from dataclasses import dataclass
from typing import Any

from conjoin.cli.options import ImageOptions, option


@dataclass(kw_only=True)
class Options(ImageOptions):
    """Copy COLLECTION with its indexes to URI: a folder, s3://, gs:// or az://.

    Or http://HOST:PORT/NAME, a collection in Milvus (needs pip install "conjoin[milvus]"), which is replaced if it is
    there. Readers of what is there see it until the copy is whole.

    Args:
        collection: Folder that `conjoin encode` wrote, or a URI.
        uri: Where to.
        keep_pictures: Make thumbnails of at most N pixels, if it has none.
        replace: Replace the collection that is there.

    Example:
        conjoin copy runs/photos s3://bucket/photos; conjoin copy runs/photos http://host:19530/photos
    """

    collection: str
    uri: str
    keep_pictures: int | None = option(least=1)
    replace: bool = False


def run(options: Options) -> None:
    """Run the command."""
    from conjoin.retrieval import Collection, copy_to_milvus
    from conjoin.retrieval.collection import milvus_address
    from conjoin.retrieval.collection_copy import copy_collection

    collection = Collection(options.collection)
    if milvus_address(options.uri):
        copy: Any = copy_to_milvus(collection, options.uri, show_progress=True)
    else:
        side, replace = options.keep_pictures, options.replace
        copy = copy_collection(collection, options.uri, side=side, replace=replace, show_progress=True)
    print(f"copied {len(copy):,} rows to {options.uri}")
