"""From rows to an embedding store, resumable at any point.

Rows are cut into shards of fixed size and every shard into batches on its own, so what a shard holds does not depend
on where an earlier run stopped: interrupted and resumed, a store ends with the bytes of an uninterrupted run.
"""

import itertools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import transformers

from conjoin import __version__
from conjoin.progress import progress
from conjoin.retrieval.compact import DTYPES, pack
from conjoin.retrieval.encode_rows import Row, RowEncoder, RowSource, row_content, row_items
from conjoin.retrieval.encoder import ItemEncoder
from conjoin.retrieval.kept_rows import kept_values
from conjoin.retrieval.store import (
    SEVERAL_IMAGES,
    STORE,
    UPDATES,
    EmbeddingStore,
    LeftOut,
    read_contents,
    write_embeddings,
    write_left_out,
)
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
    if shard_size < 1:
        raise ValueError(f"shard_size must be at least 1, got {shard_size}")
    if on_error not in ("raise", "skip"):
        raise ValueError(f"unknown on_error {on_error!r}; expected 'raise' or 'skip'")
    if dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}; expected one of {list(DTYPES)}")
    key = store_key(encoder, dtype, shard_size, instruction, source)
    found = RowSource(rows)
    with (
        FolderWriter(directory, STORE, key) as writer,
        progress(total=found.count, unit="row", desc="encoding", show=show_progress) as bar,
    ):
        if UPDATES in writer.details:
            raise ValueError(f"the store in {str(directory)!r} was updated; update it again, or encode into a new one")
        writer.details |= {"model": encoder.name, "versions": versions()}
        _Encoding(writer, found, encoder, instruction, skip=on_error == "skip").run(shard_size, dtype, bar)
    return EmbeddingStore(directory)


class _Encoding:
    """A store in the making: encodes the rows that no finished shard holds, and checks the rows of the others."""

    def __init__(
        self, writer: FolderWriter, source: RowSource, encoder: ItemEncoder, instruction: str | None, skip: bool
    ) -> None:
        self.writer, self.source = writer, source
        self.skip = skip
        self.encoding = RowEncoder(encoder, instruction, skip)
        self.left_out: list[LeftOut] = []
        self._is_closed = writer.manifest.complete  # whether an earlier run saw the end of the data
        self.encoding.parts |= set(writer.details.get("parts", ()))
        self.encoding.has_several = bool(writer.details.get(SEVERAL_IMAGES))
        self._rows_at_once = self.encoding.rows_at_once

    def run(self, shard_size: int, dtype: str, bar: Any) -> None:  # noqa: ANN401 - a progress bar
        """Write all shards that are missing, and mark the store as complete."""
        for number in itertools.count():
            if self.writer.has(number):
                bar.update(self._check_rows(number, shard_size))
            elif not self._encode_shard(number, shard_size, dtype, bar):
                break
        if self.source.position == 0:
            raise ValueError("the dataset is empty: there are no rows to encode")
        if self.source.position != self.writer.manifest.rows + len(self.left_out):
            raise self._changed(
                f"it holds {self.writer.manifest.rows} rows and now the data ends after {self.source.position}"
            )
        if len(self.left_out) == self.source.position:
            raise ValueError(f"none of the {len(self.left_out)} rows can be used; {self.left_out[0].reason}")
        write_left_out(self.writer.folder, self.left_out)
        self.writer.finish()

    def _check_rows(self, number: int, shard_size: int) -> int:
        """Pass over the rows of a finished shard, making sure that it was made from them; returns their number."""
        ids, contents, left_out = read_contents(self.writer.folder / self.writer.manifest.files[number].file)
        start = self.source.position
        if left_out and not self.skip:
            raise ValueError(
                f"cannot resume {str(self.writer.folder)!r}: it leaves out row {start + left_out[0].row} with the id "
                f"{left_out[0].id!r} ({left_out[0].reason}); pass --on-error skip (on_error) or encode into another "
                "folder"
            )
        for first in range(0, len(ids), self._rows_at_once):
            some = slice(first, first + self._rows_at_once)
            self._check_some(ids[some], contents[some])
        self._done(start, len(ids), shard_size, left_out)
        return len(ids)

    def _check_some(self, stored_ids: list[str], contents: list[int]) -> None:
        """Compare the next rows with the ids and digests that are stored of them."""
        first = self.source.position
        ids, rows = self.source.take(len(stored_ids))
        for offset, (before, content) in enumerate(zip(stored_ids, contents, strict=True)):
            row = f"row {first + offset}"
            if ids[offset : offset + 1] != [before]:
                found = f"it is {ids[offset]!r}" if offset < len(ids) else "the data ends there"
                raise self._changed(f"{row} had the id {before!r} and now {found}")
            if row_content(before, rows[offset]) != content:
                raise self._changed(f"{row} with the id {before!r} has another text, image or kept column")

    def _encode_shard(self, number: int, shard_size: int, dtype: str, bar: Any) -> bool:  # noqa: ANN401
        """Encode the next rows into shard `number`; returns whether there were any."""
        start = self.source.position
        all_ids: list[str] = []
        contents: list[int] = []
        items: list[int] = []
        kept: list[dict[str, Any]] = []
        vectors: list[np.ndarray] = []
        left_out: list[LeftOut] = []
        while self.source.position - start < shard_size:
            done = self.source.position - start
            ids, rows = self.source.take(min(self._rows_at_once, shard_size - done))
            if not ids:
                break
            if number == len(self.writer.manifest.files) and self._is_closed:
                raise self._changed(f"it ended after {start} rows, and now the data continues with id {ids[0]!r}")
            embeddings, reasons = self.encoding.encode(ids, rows, bar)
            vectors.append(embeddings)
            contents += map(row_content, ids, rows)
            used = [place for place in range(len(ids)) if place not in reasons]
            all_ids += [ids[place] for place in used]
            items += row_items([ids[place] for place in used], [rows[place] for place in used])
            kept += [kept_values(rows[place], f"item {ids[place]!r}") for place in used]
            left_out += [LeftOut(done + place, ids[place], reasons[place]) for place in sorted(reasons)]
        if self.source.position == start:
            return False
        self.writer.details["parts"] = sorted(self.encoding.parts)
        if self.encoding.has_several:
            self.writer.details[SEVERAL_IMAGES] = True
        matrix = np.concatenate(vectors)
        packed, dimension = pack(matrix, dtype), matrix.shape[1]
        write_embeddings(self.writer, number, all_ids, packed, contents, left_out, kept, items, dimension)
        self._done(start, self.source.position - start, shard_size, left_out)
        return True

    def _done(self, start: int, count: int, shard_size: int, left_out: list[LeftOut]) -> None:
        """Record that a shard holds the `count` rows from `start` on."""
        self.left_out += [row._replace(row=start + row.row) for row in left_out]
        self._is_closed = self.writer.manifest.complete or count < shard_size

    def _changed(self, what: str) -> ValueError:
        return ValueError(
            f"cannot resume {str(self.writer.folder)!r}: {what}; the data has changed, encode it into another folder "
            "or update the store (--sync, update_store)"
        )


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
