"""From rows to a collection: the first run, its resumption, an update and a sync are one algorithm.

A chunk of rows is read, and looked up by ids and digests in the collection. The rows that are new or changed are
encoded and upserted. At the end the rows that are gone are deleted, and the new state is published. Chunks have a
fixed size, so a vector does not depend on where an earlier run stopped.
"""

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain, islice
from pathlib import Path
from time import monotonic
from typing import Any, Literal, NamedTuple

import datasets
import numpy as np
import pyarrow as pa
from accelerate import PartialState
from accelerate.utils import gather_object

from conjoin.constants import DTYPES
from conjoin.data.cells import is_missing, row_kind
from conjoin.data.columns import undecoded
from conjoin.data.row_checks import SKIPPED_FILE, Skipped, SkippedFile, check_ids, check_on_error, id_keys
from conjoin.data.row_images import plain_text, row_item
from conjoin.processing.item_error import ItemError, MissingFileError
from conjoin.processing.item_inputs import check_parts, check_unicode
from conjoin.progress import progress
from conjoin.retrieval.collection import OWN_COLUMNS, Changes, Collection, vector_field
from conjoin.retrieval.encoder import ItemEncoder
from conjoin.retrieval.pictures import make_thumbnail
from conjoin.retrieval.vectors import check_vectors
from conjoin.storage import differences, item_digest, row_digest

logger = logging.getLogger(__name__)
BATCHES_AT_ONCE = 64
_ROWS_PER_COMMIT = 16_384
_SECONDS_PER_COMMIT = 20.0
_LONGEST_WAIT = timedelta(days=30)
"""How long a process waits for another one, which may have far slower rows."""

Row = Mapping[str, Any]
Record = dict[str, Any]
"""A row as the table holds it."""


@dataclass(frozen=True, kw_only=True)
class EncodeOptions:
    """How rows become a collection.

    Args:
        sync: Remove the rows of the collection that are not among those given.
        prompt: Given to the model with every row, in place of its own prompt for documents.
        prompt_name: The name of one of the model's prompts, likewise.
        role: What the rows are: `"document"`, or `"query"` for queries whose vectors are stored.
        dtype: Type of the stored numbers, `"float32"` or `"float16"`.
        on_error: `"skip"` leaves out the rows that cannot be used: whose image or text cannot be read, whose
            `"metadata"` cannot be kept, or that have a `problem` (see `load_pairs`); `Collection.skipped` lists them,
            and they are removed if they were there.
        keep_pictures: Also store a JPEG thumbnail of each row's picture, at most this many pixels wide and high.
        settings: What else the vectors are made from (plain values, as JSON holds them); recorded, and compared.

    Raises:
        ValueError: An unknown `dtype` or `on_error`.
    """

    sync: bool = False
    prompt: str | None = None
    prompt_name: str | None = None
    role: Literal["query", "document"] = "document"
    dtype: str = "float32"
    on_error: str = "raise"
    keep_pictures: int | None = None
    settings: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        check_on_error(self.on_error)
        if self.dtype not in DTYPES:
            raise ValueError(f"unknown dtype {self.dtype!r}; expected 'float32' or 'float16'")


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
            `load_pairs`); a `datasets` dataset, streaming or not, or any iterable. A row with a text whose image is
            gone (no such file, 404) is encoded by its text, with a warning.
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
    changes, wait = None, (lambda: None) if processes is None else processes.wait_for_everyone

    def encoded(existing: "ExistingRows") -> "Iterator[EncodedChunk]":
        wait()
        yield from _encoded(rows, existing, encoder, chosen, processes)

    if processes is None or processes.process_index == 0:
        changes = write_rows(encoded, rows, encoder, uri, chosen, show_progress)
    else:
        wait()  # until the first one found that it may write
        for _ in _encoded(rows, ExistingRows(Collection.newest(uri)), encoder, chosen, processes):
            pass
    wait()
    collection = Collection(uri)
    collection.changes = changes
    return collection


