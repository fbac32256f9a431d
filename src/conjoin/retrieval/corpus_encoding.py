"""From rows to an embedding store, resumable at any point.

Rows are cut into shards of fixed size and every shard into batches on its own, so what a shard holds does not depend
on where an earlier run stopped: interrupted and resumed, a store ends with the bytes of an uninterrupted run.
"""

import hashlib
import itertools
import logging
from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
import transformers
from tqdm.auto import tqdm

from conjoin import __version__
from conjoin.data.pairs import undecoded
from conjoin.retrieval.embedding_store import (
    MANIFEST,
    EmbeddingStore,
    Manifest,
    Shard,
    read_shard,
    shard_is_intact,
    write_shard,
)
from conjoin.retrieval.encoder import ItemEncoder

logger = logging.getLogger(__name__)

Row = Mapping[str, Any]
_DTYPES = ("float32", "float16")
_BATCHES_AT_ONCE = 16


def encode_corpus(
    rows: Iterable[Row],
    encoder: ItemEncoder,
    directory: str | Path,
    *,
    shard_size: int = 4096,
    dtype: str = "float32",
    show_progress: bool = False,
) -> EmbeddingStore:
    """Encode rows into a store; after an interruption, the same call again goes on where it stopped.

    Finished shards are verified by checksum and skipped, without decoding their images; a damaged one is made again.

    Args:
        rows: Mappings with a unique `"id"` and `"image"` and/or `"text"` (absent or `None`: the row has none); a
            `datasets` dataset, streaming or not, or any iterable that gives the same rows each time.
        encoder: Computes the vectors. The same batch size must be used on resuming for equal bytes.
        directory: The store; made if needed.
        shard_size: Rows per file.
        dtype: Type of the stored numbers, `"float32"` or `"float16"`.
        show_progress: Show rows done and per second.

    Raises:
        ValueError: No rows, a row without id or content, an id met twice, an unreadable item, or a store that was
            begun with other settings, another model or other data.
        OSError: The disk is full or fails; the message says how many rows are safe.
    """
    if shard_size < 1:
        raise ValueError(f"shard_size must be at least 1, got {shard_size}")
    if dtype not in _DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}; expected one of {list(_DTYPES)}")
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    writer = _StoreWriter(directory, encoder, shard_size, dtype)
    source = _RowSource(rows)
    with tqdm(total=source.count, unit="row", desc="encoding", disable=not show_progress) as bar:
        for number in itertools.count():
            recorded = writer.recorded(number)
            if recorded is not None:
                writer.check_ids(recorded, source)
                bar.update(recorded.rows)
            elif not writer.encode_shard(number, source, bar):
                break
    return writer.finish(source)


class _RowSource:
    """Rows in order, once; where only their ids are wanted, images are not even read if that can be helped."""

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
            self._id_column = self._dataset.select_columns(["id"])
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

    def take_ids(self, count: int) -> list[str]:
        """The ids of the next `count` rows, fewer at the end."""
        if self._dataset is None:
            return [self._next_id(row) for row in itertools.islice(self._iterator, count)]
        return [self._next_id({"id": id_}) for id_ in self._id_column[self.position : self.position + count]["id"]]

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


