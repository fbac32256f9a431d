"""Encoding on a cluster: Ray Data reads the parts of the data, a pool of workers encodes, and this process writes."""

import os
import pickle
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import datasets

from conjoin.data.pairs import PairReader, PairSource, open_pairs
from conjoin.data.row_images import ALLOW_ROOTS
from conjoin.processing.item_images import ALLOW_URLS
from conjoin.progress import progress
from conjoin.retrieval.collection import Collection
from conjoin.retrieval.collection_table import local_folder, writing
from conjoin.retrieval.encode import CollectionWriter, collection_key, kept_types, open_known
from conjoin.retrieval.encode_rows import encode_rows
from conjoin.retrieval.encoder import ItemEncoder
from conjoin.retrieval.options import EncodeOptions
from conjoin.storage import differences

MakeEncoder = Callable[[str | None], ItemEncoder]
"""Loads the encoder on a device; None takes a GPU when there is one."""
_ROWS_PER_TASK = 2048


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
    arguments = {**(reading or {}), "streaming": True, "on_error": chosen.on_error}
    stream, first, reader = open_pairs(_absolute(data), **arguments)
    if not isinstance(stream, datasets.IterableDataset):
        raise TypeError(f"cannot read {data!r:.80} in parts")
    stream = stream.reshard() if stream.num_shards < count else stream
    if stream.num_shards > 1 and reader.columns.id is None:
        raise ValueError("the data is read in parts, so its rows have no numbers: name a column by --id-column")
    parts = [{"part": part} for part in range(stream.num_shards)]
    read = _Read(stream.select_columns(reader.names), reader, _ROWS_PER_TASK)
    where = {"ray.io/node-id": ray.get_runtime_context().get_node_id()} if len(parts) == 1 else None  # a file of here
    with (
        writing(uri),
        CollectionWriter(uri, make_encoder("cpu"), chosen, kept_types(reader.stream(stream, first))) as writer,
        progress(desc="encoding", unit="row", show=show_progress) as bar,
    ):
        environment = {name: os.environ[name] for name in (ALLOW_URLS, ALLOW_ROOTS) if name in os.environ}
        rows = ray.data.from_items(parts, override_num_blocks=len(parts)).flat_map(
            read, num_cpus=0, compute=ray.data.TaskPoolStrategy(size=min(count, len(parts))), label_selector=where
        )
        rows.context.target_max_block_size = 1  # what `read` gives at a time is a block
        rows.context.enable_progress_bars = False
        done = rows.map_batches(
            _Worker,
            fn_constructor_args=(make_encoder, uri, writer.key, chosen, environment),
            batch_size=1,
            compute=ray.data.ActorPoolStrategy(size=count),
            **({"num_gpus": 1} if has_gpu else {"num_cpus": 1}),
        )
        for task in done.iter_rows():
            if isinstance(result := pickle.loads(task["result"]), Exception):
                raise result
            ids, encoded = result
            writer.known.see(ids, None)
            for each in encoded:
                writer.add(each)
            bar.update(len(ids))
        changes = writer.finish()
    collection = Collection(uri)
    collection.changes = changes
    return collection


class _Read:
    """Reads a part of the data: pickled lists of pairs, or an error."""

    def __init__(self, stream: datasets.IterableDataset, reader: PairReader, rows_per_task: int) -> None:
        self.stream, self.reader, self.rows_per_task = stream, reader, rows_per_task

    def __call__(self, task: dict[str, Any]) -> Iterator[dict[str, bytes]]:
        part, count = int(task["part"]), self.stream.num_shards
        suffix = f" of part {part}" if count > 1 else ""
        pairs: list[Any] = []
        try:
            for number, row in enumerate(self.stream.shard(count, part)):
                pairs += self.reader.pairs(row, f"{number}{suffix}")
                if len(pairs) >= self.rows_per_task:
                    yield {"rows": pickle.dumps(pairs)}
                    pairs = []
        except (ValueError, OSError) as error:
            yield {"rows": pickle.dumps(error)}
        else:
            if pairs:
                yield {"rows": pickle.dumps(pairs)}


class _Worker:
    """Encodes the rows of a task that the collection has not: their ids and what is encoded, or an error."""

    def __init__(
        self,
        make_encoder: MakeEncoder,
        uri: str,
        key: Mapping[str, Any],
        options: EncodeOptions,
        environment: Mapping[str, str],
    ) -> None:
        os.environ.update(environment)
        self.encoder, self.options, self.known = make_encoder(None), options, open_known(uri)
        self.differing = differences(collection_key(self.encoder, options), key)

    def __call__(self, task: dict[str, Any]) -> dict[str, list[bytes]]:
        rows = pickle.loads(task["rows"][0])
        try:
            if self.differing:
                raise ValueError(
                    f"a worker loaded another model: it has {self.differing}; give all machines the same model"
                )
            if isinstance(rows, Exception):
                raise rows
            ids = [str(row["id"]) for row in rows]
            result: Any = ids, [*encode_rows(None, ids, rows, self.known, self.encoder, self.options)]
        except (ValueError, OSError) as error:
            result = error
        return {"result": [pickle.dumps(result)]}


def _absolute(data: PairSource) -> PairSource:
    """Make paths absolute: a worker has another working directory."""
    if isinstance(data, list | tuple):
        return [str(_absolute(source)) for source in data]
    if isinstance(data, str | os.PathLike) and Path(data).expanduser().exists():
        return str(Path(data).expanduser().absolute())
    return data


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
