"""Encoding on a cluster: Ray Data reads the data in parallel, and a pool of workers writes into one collection.

The tasks that read give the rows as `datasets` reads them, as Arrow tables; the workers make pairs of them, as
`load_pairs` does. A worker writes the rows of a task before it reports them, and passes over those that the collection
has. So a task may be repeated, and an interrupted run resumes.
"""

import json
import os
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pyarrow as pa

from conjoin.data.pairs import PairReader, PairSource, open_pairs
from conjoin.data.row_checks import Skipped, require_unique
from conjoin.data.row_images import ALLOW_ROOTS
from conjoin.processing.item_images import ALLOW_URLS
from conjoin.progress import progress
from conjoin.retrieval.collection import Collection
from conjoin.retrieval.collection_table import local_folder, writing
from conjoin.retrieval.encode import CollectionWriter
from conjoin.retrieval.encode_rows import Row, kept_types
from conjoin.retrieval.encoder import ItemEncoder
from conjoin.retrieval.options import EncodeOptions
from conjoin.storage import differences

MakeEncoder = Callable[[str | None], ItemEncoder]
"""Loads the encoder on a device; None takes a GPU when there is one."""
_ROWS_PER_TASK = 16_384
_BYTES_PER_TASK = 2**26
_ROWS_AT_ONCE = 256
_ERRORS: dict[str, type[Exception]] = {
    "FileNotFoundError": FileNotFoundError,
    "OSError": OSError,
    "ValueError": ValueError,
}


def encode_on_ray(
    data: PairSource,
    make_encoder: MakeEncoder,
    uri: str | Path,
    *,
    workers: int | None = None,
    reading: Mapping[str, Any] | None = None,
    show_progress: bool = False,
    **options: Any,  # noqa: ANN401 - fields of EncodeOptions
) -> Collection:
    """Encode data into a collection on a Ray cluster, as `encode_collection` does on one machine.

    Files are read in parallel, Parquet by row groups; any other source by one task. Each worker loads the model. Ray
    starts a killed worker again and repeats its task; after an interruption of this process, the same call resumes.
    Another batch has another rounding: vectors equal those of one process to about 1e-6.

    Args:
        data: As for `load_pairs`; every machine can read it, and its images.
        make_encoder: Loads the encoder; called here for `"cpu"`, and in each worker for None. It can be pickled.
        uri: As for `encode_collection`; a folder must be one that all machines share.
        workers: How many; None for one for each GPU of the cluster, or each CPU if it has none.
        reading: Further arguments of `load_pairs`, which is called with `streaming=True`.
        show_progress: Show rows done and per second.
        options: Fields of `EncodeOptions`, as for `encode_collection`.

    Raises:
        ImportError: Ray is not installed.
        ValueError: As for `encode_collection` and `load_pairs`; or data in several files has no column of ids.
        OSError: As for `encode_collection`.
    """
    chosen = EncodeOptions(**options)
    if workers is not None and workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}")
    ray = _import_ray()
    has_gpu = ray.cluster_resources().get("GPU", 0) >= 1
    count = workers or int(ray.cluster_resources().get("GPU" if has_gpu else "CPU", 1))
    folder = local_folder(uri)
    uri = str(uri if folder is None else folder)
    arguments: dict[str, Any] = {**(reading or {}), "streaming": True, "on_error": chosen.on_error}
    stream, first, reader = open_pairs(_absolute(data), **arguments)
    if not isinstance(stream, datasets.IterableDataset):
        raise TypeError(f"cannot read {data!r:.80} in parts")
    if stream.num_shards < count:
        stream = stream.reshard()
    if stream.num_shards > 1 and reader.columns.id is None:
        raise ValueError("the data is read in parts, so its rows have no numbers: name a column by --id-column")
    encoder = make_encoder("cpu")
    writer = CollectionWriter(uri, encoder, chosen, is_shared=True)
    worker = _Settings(make_encoder, reader, stream.num_shards > 1, uri, writer.key, chosen, _allowed())
    with writing(uri), progress(desc="encoding", unit="row", show=show_progress) as bar:
        writer.create(kept_types(reader.stream(stream, first)), encoder.dimension)
        done = _plan(
            ray, stream.select_columns(reader.names), worker, count, {"num_gpus": 1} if has_gpu else {"num_cpus": 1}
        )
        changes = writer.finish(_collect(done, writer, bar), chosen.sync)
    collection = Collection(uri)
    collection.changes = changes
    return collection


@dataclass(frozen=True)
class _Read:
    """Gives the rows of a part of the data, some at a time: the part, the index of the first row in it, the rows."""

    stream: datasets.IterableDataset
    rows_per_task: int

    def __call__(self, task: dict[str, Any]) -> Iterator[dict[str, Any]]:
        part, start = int(task["part"]), 0
        tables: list[pa.Table] = []
        stream = self.stream.shard(self.stream.num_shards, part).with_format("arrow")
        try:
            for table in stream.iter(min(_ROWS_AT_ONCE, self.rows_per_task)):
                tables.append(table)
                size = sum(map(len, tables))
                if size >= self.rows_per_task or sum(table.nbytes for table in tables) >= _BYTES_PER_TASK:
                    yield {"part": part, "start": start, "rows": _serialised(tables), "error": ""}
                    start, tables = start + size, []
        except (ValueError, OSError) as error:
            yield {"part": part, "start": start, "rows": b"", "error": _described(error)}
        else:
            if tables:
                yield {"part": part, "start": start, "rows": _serialised(tables), "error": ""}


