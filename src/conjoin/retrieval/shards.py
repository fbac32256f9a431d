"""The rows of each shard of a store: those to encode, and those that are compared with what a shard was made from."""

import itertools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from conjoin.retrieval.compact import pack
from conjoin.retrieval.encode_rows import Row, RowEncoder, RowSource, row_content, row_items
from conjoin.retrieval.kept_rows import kept_values
from conjoin.retrieval.row_table import RowTable
from conjoin.retrieval.store import SEVERAL_IMAGES, STORE, LeftOut, read_contents, shard_content, write_left_out
from conjoin.storage import FolderWriter, StoredFile, is_intact

Chunk = tuple[list[str], list[Row]]
"""Some ids and their rows."""


class EncodedShard(NamedTuple):
    """A shard that was encoded: its tensors, the rows in it, and the details of the store that follow from it."""

    tensors: dict[str, torch.Tensor]
    rows: int
    details: dict[str, Any]


class ShardRows:
    """The shards of a store that are still to be made, each with its rows.

    Iterating gives the number of a shard and an iterator over its rows, which must be read to its end before the next
    shard. Rows of finished shards are passed over without decoding their images, and compared with what the shards
    were made from; those of a damaged shard are given again.

    Args:
        source: All rows.
        folder: Of the store.
        files: The finished shards by number; shards may be added meanwhile.
        shard_size: Rows per shard.
        rows_at_once: How many rows a part of a shard has.
        skip: Whether the store may leave rows out.
        end: How many rows an earlier run counted; None if it did not come to the end.
        rank: Which of the processes of this run this one is; it makes the shards `rank`, `rank + world_size` ...
        world_size: How many they are.
        on_passed: Called with the number of rows of each finished shard.
    """

    def __init__(
        self,
        source: RowSource,
        folder: Path,
        files: Mapping[int, StoredFile],
        shard_size: int,
        rows_at_once: int,
        skip: bool,
        end: int | None = None,
        rank: int = 0,
        world_size: int = 1,
        on_passed: Callable[[int], object] = lambda rows: None,
    ) -> None:
        self.source, self.folder, self.files = source, folder, files
        self.shard_size, self.rows_at_once, self.skip = shard_size, rows_at_once, skip
        self.end, self.rank, self.world_size, self.on_passed = end, rank, world_size, on_passed

    def __iter__(self) -> Iterator[tuple[int, Iterator[Chunk]]]:
        for number in itertools.count():
            start = number * self.shard_size
            if number % self.world_size != self.rank:
                self.source.skip(self.shard_size)
            elif number in self.files and is_intact(self.folder, self.files[number], STORE):
                self.on_passed(self._check_rows(self.folder / self.files[number].file))
            elif first := self._take(min(self.rows_at_once, self.shard_size)):
                yield number, self._parts(first, start + self.shard_size)
            if self.source.position < start + self.shard_size:
                break
        self._check_end()

    def _parts(self, first: Chunk, end: int) -> Iterator[Chunk]:
        chunk: Chunk | None = first
        while chunk:
            yield chunk
            chunk = self._take(min(self.rows_at_once, end - self.source.position))

    def _take(self, count: int) -> Chunk | None:
        """The next rows; None at the end."""
        start = self.source.position
        ids, rows = self.source.take(count)
        if self.end is not None and self.source.position > self.end:
            following = ids[max(self.end - start, 0)]
            raise self._changed(f"it ended after {self.end} rows, and now the data continues with id {following!r}")
        return (ids, rows) if ids else None

    def _check_rows(self, path: Path) -> int:
        """Pass over the rows of a finished shard, making sure that it was made from them; returns their number."""
        ids, contents, left_out = read_contents(path)
        start = self.source.position
        if left_out and not self.skip:
            raise ValueError(
                f"cannot resume {str(self.folder)!r}: it leaves out row {start + left_out[0].row} with the id "
                f"{left_out[0].id!r} ({left_out[0].reason}); pass --on-error skip (on_error) or encode into another "
                "folder"
            )
        for first in range(0, len(ids), self.rows_at_once):
            some = slice(first, first + self.rows_at_once)
            self._check_some(ids[some], contents[some])
        if len(ids) < self.shard_size:
            self.end = start + len(ids)
        if self.end == self.source.position:
            self._take(1)  # there should be none
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

    def _check_end(self) -> None:
        """Make sure that the data is not shorter than it was."""
        total = self.source.position
        if total == 0:
            raise ValueError("the dataset is empty: there are no rows to encode")
        beyond = any(number * self.shard_size >= total for number in self.files)
        if beyond or (self.end is not None and total < self.end):
            held = sum(file.rows for file in self.files.values())
            raise self._changed(f"it holds {held} rows and now the data ends after {total}")

    def _changed(self, what: str) -> ValueError:
        return ValueError(
            f"cannot resume {str(self.folder)!r}: {what}; the data has changed, encode it into another folder "
            "or update the store (--sync, update_store)"
        )


