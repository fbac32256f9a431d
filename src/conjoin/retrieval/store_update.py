"""Updating a store: rows are added, replaced and removed while others read it.

Shards never change. New and changed rows go into new shards, removed ones are listed in a file beside them, and one
new manifest makes both visible. Shards that are less than half full are merged when there are many of them.
"""

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors import safe_open
from safetensors.numpy import save

from conjoin.progress import progress
from conjoin.retrieval.compact import pack
from conjoin.retrieval.encode import store_key, versions
from conjoin.retrieval.encode_rows import Row, RowEncoder, RowSource, row_content, row_items
from conjoin.retrieval.encoder import ItemEncoder
from conjoin.retrieval.kept_rows import kept_values
from conjoin.retrieval.row_table import RowPlace, RowTable
from conjoin.retrieval.store import (
    KEPT,
    REMOVED,
    SEVERAL_IMAGES,
    STORE,
    UPDATES,
    LeftOut,
    read_removed,
    read_row_digests,
    shard_tensors,
    write_left_out,
)
from conjoin.storage import DamagedError, FolderUpdate, StoredFile, check_file, check_key

logger = logging.getLogger(__name__)

_MOST_SPARSE = 8
"""How many shards may be less than half full before they are merged."""
_DATA = ("data", "keep")
"""What an update may read otherwise than the store did so far: the entries of `source`."""


@dataclass
class StoreChanges:
    """How many rows an update added, replaced, removed, left as they were, and left out as unusable.

    `encoded` counts the rows that were encoded: a replaced row whose image and text are the same keeps its vector.
    """

    added: int = 0
    replaced: int = 0
    removed: int = 0
    unchanged: int = 0
    left_out: int = 0
    encoded: int = 0

    @property
    def any(self) -> bool:
        """Whether the store is another one now."""
        return bool(self.added or self.replaced or self.removed)


def update_store(
    rows: Iterable[Row],
    encoder: ItemEncoder,
    directory: str | Path,
    *,
    sync: bool = False,
    instruction: str | None = None,
    source: Mapping[str, Any] | None = None,
    on_error: Literal["raise", "skip"] = "raise",
    show_progress: bool = False,
) -> StoreChanges:
    """Add rows to a store that `encode_corpus` wrote, and replace those that changed.

    A row changed if its text, its kept columns, or its image file (path, size, time) differ. It is encoded again only
    if the text or the bytes of the image differ. Rows that are new or changed come last in the store.

    Readers see the store as it was until all rows are done. After an interruption it is as it was, and the same call
    resumes with the shards that are finished.

    Args:
        rows: As for `encode_corpus`; all rows of the source with `sync`, else any of them.
        encoder: The model that made the store.
        directory: The store.
        sync: Remove the rows of the store that are not among `rows`. A damaged shard is made again then.
        instruction: As the store was made with.
        source: As for `encode_corpus`; `"data"` and `"keep"` may differ from those so far.
        on_error: As for `encode_corpus`. A row that is left out is removed; `left_out.jsonl` lists those of this call.
        show_progress: Show rows done and per second.

    Raises:
        FileNotFoundError: There is no store.
        ValueError: No rows, an unusable row, an id met twice, a store of another model or other settings, one that is
            unfinished (without `sync`), or one that another process writes; the store is as it was.
        OSError: The disk is full or fails; the store is as it was.
    """
    if on_error not in ("raise", "skip"):
        raise ValueError(f"unknown on_error {on_error!r}; expected 'raise' or 'skip'")
    found = RowSource(rows)
    with (
        FolderUpdate(directory, STORE) as folder,
        progress(total=found.count, unit="row", desc="updating", show=show_progress) as bar,
    ):
        old = folder.manifest.key
        key = store_key(encoder, old["dtype"], old["shard_size"], instruction, source)
        check_key(_compared(old), _compared(key), folder.folder, STORE)
        update = _Update(folder, repair=sync)
        left_out = update.take(found, RowEncoder(encoder, instruction, on_error == "skip"), bar)
        if sync:
            update.remove(update.base.unmarked())
        update.finish(key, {"model": encoder.name, "versions": versions()}, left_out)
    return update.changes


def remove_rows(directory: str | Path, ids: Collection[str]) -> None:
    """Remove rows from a store. An update that was interrupted does not resume then, but starts over.

    Args:
        directory: The store.
        ids: Of the rows.

    Raises:
        FileNotFoundError: There is no store.
        ValueError: An id is not in the store, it is unfinished, or another process writes into it; the store is as it
            was.
    """
    with FolderUpdate(directory, STORE) as folder:
        update = _Update(folder)
        places = {id_: update.base.get(id_) for id_ in ids}
        if missing := [id_ for id_, place in places.items() if place is None]:
            raise ValueError(f"the store {str(directory)!r} has no row {missing[0]!r}; nothing was removed")
        update.remove((place.shard, place.place) for place in places.values() if place is not None)
        update.finish(folder.manifest.key, {}, None)


class _NewRow(NamedTuple):
    """A row of a shard in the making."""

    id: str
    vector: np.ndarray
    content: int
    item: int
    kept: dict[str, Any]


