"""From rows to a collection: the first run, its resumption, an update and a sync are one algorithm.

Rows that the table has are passed over, the others are encoded and written, and the new state is published at the end.
Rows are encoded in chunks of fixed size, so a vector does not depend on where an earlier run stopped.
"""

import os
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
import transformers
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object
from lancedb.table import Table

from conjoin import __version__
from conjoin.data.row_checks import SKIPPED_FILE, Skipped, SkippedFile, check_on_error, id_keys, require_unique
from conjoin.progress import progress
from conjoin.retrieval.collection import Changes, Collection
from conjoin.retrieval.collection_table import (
    DIGESTS,
    PICTURE,
    TEXT,
    VECTOR,
    committing,
    create_table,
    id_conditions,
    local_folder,
    open_newest,
    open_table,
    publish,
    published_version,
    read_metadata,
    reading,
    vector_field,
    write_metadata,
    writing,
)
from conjoin.retrieval.encode_rows import (
    KnownRows,
    Row,
    RowDigests,
    RowEncoder,
    RowSource,
    finish_widening,
    fit,
    image_paths,
    kept_types,
    kept_values,
    make_column,
    row_parts,
    row_stamp,
)
from conjoin.retrieval.encoder import ItemEncoder
from conjoin.retrieval.options import EncodeOptions
from conjoin.retrieval.pictures import make_thumbnail
from conjoin.retrieval.vectors import check_vectors
from conjoin.storage import differences, item_digest

_BATCHES_AT_ONCE = 64
_ROWS_PER_COMMIT = 16_384
_SECONDS_PER_COMMIT = 20.0
_NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
_LONGEST_WAIT = timedelta(days=30)
"""How long a process waits for another one, which may have far slower rows."""


def encode_collection(
    rows: Iterable[Row],
    encoder: ItemEncoder,
    uri: str | Path,
    *,
    processes: PartialState | None = None,
    show_progress: bool = False,
    **options: Any,  # noqa: ANN401 - fields of EncodeOptions
) -> Collection:
    """Encode rows into a collection: make it, resume it, or bring it up to date.

    A row that is in the collection is passed over without decoding its image, if its text, its kept columns and its
    image file (path, size, time) are the same. It is encoded again if its text or the bytes of its image differ, and
    else only written again. Readers see the collection as it was until all rows are done.

    Args:
        rows: Mappings with a unique `"id"` and `"image"` and/or `"text"` (absent or `None`: the row has none), and
            optionally `"metadata"`, a mapping of further values to keep (several images: a list, interleaved as for
            `load_pairs`); a `datasets` dataset, streaming or not, or any iterable.
        encoder: Computes the vectors. The same batch size must be used on resuming for equal bits.
        uri: A folder, or `s3://`, `gs://`, `az://`; made if needed.
        processes: Accelerate's state of a launched run, whose processes share the rows; each gives the same rows, and
            all return the published collection. None encodes in this process alone.
        show_progress: Show rows done and per second.
        options: Fields of `EncodeOptions`: `sync`, `prompt`, `prompt_name`, `role`, `dtype`, `on_error`,
            `keep_pictures`, `settings`.

    Raises:
        ValueError: No rows, a row without id or content, an id met twice, an unreadable item, a collection that was
            made with another model or other settings, or that another process writes.
        OSError: The disk is full or fails; the same call resumes.
    """
    chosen = EncodeOptions(**options)
    rank, world_size = (0, 1) if processes is None else (processes.process_index, processes.num_processes)
    source = RowSource(rows, _BATCHES_AT_ONCE * encoder.batch_size, rank, world_size)
    writer = CollectionWriter(uri, encoder, chosen, is_shared=world_size > 1)
    changes = None
    with progress(total=source.count, unit="row", desc="encoding", show=show_progress and rank == 0) as bar:
        if rank > 0:
            _encode_share(writer, source, bar, processes)
        else:
            with writing(uri):
                writer.create(kept_types(rows), encoder.dimension if world_size > 1 else None)
                wait(processes)  # the others lock the folder too, and open the table
                wait(processes)
                _encode_chunks(writer, source, bar)
                _merge(writer, source, gather(processes, _report(writer, source)))
                changes = writer.finish(source.position, chosen.sync)
    wait(processes)
    collection = Collection(uri)
    collection.changes = changes
    return collection


def _digest(function: Callable[..., int], *arguments: Any) -> int:  # noqa: ANN401
    """A digest of a row; 0, which no digest is, of one that cannot be read: encoding it says why."""
    try:
        return function(*arguments)
    except (RecursionError, OSError):
        return 0