class _StoreWriter:
    """The state of a store in the making: what is recorded of it and what is still to be written."""

    def __init__(self, directory: Path, encoder: ItemEncoder, shard_size: int, dtype: str) -> None:
        self.directory = directory
        self.encoder = encoder
        self.manifest = Manifest(
            model=encoder.name,
            fingerprint=encoder.fingerprint,
            precision="full" if encoder.dtype is None else str(encoder.dtype).removeprefix("torch."),
            dimension=0,  # known after the first shard
            dtype=dtype,
            shard_size=shard_size,
            complete=False,
            shards=(),
            versions={
                "conjoin": __version__,
                "torch": str(torch.__version__),
                "transformers": transformers.__version__,
            },
        )
        if (directory / MANIFEST).exists():
            begun = Manifest.load(directory)
            self._check_settings(begun)
            self.manifest = replace(
                self.manifest, dimension=begun.dimension, shards=begun.shards, complete=begun.complete
            )

    def _check_settings(self, begun: Manifest) -> None:
        now = self.manifest
        settings: dict[str, tuple[object, object]] = {
            "model": (begun.identity, now.identity),
            "precision": (begun.precision, now.precision),
            "dtype": (begun.dtype, now.dtype),
            "shard_size": (begun.shard_size, now.shard_size),
        }
        if begun.fingerprint == now.fingerprint:
            del settings["model"]  # the same model may have moved
        for name, (before, wanted) in settings.items():
            if before != wanted:
                raise ValueError(
                    f"cannot resume {str(self.directory)!r}: it was begun with {name} {before}, not {wanted}; "
                    f"use the same {name} or another directory"
                )

    def recorded(self, number: int) -> Shard | None:
        """Shard `number` if it is finished and undamaged."""
        if number >= len(self.manifest.shards):
            return None
        shard = self.manifest.shards[number]
        if shard_is_intact(self.directory, shard):
            return shard
        logger.warning("%s in %s is missing or damaged: encoding its rows again", shard.file, self.directory)
        return None

    def check_ids(self, shard: Shard, source: _RowSource) -> None:
        """Pass over the rows of a finished shard, making sure that they are the ones it holds."""
        stored, _ = read_shard(self.directory / shard.file, shard.rows, self.manifest.dimension)
        first = source.position
        ids = source.take_ids(shard.rows)
        for offset, (before, now) in enumerate(itertools.zip_longest(stored, ids)):
            if before != now:
                found = "the data ends there" if now is None else f"it is {now!r}"
                raise ValueError(
                    f"cannot resume {str(self.directory)!r}: row {first + offset} had the id {before!r} and now "
                    f"{found}; the data has changed, encode it into another directory"
                )

    def encode_shard(self, number: int, source: _RowSource, bar: tqdm) -> bool:
        """Encode the next rows into shard `number`; returns whether there were any."""
        all_ids: list[str] = []
        parts: list[np.ndarray] = []
        while len(all_ids) < self.manifest.shard_size:
            at_once = min(_BATCHES_AT_ONCE * self.encoder.batch_size, self.manifest.shard_size - len(all_ids))
            ids, rows = source.take(at_once)
            if not ids:
                break
            if number == len(self.manifest.shards) and self._is_closed():
                raise ValueError(
                    f"cannot resume {str(self.directory)!r}: it ended after {self.manifest.count} rows and now the "
                    f"data goes on with the id {ids[0]!r}; the data has changed, encode it into another directory"
                )
            items = [_item(id_, row) for id_, row in zip(ids, rows, strict=True)]
            parts.append(self.encoder.encode(items, ids, on_batch=bar.update))
            all_ids += ids
        if all_ids:
            self._write(number, all_ids, np.concatenate(parts))
        return bool(all_ids)

    def _is_closed(self) -> bool:
        """Whether an earlier run saw the end of the data."""
        shards = self.manifest.shards
        return self.manifest.complete or bool(shards and shards[-1].rows < self.manifest.shard_size)

    def _write(self, number: int, ids: list[str], embeddings: np.ndarray) -> None:
        path = self.directory / f"shard-{number:05d}.safetensors"
        try:
            shard = write_shard(path, ids, embeddings.astype(self.manifest.dtype))
            manifest = replace(self.manifest, dimension=embeddings.shape[1]).with_shard(number, shard)
            manifest.save(self.directory)
        except OSError as error:
            done = f"{self.manifest.count} rows in {len(self.manifest.shards)} shards are safe"
            raise OSError(
                error.errno,
                f"{error.strerror or error} while writing {str(path)!r}: {done}; "
                "make room and run the same again, it resumes after them",
            ) from error
        self.manifest = manifest

    def finish(self, source: _RowSource) -> EmbeddingStore:
        """Mark the store as complete and open it."""
        if source.position == 0:
            raise ValueError("the dataset is empty: there are no rows to encode")
        if source.position != self.manifest.count:
            raise ValueError(
                f"cannot resume {str(self.directory)!r}: it holds {self.manifest.count} rows, the data ends after "
                f"{source.position}; the data has changed, encode it into another directory"
            )
        if not self.manifest.complete:
            self.manifest = replace(self.manifest, complete=True)
            self.manifest.save(self.directory)
        return EmbeddingStore.open(self.directory)


def _item(id_: str, row: Row) -> dict[str, Any]:
    parts = {key: row[key] for key in ("image", "text") if row.get(key) is not None}
    if not parts:
        raise ValueError(f'item {id_!r} has neither "image" nor "text"; its row has the keys {list(row)}')
    return parts


def _require_id(columns: list[str]) -> None:
    if "id" not in columns:
        raise ValueError(f'the dataset has no column "id", it has {columns}')
