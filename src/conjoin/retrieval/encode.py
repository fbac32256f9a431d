"""From rows to an embedding store, resumable at any point.

Rows are cut into shards of fixed size and every shard into batches on its own, so what a shard holds does not depend
on where an earlier run stopped: interrupted and resumed, a store ends with the bytes of an uninterrupted run.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
import transformers

from conjoin import __version__
from conjoin.progress import progress
from conjoin.retrieval.compact import DTYPES
from conjoin.retrieval.encode_rows import Row, RowEncoder, RowSource
from conjoin.retrieval.encoder import ItemEncoder
from conjoin.retrieval.shards import ShardRows, encode_shard, end_of, finish_store, read_left_out
from conjoin.retrieval.store import STORE, UPDATES, EmbeddingStore, write_left_out
from conjoin.storage import FolderWriter


def encode_corpus(
    rows: Iterable[Row],
    encoder: ItemEncoder,
    directory: str | Path,
    *,
    instruction: str | None = None,
    shard_size: int = 4096,
    dtype: str = "float32",
    source: Mapping[str, Any] | None = None,
    on_error: Literal["raise", "skip"] = "raise",
    show_progress: bool = False,
) -> EmbeddingStore:
    """Encode rows into a store; after an interruption, the same call resumes.

    Finished shards are skipped without decoding their images. Their checksums are compared, and the ids, texts and
    undecoded images of their rows. A damaged shard is encoded again.

    A store that `update_store` changed is refused: it no longer follows the order of its data.

    Beside the vectors, the store keeps the text and the image's path of each row, and what the row has under `"kept"`.

    Args:
        rows: Mappings with a unique `"id"` and `"image"` and/or `"text"` (absent or `None`: the row has none), and
            optionally `"kept"`, a mapping of further values to keep (several images: a list, interleaved as for
            `load_pairs`); a `datasets` dataset, streaming or not, or any
            iterable that gives the same rows each time.
        encoder: Computes the vectors. The same batch size must be used on resuming for equal bytes.
        directory: The store; made if needed.
        instruction: Given to the model with every row.
        shard_size: Rows per file.
        dtype: Type of the stored numbers: `"float32"`, `"float16"`, or of compact vectors `"int8"` or `"binary"`.
        source: What else the store is made from, such as the data set and its columns (plain values, as JSON holds
            them); recorded, and compared on resuming.
        on_error: "skip" leaves out the rows that cannot be used: whose image or text cannot be read, or that have a
            `problem` (see `load_pairs`). The shards record them; `left_out.jsonl` in the store lists row, id and
            reason. A store that leaves rows out resumes only with "skip".
        show_progress: Show rows done and per second.

    Raises:
        ValueError: No rows, a row without id or content, an id met twice, an unreadable item, a store that was begun
            with other settings, another model or other data, or that another process writes.
        OSError: The disk is full or fails; the message says how many rows are safe.
    """
    options: dict[str, Any] = {"instruction": instruction, "shard_size": shard_size, "dtype": dtype, "source": source}
    options |= {"on_error": on_error, "show_progress": show_progress}
    encode_rank(rows, encoder, directory, 0, 1, **options)
    return EmbeddingStore(directory)


def encode_rank(
    rows: Iterable[Row],
    encoder: ItemEncoder,
    directory: str | Path,
    rank: int,
    world_size: int,
    *,
    instruction: str | None = None,
    shard_size: int = 4096,
    dtype: str = "float32",
    source: Mapping[str, Any] | None = None,
    on_error: Literal["raise", "skip"] = "raise",
    show_progress: bool = False,
) -> EmbeddingStore | None:
    """Encode the shards `rank`, `rank + world_size` ... of a store, while other processes encode the others.

    The processes do not talk to each other. Each records what it finished in the folder; the one that ends last makes
    sure that no id occurs twice, and completes the store, which has the bytes that one process writes. Any number of
    processes resumes.

    Args:
        rows: As for `encode_corpus`, the same in all processes.
        encoder: As for `encode_corpus`.
        directory: The store, on a file system that all processes share.
        rank: Which process this one is, counted from 0.
        world_size: How many there are.
        instruction: As for `encode_corpus`.
        shard_size: As for `encode_corpus`.
        dtype: As for `encode_corpus`.
        source: As for `encode_corpus`.
        on_error: As for `encode_corpus`.
        show_progress: As for `encode_corpus`.

    Returns:
        The store; None if other processes have not ended yet.

    Raises:
        ValueError: As for `encode_corpus`; the processes do not read the same data, or another run writes the store.
        OSError: As for `encode_corpus`.
    """
    check_options(shard_size, dtype, on_error)
    key = store_key(encoder, dtype, shard_size, instruction, source)
    found, skip = RowSource(rows), on_error == "skip"
    with (
        FolderWriter(directory, STORE, key, rank, world_size) as writer,
        progress(total=found.count, unit="row", desc="encoding", show=show_progress) as bar,
    ):
        check_not_updated(writer)
        writer.details |= {"model": encoder.name, "versions": versions()}
        encoding = RowEncoder(encoder, instruction, skip)
        sizes = shard_size, encoding.rows_at_once
        shards = ShardRows(
            found, writer.folder, writer.files, *sizes, skip, end_of(writer), rank, world_size, bar.update
        )
        for number, parts in shards:
            writer.write(number, *encode_shard(encoding, number, parts, dtype, bar))
        with writer.ending(found.position) as is_last:
            if is_last:
                finish_store(writer, found.position, check_ids=world_size > 1)
            elif rank == 0 and writer.manifest.complete:
                write_left_out(writer.folder, read_left_out(writer))  # it may be damaged
        return EmbeddingStore(directory) if writer.manifest.complete else None


def check_options(shard_size: int, dtype: str, on_error: str) -> None:
    """Refuse settings that no store can have.

    Raises:
        ValueError: The message names the one.
    """
    if shard_size < 1:
        raise ValueError(f"shard_size must be at least 1, got {shard_size}")
    if on_error not in ("raise", "skip"):
        raise ValueError(f"unknown on_error {on_error!r}; expected 'raise' or 'skip'")
    if dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}; expected one of {list(DTYPES)}")


def check_not_updated(writer: FolderWriter) -> None:
    """Refuse a store that no longer follows the order of its data.

    Raises:
        ValueError: It does not.
    """
    if UPDATES in writer.details:
        raise ValueError(f"the store in {str(writer.folder)!r} was updated; update it again, or encode into a new one")


def store_key(
    encoder: ItemEncoder, dtype: str, shard_size: int, instruction: str | None, source: Mapping[str, Any] | None
) -> dict[str, Any]:
    """What the vectors of a store are made from, each part under a name that an error message can use."""
    key = {
        "fingerprint": encoder.fingerprint,
        "processor": encoder.processing,
        "precision": "full" if encoder.dtype is None else str(encoder.dtype).removeprefix("torch."),
        "dtype": dtype,
        "shard_size": shard_size,
        "instruction": instruction,
        "source": dict(source or {}),
    }
    if encoder.dims is not None:
        key["dims"] = encoder.dims
    if encoder.input_type != "seq":  # stores of earlier versions have no other
        key["input_type"] = encoder.input_type
    return key


def versions() -> dict[str, str]:
    """The versions of the libraries that make vectors."""
    return {"conjoin": __version__, "torch": str(torch.__version__), "transformers": transformers.__version__}
