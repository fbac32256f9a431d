"""Streams of pairs that are mixed, shuffled, divided among processes, and resumed where they stopped."""

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import datasets
import numpy as np
from datasets.distributed import split_dataset_by_node
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from conjoin.data.row_checks import Skipped, problem_of

Rows = list[dict[str, Any]]


class StreamMark(NamedTuple):
    """Where a stream is after a batch.

    Attributes:
        worker: The worker that made the batch.
        state: From which the worker makes its next batch.
        skipped: The rows before it that cannot be used.
    """

    worker: int
    state: dict[str, Any]
    skipped: list[Skipped]


class PairStream(IterableDataset[Any]):
    """An endless mix of streamed sources.

    Every source starts again at its end. The mix is even: after any number of rows, each source has given its share to
    within one row. Rows are shuffled in windows; a row's place depends on the seed, the pass and the window alone.

    Args:
        sources: Streams by name, as `load_training_pairs` returns them.
        weights: Relative number of rows of each source; equal when None.
        window: Rows that are held, undecoded, and shuffled; 1 keeps their order.
        skip: Skip rows that cannot be used, instead of raising.

    Attributes:
        position: Of this process: `batches` read, by how many `readers` (workers, or one process), and their states.

    Raises:
        ValueError: A weight or the window is not positive.
    """

    def __init__(
        self,
        sources: Mapping[str, datasets.IterableDataset],
        weights: Sequence[float] | None = None,
        window: int = 1000,
        skip: bool = False,
    ) -> None:
        self.sources = dict(sources)
        self.weights = [1.0] * len(self.sources) if weights is None else list(weights)
        if window < 1 or len(self.weights) != len(self.sources) or not all(weight > 0 for weight in self.weights):
            raise ValueError(f"weights={self.weights}, window={window}: expected a positive number for every source")
        self.window, self.skip = window, skip
        self.position: dict[str, Any] = {"batches": 0, "workers": {}}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Iterate over the rows, without end."""
        for batch in _Batches(self, 1, 0, 1, 0):
            yield from batch[0] if batch is not None else ()

    def loader(
        self,
        collate: Callable[[Rows], dict[str, Any]],
        batch_size: int,
        *,
        rank: int = 0,
        processes: int = 1,
        seed: int = 0,
        workers: int = 0,
        **options: Any,
    ) -> "StreamLoader":
        """Return the batches of one process from `position` on: what `collate` makes of the rows, and their mark.

        Raises:
            ValueError: A source has fewer shards than a process has workers, or the position is of another number of
                workers.
        """
        batches = _Batches(self, batch_size, rank, processes, seed)
        for name, source in batches.sources.items():
            if workers > source.num_shards:
                raise ValueError(
                    f"{workers} workers read the source {name!r}, which has {source.num_shards} shards for this "
                    "process; set dataloader_num_workers to at most this number"
                )
        readers = max(workers, 1)
        if not self.position["batches"]:
            self.position["readers"] = readers
        known = self.position["readers"]
        if known != readers:
            raise ValueError(f"the stream was read by {known} workers; resume it with as many, not with {workers}")
        options |= {"collate_fn": partial(_collate, collate), "num_workers": workers}
        return StreamLoader(batches, batch_size=None, **options)

    def advance(self, mark: StreamMark) -> None:
        """Set the position after a batch that was used."""
        self.position["batches"] += 1
        self.position["workers"][str(mark.worker)] = mark.state


class StreamLoader(DataLoader[Any]):
    """A loader of a `PairStream`."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Iterate over `(batch, mark)`."""
        return (batch for batch in super().__iter__() if batch is not None)


def _collate(collate: Callable[[Rows], Any], batch: tuple[Rows, StreamMark] | None) -> tuple[Any, StreamMark] | None:
    return None if batch is None else (collate(batch[0]), batch[1])


class _Batches(IterableDataset[Any]):
    """Batches of rows with their marks, of one process or one of its workers."""

    def __init__(self, stream: PairStream, batch_size: int, rank: int, processes: int, seed: int) -> None:
        self.stream, self.batch_size, self.seed = stream, batch_size, seed
        self.sources = {
            name: source if processes == 1 else split_dataset_by_node(source, rank, processes)
            for name, source in stream.sources.items()
        }

    def __iter__(self) -> Iterator[tuple[Rows, StreamMark] | None]:
        info, position = get_worker_info(), self.stream.position
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        if worker < position["batches"] % workers:
            yield None  # the loader asks the workers in turn, from the first on
        state = position["workers"].get(str(worker), {"counts": [0] * len(self.sources), "sources": {}})
        counts, states = list(state["counts"]), dict(state["sources"])
        readers = [
            _read(name, source, self.stream, (self.seed, worker), states.get(name))
            for name, source in self.sources.items()
        ]
        names = list(self.sources)
        while True:
            rows: Rows = []
            skipped: list[Skipped] = []
            while len(rows) < self.batch_size:
                source = _next_source(counts, self.stream.weights)
                row, reason, states[names[source]] = next(readers[source])
                if reason is not None:
                    skipped.append(Skipped(names[source], None, str(row.get("id")), reason))
                    continue
                rows.append({name: value for name, value in row.items() if name != "problem"})
                counts[source] += 1
            yield rows, StreamMark(worker, {"counts": list(counts), "sources": dict(states)}, skipped)


def _next_source(counts: Sequence[int], weights: Sequence[float]) -> int:
    """Return the source of the next row, by the quota method (Balinski and Young, 1975).

    It is one that the next row does not lift above its share by a whole row; no source then falls behind by one.
    """
    share = (sum(counts) + 1) / sum(weights)
    behind = [source for source, weight in enumerate(weights) if counts[source] < weight * share]
    return min(behind, key=lambda source: ((counts[source] + 1) / weights[source], source))


def _read(
    name: str, source: datasets.IterableDataset, stream: PairStream, seed: tuple[int, int], state: Any
) -> Iterator[tuple[dict[str, Any], str | None, dict[str, Any]]]:
    """Read one source in shuffled windows, again and again.

    Args:
        name: Of the source.
        source: What this process reads of it.
        stream: The settings.
        seed: Of the order in a window, together with the pass and the window.
        state: To start from, as it is yielded; None for the start.

    Yields:
        A row, why it cannot be used, and the state behind it: that of the source before the window, and the place in
        the window.

    Raises:
        ValueError: No row of a whole pass can be used.
    """
    place: dict[str, Any] = {"pass": 0, "window": 0, "index": 0, "source": None} if state is None else dict(state)
    used = state is not None
    while True:
        rows = copy.deepcopy(source)  # a stream keeps the state that it once started from
        if place["source"] is not None:
            rows.load_state_dict(place["source"])
        left = iter(rows)
        while window := list(itertools.islice(left, stream.window)):
            order = np.random.default_rng((*seed, place["pass"], place["window"])).permutation(len(window))
            for index in range(place["index"], len(window)):
                row = window[order[index]]
                reason = problem_of(row) if stream.skip else None
                used |= reason is None
                yield row, reason, place | {"index": index + 1}
            place |= {"window": place["window"] + 1, "index": 0, "source": copy.deepcopy(rows.state_dict())}
        if not used:
            raise ValueError(f"the source {name!r} has no row that can be used")
        place, used = {"pass": place["pass"] + 1, "window": 0, "index": 0, "source": None}, False
