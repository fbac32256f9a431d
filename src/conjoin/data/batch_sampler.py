"""Batches for contrastive training: rows of a batch share no positive; optionally one dataset per batch."""

import logging
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterator, Sequence

import torch
from torch.utils.data import Sampler

logger = logging.getLogger(__name__)


class RetrievalBatchSampler(Sampler[list[int]]):
    """Yields lists of row numbers, reshuffled in every epoch.

    If the positive of a row is already in the batch, the row moves to a later batch. Rows that fit no full batch are
    skipped in this epoch (other rows in the next); the log says how many if they would fill a step. All epochs are as
    long as the first: more batches are cut, and missing ones come from another order of all rows. Pass the sampler as
    `batch_sampler` to a `DataLoader`. accelerate deals its batches to the processes in turn, so `processes`
    consecutive batches form one step. With the right `processes`, both guarantees hold for the whole step.

    Args:
        positives: The ids of each row's positives, or one id per row.
        batch_size: Rows per process.
        sources: The dataset of each row: each step then has rows of one dataset only. None mixes datasets.
        processes: Number of processes that share a step.
        seed: Seed of the order; seed and epoch determine it completely.
        repeats: How many times each row is used in an epoch: 2 for twice, 0.5 for a random half of the rows with this
            number. None uses every row once.

    Raises:
        ValueError: The rows do not fill one step.
    """

    drop_last = True

    def __init__(
        self,
        positives: Sequence[Hashable | Collection[Hashable]],
        batch_size: int,
        sources: Sequence[Hashable] | None = None,
        processes: int = 1,
        seed: int = 0,
        repeats: Sequence[float] | None = None,
    ) -> None:
        self.positives = positives
        self.batch_size = batch_size
        self.sources = sources
        self.processes = processes
        self.seed = seed
        self.repeats = repeats
        self.epoch = 0
        self._length = len(self._make(self._generator()))
        if not self._length:
            raise ValueError(
                f"{len(positives)} rows do not fill a step of {batch_size * processes} with different positives"
                + ("" if sources is None else " of one dataset")
                + "; lower the batch size"
            )
        rows = len(positives) if repeats is None else len(self._order(self._generator()))
        if (skipped := rows - batch_size * self._length) >= batch_size * processes:  # more than an unfilled last step
            logger.warning("%d of %d rows fill no batch and are skipped in this epoch", skipped, rows)

    @property
    def sampler(self) -> "RetrievalBatchSampler":
        """Return the sampler itself: accelerate calls `set_epoch` of a sharded batch sampler through this."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which determines the order."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[list[int]]:
        generator = self._generator()
        batches = self._make(generator)
        while len(batches) < self._length:
            batches += self._make(generator)
        return iter(batches[: self._length])

    def _generator(self) -> torch.Generator:
        return torch.Generator().manual_seed((self.seed << 20) + self.epoch)

    def _make(self, generator: torch.Generator) -> list[list[int]]:
        by_source: dict[Hashable, list[int]] = {}
        for row in self._order(generator):
            by_source.setdefault(None if self.sources is None else self.sources[row], []).append(row)
        steps = [step for rows in by_source.values() for step in self._steps(rows)]
        order = torch.randperm(len(steps), generator=generator).tolist()
        size = self.batch_size
        return [steps[index][start : start + size] for index in order for start in range(0, len(steps[index]), size)]

    def _order(self, generator: torch.Generator) -> list[int]:
        """Return the rows of an epoch in random order, each as often as `repeats` says."""
        if self.repeats is None:
            return torch.randperm(len(self.positives), generator=generator).tolist()
        repeats = torch.tensor(self.repeats, dtype=torch.float64)
        copies = []
        for number in sorted(set(self.repeats)):
            rows = (repeats == number).nonzero().flatten()
            rows = rows[torch.randperm(len(rows), generator=generator)]
            copies += [rows] * int(number) + [rows[: round(number % 1 * len(rows))]]
        joined = torch.cat(copies)
        return joined[torch.randperm(len(joined), generator=generator)].tolist()

    def _steps(self, rows: list[int]) -> list[list[int]]:
        """Return full steps of `rows`, in order: each row goes into the first step without its positives."""
        size = self.batch_size * self.processes
        steps: list[list[int]] = []
        holding: dict[Hashable, set[int]] = defaultdict(set)  # by positive the steps that have it
        free_from: dict[Hashable, int] = defaultdict(int)  # all open steps before this one have the positive
        first_open = 0
        for row in rows:
            ids = self.positives[row]
            ids = set(ids) if isinstance(ids, Collection) and not isinstance(ids, str) else {ids}
            index = max([first_open, *(free_from[key] for key in ids)])
            while index < len(steps) and (len(steps[index]) == size or any(index in holding[key] for key in ids)):
                index += 1
            if index == len(steps):
                steps.append([])
            steps[index].append(row)
            while first_open < len(steps) and len(steps[first_open]) == size:
                first_open += 1
            for key in ids:
                holding[key].add(index)
                free_from[key] = max(free_from[key], first_open)
                while free_from[key] in holding[key]:
                    free_from[key] += 1
        return [step for step in steps if len(step) == size]