@dataclass(frozen=True)
class _Settings:
    """What each worker needs to know."""

    make_encoder: MakeEncoder
    reader: PairReader
    has_parts: bool
    uri: str
    key: Mapping[str, Any]
    options: EncodeOptions
    environment: Mapping[str, str]


class _Worker:
    """Encodes the rows of a task, writes them, and reports them, or a `ValueError` or `OSError`."""

    def __init__(self, settings: _Settings) -> None:
        os.environ.update(settings.environment)
        self.settings, self.name = settings, f"worker-{uuid.uuid4().hex}"
        self.writer: CollectionWriter | None = None

    def __call__(self, task: dict[str, Any]) -> dict[str, Any]:
        where = {"part": int(task["part"]), "start": int(task["start"])}
        if task["error"]:
            return where | {"report": task["error"]}
        try:
            return where | {"report": json.dumps(self._encode(task["rows"], **where))}
        except (ValueError, OSError) as error:
            return where | {"report": _described(error)}

    def _encode(self, serialised: bytes, part: int, start: int) -> dict[str, Any]:
        if self.writer is None:
            self.writer = self._open()
        suffix = f" of part {part}" if self.settings.has_parts else ""
        rows = enumerate(pa.ipc.open_stream(serialised).read_all().to_pylist(), start)
        pairs: list[Row] = []
        for index, row in rows:
            pairs += self.settings.reader.pairs(row, f"{index}{suffix}")
        ids = [pair["id"] for pair in pairs]
        with writing(self.settings.uri, self.name):
            self.writer.take(0, ids, pairs, self.writer.find(ids), SimpleNamespace(update=lambda count: None))
            self.writer.flush()
        return self.writer.take_report() | {"ids": ids}

    def _open(self) -> CollectionWriter:
        settings = self.settings
        writer = CollectionWriter(settings.uri, settings.make_encoder(None), settings.options, is_shared=True)
        if differing := differences(writer.key, settings.key):
            raise ValueError(f"a worker loaded another model: it has {differing}; give all machines the same model")
        writer.open()
        return writer


def _plan(ray: Any, stream: datasets.IterableDataset, worker: _Settings, count: int, resources: dict[str, int]) -> Any:  # noqa: ANN401
    """What Ray Data is to do: a task for each part of the data reads it, and `count` workers encode what they read."""
    parts = [{"part": part} for part in range(stream.num_shards)]
    tasks = ray.data.from_items(parts, override_num_blocks=len(parts))
    here = {"ray.io/node-id": ray.get_runtime_context().get_node_id()}
    where = here if stream.num_shards == 1 else None  # one file may lie on this machine alone
    readers, workers = ray.data.TaskPoolStrategy(size=min(count, len(parts))), ray.data.ActorPoolStrategy(size=count)
    rows = tasks.flat_map(_Read(stream, _ROWS_PER_TASK), num_cpus=0, compute=readers, label_selector=where)
    rows.context.target_max_block_size = 1  # what `_Read` gives at a time is a block, and a block is a task
    rows.context.enable_progress_bars = False
    return rows.map(_Worker, fn_constructor_args=(worker,), compute=workers, **resources)


def _collect(done: Any, writer: CollectionWriter, bar: Any) -> int:  # noqa: ANN401
    """Add up the reports of the workers; returns the number of rows.

    Raises:
        ValueError: A row or a worker is at fault, or an id occurs twice.
        OSError: The disk is full or fails.
    """
    counts: dict[tuple[int, int], int] = {}
    skipped: list[tuple[tuple[int, int], Skipped]] = []
    for task in done.iter_rows():
        report, where = json.loads(task["report"]), (int(task["part"]), int(task["start"]))
        if "error" in report:
            raise _ERRORS[report["error"]](report["message"])
        ids = report["ids"]
        require_unique(ids, writer.find(ids).repeated, None)
        skipped += [(where, Skipped(*row)) for row in report["skipped"]]
        counts[where] = len(ids)
        writer.merge(report | {"skipped": []})
        bar.update(len(ids))
    total, before = 0, {}
    for where in sorted(counts):
        before[where], total = total, total + counts[where]
    writer.skipped = [row._replace(row=(row.row or 0) + before[where]) for where, row in skipped]
    return total


def _serialised(tables: list[pa.Table]) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, tables[0].schema) as file:
        for table in tables:
            file.write_table(table)
    return bytes(sink.getvalue())


def _absolute(data: PairSource) -> PairSource:
    """Make paths absolute: a worker has another working directory."""
    if isinstance(data, list | tuple):
        return [str(_absolute(source)) for source in data]
    if isinstance(data, str | os.PathLike) and Path(data).expanduser().exists():
        return str(Path(data).expanduser().absolute())
    return data


def _allowed() -> dict[str, str]:
    """The environment variables that allow images, here and on other machines."""
    return {name: os.environ[name] for name in (ALLOW_URLS, ALLOW_ROOTS) if name in os.environ}


def _described(error: Exception) -> str:
    """An error as a report: its type, as far as callers tell them apart, and its message."""
    kind = next(name for name, kind in _ERRORS.items() if isinstance(error, kind))
    return json.dumps({"error": kind, "message": str(error)})


def _import_ray() -> Any:  # noqa: ANN401
    """Ray, connected to the cluster of `RAY_ADDRESS` or of this machine; a local one is started if there is none."""
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise ImportError("encoding on Ray needs Ray Data: pip install 'conjoin[ray]'") from error
    if not ray.is_initialized():
        ray.init(log_to_driver=False)
    return ray
