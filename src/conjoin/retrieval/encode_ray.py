"""Encoding on a cluster: the workers of Ray Data read and encode the parts of the data, and this process writes."""

import os
import pickle
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import datasets

from conjoin.data.csv_files import ENCODING
from conjoin.data.pairs import PairSource, open_pairs
from conjoin.data.row_images import ALLOW_ROOTS
from conjoin.processing.urls import ALLOW_URLS
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

    Files are read in parallel, Parquet by row groups; otherwise each worker reads all and encodes its share.
    Ray starts a killed worker again and repeats its task; after an interruption here, the same call resumes.
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
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise ImportError("encoding on Ray needs Ray Data: pip install 'conjoin[ray]'") from error
    if not ray.is_initialized():  # the cluster of RAY_ADDRESS, or one of this machine
        ray.init(log_to_driver=False)
    device = "GPU" if ray.cluster_resources().get("GPU", 0) >= 1 else "CPU"
    count = workers or int(ray.cluster_resources().get(device, 1))
    folder = local_folder(uri)
    uri = str(uri if folder is None else folder)
    if isinstance(data, str | os.PathLike) and Path(data).expanduser().exists():
        data = str(Path(data).expanduser().absolute())  # a worker has another working directory
    arguments = {**(reading or {}), "streaming": True, "on_error": chosen.on_error}
    stream, first, reader = open_pairs(data, **arguments)
    if not isinstance(stream, datasets.IterableDataset):
        raise TypeError(f"cannot read {data!r:.80} in parts")
    stream = stream.reshard() if stream.num_shards < count else stream
    parts = stream.num_shards
    if parts > 1 and reader.columns.id is None:
        raise ValueError("the data is read in parts, so its rows have no numbers: name a column by --id-column")
    turns = max(1, count // parts)  # how many workers share a part
    tasks = [(part, turn) for part in range(parts) for turn in range(turns)]
    stream = stream.select_columns(reader.names)

    def read(part: int) -> Iterator[Mapping[str, Any]]:
        return iter(reader.stream(stream.shard(parts, part), first))

    with (
        writing(uri),
        CollectionWriter(uri, make_encoder("cpu"), chosen, kept_types(reader.stream(stream, first))) as writer,
        progress(desc="encoding", unit="row", show=show_progress) as bar,
    ):
        environment = {name: os.environ[name] for name in (ALLOW_URLS, ALLOW_ROOTS, ENCODING) if name in os.environ}
        listed = ray.data.from_items([{"task": task} for task in tasks], override_num_blocks=len(tasks))
        listed.context.target_max_block_size = 1  # what a worker gives at a time is a block
        listed.context.enable_progress_bars = False
        done = listed.map_batches(
            _Worker,
            fn_constructor_args=(read, turns, _ROWS_PER_TASK, make_encoder, uri, writer.key, chosen, environment),
            batch_size=1,
            compute=ray.data.ActorPoolStrategy(size=count),
            num_gpus=1 if device == "GPU" else None,
            num_cpus=None if device == "GPU" else 1,
        )
        for row in done.iter_rows():
            if isinstance(result := pickle.loads(row["result"]), Exception):
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


class _Worker:
    """Reads and encodes the rows of a task that the collection has not: their ids and what is encoded, or an error."""

    def __init__(
        self,
        read: Callable[[int], Iterator[Mapping[str, Any]]],
        turns: int,
        rows_at_once: int,
        make_encoder: MakeEncoder,
        uri: str,
        key: Mapping[str, Any],
        options: EncodeOptions,
        environment: Mapping[str, str],
    ) -> None:
        os.environ.update(environment)
        self.read, self.turns, self.rows_at_once, self.options = read, turns, rows_at_once, options
        self.encoder, self.known = make_encoder(None), open_known(uri)
        self.differing = differences(collection_key(self.encoder, options), key)

    def __call__(self, batch: dict[str, Any]) -> Iterator[dict[str, list[bytes]]]:
        part, turn = (int(number) for number in batch["task"][0])
        try:
            if self.differing:
                raise ValueError(
                    f"a worker loaded another model: it has {self.differing}; give all machines the same model"
                )
            rows = self.read(part)
            for number, chunk in enumerate(iter(lambda: list(islice(rows, self.rows_at_once)), [])):
                if number % self.turns == turn:
                    ids = [str(row["id"]) for row in chunk]
                    encoded = [*encode_rows(None, ids, chunk, self.known, self.encoder, self.options)]
                    yield {"result": [pickle.dumps((ids, encoded))]}
        except Exception as error:  # raised here, it would overtake the results before it
            yield {"result": [pickle.dumps(error)]}
