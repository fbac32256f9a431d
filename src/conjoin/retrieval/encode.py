"""From rows to a collection: the first run, its resumption, an update and a sync are one algorithm.

The ids and digests of the table say which rows are new and which changed. Those are encoded; `add` writes the new ones
and `merge_insert("id")` the changed ones, and the tag `published` moves at the end. Rows are encoded in chunks of
fixed size, so a vector does not depend on where an earlier run stopped.
"""

import gc
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from time import monotonic
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import torch
import transformers
from accelerate import PartialState
from accelerate.utils import gather_object
from lancedb.table import Table

from conjoin import __version__
from conjoin.data.row_checks import SKIPPED_FILE, Skipped, SkippedFile, check_on_error, id_keys
from conjoin.progress import progress
from conjoin.retrieval.collection import Changes, Collection
from conjoin.retrieval.collection_table import (
    ITEM_DIGEST,
    PICTURE,
    ROW_DIGEST,
    TEXT,
    VECTOR,
    committing,
    create_table,
    local_folder,
    open_newest,
    open_table,
    publish,
    published_version,
    read_metadata,
    vector_field,
    write_metadata,
    writing,
)
from conjoin.retrieval.encode_rows import (
    Encoded,
    KnownRows,
    Record,
    Row,
    cast_to_schema,
    encode_rows,
    read_chunks,
    to_table,
)
from conjoin.retrieval.encoder import ItemEncoder
from conjoin.retrieval.options import EncodeOptions
from conjoin.storage import differences

logger = logging.getLogger(__name__)
BATCHES_AT_ONCE = 64
_ROWS_PER_COMMIT = 16_384
_SECONDS_PER_COMMIT = 20.0
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
        processes: Accelerate's state of a launched run, whose processes share the rows; each gives the same rows, the
            first one writes, and all return the published collection. None encodes in this process alone.
        show_progress: Show rows done and per second.
        options: Fields of `EncodeOptions`: `sync`, `prompt`, `prompt_name`, `role`, `dtype`, `on_error`,
            `keep_pictures`, `settings`.

    Raises:
        ValueError: No rows, a row without id or content, an id met twice, an unreadable item, a collection that was
            made with another model or other settings, or that another process writes.
        OSError: The disk is full or fails; the same call resumes.
        KeyboardInterrupt: Ctrl-C; the message says how many rows are kept.
    """
    chosen = EncodeOptions(**options)
    check_on_error(chosen.on_error)
    is_first, wait = True, lambda: None
    if processes is not None:
        is_first, wait = processes.process_index == 0, processes.wait_for_everyone
    changes = None
    total = len(rows) if isinstance(rows, Sized) else None
    bar = progress(total=total, unit="row", desc="encoding", show=show_progress and is_first)
    with _imports_frozen(), bar:
        if is_first:
            with writing(uri), CollectionWriter(uri, encoder, chosen, kept_types(rows)) as writer:
                wait()
                for encoded in _encoded(rows, writer.known, encoder, chosen, processes):
                    writer.add(encoded)
                    bar.update(len(encoded.records) + encoded.unchanged + len(encoded.skipped))
                changes = writer.finish()
        else:
            wait()  # until the first one found that it may write
            for _ in _encoded(rows, open_known(uri), encoder, chosen, processes):
                pass
    wait()
    collection = Collection(uri)
    collection.changes = changes
    return collection


@contextmanager
def _imports_frozen() -> Iterator[None]:
    """Let the garbage collector pass over what exists now: its looks at all libraries' objects take 10 µs a row."""
    is_frozen = gc.get_freeze_count() > 0
    if not is_frozen:
        gc.freeze()
    try:
        yield
    finally:
        if not is_frozen:
            gc.unfreeze()