def collection_key(encoder: ItemEncoder, options: EncodeOptions) -> dict[str, Any]:
    """What vectors are made from, each part under a name that an error message can use."""
    return {
        "fingerprint": encoder.fingerprint,
        "processor": encoder.processing,
        "precision": "full" if encoder.dtype is None else str(encoder.dtype).removeprefix("torch."),
        "dtype": options.dtype,
        "role": options.role,
        "prompt": encoder.prompt_of(options.role, options.prompt, options.prompt_name),
        "dims": encoder.dims,
        "input_type": encoder.input_type,
        **(options.settings or {}),
    }


class CollectionWriter:
    """Writes encoded rows into the table of a collection.

    Args:
        uri: Of the collection.
        encoder: Computes the vectors.
        options: How.
        is_shared: Whether other processes write into the table as well.
    """

    def __init__(self, uri: str | Path, encoder: ItemEncoder, options: EncodeOptions, is_shared: bool = False) -> None:
        self.uri, self.encoder, self.is_shared = uri, encoder, is_shared
        self.key = collection_key(encoder, options)
        self.side, self.skip = options.keep_pictures, check_on_error(options.on_error)
        self.rows = RowEncoder(encoder, options, self.skip)
        self.changes = Changes()
        self.skipped: list[Skipped] = []
        self._table: Table | None = None
        self._kept_types: Mapping[str, pa.DataType] = {}
        self._known = RowDigests()
        self._gone: list[str] = []
        self._pending: list[pa.Table] = []
        self._replaced: list[int] = []
        self._written = time.monotonic()

    def create(self, kept_types: Mapping[str, pa.DataType], dimension: int | None = None) -> None:
        """Open the table, or make it with columns of these types.

        Args:
            kept_types: Of the kept columns, as far as they are known.
            dimension: Of the vectors; without it, a new table is made when the first vectors are written.

        Raises:
            ValueError: The table was made with another model or other settings.
        """
        self._kept_types = kept_types
        with committing(self.uri):
            try:
                table = open_newest(self.uri)
            except FileNotFoundError:
                table = None
            if table is not None and published_version(table) is None and not table.count_rows():
                table = None  # it was just begun
            if table is not None:
                finish_widening(table)
                if published_version(table) != table.version:
                    _remove_repeated(table)
            elif dimension is not None:
                table = create_table(self.uri, self._schema(dimension))
        if table is not None:
            self.open(table)

    def open(self, table: Table | None = None, lookup: bool = True) -> None:
        """Open the table that process 0 made, and read which rows it has (`lookup`).

        Raises:
            ValueError: It was made with another model or other settings.
        """
        table = open_table(self.uri, writes=True) if table is None else table
        if differing := differences(read_metadata(table)["key"], self.key):
            raise ValueError(
                f"the collection {str(self.uri)!r} was made with {differing}; encode into another folder, or as before"
            )
        self._table = table
        if not lookup:
            return
        with reading(self.uri):
            for batch in table.search().select(["id", "stamp"]).to_batches():
                self._known.add(id_keys(batch["id"].to_pylist()), batch["stamp"].to_numpy())

    def find(self, ids: list[str]) -> KnownRows:
        """What the collection has of rows of the data, by their ids; `sync` keeps them."""
        return self._known.find(id_keys(ids))

    def take(self, start: int, ids: list[str], rows: list[Row], known: KnownRows, bar: Any) -> None:  # noqa: ANN401
        """Encode and write the new and changed rows of a chunk.

        Args:
            start: The number of the first one in the data.
            ids: Of the rows.
            rows: The rows.
            known: What `find` gave for the ids.
            bar: Shows progress.

        Raises:
            ValueError: A row cannot be used, and such rows are not to be skipped; or a column cannot be kept.
        """
        is_known = known.found
        pairs = zip(ids, rows, strict=True)
        parts = [{} if row.get("problem") is not None else row_parts(id_, row) for id_, row in pairs]
        stamps = [_digest(row_stamp, row, item) if item else 0 for row, item in zip(rows, parts, strict=True)]
        is_same = is_known & (np.array(stamps, dtype=np.int64) == known.stamps)
        changed = np.flatnonzero(~is_same).tolist()
        contents = {
            index: (
                _digest(item_digest, parts[index])
                if rows[index].get("metadata") or "image" in parts[index]
                else stamps[index]
            )
            for index in changed
        }
        numbers, vectors = self._stored({ids[index]: index for index in changed if is_known[index]}, contents)
        encoded_before = [*np.flatnonzero(is_same).tolist(), *vectors]
        for index in encoded_before:
            self.rows.note(parts[index])
        bar.update(len(encoded_before))
        new = [index for index in changed if index not in vectors]
        chosen = [ids[index] for index in new], [rows[index] for index in new], [parts[index] for index in new]
        encoded, reasons = self.rows.encode(*chosen, bar)
        vectors |= zip((index for number, index in enumerate(new) if number not in reasons), encoded, strict=True)
        for number, reason in reasons.items():
            self._skip(Skipped(None, start + new[number], ids[new[number]], reason), bool(is_known[new[number]]))
        used = sorted(vectors)
        replaced = int(is_known[used].sum())
        unchanged = int(is_same.sum())
        self._count(Changes(len(used) - replaced, replaced, 0, unchanged, len(reasons), len(new) - len(reasons)))
        if used:
            self._replaced += [numbers[index] for index in used if index in numbers]
            table = self._records(
                [ids[p] for p in used], [rows[p] for p in used], np.stack([vectors[p] for p in used])
            )
            digests = [contents[index] for index in used], [stamps[index] for index in used]
            for name, values in zip(DIGESTS, digests, strict=True):
                table = table.append_column(name, pa.array(values, pa.int64()))
            self._pending.append(table)
        is_due = time.monotonic() - self._written > _SECONDS_PER_COMMIT
        if is_due or sum(map(len, self._pending)) >= _ROWS_PER_COMMIT:
            self.flush()

    def _skip(self, row: Skipped, is_there: bool) -> None:
        """List a row that cannot be used; the table has it no longer."""
        self.skipped.append(row)
        if is_there:
            self._gone.append(row.id)

    def flush(self) -> None:
        """Write the rows that are encoded, then delete what they replace: `create` ends what is interrupted between.

        Raises:
            OSError: The disk is full or fails.
            ValueError: A column cannot be kept.
        """
        if self._pending:
            with committing(self.uri):
                rows = pa.concat_tables(self._pending, promote_options="permissive")
                if self._table is None:
                    self._table = create_table(self.uri, self._schema(rows.schema.field(VECTOR).type.list_size))
                if not self.is_shared:  # a run that is stopped leaves the parts; several processes report to the first
                    metadata = read_metadata(self._table)
                    details = self._united(metadata["details"], metadata["details"])
                    write_metadata(self._table, metadata | {"details": details})
                self._table.add(fit(rows, self._table, self.is_shared))
                _delete(self._table, self._replaced)
        self._pending, self._replaced, self._written = [], [], time.monotonic()

    def merge(self, report: Mapping[str, Any]) -> None:
        """Add what `take_report` gave in another process."""
        self._count(report["changes"])
        self.skipped += [Skipped(*row) for row in report["skipped"]]
        self._gone += report["gone"]
        self.rows.parts |= set(report["parts"])
        self.rows.has_several |= report["several"]

    def take_report(self) -> dict[str, Any]:
        """What another process needs to know of the rows that this one took since the last report."""
        report = {
            "changes": tuple(self.changes),
            "skipped": [tuple(row) for row in self.skipped],
            "gone": self._gone,
            "parts": sorted(self.rows.parts),
            "several": self.rows.has_several,
        }
        self.changes, self.skipped, self._gone = Changes(), [], []
        return report

    def finish(self, total: int, sync: bool) -> Changes:
        """Remove the rows that are gone, record what the collection holds, and publish it.

        Args:
            total: Rows of the data.
            sync: Whether rows that were not among them are gone.

        Raises:
            OSError: The disk is full or fails.
            ValueError: There were no rows, or none that can be used.
        """
        if total == 0:
            raise ValueError("the dataset is empty: there are no rows to encode")
        if self._table is None:
            raise self._none_usable(total)
        with committing(self.uri):
            self._publish(open_table(self.uri, writes=True), total, sync)  # the newest state, of all processes
        self._write_skipped()
        return self.changes

    def _none_usable(self, total: int) -> ValueError:
        reasons = dict.fromkeys(self.skipped[index].reason for index in (0, -1))  # rows may be wrong, and the model
        return ValueError(f"none of the {total} rows can be used; {'; '.join(reasons)}")

    def _publish(self, table: Table, total: int, sync: bool) -> None:
        if self.is_shared and table.count_rows() != len(self._known) + self.changes.added:
            _remove_repeated(table)
        gone = self._unseen(table) if sync else []
        self._known = RowDigests()  # frees its memory
        self.changes = self.changes._replace(removed=len(self._gone) + len(gone))
        if not table.count_rows() - self.changes.removed:
            raise self._none_usable(total)
        _delete(table, gone)
        for where in id_conditions(self._gone):
            table.delete(where)
        metadata = read_metadata(table)
        details = self._details() if sync else self._united(self._details(), metadata["details"])
        if published_version(table) != table.version:
            write_metadata(table, metadata | {"details": details})
        publish(self.uri, table)

    def _details(self) -> dict[str, Any]:
        versions: dict[str, str] = {
            "conjoin": __version__,
            "torch": str(torch.__version__),
            "transformers": transformers.__version__,
        }
        parts = {"parts": sorted(self.rows.parts), "several": self.rows.has_several}
        how = {"model": self.encoder.name, "load_options": dict(self.encoder.load_options)}
        return {**how, "versions": versions, **parts}

    def _united(self, details: dict[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
        """Details with the parts of rows that this run did not see."""
        parts = sorted({*self.rows.parts, *before["parts"]})
        return details | {"parts": parts, "several": self.rows.has_several or before["several"]}

    def _open_table(self) -> Table:
        if self._table is None:
            self._table = open_table(self.uri, writes=True)
        return self._table

    def _schema(self, dimension: int) -> pa.Schema:
        metadata = {"key": self.key, "details": self._details(), "index": None}
        fields = [pa.field("id", pa.string(), nullable=False)]
        fields.append(vector_field(dimension, str(self.key["dtype"]), metadata))
        fields += [pa.field(TEXT, pa.string()), pa.field("image", pa.list_(pa.string()))]
        fields += [pa.field(name, pa.int64()) for name in DIGESTS]
        fields += [pa.field(PICTURE, pa.binary())] if self.side else []
        known = {field.name for field in fields}
        return pa.schema(
            [*fields, *(pa.field(name, kind) for name, kind in self._kept_types.items() if name not in known)]
        )

    def _stored(
        self, indices: Mapping[str, int], contents: Mapping[int, int]
    ) -> tuple[dict[int, int], dict[int, np.ndarray]]:
        """Lance's numbers of the rows that the table has, and their vectors where what was encoded is the same now."""
        numbers: dict[int, int] = {}
        vectors: dict[int, np.ndarray] = {}
        for where in id_conditions(list(indices)):
            search = self._open_table().search().where(where).select(["id", "content", VECTOR]).with_row_id(True)
            with reading(self.uri):
                stored = search.to_arrow().to_pylist()
            for row in stored:
                index = indices[row["id"]]
                numbers[index] = row["_rowid"]
                if row["content"] == contents[index]:
                    vectors[index] = np.array(row[VECTOR], dtype=np.float32)
        return numbers, vectors

    def _records(self, ids: list[str], rows: list[Row], vectors: np.ndarray) -> pa.Table:
        """Rows as the table holds them, without their digests."""
        numbers = vectors.astype(np.float16 if self.key["dtype"] == "float16" else np.float32)
        check_vectors(numbers, None, ids)
        kept = [kept_values(row, f"item {id_!r}") for id_, row in zip(ids, rows, strict=True)]
        columns = {
            "id": pa.array(ids),
            VECTOR: pa.FixedSizeListArray.from_arrays(pa.array(numbers.reshape(-1)), numbers.shape[1]),
            "image": pa.array(
                [image_paths(values.pop("image", None)) or None for values in kept], pa.list_(pa.string())
            ),
        }
        for name in dict.fromkeys(name for values in kept for name in values):
            columns[name] = make_column(name, [values.get(name) for values in kept])
        if self.side:
            columns[PICTURE] = pa.array(
                [
                    None if row.get("image") is None else make_thumbnail(row["image"], self.side, f"item {id_!r}")
                    for id_, row in zip(ids, rows, strict=True)
                ],
                pa.binary(),
            )
        return pa.table(columns)

    def _count(self, changes: Iterable[int]) -> None:
        self.changes = Changes(*(a + b for a, b in zip(self.changes, changes, strict=True)))

    def _unseen(self, table: Table) -> list[int]:
        """Lance's numbers of rows that were in the table at first, and that the data does not have."""
        gone: list[int] = []
        for batch in table.search().select(["id"]).with_row_id(True).to_batches():
            gone += batch["_rowid"].to_numpy()[self._known.unseen(id_keys(batch["id"].to_pylist()))].tolist()
        return gone

    def _write_skipped(self) -> None:
        folder = local_folder(self.uri)
        if folder is None:
            return
        (folder / SKIPPED_FILE).unlink(missing_ok=True)
        SkippedFile(folder).add(sorted(self.skipped))


def _encode_share(writer: CollectionWriter, source: RowSource, bar: Any, processes: PartialState | None) -> None:  # noqa: ANN401
    """Encode the rows of a process that is not the first."""
    wait(processes)
    with writing(writer.uri, f"process-{source.rank}"):
        writer.open()
        wait(processes)
        _encode_chunks(writer, source, bar)
        gather(processes, _report(writer, source))


def _encode_chunks(writer: CollectionWriter, source: RowSource, bar: Any) -> None:  # noqa: ANN401 - a progress bar
    for start, ids, rows in source:
        known = writer.find(ids)
        require_unique(ids, known.repeated, start)
        if rows is not None:
            writer.take(start, ids, rows, known, bar)
    writer.flush()


def _report(writer: CollectionWriter, source: RowSource) -> dict[str, Any]:
    return writer.take_report() | {"read": (source.position, source.sums[source.rank])}


def _merge(writer: CollectionWriter, source: RowSource, reports: list[dict[str, Any]]) -> None:
    """Add up the reports of all processes.

    Raises:
        ValueError: They did not read the same rows.
    """
    for rank, report in enumerate(reports):
        if report["read"] != (source.position, source.sums[rank]):
            raise ValueError(
                f"process {rank} read {report['read'][0]} rows and process 0 {source.position}, or others: all must "
                "read the same rows in the same order"
            )
        writer.merge(report)


def _remove_repeated(table: Table) -> None:
    """Remove all rows of an id but the newest: a process that was cut off may not have deleted what it replaced."""
    keys, numbers = [np.empty(0, dtype=np.uint64)], [np.empty(0, dtype=np.uint64)]
    for batch in table.search().select(["id"]).with_row_id(True).to_batches():
        keys.append(id_keys(batch["id"].to_pylist()))
        numbers.append(batch["_rowid"].to_numpy())
    newest = np.argsort(np.concatenate(numbers))[::-1]  # Lance numbers rows in the order in which they are written
    kept = np.unique(np.concatenate(keys)[newest], return_index=True)[1]
    _delete(table, np.delete(np.concatenate(numbers)[newest], kept).tolist())


def _delete(table: Table, row_ids: list[int]) -> None:
    """Delete rows by Lance's numbers."""
    for start in range(0, len(row_ids), _ROWS_PER_COMMIT):
        table.delete(f"_rowid in ({', '.join(map(str, row_ids[start : start + _ROWS_PER_COMMIT]))})")


def launched_processes() -> PartialState | None:
    """Connect to the other processes of `accelerate launch` or `torchrun`; None if this process was started alone.

    They meet over the CPU (gloo), whatever device each encodes on.

    Raises:
        ValueError: The environment does not name the processes with numbers that fit.
    """
    given = {name: os.environ[name] for name in _NUMBERS if name in os.environ}
    for name, value in given.items():
        if not value.isdecimal():
            raise ValueError(f"the environment variable {name} must be a number, got {value!r}")
    rank, count = int(given.get("RANK", 0)), int(given.get("WORLD_SIZE", 1))
    if rank >= max(count, 1):
        raise ValueError(f"the environment variable RANK must be below WORLD_SIZE, got {rank} of {count}")
    return PartialState(cpu=True, backend="gloo", timeout=_LONGEST_WAIT) if count > 1 else None


def wait(processes: PartialState | None) -> None:
    """Wait until all processes are here.

    Raises:
        ConnectionError: One of them has ended.
    """
    if processes is not None:
        _together(processes.wait_for_everyone)


def gather(processes: PartialState | None, report: dict[str, Any]) -> list[dict[str, Any]]:
    """The reports of all processes, by rank, once each has given its own.

    Raises:
        ConnectionError: One of them has ended.
    """
    if processes is None or processes.num_processes == 1:
        return [report]
    return list(_together(lambda: gather_object([report])))


def from_first(processes: PartialState | None, value: Any) -> Any:  # noqa: ANN401 - whatever it is
    """The value of the first process, in all of them.

    Raises:
        ConnectionError: One of them has ended.
    """
    return value if processes is None else _together(lambda: broadcast_object_list([value]))[0]


def _together(call: Callable[[], Any]) -> Any:  # noqa: ANN401 - what the call returns
    try:
        return call()
    except RuntimeError as error:
        raise ConnectionError(
            "another process of this run has ended, see its error; run the same again, it resumes"
        ) from error
