"""From rows to an embedding store, resumable at any point.

Rows are cut into shards of fixed size and every shard into batches on its own, so what a shard holds does not depend
on where an earlier run stopped: interrupted and resumed, a store ends with the bytes of an uninterrupted run.
"""

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sized
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
import transformers

from conjoin import __version__
from conjoin.data.image_columns import undecoded
from conjoin.progress import progress
from conjoin.retrieval.encoder import ItemEncoder
from conjoin.retrieval.store import STORE, EmbeddingStore, read_contents, write_embeddings
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
    show_progress: bool = False,
) -> EmbeddingStore:
    """Encode rows into a store; after an interruption, the same call resumes.

    Finished shards are skipped without decoding their images. Their checksums are compared, and the ids, texts and
    undecoded images of their rows. A damaged shard is encoded again.

    Args:
        rows: Mappings with a unique `"id"` and `"image"` and/or `"text"` (absent or `None`: the row has none); a
            `datasets` dataset, streaming or not, or any iterable that gives the same rows each time.
        encoder: Computes the vectors. The same batch size must be used on resuming for equal bytes.
        directory: The store; made if needed.
        instruction: Given to the model with every row.
        shard_size: Rows per file.
        dtype: Type of the stored numbers, `"float32"` or `"float16"`.
        source: What else the store is made from, such as the data set and its columns (plain values, as JSON holds
            them); recorded, and compared on resuming.
        show_progress: Show rows done and per second.

    Raises:
        ValueError: No rows, a row without id or content, an id met twice, an unreadable item, a store that was begun
            with other settings, another model or other data, or that another process writes.
        OSError: The disk is full or fails; the message says how many rows are safe.
    """
    if shard_size < 1:
        raise ValueError(f"shard_size must be at least 1, got {shard_size}")
    if dtype not in _DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}; expected one of {list(_DTYPES)}")
    key = {
        "fingerprint": encoder.fingerprint,
        "precision": "full" if encoder.dtype is None else str(encoder.dtype).removeprefix("torch."),
        "dtype": dtype,
        "shard_size": shard_size,
        "instruction": instruction,
        "source": dict(source or {}),
    }
    found = _RowSource(rows)
    with (
        FolderWriter(directory, STORE, key) as writer,
        progress(total=found.count, unit="row", desc="encoding", show=show_progress) as bar,
    ):
        writer.details |= {"model": encoder.name, "versions": _versions()}
        _Encoding(writer, found, encoder, instruction).run(shard_size, dtype, bar)
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
        self, writer: FolderWriter, source: _RowSource, encoder: ItemEncoder, instruction: str | None
    ) -> None:
        self.writer, self.source, self.encoder, self.instruction = writer, source, encoder, instruction
        self.parts: set[str] = set(writer.details.get("parts", ()))
        self._rows_at_once = _BATCHES_AT_ONCE * encoder.batch_size

    def run(self, shard_size: int, dtype: str, bar: Any) -> None:  # noqa: ANN401 - a progress bar
        """Write all shards that are missing, and mark the store as complete."""
        for number in itertools.count():
            if self.writer.has(number):
                bar.update(self._check_rows(number))
            elif not self._encode_shard(number, shard_size, dtype, bar):
                break
        if self.source.position == 0:
            raise ValueError("the dataset is empty: there are no rows to encode")
        if self.source.position != self.writer.manifest.rows:
            raise self._changed(
                f"it holds {self.writer.manifest.rows} rows and now the data ends after {self.source.position}"
            )
        self.writer.finish()

    def _check_rows(self, number: int) -> int:
        """Pass over the rows of a finished shard, making sure that it was made from them; returns their number."""
        file = self.writer.manifest.files[number]
        stored_ids, contents = read_contents(self.writer.folder / file.file)
        while stored_ids:
            first, at_once = self.source.position, min(len(stored_ids), self._rows_at_once)
            ids, rows = self.source.take(at_once)
            for offset, before in enumerate(stored_ids[:at_once]):
                row = f"row {first + offset}"
                if ids[offset : offset + 1] != [before]:
                    found = f"it is {ids[offset]!r}" if offset < len(ids) else "the data ends there"
                    raise self._changed(f"{row} had the id {before!r} and now {found}")
                if row_digest(_item(before, rows[offset])) != contents[offset]:
                    raise self._changed(f"{row} with the id {before!r} has another text or image than before")
            stored_ids, contents = stored_ids[at_once:], contents[at_once:]
        return file.rows

    def _encode_shard(self, number: int, shard_size: int, dtype: str, bar: Any) -> bool:  # noqa: ANN401
        """Encode the next rows into shard `number`; returns whether there were any."""
        all_ids: list[str] = []
        contents: list[int] = []
        vectors: list[np.ndarray] = []
        while len(all_ids) < shard_size:
            ids, rows = self.source.take(min(self._rows_at_once, shard_size - len(all_ids)))
            if not ids:
                break
            if number == len(self.writer.manifest.files) and self._is_closed(shard_size):
                raise self._changed(
                    f"it ended after {self.writer.manifest.rows} rows, and now the data continues with id {ids[0]!r}"
                )
            items = [_item(id_, row) for id_, row in zip(ids, rows, strict=True)]
            self.parts.update(*items)
            vectors.append(self.encoder.encode(items, ids, on_batch=bar.update, instruction=self.instruction))
            contents += map(row_digest, items)
            all_ids += ids
        if all_ids:
            self.writer.details["parts"] = sorted(self.parts)
            write_embeddings(self.writer, number, all_ids, np.concatenate(vectors).astype(dtype), contents)
        return bool(all_ids)

    def _is_closed(self, shard_size: int) -> bool:
        """Whether an earlier run saw the end of the data."""
        manifest = self.writer.manifest
        return manifest.complete or bool(manifest.files and manifest.files[-1].rows < shard_size)

    def _changed(self, what: str) -> ValueError:
        return ValueError(
            f"cannot resume {str(self.writer.folder)!r}: {what}; the data has changed, encode it into another folder"
        )


def _item(id_: str, row: Row) -> dict[str, Any]:
    parts = {key: row[key] for key in ("image", "text") if row.get(key) is not None}
    if not parts:
        raise ValueError(f'item {id_!r} has neither "image" nor "text"; its row has the keys {list(row)}')
    return parts


def _require_id(columns: list[str]) -> None:
    if "id" not in columns:
        raise ValueError(f'the dataset has no column "id", it has {columns}')


def _versions() -> dict[str, str]:
    return {"conjoin": __version__, "torch": str(torch.__version__), "transformers": transformers.__version__}