def _encoded(
    rows: Iterable[Row], known: KnownRows, encoder: ItemEncoder, options: EncodeOptions, processes: PartialState | None
) -> Iterator[Encoded]:
    """Encode the rows that are new or changed; each of several processes encodes its share, and gives all of them.

    Raises:
        ValueError: As `encode_collection`; or the processes did not read the same rows.
    """
    rank, world_size = (0, 1) if processes is None else (processes.process_index, processes.num_processes)
    size = BATCHES_AT_ONCE * encoder.batch_size
    chunks = read_chunks(rows, size * world_size)
    while True:
        start, ids, chunk = next(chunks, (0, [], []))
        known.see(ids, start)
        own = slice(rank * size, (rank + 1) * size)
        parts = encode_rows(start + own.start, ids[own], chunk[own], known, encoder, options)
        if world_size == 1:
            yield from parts if ids else ()
        else:
            read = start, len(ids), int(np.bitwise_xor.reduce(id_keys(ids)))
            reports = gather_object([(read, [*parts] if ids else [])])
            for other, (read_there, encoded) in enumerate(reports):
                if read_there != read:
                    raise ValueError(
                        f"process {other} read other rows than process {rank} after row {start}: all must read the "
                        "same rows in the same order"
                    )
                yield from encoded
        if not ids:
            return


def kept_types(rows: Iterable[Row]) -> dict[str, pa.DataType]:
    """The types of the kept columns, where the source knows them."""
    features = rows.features if isinstance(rows, datasets.Dataset | datasets.IterableDataset) else None
    kept = (features or {}).get("metadata")
    schema = datasets.Features(kept).arrow_schema if isinstance(kept, dict) else ()
    return {field.name: field.type for field in schema if not pa.types.is_null(field.type)}


