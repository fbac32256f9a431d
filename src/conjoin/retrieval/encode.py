"""From rows to an embedding store, resumable at any point.

Rows are cut into shards of fixed size and every shard into batches on its own, so what a shard holds does not depend
on where an earlier run stopped: interrupted and resumed, a store ends with the bytes of an uninterrupted run.
"""

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sized
from pathlib import Path
from typing import Any, Literal

import datasets
import numpy as np
import torch
import transformers

from conjoin import __version__
from conjoin.data.image_columns import undecoded
from conjoin.data.interleaved import InterleavingError, row_item
from conjoin.processing.input_types import count_images
from conjoin.progress import progress
from conjoin.retrieval.encoder import ItemEncoder
from conjoin.retrieval.kept_rows import kept_values
from conjoin.retrieval.store import (
    SEVERAL_IMAGES,
    STORE,
    EmbeddingStore,
    LeftOut,
    read_contents,
    write_embeddings,
    write_left_out,
)
from conjoin.storage import FolderWriter, row_digest

Row = Mapping[str, Any]
_DTYPES = ("float32", "float16")
_BATCHES_AT_ONCE = 16


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
        dtype: Type of the stored numbers, `"float32"` or `"float16"`.
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
    if dtype not in _DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}; expected one of {list(_DTYPES)}")
    key = {
        "fingerprint": encoder.fingerprint,
        "processor": encoder.processing,
        "precision": "full" if encoder.dtype is None else str(encoder.dtype).removeprefix("torch."),
        "dtype": dtype,
        "shard_size": shard_size,
        "instruction": instruction,
        "source": dict(source or {}),
    }
    if encoder.input_type != "seq":  # stores of earlier versions have no other
        key["input_type"] = encoder.input_type
    found = _RowSource(rows)
    with (
        FolderWriter(directory, STORE, key) as writer,
        progress(total=found.count, unit="row", desc="encoding", show=show_progress) as bar,
    ):
        writer.details |= {"model": encoder.name, "versions": _versions()}
        _Encoding(writer, found, encoder, instruction, skip=on_error == "skip").run(shard_size, dtype, bar)
    return EmbeddingStore(directory)


