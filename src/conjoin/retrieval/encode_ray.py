"""Encoding on a cluster with Ray Data: one task per shard; the manifest of the store is the record of what is done."""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

from conjoin.processing.item_urls import ALLOW_URLS
from conjoin.progress import progress
from conjoin.retrieval.encode import check_not_updated, check_options, store_key, versions
from conjoin.retrieval.encode_rows import Row, RowEncoder, RowSource
from conjoin.retrieval.encoder import ItemEncoder
from conjoin.retrieval.shards import Chunk, ShardRows, encode_shard, end_of, finish_store, read_left_out
from conjoin.retrieval.store import STORE, EmbeddingStore, write_left_out
from conjoin.storage import FolderWriter, StoredFile, write_shard

MakeEncoder = Callable[[str | None], ItemEncoder]
"""Loads the encoder on a device; None takes a GPU when there is one."""


def encode_on_ray(
    rows: Iterable[Row],
    make_encoder: MakeEncoder,
    directory: str | Path,
    *,
    workers: int | None = None,
    instruction: str | None = None,
    shard_size: int = 4096,
    dtype: str = "float32",
    source: Mapping[str, Any] | None = None,
    on_error: Literal["raise", "skip"] = "raise",
    show_progress: bool = False,
) -> EmbeddingStore:
    """Encode rows into a store on a Ray cluster, as `encode_corpus` does on one machine.

    One task reads the rows and cuts them into shards. Workers, each with a GPU if the cluster has any, encode a shard
    per task and write it. This process records the finished shards. Ray starts a killed worker again and repeats its
    task; after an interruption of this process, the same call resumes, and so do `encode_corpus` and `encode_rank`.

    Args:
        rows: As for `encode_corpus`; they can be pickled, and every machine can read their images.
        make_encoder: Loads the encoder; called on this machine for `"cpu"`, and in each worker for None.
        directory: The store, on a file system that all machines share.
        workers: How many; None for one for each GPU of the cluster, or each CPU if it has none.
        instruction: As for `encode_corpus`.
        shard_size: As for `encode_corpus`.
        dtype: As for `encode_corpus`.
        source: As for `encode_corpus`.
        on_error: As for `encode_corpus`.
        show_progress: Show rows done and per second.

    Raises:
        ImportError: Ray is not installed.
        ValueError: As for `encode_corpus`, or a worker loaded another model.
        OSError: As for `encode_corpus`.
    """
    check_options(shard_size, dtype, on_error)
    if workers is not None and workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}")
    ray = _import_ray()
    encoder = make_encoder("cpu")
    key = store_key(encoder, dtype, shard_size, instruction, source)
    at_once = RowEncoder(encoder, instruction, False).rows_at_once
    directory = Path(directory).absolute()
    with (
        FolderWriter(directory, STORE, key) as writer,
        progress(desc="encoding", unit="row", show=show_progress) as bar,
    ):
        check_not_updated(writer)
        writer.details |= {"model": encoder.name, "versions": versions()}
        skip = on_error == "skip"
        reader = _Reader(rows, directory, dict(writer.files), shard_size, at_once, skip, end_of(writer))
        settings = _Settings(
            make_encoder, encoder.fingerprint, directory, instruction, dtype, skip, os.environ.get(ALLOW_URLS)
        )
        total = _run(ray, reader, settings, workers, writer, bar)
        with writer.ending(total) as is_last:
            if is_last:
                finish_store(writer, total, check_ids=False)
            else:
                write_left_out(writer.folder, read_left_out(writer))
    return EmbeddingStore(directory)


@dataclass(frozen=True)
class _Reader:
    """Reads the rows in a task: gives what to do for each shard that is missing, and the number of rows at the end."""

    rows: Iterable[Row]
    folder: Path
    files: dict[int, StoredFile]
    shard_size: int
    rows_at_once: int
    skip: bool
    end: int | None

    def __call__(self, _: Any) -> Iterator[dict[str, Any]]:  # noqa: ANN401
        source = RowSource(self.rows)
        sizes = self.shard_size, self.rows_at_once
        for number, parts in ShardRows(source, self.folder, self.files, *sizes, self.skip, self.end):
            yield {"number": number, "rows": 0, "parts": _Parts(list(parts))}
        yield {"number": -1, "rows": source.position, "parts": _Parts([])}


@dataclass(frozen=True)
class _Parts:
    """The rows of a shard; Ray carries them as they are."""

    chunks: list[Chunk]


@dataclass(frozen=True)
class _Settings:
    """What each worker needs to know."""

    make_encoder: MakeEncoder
    fingerprint: str
    folder: Path
    instruction: str | None
    dtype: str
    skip: bool
    urls: str | None


class _Worker:
    """Encodes one shard per call and writes it."""

    def __init__(self, settings: _Settings) -> None:
        if settings.urls:
            os.environ[ALLOW_URLS] = settings.urls
        self.settings = settings
        encoder = settings.make_encoder(None)
        if encoder.fingerprint != settings.fingerprint:
            raise ValueError(
                f"a worker loaded {encoder.identity}, expected the fingerprint {settings.fingerprint[:12]}; give all "
                "machines the same model"
            )
        self.encoding = RowEncoder(encoder, settings.instruction, settings.skip)

    def __call__(self, task: dict[str, Any]) -> dict[str, Any]:
        number, done = int(task["number"]), {"number": task["number"], "rows": task["rows"], "record": ""}
        if number < 0:
            return done
        bar = SimpleNamespace(update=lambda count: None)
        tensors, rows, details = encode_shard(
            self.encoding, number, iter(task["parts"].chunks), self.settings.dtype, bar
        )
        stored = write_shard(self.settings.folder, STORE, number, tensors, rows)
        return done | {"record": json.dumps([asdict(stored), details])}


def _run(
    ray: Any,  # noqa: ANN401
    reader: _Reader,
    settings: _Settings,
    workers: int | None,
    writer: FolderWriter,
    bar: Any,  # noqa: ANN401
) -> int:
    """Encode all shards that are missing and record them as they end; returns the number of rows.

    Raises:
        ValueError: A row or a worker is at fault.
        OSError: The disk is full or fails.
    """
    has_gpu = ray.cluster_resources().get("GPU", 0) >= 1
    count = workers or int(ray.cluster_resources().get("GPU" if has_gpu else "CPU", 1))
    resources = {"num_gpus": 1} if has_gpu else {"num_cpus": 1}
    tasks = ray.data.from_items([0]).flat_map(reader, num_cpus=0)
    tasks.context.target_max_block_size = 1  # a block is a shard, and a shard is a task
    tasks.context.enable_progress_bars = False
    done = tasks.map(_Worker, fn_constructor_args=(settings,), concurrency=count, **resources)
    total = 0
    try:
        for found in done.iter_rows():
            total += int(found["rows"])
            if found["record"]:
                stored, details = json.loads(found["record"])
                writer.record(int(found["number"]), StoredFile(**stored), details)
                bar.update(stored["rows"])
    except Exception as error:
        cause = _cause(error)
        if cause is None:
            raise
        raise cause from error
    return total


def _cause(error: BaseException) -> ValueError | OSError | None:
    """The error of a row or of the disk that a task of Ray failed with."""
    seen: BaseException | None = error
    while seen is not None:
        inner = vars(seen).get("cause")
        for found in (inner, seen):
            if isinstance(found, ValueError | OSError) and not type(found).__module__.startswith("ray."):
                return found
        seen = inner if isinstance(inner, BaseException) and inner is not seen else seen.__cause__
    return None


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
