"""`conjoin encode`: a dataset through a model into a collection."""

import logging
import os
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from conjoin.cli.options import ColumnOptions, ComputeOptions, ImageOptions, PromptOptions, option, pick

if TYPE_CHECKING:
    from conjoin.retrieval import Collection, ItemEncoder

logger = logging.getLogger(__name__)
_LARGE = 200_000
"""Rows of 384 numbers that one core compares with a query in about 0.3 seconds."""


@dataclass(kw_only=True)
class Options(ColumnOptions, PromptOptions, ImageOptions, ComputeOptions):
    """Encode every row of DATA with MODEL into the collection --out, one Lance table.

    The same command resumes it after an interruption, and later brings it up to date: rows that are new or changed are
    encoded, and readers see the old state until the end. Under `accelerate launch -m` or `torchrun -m` the processes
    share the rows.

    Args:
        model: Folder or Hub name of a model: of this package, of sentence-transformers, or a text encoder, vision
            transformer or two-tower model of transformers; or "sample", the towers of the embedded sample as they are.
        data: A folder of images with captions or labels, a CSV, TSV, JSONL or Parquet file, webdataset tar shards, a
            dataset on the Hub, or "emoji", the embedded sample.
        out: The collection: a folder, s3://, gs:// or az://.
        encoding: Of a CSV file, such as cp1250 (default: UTF-8, else Windows-1252).
        only: Read this part of every row; the data need not have the other (default: image and text as one item).
        keep: Further columns of DATA to keep, for filters and results (the text and the image's path always are);
            price:number reads the texts of a CSV file as numbers or prices, such as 9.5 or 1.299,00 €.
        keep_pictures: Also keep a JPEG thumbnail of each picture, at most N pixels wide and high (256 if not given).
        dtype: Type of the stored numbers.
        on_error: What to do with a row that cannot be used: stop, or skip it and list it in skipped.jsonl in --out.
        sync: Also remove the rows of the collection that are no longer in DATA.
        streaming: Read while encoding, without loading the data first.
        bf16: Compute in bfloat16, or in float32 (default: what is faster here).
        ray: Encode by workers on a Ray cluster: N, or if not given one for each GPU, or for each CPU if there is none.

    Example:
        conjoin encode runs/demo/model photos/ --only image --out runs/photos
    """

    model: str
    data: str
    out: str = option(required=True)
    encoding: str | None = None
    only: Literal["image", "text"] | None = None
    keep: list[str] = field(default_factory=list)
    keep_pictures: int | None = option(nargs="?", const=256, least=1)
    dtype: Literal["float32", "float16"] = "float32"
    on_error: Literal["raise", "skip"] = "raise"
    sync: bool = False
    streaming: bool = False
    bf16: bool | None = None
    ray: int | None = option(nargs="?", const=0, least=0)


def run(options: Options) -> None:
    """Run the command."""
    from accelerate.utils import broadcast_object_list

    from conjoin.data.csv_files import ENCODING
    from conjoin.retrieval import encode_collection, load_encoder

    if options.encoding is not None:
        os.environ[ENCODING] = options.encoding
    processes = options.launched()
    if options.bf16 is None:
        options.bf16 = _is_bf16(options)
        if processes is not None:
            options.bf16 = broadcast_object_list([options.bf16])[0]
    is_first = processes is None or processes.is_main_process
    how = pick(options, "sync", "prompt", "prompt_name", "dtype", "on_error", "keep_pictures")
    how |= {"settings": {"only": options.only}, "show_progress": not options.quiet}
    rows = options.load_rows(options.data, on_error=options.on_error, keep=options.keep)
    if options.sync and is_first and not options.streaming and all(id_ == str(n) for n, id_ in enumerate(rows["id"])):
        logger.warning(
            "the ids are row numbers: a row that is added or removed changes all after it; name a column of ids "
            "(--columns id=...)"
        )
    if options.ray is not None:
        from conjoin.retrieval.encode_ray import encode_on_ray

        if processes is not None:
            raise ValueError("--ray starts its own workers: run `conjoin encode` without accelerate launch")
        model, own = options.model, options.encoder_options()

        def load(device: str | None) -> "ItemEncoder":
            return load_encoder(model, **own | {"device": device or own["device"]})

        _report(options, encode_on_ray(rows, load, options.out, workers=options.ray or None, **how))
        return
    encoder = load_encoder(options.model, **options.encoder_options())
    collection = encode_collection(rows, encoder, options.out, processes=processes, **how)
    if is_first:
        _report(options, collection)


def _is_bf16(options: Options) -> bool:
    """Whether to compute in bfloat16: as the collection was made, else as is faster here; not on a cluster."""
    from conjoin.devices import choose_bf16
    from conjoin.retrieval import Collection

    if (collection := Collection.newest(options.out)) is not None:
        return bool(collection.metadata["key"]["precision"] == "bfloat16")
    return options.ray is None and choose_bf16(options.device)


def _report(options: Options, collection: "Collection") -> None:
    """Say what changed, what the collection holds, and what to do next."""
    changes, out = collection.changes, options.out
    if changes is not None:
        print(
            f"{changes.added} rows added, {changes.replaced} replaced, {changes.removed} removed, {changes.unchanged} "
            f"unchanged; {changes.encoded} encoded"
        )
        if changes.skipped:
            print(f"skipped {changes.skipped} rows that cannot be used: {Path(out) / 'skipped.jsonl'}")
    print(f"{len(collection)} vectors of {collection.dimension} dimensions in {out}")
    if len(collection) >= _LARGE and not collection.metadata["index"]:
        print(f"next: conjoin index {shlex.quote(out)} makes searches faster")
    print(f"next: conjoin search {shlex.quote(out)} --{'image' if options.only == 'image' else 'text'} ...")