def launched_processes() -> PartialState | None:
    """Connect to the other processes of `accelerate launch` or `torchrun`; None if this process was started alone.

    They meet over the CPU (gloo), whatever device each encodes on.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) <= 1:
        return None
    return PartialState(cpu=True, backend="gloo", timeout=_LONGEST_WAIT)


def write_rows(
    encoded: "Callable[[ExistingRows], Iterable[EncodedChunk]]",
    rows: Iterable[Row],
    encoder: ItemEncoder,
    uri: str | Path,
    options: EncodeOptions,
    show_progress: bool,
) -> Changes:
    """Write encoded rows into the table of a collection, remove those that are gone, and publish.

    Rows are written when they are many or 20 seconds old, and also when an error or Ctrl-C ends the work.

    Args:
        encoded: Encodes rows, given those that the table has.
        rows: The data, for its length and the types of its columns.
        encoder: Computes the vectors.
        uri: Of the collection.
        options: How.
        show_progress: Show rows done and per second.

    Raises:
        KeyboardInterrupt: It was Ctrl-C.
        OSError: The disk is full or fails.
        ValueError: The table was made with another model or other settings; there were no rows, or none that can be
            used; or a column cannot be kept.
    """
    key = collection_key(encoder, options)
    details: dict[str, Any] = {
        "model": encoder.name,
        "load_options": dict(encoder.load_options),
        "has_multi_image_items": False,
    }
    counts: Counter[str] = Counter()
    skipped: list[Skipped] = []
    pending: list[tuple[int, Record]] = []
    written = monotonic()
    collection: Collection | None = None

    def write() -> None:
        nonlocal collection, written
        records = [record for _, record in sorted(pending, key=lambda each: each[0])]
        pending.clear()
        written = monotonic()
        if not records:
            return
        values = to_table(records, options.dtype)
        exists = existing.digests([record["id"] for record in records]) >= 0
        if collection is None:
            metadata = {"key": key, "details": details, "index": None}
            collection = Collection.create(uri, _schema(rows, len(records[0]["vector"]), metadata, options))
        collection.upsert(values, exists, details)  # a run that is stopped leaves items with several images
        counts.update(added=int((~exists).sum()), replaced=int(exists.sum()))

    length = len(rows) if isinstance(rows, Sized) else None
    bar = progress(total=length, unit="row", desc="encoding", show=show_progress)
    with Collection.writing(uri) as newest, bar:
        collection = newest
        if collection is not None:
            if differing := differences(collection.metadata["key"], key):
                raise ValueError(
                    f"the collection {str(uri)!r} was made with {differing}; encode into another folder (--out), or "
                    "as before"
                )
            details["has_multi_image_items"] = collection.metadata["details"]["has_multi_image_items"]
        existing = ExistingRows(collection)
        try:
            for part in encoded(existing):
                pending += part.records
                skipped += part.skipped
                details["has_multi_image_items"] |= part.has_multi_image_items
                counts.update(unchanged=part.unchanged, skipped=len(part.skipped), encoded=part.encoded)
                bar.update(len(part.records) + part.unchanged + len(part.skipped))
                if len(pending) >= _ROWS_PER_COMMIT or monotonic() - written > _SECONDS_PER_COMMIT:
                    write()
            write()
            total = counts.total() - counts["encoded"]
            if not total:
                raise ValueError("the dataset is empty: there are no rows to encode")
            is_gone = np.isin(existing.keys, id_keys(row.id for row in skipped))
            if options.sync:
                is_gone |= np.array([key not in existing.seen for key in existing.keys.tolist()], bool)
            gone = existing.keys[is_gone]
            if collection is None or len(collection) == len(gone):
                reasons = dict.fromkeys(skipped[index].reason for index in (0, -1))  # of the rows, and of the model
                raise ValueError(f"none of the {total} rows can be used; {'; '.join(reasons)}")
            if len(gone):
                ids = np.array(collection.ids, dtype=object)
                collection.delete(ids[np.isin(id_keys(ids), gone)].tolist())
            collection.publish()
        except KeyboardInterrupt as stop:
            write()
            kept = 0 if collection is None else len(collection)
            raise KeyboardInterrupt(f"{kept} rows are kept in {str(uri)!r}: run the same again, it resumes") from stop
        finally:
            write()
        if (folder := collection.folder) is not None:
            (folder / SKIPPED_FILE).unlink(missing_ok=True)
            SkippedFile(folder).add(sorted(skipped))
    return Changes(removed=len(gone), **counts)


def collection_key(encoder: ItemEncoder, options: EncodeOptions) -> dict[str, Any]:
    """What vectors are made from, each part under a name that an error message can use."""
    return {
        "fingerprint": encoder.fingerprint,
        "processor": encoder.processing,
        "precision": encoder.identity.precision,
        "dtype": options.dtype,
        "role": options.role,
        "prompt": encoder.prompt_of(options.role, options.prompt, options.prompt_name),
        "truncate_dim": encoder.truncate_dim,
        "input_type": encoder.input_type,
        **(options.settings or {}),
    }


class EncodedChunk(NamedTuple):
    """Some rows of a chunk.

    Attributes:
        records: The new and the changed ones, with their numbers in the data.
        encoded: How many of them went through the model.
        unchanged: How many rows are in the table as they are in the data.
        skipped: Those that cannot be used.
        has_multi_image_items: Whether an item has several images.
    """

    records: Sequence[tuple[int, Record]]
    encoded: int
    unchanged: int = 0
    skipped: Sequence[Skipped] = ()
    has_multi_image_items: bool = False


class ExistingRows:
    """The rows that a collection has at first, by 64-bit digests of their ids, in 16 bytes each.

    Attributes:
        keys: Digests of the ids, ascending.
        seen: Digests of the ids that the data had so far.
    """

    def __init__(self, collection: Collection | None) -> None:
        self._collection, self.seen = collection, set[int]()
        keys, digests = [np.empty(0, dtype=np.uint64)], [np.empty(0, dtype=np.int64)]
        for batch in () if collection is None else collection.scan(["id", "row_digest"]):
            keys.append(id_keys(batch["id"].to_pylist()))
            digests.append(batch["row_digest"].to_numpy())
        self.keys, self._digests = np.concatenate(keys), np.concatenate(digests)
        order = np.argsort(self.keys)
        self.keys, self._digests = self.keys[order], self._digests[order]

    def digests(self, ids: Sequence[str]) -> np.ndarray:
        """The row digests `(N,)` that the table has of some ids; -1 of those that it has not."""
        if not len(self.keys):
            return np.full(len(ids), -1)
        keys = id_keys(ids)
        at = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        return np.where(self.keys[at] == keys, self._digests[at], -1)

    def vectors(self, digests: Mapping[str, int]) -> dict[str, np.ndarray]:
        """The vectors of the ids whose rows in the collection have the given item digests."""
        if self._collection is None or not digests:
            return {}
        stored = self._collection.take(list(digests), ["id", "item_digest", "vector"]).to_pylist()
        same = (row for row in stored if row["item_digest"] == digests[row["id"]])
        return {row["id"]: np.array(row["vector"], dtype=np.float32) for row in same}


def _encoded(
    rows: Iterable[Row],
    existing: ExistingRows,
    encoder: ItemEncoder,
    options: EncodeOptions,
    processes: PartialState | None,
) -> Iterator[EncodedChunk]:
    """Encode the rows that are new or changed; each of several processes encodes its share, and gives all of them.

    Raises:
        ValueError: As `encode_collection`; or the processes did not read the same rows.
    """
    rank, count = (0, 1) if processes is None else (processes.process_index, processes.num_processes)
    size = BATCHES_AT_ONCE * encoder.batch_size
    own = slice(rank * size, (rank + 1) * size)
    for start, ids, chunk in chain(read_chunks(rows, size * count, existing.seen), [(0, [], [])]):
        parts = encode_rows(start + own.start, ids[own], chunk[own], existing, encoder, options)
        if processes is None:
            yield from parts
            continue
        read = start, len(ids), int(np.bitwise_xor.reduce(id_keys(ids)))
        for other, (read_there, encoded) in enumerate(gather_object([(read, [*parts])])):
            if read_there != read:
                raise ValueError(
                    f"process {other} read other rows than process {rank} after row {start}: all must read the same "
                    "rows in the same order"
                )
            yield from encoded


def read_chunks(rows: Iterable[Row], size: int, seen: set[int]) -> Iterator[tuple[int, list[str], list[Row]]]:
    """The number of the first row, the ids and the rows of each chunk; images stay undecoded where that is possible.

    Raises:
        ItemError: A row is no mapping, or its id is no text and no whole number, or in `seen`.
    """
    batches: Iterator[list[Row]]
    if isinstance(rows, datasets.Dataset | datasets.IterableDataset):
        if "id" not in (rows.column_names or ["id"]):
            raise ValueError(f'the dataset has no column "id", it has {rows.column_names}')
        columns = undecoded(rows).iter(size)
        batches = ([dict(zip(each, row, strict=True)) for row in zip(*each.values(), strict=True)] for each in columns)
    else:
        iterator = iter(rows)
        batches = iter(lambda: list(islice(iterator, size)), [])
    start = 0
    for batch in batches:
        ids = []
        for number, row in enumerate(batch, start):
            if not isinstance(row, Mapping):
                raise ItemError(
                    f"row {number}", f'expected a mapping with "id" and "image" and/or "text", got {row!r:.80}'
                )
            id_ = row.get("id")
            if isinstance(id_, bool) or not isinstance(id_, str | int) or id_ == "":
                raise ItemError(
                    f"row {number}", f"the id must be a string or an integer, got {id_!r:.80} (keys {list(row)})"
                )
            ids.append(check_unicode(str(id_), f"row {number}"))
        check_ids(ids, seen, start)
        yield start, ids, batch
        start += len(batch)


def encode_rows(
    start: int,
    ids: Sequence[str],
    rows: Sequence[Row],
    existing: ExistingRows,
    encoder: ItemEncoder,
    options: EncodeOptions,
) -> Iterator[EncodedChunk]:
    """Encode the rows of a chunk that are new or changed: first what needs no model, then batch by batch.

    Args:
        start: The number of the first row in the data.
        ids: Of the rows.
        rows: The rows.
        existing: The rows of the collection.
        encoder: Computes the vectors.
        options: How.

    Raises:
        ValueError: A row cannot be used, and such rows are not to be skipped; or a column cannot be kept.
    """
    changed: dict[int, Record] = {}  # what the table will hold of them, less the vector
    items: dict[int, Any] = {}
    skipped: list[Skipped] = []
    has_multi = False

    def skip(index: int, error: Exception) -> None:
        if options.on_error == "raise":
            raise error
        skipped.append(Skipped(None, start + index, ids[index], str(error)))

    def record(index: int, vector: np.ndarray) -> tuple[int, Record]:
        picture = {}
        if options.keep_pictures and changed[index]["row_kind"] != "text":
            picture["picture"] = make_thumbnail(rows[index]["image"], options.keep_pictures, f"item {ids[index]!r}")
        return start + index, changed[index] | picture | {"vector": vector}

    digests = existing.digests(ids)
    unchanged = 0
    for index, row in enumerate(rows):
        name = f"item {ids[index]!r}"
        if row.get("problem") is not None:
            skip(index, ValueError(str(row["problem"])))
            continue
        try:
            parts = check_parts({key: row[key] for key in ("image", "text") if row.get(key) is not None}, name)
            image = parts.get("image")
            has_multi |= isinstance(image, list) and sum(each is not None for each in image) > 1
            digest = row_digest({**parts, "metadata": row.get("metadata") or {}})
            if digest == digests[index]:
                unchanged += 1
                continue
            items[index] = row_item(parts, name)
            known_values = {"id": ids[index], "item_digest": item_digest(parts), "row_digest": digest}
            known_values["row_kind"] = row_kind(parts) or "text"  # such as "none"
            paths = {} if image is None else {"image": _image_paths(image) or None}
            changed[index] = known_values | _kept_values(row, name) | paths
        except (OSError, RecursionError, ValueError) as error:
            skip(index, error if isinstance(error, ItemError) else ItemError(name, str(error)))
    stored = existing.vectors(
        {ids[index]: values["item_digest"] for index, values in changed.items() if digests[index] >= 0}
    )
    moved = [record(index, stored[ids[index]]) for index in changed if ids[index] in stored]
    yield EncodedChunk(moved, 0, unchanged, skipped[:], has_multi)
    skipped.clear()
    order = [index for index in changed if ids[index] not in stored]
    while order:
        lost: dict[int, ItemError] = {}  # rows whose text remains when their image is gone

        def unusable(position: int, error: ItemError, order: list[int] = order, lost: Any = lost) -> None:  # noqa: ANN401
            index = order[position]
            if isinstance(error, MissingFileError) and changed[index]["row_kind"] == "both":
                lost[index] = error
            else:
                skip(index, error)

        batches = encoder.encode_batches(
            [items[index] for index in order],
            [ids[index] for index in order],
            role=options.role,
            prompt=options.prompt,
            prompt_name=options.prompt_name,
            on_unusable=unusable,
        )
        for _, usable, vectors in batches:
            records = [record(order[position], vector) for position, vector in zip(usable, vectors, strict=True)]
            yield EncodedChunk(records, len(records), 0, skipped[:])
            skipped.clear()
        for index in lost:
            items[index] = {"text": plain_text(rows[index]["image"], rows[index]["text"])}
            changed[index] |= {"row_kind": "text", "image": None}
        if lost:
            first = next(iter(lost.values()))
            logger.warning(
                "%d rows name an image that does not exist, and are read by their text; %s", len(lost), first
            )
        order = [*lost]


def _image_paths(image: Any) -> list[str]:  # noqa: ANN401 - an image or several
    """The paths or URLs of an image or of several; images without one, such as bytes, are left out."""
    several = image if isinstance(image, list | tuple) else [image]
    named = [single.get("path") if isinstance(single, Mapping) else single for single in several]
    paths = [str(path) for path in named if isinstance(path, str | os.PathLike) and path]
    return [path for path in paths if not path.startswith("data:")]


def _kept_values(row: Row, name: str) -> dict[str, Any]:
    """The text of a row and its `"metadata"`.

    Raises:
        ItemError: `"metadata"` is no mapping from names, or has a name that no column can have.
    """
    text = {"text": row["text"]} if isinstance(row.get("text"), str) else {}
    kept = row.get("metadata") or {}
    if not isinstance(kept, Mapping) or not all(isinstance(column, str) and column for column in kept):
        raise ItemError(name, f'"metadata" must be a mapping from names to values, got {kept!r:.80}')
    for column in kept:
        if column in (*OWN_COLUMNS, "image", *text) or column.startswith("_") or {*column} & {".", "`"}:
            own = f"{', '.join((*OWN_COLUMNS, 'image'))} and names with _ at first are the collection's own"
            raise ItemError(
                name, f'"metadata" holds {column!r}, which cannot be a column: {own}, "." and "`" mean more'
            )
    empty = str, bytes, list, tuple  # of which an empty one is kept as it is
    return text | {
        column: None if is_missing(value) and not isinstance(value, empty) else value for column, value in kept.items()
    }


def _schema(rows: Iterable[Row], dimension: int, metadata: dict[str, Any], options: EncodeOptions) -> pa.Schema:
    """The columns of a new table: its own, and those kept ones whose types the data knows."""
    features = rows.features if isinstance(rows, datasets.Dataset | datasets.IterableDataset) else None
    kept = (features or {}).get("metadata")
    known = datasets.Features(kept).arrow_schema if isinstance(kept, dict) else ()
    own = [
        pa.field("id", pa.string(), nullable=False),
        vector_field(dimension, options.dtype, metadata),
        pa.field("text", pa.string()),
        pa.field("image", pa.list_(pa.string())),
        *(pa.field(name, pa.int64()) for name in ("item_digest", "row_digest")),
        pa.field("row_kind", pa.string()),
        *([pa.field("picture", pa.binary())] if options.keep_pictures else []),
    ]
    return pa.schema([*own, *(field for field in known if field.name != "text" and not pa.types.is_null(field.type))])


def to_table(records: Sequence[Record], dtype: str) -> pa.Table:
    """Records as a table, with a column for each name that one of them has.

    Raises:
        ValueError: A column cannot be kept, or a vector is not finite.
    """
    vectors = np.stack([record["vector"] for record in records]).astype(dtype)
    check_vectors(vectors, None, [record["id"] for record in records])
    columns = {"vector": pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), vectors.shape[1])}
    for name in dict.fromkeys(name for record in records for name in record if name != "vector"):
        try:
            columns[name] = pa.array([record.get(name) for record in records])
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"the column {name!r} cannot be kept: {error}") from error
    return pa.table(columns)