def open_known(uri: str | Path) -> KnownRows:
    """The rows of a table that another process writes; none if there is no table."""
    try:
        return KnownRows(uri, open_table(uri))
    except FileNotFoundError:
        return KnownRows(uri, None)


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
    """Writes encoded rows into the table of a collection; as a context, also those that an error or Ctrl-C leaves.

    Args:
        uri: Of the collection.
        encoder: Computes the vectors.
        options: How.
        kept_types: Types of the kept columns, as far as they are known.

    Attributes:
        known: The rows that the table has.
        skipped: The rows that cannot be used.

    Raises:
        ValueError: The table was made with another model or other settings.
    """

    def __init__(
        self, uri: str | Path, encoder: ItemEncoder, options: EncodeOptions, kept_types: Mapping[str, pa.DataType]
    ) -> None:
        self.uri, self.encoder, self.options, self.kept_types = uri, encoder, options, kept_types
        self.key = collection_key(encoder, options)
        self.changes, self.skipped = Changes(), list[Skipped]()
        self._several = False
        self._pending: list[tuple[int, Record]] = []
        self._written = monotonic()
        self._table: Table | None = None
        with committing(uri):
            try:
                table = open_newest(uri)
            except FileNotFoundError:
                table = None
            if table is not None and (published_version(table) is not None or table.count_rows()):
                if differing := differences(read_metadata(table)["key"], self.key):
                    raise ValueError(
                        f"the collection {str(uri)!r} was made with {differing}; encode into another folder (--out), "
                        "or as before"
                    )
                self._table = table
                self._several = bool(read_metadata(table)["details"]["several"])
        self.known = KnownRows(uri, self._table)

    def __enter__(self) -> "CollectionWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Keep what is encoded.

        Raises:
            KeyboardInterrupt: It was Ctrl-C.
        """
        if isinstance(error, Exception | KeyboardInterrupt):
            self._flush()
        if isinstance(error, KeyboardInterrupt):
            count = 0 if self._table is None else self._table.count_rows()
            raise KeyboardInterrupt(f"{count} rows are kept in {str(self.uri)!r}: run the same again, it resumes")

    def add(self, rows: Encoded) -> None:
        """Add rows, and write those so far if they are many, or 20 seconds old.

        Raises:
            OSError: The disk is full or fails.
            ValueError: A column cannot be kept.
        """
        counts = Changes(0, 0, 0, rows.unchanged, len(rows.skipped), rows.encoded)
        self.changes = Changes(*(a + b for a, b in zip(self.changes, counts, strict=True)))
        self.skipped += rows.skipped
        positions = self.known.positions([row.id for row in rows.skipped])
        self.known.states[positions[positions >= 0]] = 2
        self._several |= rows.several
        self._pending += rows.records
        if len(self._pending) >= _ROWS_PER_COMMIT or monotonic() - self._written > _SECONDS_PER_COMMIT:
            self._flush()

    def _flush(self) -> None:
        records = [record for _, record in sorted(self._pending, key=lambda each: each[0])]
        is_known = self.known.positions([record["id"] for record in records]) >= 0
        changed, new = ([record for record, known in zip(records, is_known, strict=True) if known == wanted]
                        for wanted in (True, False))  # fmt: skip
        self._pending = []
        with committing(self.uri):
            if new:
                rows = to_table(new, self.options.dtype)
                if self._table is None:
                    self._table = create_table(self.uri, self._schema(rows))
                self._table.add(cast_to_schema(rows, self._table))
            if changed and self._table is not None:
                rows = cast_to_schema(to_table(changed, self.options.dtype), self._table)
                self._table.merge_insert("id").when_matched_update_all().execute(rows)
            if records and self._table is not None:  # a run that is stopped leaves them
                metadata = read_metadata(self._table)
                write_metadata(self._table, metadata | {"details": metadata["details"] | {"several": self._several}})
        self.changes = self.changes._replace(
            added=self.changes.added + len(new), replaced=self.changes.replaced + len(changed)
        )
        self._written = monotonic()

    def finish(self) -> Changes:
        """Write what is left, remove the rows that are gone, and publish.

        Raises:
            OSError: The disk is full or fails.
            ValueError: There were no rows, or none that can be used.
        """
        self._flush()
        total = self.changes.added + self.changes.replaced + self.changes.unchanged + self.changes.skipped
        if not total:
            raise ValueError("the dataset is empty: there are no rows to encode")
        states = self.known.states
        gone = (states == 2) | (self.options.sync & (states == 0))
        self.changes = self.changes._replace(removed=int(gone.sum()))
        if self._table is None or self._table.count_rows() == self.changes.removed:
            reasons = dict.fromkeys(self.skipped[index].reason for index in (0, -1))  # of the rows, and of the model
            raise ValueError(f"none of the {total} rows can be used; {'; '.join(reasons)}")
        with committing(self.uri):
            if gone.any():
                numbers: list[int] = []
                for batch in self._table.search().select(["id"]).with_row_id(True).to_batches():
                    positions = self.known.positions(batch["id"].to_pylist())
                    numbers += batch["_rowid"].to_numpy()[(positions >= 0) & gone[positions]].tolist()
                for start in range(0, len(numbers), _ROWS_PER_COMMIT):
                    chosen = ", ".join(map(str, numbers[start : start + _ROWS_PER_COMMIT]))
                    self._table.delete(f"_rowid in ({chosen})")
            if published_version(self._table) != self._table.version:
                write_metadata(self._table, read_metadata(self._table) | {"details": self._details()})
            publish(self.uri, self._table)
        if (folder := local_folder(self.uri)) is not None:
            (folder / SKIPPED_FILE).unlink(missing_ok=True)
            SkippedFile(folder).add(sorted(self.skipped))
        return self.changes

    def _details(self) -> dict[str, Any]:
        versions = {"conjoin": __version__, "torch": str(torch.__version__), "transformers": transformers.__version__}
        return {
            "model": self.encoder.name,
            "load_options": dict(self.encoder.load_options),
            "versions": versions,
            "several": self._several,
        }

    def _schema(self, rows: pa.Table) -> pa.Schema:
        metadata = {"key": self.key, "details": self._details(), "index": None}
        own = [
            pa.field("id", pa.string(), nullable=False),
            vector_field(rows.schema.field(VECTOR).type.list_size, self.options.dtype, metadata),
            pa.field(TEXT, pa.string()),
            pa.field("image", pa.list_(pa.string())),
            *(pa.field(name, pa.int64()) for name in (ITEM_DIGEST, ROW_DIGEST)),
            *([pa.field(PICTURE, pa.binary())] if self.options.keep_pictures else []),
        ]
        kept = (pa.field(name, kind) for name, kind in self.kept_types.items() if name != TEXT)
        return pa.schema([*own, *kept])


def launched_processes() -> PartialState | None:
    """Connect to the other processes of `accelerate launch` or `torchrun`; None if this process was started alone.

    They meet over the CPU (gloo), whatever device each encodes on.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) <= 1:
        return None
    return PartialState(cpu=True, backend="gloo", timeout=_LONGEST_WAIT)