class _RowSource:
    """Rows in order, once; their images stay undecoded where that is possible."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self._dataset: datasets.Dataset | None = None
        self._iterator: Iterator[Row] = iter(())
        self._seen: set[bytes] = set()
        self.position = 0
        self.count: int | None = None
        if isinstance(rows, Sized):
            self.count = len(rows)
        if isinstance(rows, datasets.Dataset):
            _require_id(rows.column_names)
            self._dataset = undecoded(rows)
        elif isinstance(rows, datasets.IterableDataset):
            _require_id(rows.column_names or ["id"])
            self._iterator = iter(rows.decode(False) if rows.features else rows)
        else:
            self._iterator = iter(rows)

    def take(self, count: int) -> tuple[list[str], list[Row]]:
        """The next `count` rows, fewer at the end, and their ids."""
        if self._dataset is None:
            rows = list(itertools.islice(self._iterator, count))
        else:
            columns = self._dataset[self.position : self.position + count]
            rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        return [self._next_id(row) for row in rows], rows

    def _next_id(self, row: Row) -> str:
        """Check and count a row."""
        name = f"row {self.position}"
        if not isinstance(row, Mapping):
            raise ValueError(f'{name}: expected a mapping with "id" and "image" and/or "text", got {row!r:.80}')
        id_ = row.get("id")
        if isinstance(id_, bool) or not isinstance(id_, str | int) or id_ == "":
            raise ValueError(f"{name}: the id must be a string or an integer, got {id_!r:.80} (keys {list(row)})")
        digest = hashlib.blake2b(str(id_).encode("utf-8", "surrogatepass"), digest_size=16).digest()
        if digest in self._seen:
            raise ValueError(f"{name}: the id {str(id_)!r} occurs twice; ids must be unique")
        self._seen.add(digest)
        self.position += 1
        return str(id_)


class _Encoding:
    """A store in the making: encodes the rows that no finished shard holds, and checks the rows of the others."""

    def __init__(
        self, writer: FolderWriter, source: _RowSource, encoder: ItemEncoder, instruction: str | None, skip: bool
    ) -> None:
        self.writer, self.source, self.encoder, self.instruction = writer, source, encoder, instruction
        self.skip = skip
        self.left_out: list[LeftOut] = []
        self._is_closed = writer.manifest.complete  # whether an earlier run saw the end of the data
        self.parts: set[str] = set(writer.details.get("parts", ()))
        self.has_several = bool(writer.details.get(SEVERAL_IMAGES))
        self._rows_at_once = _BATCHES_AT_ONCE * encoder.batch_size

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
            if _content(before, rows[offset]) != content:
                raise self._changed(f"{row} with the id {before!r} has another text, image or kept column")

    def _encode_shard(self, number: int, shard_size: int, dtype: str, bar: Any) -> bool:  # noqa: ANN401
        """Encode the next rows into shard `number`; returns whether there were any."""
        start = self.source.position
        all_ids: list[str] = []
        contents: list[int] = []
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
            embeddings, reasons = self._encode_rows(ids, rows, bar)
            vectors.append(embeddings)
            contents += map(_content, ids, rows)
            used = [(id_, row) for place, (id_, row) in enumerate(zip(ids, rows, strict=True)) if place not in reasons]
            all_ids += [id_ for id_, _ in used]
            kept += [kept_values(row, f"item {id_!r}") for id_, row in used]
            left_out += [LeftOut(done + place, ids[place], reasons[place]) for place in sorted(reasons)]
        if self.source.position == start:
            return False
        self.writer.details["parts"] = sorted(self.parts)
        if self.has_several:
            self.writer.details[SEVERAL_IMAGES] = True
        matrix = np.concatenate(vectors).astype(dtype)
        write_embeddings(self.writer, number, all_ids, matrix, contents, left_out, kept)
        self._done(start, self.source.position - start, shard_size, left_out)
        return True

    def _encode_rows(self, ids: list[str], rows: list[Row], bar: Any) -> tuple[np.ndarray, dict[int, str]]:  # noqa: ANN401
        """Encode rows; returns the vectors `(n, D)` of those that can be used, and why the others cannot, by place."""
        found = [_input(id_, row) for id_, row in zip(ids, rows, strict=True)]
        reasons = {place: problem for place, (_, problem) in enumerate(found) if problem is not None}
        if reasons and not self.skip:
            raise ValueError(next(iter(reasons.values())))
        places = [place for place in range(len(rows)) if place not in reasons]
        bar.update(len(reasons))
        if not places:
            return np.empty((0, self.encoder.dimension), dtype=np.float32), reasons
        items = [_item(ids[place], rows[place]) for place in places]
        names = [ids[place] for place in places]
        inputs = [found[place][0] for place in places]

        def leave_out(position: int, error: Exception) -> None:
            reasons[places[position]] = str(error)

        options: dict[str, Any] = {"on_unusable": leave_out} if self.skip else {}
        vectors = self.encoder.encode(inputs, names, on_batch=bar.update, instruction=self.instruction, **options)
        used = [position for position, place in enumerate(places) if place not in reasons]
        self.parts.update(*(items[position] for position in used))
        self.has_several |= any(count_images(inputs[position]) > 1 for position in used)
        return vectors[used], reasons

    def _done(self, start: int, count: int, shard_size: int, left_out: list[LeftOut]) -> None:
        """Record that a shard holds the `count` rows from `start` on."""
        self.left_out += [row._replace(row=start + row.row) for row in left_out]
        self._is_closed = self.writer.manifest.complete or count < shard_size

    def _changed(self, what: str) -> ValueError:
        return ValueError(
            f"cannot resume {str(self.writer.folder)!r}: {what}; the data has changed, encode it into another folder"
        )


def _content(id_: str, row: Row) -> int:
    """The digest of what is encoded and kept of a row, or of why nothing is."""
    if row.get("problem") is not None:
        return row_digest({"problem": row["problem"]})
    return row_digest(_item(id_, row) | ({"kept": row["kept"]} if row.get("kept") else {}))


def _item(id_: str, row: Row) -> dict[str, Any]:
    parts = {key: row[key] for key in ("image", "text") if row.get(key) is not None}
    if not parts:
        raise ValueError(f'item {id_!r} has neither "image" nor "text"; its row has the keys {list(row)}')
    return parts


def _input(id_: str, row: Row) -> tuple[Any, str | None]:
    """The item to encode of a row, and why there is none."""
    if row.get("problem") is not None:
        return None, str(row["problem"])
    try:
        return row_item(_item(id_, row), f"item {id_!r}"), None
    except InterleavingError as error:
        return None, str(error)


def _require_id(columns: list[str]) -> None:
    if "id" not in columns:
        raise ValueError(f'the dataset has no column "id", it has {columns}')


def _versions() -> dict[str, str]:
    return {"conjoin": __version__, "torch": str(torch.__version__), "transformers": transformers.__version__}
