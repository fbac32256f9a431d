"""Encoding on a cluster: this process reads and writes, and workers of Ray encode chunks of rows."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from conjoin.processing.urls import ALLOW_URLS
from conjoin.progress import progress
from conjoin.retrieval.collection import Collection
from conjoin.retrieval.collection_table import local_folder, writing
from conjoin.retrieval.encode import BATCHES_AT_ONCE, CollectionWriter, collection_key, kept_types, open_known
from conjoin.retrieval.encode_rows import Encoded, Row, encode_rows, read_chunks
from conjoin.retrieval.encoder import ItemEncoder
from conjoin.retrieval.options import EncodeOptions
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
    encoder, bar = make_encoder("cpu"), progress(desc="encoding", unit="row", show=show_progress)
    with writing(uri), CollectionWriter(uri, encoder, chosen, kept_types(rows)) as writer, bar:
        given = make_encoder, uri, writer.key, chosen, os.environ.get(ALLOW_URLS)
        pool = ActorPool([worker.remote(*given) for _ in range(count)] * 2)  # each has one chunk, and one that waits

        def write_next() -> None:
            try:
                results: list[Encoded] = pool.get_next_unordered()
            except ray.exceptions.RayTaskError as error:
                raise error.cause from None
            for encoded in results:
                writer.add(encoded)
                bar.update(len(encoded.records) + encoded.unchanged + len(encoded.skipped))

        for start, ids, chunk in read_chunks(rows, BATCHES_AT_ONCE * encoder.batch_size):
            writer.known.see(ids, start)
            if not pool.has_free():
                write_next()
            pool.submit(lambda actor, values: actor.encode.remote(*values), (start, ids, chunk))
        while pool.has_next():
            write_next()
        changes = writer.finish()
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
        self.options, self.encoder, self.known = options, make_encoder(None), open_known(uri)
        self.differing = differences(collection_key(self.encoder, options), key)

    def encode(self, start: int, ids: Sequence[str], chunk: Sequence[Row]) -> list[Encoded]:
        if self.differing:
            raise ValueError(
                f"a worker loaded another model: it has {self.differing}; give all machines the same model"
            )
        return [*encode_rows(start, ids, chunk, self.known, self.encoder, self.options)]