def encode_shard(encoder: RowEncoder, number: int, parts: Iterator[Chunk], dtype: str, bar: Any) -> EncodedShard:  # noqa: ANN401
    """Encode the rows of a shard; the result does not depend on other shards.

    Args:
        encoder: Computes the vectors.
        number: Of the shard.
        parts: Its rows.
        dtype: Of the vectors to store.
        bar: A progress bar of rows.

    Raises:
        ValueError: A row cannot be used, and the encoder does not skip such rows.
    """
    encoder.parts, encoder.has_several = set(), False
    used_ids: list[str] = []
    contents: list[int] = []
    items: list[int] = []
    kept: list[dict[str, Any]] = []
    vectors: list[np.ndarray] = []
    left_out: list[LeftOut] = []
    for ids, rows in parts:
        embeddings, reasons = encoder.encode(ids, rows, bar)
        used = [place for place in range(len(ids)) if place not in reasons]
        left_out += [LeftOut(len(contents) + place, ids[place], reasons[place]) for place in sorted(reasons)]
        vectors.append(embeddings)
        contents += map(row_content, ids, rows)
        used_ids += [ids[place] for place in used]
        items += row_items([ids[place] for place in used], [rows[place] for place in used])
        kept += [kept_values(rows[place], f"item {ids[place]!r}") for place in used]
    matrix = np.concatenate(vectors)
    tensors, details = shard_content(
        number, used_ids, pack(matrix, dtype), contents, left_out, kept, items, matrix.shape[1]
    )
    details["parts"] = sorted(encoder.parts)
    if encoder.has_several:
        details[SEVERAL_IMAGES] = True
    return EncodedShard(tensors, len(used_ids), details)


def finish_store(writer: FolderWriter, rows: int, check_ids: bool) -> None:
    """Mark a store as complete, after all shards are written.

    Args:
        writer: Of the store.
        rows: How many rows the data has.
        check_ids: Whether to make sure that no id is in several shards.

    Raises:
        ValueError: A shard is missing, an id occurs twice, or none of the rows can be used.
    """
    shard_size, counts = writer.manifest.key["shard_size"], counts_left_out(writer)
    for number in range(-(-rows // shard_size)):
        expected = min(shard_size, rows - number * shard_size)
        found = writer.files[number].rows + counts.get(number, 0) if number in writer.files else 0
        if found != expected:
            raise ValueError(
                f"shard {number} of {str(writer.folder)!r} has {found} rows, expected {expected}; run the same again"
            )
    if check_ids:
        seen = RowTable()
        for number, file in sorted(writer.files.items()):
            _check_new(read_contents(writer.folder / file.file)[0], number * shard_size, seen)
    left_out = read_left_out(writer)
    if len(left_out) == rows:
        raise ValueError(f"none of the {rows} rows can be used; {left_out[0].reason}")
    write_left_out(writer.folder, left_out)
    writer.finish()


def read_left_out(writer: FolderWriter) -> list[LeftOut]:
    """The rows that the shards of a store leave out, in order."""
    found: list[LeftOut] = []
    for number in sorted(counts_left_out(writer)):
        start = number * writer.manifest.key["shard_size"]
        _, _, rows = read_contents(writer.folder / writer.files[number].file)
        found += [row._replace(row=start + row.row) for row in rows]
    return found


def end_of(writer: FolderWriter) -> int | None:
    """How many rows the data had when a shard was written that is not full; None if there is no such shard."""
    counts, shard_size = counts_left_out(writer), writer.manifest.key["shard_size"]
    sizes = {number: file.rows + counts.get(number, 0) for number, file in writer.files.items()}
    if writer.manifest.complete:
        return sum(sizes.values())
    ends = [number * shard_size + size for number, size in sizes.items() if size < shard_size]
    return min(ends, default=None)


def counts_left_out(writer: FolderWriter) -> dict[int, int]:
    """How many rows each shard leaves out, of those that leave some out."""
    return {int(number): count for number, count in writer.manifest.details.get("left_out", {}).items()}


def _check_new(ids: list[str], start: int, seen: RowTable) -> None:
    for place, id_ in enumerate(ids):
        if not seen.add(id_):
            raise ValueError(f"row {start + place}: the id {id_!r} occurs twice; ids must be unique")
