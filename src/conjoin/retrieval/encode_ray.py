"""Encoding on a cluster: this process reads and writes, and workers of Ray encode chunks of rows."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from conjoin.processing.urls import ALLOW_URLS
from conjoin.retrieval.collection import Collection, local_folder
from conjoin.retrieval.encode import (
    BATCHES_AT_ONCE,
    EncodedChunk,
    EncodeOptions,
    ExistingRows,
    Row,
    collection_key,
    encode_rows,
    read_chunks,
    write_rows,
)
from conjoin.retrieval.encoder import ItemEncoder
from conjoin.storage import differences

MakeEncoder = Callable[[str | None], ItemEncoder]
"""Loads the encoder on a device; None takes a GPU when there is one."""


def encode_on_ray(
    rows: Iterable[Row],
    make_encoder: MakeEncoder,
    uri: str | Path,
    *,
    workers: int | None = None,
    show_progress: bool = False,
    **options: Any,  # noqa: ANN401 - fields of EncodeOptions
) -> Collection:
    """Encode rows into a collection on a Ray cluster, as `encode_collection` does on one machine.

    Ray starts a killed worker again and repeats its chunk; after an interruption here, the same call resumes.

    Args:
        rows: As for `encode_collection`; every machine can read the files of their images.
        make_encoder: Loads the encoder; called here for `"cpu"`, and in each worker for None. It can be pickled.
        uri: As for `encode_collection`; a folder must be one that all machines share.
        workers: How many; None for one for each GPU of the cluster, or each CPU if it has none.
        show_progress: Show rows done and per second.
        options: Fields of `EncodeOptions`, as for `encode_collection`.

    Raises:
        ImportError: Ray is not installed.
        ValueError: As for `encode_collection`; or a worker loaded another model than this process.
        OSError: As for `encode_collection`.
    """
    chosen = EncodeOptions(**options)
    if workers is not None and workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}")
    try:
        import ray
        from ray.util import ActorPool
    except ImportError as error:
        raise ImportError("encoding on Ray needs Ray: pip install 'conjoin[ray]'") from error
    if not ray.is_initialized():  # the cluster of RAY_ADDRESS, or one of this machine
        ray.init(log_to_driver=False)
    device = "GPU" if ray.cluster_resources().get("GPU", 0) >= 1 else "CPU"
    count = workers or int(ray.cluster_resources().get(device, 1))
    needs = {"num_gpus": 1} if device == "GPU" else {"num_cpus": 1}
    worker = ray.remote(_Worker).options(max_restarts=-1, max_task_retries=-1, **needs)
    folder = local_folder(uri)
    uri = str(uri if folder is None else folder)  # a worker has another working directory
    encoder = make_encoder("cpu")
    given = make_encoder, uri, collection_key(encoder, chosen), chosen, os.environ.get(ALLOW_URLS)

    def encoded(existing: ExistingRows) -> Iterator[EncodedChunk]:
        pool = ActorPool([worker.remote(*given) for _ in range(count)] * 2)  # each has one chunk, and one that waits

        def next_chunk() -> list[EncodedChunk]:
            try:
                return pool.get_next_unordered()
            except ray.exceptions.RayTaskError as error:
                raise error.cause from None

        for chunk in read_chunks(rows, BATCHES_AT_ONCE * encoder.batch_size, existing.seen):
            if not pool.has_free():
                yield from next_chunk()
            pool.submit(lambda actor, values: actor.encode.remote(*values), chunk)
        while pool.has_next():
            yield from next_chunk()

    changes = write_rows(encoded, rows, encoder, uri, chosen, show_progress)
    collection = Collection(uri)
    collection.changes = changes
    return collection


class _Worker:
    """Encodes the rows of a chunk that the collection has not."""

    def __init__(
        self,
        make_encoder: MakeEncoder,
        uri: str,
        key: Mapping[str, Any],
        options: EncodeOptions,
        allow_urls: str | None,
    ) -> None:
        if allow_urls is not None:
            os.environ[ALLOW_URLS] = allow_urls
        self.options, self.encoder, self.existing = options, make_encoder(None), ExistingRows(Collection.newest(uri))
        self.differing = differences(collection_key(self.encoder, options), key)

    def encode(self, start: int, ids: Sequence[str], chunk: Sequence[Row]) -> list[EncodedChunk]:
        if self.differing:
            raise ValueError(
                f"a worker loaded another model: it has {self.differing}; give all machines the same model"
            )
        return [*encode_rows(start, ids, chunk, self.existing, self.encoder, self.options)]
