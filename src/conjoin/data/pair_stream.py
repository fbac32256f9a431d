"""Streams of pairs that are mixed, shuffled, divided among processes, and resumed where they stopped."""

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
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
        options |= {"collate_fn": _Collate(collate), "num_workers": workers}
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


class _Collate:
    def __init__(self, collate: Callable[[Rows], dict[str, Any]]) -> None:
        self.collate = collate

    def __call__(self, batch: tuple[Rows, StreamMark] | None) -> tuple[dict[str, Any], StreamMark] | None:
        return None if batch is None else (self.collate(batch[0]), batch[1])


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
        counts, weights = list(state["counts"]), self.stream.weights
        readers = [
            _SourceReader(name, source, self.stream, (self.seed, worker), state["sources"].get(name))
            for name, source in self.sources.items()
        ]
        while True:
            rows: Rows = []
            skipped: list[Skipped] = []
            while len(rows) < self.batch_size:
                source = _next_source(counts, weights)
                rows.append(readers[source].read(skipped))
                counts[source] += 1
            after = {"counts": list(counts), "sources": {reader.name: reader.state for reader in readers}}
            yield rows, StreamMark(worker, after, skipped)


def _next_source(counts: Sequence[int], weights: Sequence[float]) -> int:
    """Return the source of the next row, by the quota method (Balinski and Young, 1975).

    It is one that the next row does not lift above its share by a whole row; no source then falls behind by one.
    """
    share = (sum(counts) + 1) / sum(weights)
    behind = [source for source, weight in enumerate(weights) if counts[source] < weight * share]
    return min(behind, key=lambda source: ((counts[source] + 1) / weights[source], source))


class _SourceReader:
    """Reads one source in shuffled windows, again and again.

    Args:
        name: Of the source.
        source: What this process reads of it.
        stream: The settings.
        seed: Of the order in a window, together with the pass and the window.
        state: To start from, as `state`; None for the start.
    """

    def __init__(
        self,
        name: str,
        source: datasets.IterableDataset,
        stream: PairStream,
        seed: tuple[int, int],
        state: Mapping[str, Any] | None,
    ) -> None:
        self.name, self.unread, self.settings, self.seed = name, source, stream, seed
        start = state or {"pass": 0, "window": 0, "used": 0, "source": None, "index": 0}
        self.rows: Rows = []
        self.source = source
        self.passed, self.number, self.used = start["pass"], start["window"], start["used"]
        self._begin(start["source"])
        self._fill()
        self.index = start["index"]

    @property
    def state(self) -> dict[str, Any]:
        """The state before the next row: that of the source before its window, and the index in it."""
        numbers = {"pass": self.passed, "window": self.number, "used": self.used, "index": self.index}
        return numbers | {"source": self.before}

    def read(self, skipped: list[Skipped]) -> dict[str, Any]:
        """Return the next row that can be used, and append those before it that cannot to `skipped`.

        Raises:
            ValueError: No row of a whole pass can be used.
        """
        while True:
            while self.index == len(self.rows):
                self._next_window()
            row = self.rows[self.index]
            self.index += 1
            reason = problem_of(row) if self.settings.skip else None
            if reason is None:
                self.used += 1
                return {name: value for name, value in row.items() if name != "problem"}
            skipped.append(Skipped(self.name, None, str(row.get("id")), reason))

    def _next_window(self) -> None:
        if self.rows:
            self.number += 1
            self.before = copy.deepcopy(self.source.state_dict())
        else:
            if not self.used:
                raise ValueError(f"the source {self.name!r} has no row that can be used")
            self.passed, self.number, self.used = self.passed + 1, 0, 0
            self._begin(None)
        self._fill()

    def _begin(self, before: dict[str, Any] | None) -> None:
        """Start a pass, or resume it from a state of the source."""
        self.before = before
        self.source = copy.deepcopy(self.unread)  # a stream keeps the state that it once started from
        if before is not None:
            self.source.load_state_dict(before)
        self.rows_left = iter(self.source)

    def _fill(self) -> None:
        window = list(itertools.islice(self.rows_left, self.settings.window))
        order = np.random.default_rng((*self.seed, self.passed, self.number)).permutation(len(window))
        self.rows, self.index = [dict(window[index]) for index in order], 0