class _Update:
    """The state of a store that is updated: its shards, old and new, and which of their rows are removed."""

    def __init__(self, folder: FolderUpdate, repair: bool = False) -> None:
        if not (repair or folder.manifest.complete):
            raise ValueError(
                f"the store in {str(folder.folder)!r} is unfinished ({folder.manifest.rows} rows so far); "
                f"{STORE.remedy} again, it resumes"
            )
        self.folder, self.changes = folder, StoreChanges()
        self._is_damaged = False
        self.details = dict(folder.manifest.details)
        self.base, self._pending = RowTable(), RowTable()
        self._files: list[StoredFile] = []
        self._removed: list[list[int]] = []
        self._dropped: set[int] = set()
        self._buffer: list[_NewRow] = []
        self._size: int = folder.manifest.key["shard_size"]
        self._dtype: str = folder.manifest.key["dtype"]
        self._open = lru_cache(maxsize=64)(self._open_shard)
        removed = read_removed(folder.folder, folder.manifest)
        for file in folder.manifest.files:
            places = removed.get(file.file, np.empty(0, dtype=np.int64)).tolist()
            try:
                self._add_file(replace(file, rows=file.rows + len(places)), places, self.base)
            except DamagedError as error:
                if not repair:
                    raise DamagedError(f"{error} with --sync (sync) and all the data") from error
                logger.warning("%s; encoding its rows again", error)
                self._is_damaged = True
        for file in folder.pending:
            self._add_file(file, [], self._pending)

    def _add_file(self, file: StoredFile, removed: list[int], table: RowTable) -> None:
        shard = len(self._files)
        ids, contents, items = read_row_digests(check_file(self.folder.folder, file, STORE))
        if table is self._pending:  # an update that stopped earlier may have written the same row
            for old in filter(None, map(table.get, ids)):
                self._removed[old.shard].append(old.place)
        gone = set(removed)
        triples = enumerate(zip(ids, contents.tolist(), items.tolist(), strict=True))
        table.put((id_, RowPlace(shard, place, *row)) for place, (id_, *row) in triples if place not in gone)
        self._files.append(file)
        self._removed.append(removed)

    def take(self, source: RowSource, encoder: RowEncoder, bar: Any) -> list[LeftOut]:  # noqa: ANN401 - a progress bar
        """Add the rows of a source, or replace the old ones; returns those that cannot be used."""
        left_out: list[LeftOut] = []
        encoder.parts |= set(self.details.get("parts", ()))
        encoder.has_several = bool(self.details.get(SEVERAL_IMAGES))
        while True:
            start = source.position
            ids, rows = source.take(encoder.rows_at_once)
            if not ids:
                break
            left_out += [row._replace(row=start + row.row) for row in self._take_some(ids, rows, encoder, bar)]
        if source.position == 0:
            raise ValueError("the data is empty: the store stays as it is")
        self._flush()
        self.details["parts"] = sorted(encoder.parts)
        if encoder.has_several:
            self.details[SEVERAL_IMAGES] = True
        self.changes.left_out = len(left_out)
        return left_out

    def _take_some(self, ids: list[str], rows: list[Row], encoder: RowEncoder, bar: Any) -> list[LeftOut]:  # noqa: ANN401
        contents = list(map(row_content, ids, rows))
        pending = [
            place for place, row in enumerate(rows) if not self._is_known(ids[place], row, contents[place], encoder)
        ]
        bar.update(len(ids) - len(pending))
        usable = [place for place in pending if rows[place].get("problem") is None]
        items = dict(zip(usable, row_items([ids[p] for p in usable], [rows[p] for p in usable]), strict=True))
        known = {place: self._known_vector(ids[place], items[place]) for place in usable}
        vectors = {place: vector for place, vector in known.items() if vector is not None}
        for place in vectors:
            encoder.note(ids[place], rows[place])
        bar.update(len(vectors))
        unknown = [place for place in pending if place not in vectors]
        reasons: dict[int, str] = {}
        if unknown:
            encoded, reasons = encoder.encode([ids[p] for p in unknown], [rows[p] for p in unknown], bar)
            used = [place for number, place in enumerate(unknown) if number not in reasons]
            self.changes.encoded += len(used)
            vectors |= dict(zip(used, pack(encoded, self._dtype), strict=True))
        for place in pending:
            is_replaced = self._remove_old(ids[place])
            if place in vectors:
                self._count(is_replaced)
                kept = kept_values(rows[place], f"item {ids[place]!r}")
                self._append(_NewRow(ids[place], vectors[place], contents[place], items[place], kept))
            else:
                self.changes.removed += is_replaced
        return [LeftOut(unknown[number], ids[unknown[number]], reasons[number]) for number in sorted(reasons)]

    def _is_known(self, id_: str, row: Row, content: int, encoder: RowEncoder) -> bool:
        """Whether the store, or a shard of an update that did not end, has a row; marks it."""
        old = self.base.get(id_)
        if old is not None and old.content == content:
            self.base.mark(id_)
            self.changes.unchanged += 1
            return True
        new = self._pending.get(id_)
        if new is None or new.content != content:
            return False
        self._pending.mark(id_)
        encoder.note(id_, row)
        self._count(self._remove_old(id_))
        return True

    def _known_vector(self, id_: str, item: int) -> np.ndarray | None:
        """The vector of a row whose kept columns alone are others now, or whose image was moved."""
        for place in (self.base.get(id_), self._pending.get(id_)):
            if place is not None and place.item == item:
                vector: torch.Tensor = self._open(place.shard).get_slice("embeddings")[place.place]
                return vector.numpy()
        return None

    def _remove_old(self, id_: str) -> bool:
        """Remove the row that the store has under an id, if any; returns whether there is one."""
        old = self.base.get(id_)
        if old is None:
            return False
        self.base.mark(id_)
        self._removed[old.shard].append(old.place)
        return True

    def _count(self, is_replaced: bool) -> None:
        self.changes.replaced += is_replaced
        self.changes.added += not is_replaced

    def remove(self, places: Iterable[tuple[int, int]], count: bool = True) -> None:
        """Remove the rows at some places of the shards."""
        for shard, place in places:
            self._removed[shard].append(place)
            self.changes.removed += count

    def finish(self, key: Mapping[str, Any], details: Mapping[str, Any], left_out: Sequence[LeftOut] | None) -> None:
        """Replace the manifest, if there are changes.

        Args:
            key: What the rows were made from.
            details: What else the manifest records.
            left_out: What the store lists as left out from now on; None keeps the list.
        """
        self.remove(self._pending.unmarked(), count=False)
        before = self.folder.manifest
        old_left_out = sum(before.details.get("left_out", {}).values())
        is_listed = left_out is None or len(left_out) == old_left_out
        if self.changes.any or self._is_damaged or not (before.complete and is_listed):
            self._merge()
            self.details |= {**details, UPDATES: before.details.get(UPDATES, 0) + 1}
            if left_out is not None:
                self.details["left_out"] = {"update": len(left_out)} if left_out else {}
            self._commit(key)
        if left_out is not None:
            write_left_out(self.folder.folder, left_out)

    def _merge(self) -> None:
        """Move the rows of shards that are less than half full into new ones, if there are many such shards."""
        sparse = [shard for shard in range(len(self._files)) if 2 * self._live(shard) < self._size]
        for shard in sparse if len(sparse) > _MOST_SPARSE else []:
            for row in self._read_live(shard):
                self._append(row)
            self._dropped.add(shard)
        self._flush()

    def _live(self, shard: int) -> int:
        return self._files[shard].rows - len(self._removed[shard])

    def _read_live(self, shard: int) -> list[_NewRow]:
        path = self.folder.folder / self._files[shard].file
        ids, contents, items = read_row_digests(path)
        places = np.setdiff1d(np.arange(len(ids)), self._removed[shard])
        with safe_open(path, "pt") as file:
            vectors = file.get_tensor("embeddings").numpy()
            kept: list[dict[str, Any]] = [{} for _ in ids]
            if KEPT in file.keys():
                kept = pq.read_table(pa.BufferReader(file.get_tensor(KEPT).numpy())).to_pylist()
        rows = []
        for place in places.tolist():
            values = {name: value for name, value in kept[place].items() if name != "id" and value is not None}
            rows.append(_NewRow(ids[place], vectors[place], int(contents[place]), int(items[place]), values))
        return rows

    def _append(self, row: _NewRow) -> None:
        self._buffer.append(row)
        if len(self._buffer) == self._size:
            self._flush()

    def _flush(self) -> None:
        """Write the rows that wait as a shard."""
        if not self._buffer:
            return
        ids, vectors, contents, items, kept = zip(*self._buffer, strict=True)
        tensors, columns = shard_tensors(ids, np.stack(vectors), contents, kept, items)
        self.details[KEPT] = sorted({*self.details.get(KEPT, ()), *columns})
        self._files.append(self.folder.write(tensors, len(ids)))
        self._removed.append([])
        self._buffer = []

    def _commit(self, key: Mapping[str, Any]) -> None:
        used = [shard for shard in range(len(self._files)) if shard not in self._dropped and self._live(shard)]
        files = [replace(self._files[shard], rows=self._live(shard)) for shard in used]
        places = {
            self._files[shard].file: np.sort(np.array(self._removed[shard], dtype=np.int64))
            for shard in used
            if self._removed[shard]
        }
        self.details.pop(REMOVED, None)
        beside = []
        if places:
            beside = [self.folder.write_beside("removed.safetensors", lambda path: path.write_bytes(save(places)))]
            self.details[REMOVED] = asdict(beside[0])
        self.folder.commit(files, key, self.details, beside)

    def _open_shard(self, shard: int) -> Any:  # noqa: ANN401 - safetensors has no types
        return safe_open(self.folder.folder / self._files[shard].file, "pt")


def _compared(key: Mapping[str, Any]) -> dict[str, Any]:
    """What an update must have in common with the store."""
    source = {name: value for name, value in key.get("source", {}).items() if name not in _DATA}
    return {name: value for name, value in key.items() if name != "source"} | {"source": source}
