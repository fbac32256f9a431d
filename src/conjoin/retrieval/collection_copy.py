"""Copying a collection: to another folder or an object store, perhaps without paths of this machine."""

import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path, PureWindowsPath
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from conjoin.hub.local_paths import is_absolute
from conjoin.processing.item_images import is_url
from conjoin.progress import progress
from conjoin.retrieval.collection import TABLE, Collection, committing, index_names, matrix, vector_field
from conjoin.retrieval.pictures import check_pictures, make_thumbnail, picture_folders
from conjoin.retrieval.vectors import subtract_centers
from conjoin.storage import FOLDER_CHECKSUMS

_BATCHES_PER_COMMIT = 16


def copy_collection(
    collection: Collection,
    uri: str | Path,
    *,
    model_name: str | None = None,
    side: int | None = None,
    center: Literal["kind"] | None = None,
    replace: bool = False,
    show_progress: bool = False,
) -> Collection:
    """Copy the rows that readers of a collection see, and build the indexes that it has.

    Args:
        collection: What to copy.
        uri: A folder, or `s3://`, `gs://`, `az://`.
        model_name: Publish the copy: it records this name of the model, and no path of this machine; images and kept
            texts that are such paths become names of files.
        side: Make JPEG thumbnails at most this many pixels wide and high, if the collection has none.
        center: `"kind"` subtracts from each vector the mean of the rows of its kind (image, text or both), and
            normalises again; searches then do so with queries.
        replace: Replace the collection at `uri`, whose readers see it until this copy is whole.
        show_progress: Show a bar.

    Raises:
        FileNotFoundError: The image of a row, for its thumbnail.
        ValueError: There is a collection at `uri` and `replace` is not given, another process writes there, an image
            cannot be read, or is in a folder that the collection may not name, or the vectors are centered already.
        OSError: The disk is full or fails.
    """
    schema = collection.table.schema
    details = collection.metadata["details"] | ({} if model_name is None else {"model": model_name})
    centers = kind_means(collection) if center is not None else {}
    key = collection.metadata["key"] | ({"center": center} if centers else {})
    details |= {"centers": {kind: mean.tolist() for kind, mean in centers.items()}} if centers else {}
    metadata = dict(collection.metadata) | {"key": key, "details": details, "index": None}
    vectors = vector_field(collection.dimension, collection.dtype, metadata)
    schema = schema.set(schema.get_field_index("vector"), vectors)
    adds_pictures = side is not None and "picture" not in schema.names
    schema = schema.append(pa.field("picture", pa.binary())) if adds_pictures else schema
    folders = picture_folders(collection.uri)
    texts = [field.name for field in collection.schema if field.name not in ("id", "text")
             and (pa.types.is_string(field.type) or pa.types.is_nested(field.type))]  # fmt: skip

    def batches() -> Iterator[pa.RecordBatch]:
        for batch in collection.scan(collection.table.schema.names):
            columns = dict(zip(batch.schema.names, batch.columns, strict=True))
            if centers:
                moved = subtract_centers(
                    matrix(columns["vector"], collection.dimension), columns["row_kind"].to_pylist(), centers
                )
                values = pa.array(moved.astype(collection.dtype).reshape(-1))
                columns["vector"] = pa.FixedSizeListArray.from_arrays(values, collection.dimension)
            if adds_pictures and side is not None:
                pictures: list[bytes | None] = []
                for id_, image in zip(columns["id"].to_pylist(), columns["image"].to_pylist(), strict=True):
                    check_pictures(image or [], folders, f"item {id_!r}")
                    pictures.append(make_thumbnail(image, side, f"item {id_!r}") if image else None)
                columns["picture"] = pa.array(pictures, pa.binary())
            for name in texts if model_name is not None else ():
                public = [_public(value, name == "image") for value in columns[name].to_pylist()]
                columns[name] = pa.array(public, columns[name].type)
            yield pa.record_batch([columns[name] for name in schema.names], schema=schema)

    bar = progress(total=len(collection), desc="copying", unit="row", show=show_progress)
    with bar, Collection.writing(uri) as before:
        if not replace and before is not None:
            raise ValueError(f"{str(uri)!r} holds a collection, or one that is unfinished: replace it (--replace), or "
                             "choose another address")  # fmt: skip
        copy, stream = Collection.create(uri, schema), batches()
        while some := list(islice(stream, _BATCHES_PER_COMMIT)):
            with committing(uri):
                copy.table.add(pa.Table.from_batches(some))
            bar.update(sum(map(len, some)))
        copy.publish()
    copy = Collection(uri)
    index = collection.metadata["index"]
    if index is not None:
        copy.index(**index)
    elif set(index_names(collection.table)) - {"id", "text"}:
        copy.index(None)
    return copy


def kind_means(collection: Collection) -> dict[str, np.ndarray]:
    """The mean `(D,)` of the vectors of each kind of rows that a collection has, float64.

    Raises:
        ValueError: They are centered already.
    """
    if collection.model.centers:
        raise ValueError(f"the vectors of {collection.uri!r} are centered already")
    counts, sums = collection.kinds, {kind: np.zeros(collection.dimension) for kind in collection.kinds}
    for batch in collection.scan(["vector", "row_kind"]):
        vectors, kinds = matrix(batch["vector"], collection.dimension), np.array(batch["row_kind"].to_pylist())
        for kind, total in sums.items():
            total += vectors[kinds == kind].sum(axis=0, dtype=np.float64)
    return {kind: total / counts[kind] for kind, total in sums.items()}


def _public(value: Any, is_image: bool) -> Any:  # noqa: ANN401 - a value of a row
    if isinstance(value, dict):
        return {name: _public(part, is_image) for name, part in value.items()}
    if isinstance(value, list):
        return [_public(part, is_image) for part in value]
    if not isinstance(value, str) or is_url(value):
        return value
    is_path = is_image or (is_absolute(value) and os.path.exists(value))
    return PureWindowsPath(value).name if is_path else value


def collection_files(folder: str | Path) -> dict[str, Path | bytes]:
    """Return the files of a collection by their names in it: those of its table, and their checksums."""
    folder = Path(folder)
    files = sorted(path for path in (folder / TABLE).rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path for path in (*files, folder / FOLDER_CHECKSUMS)}
