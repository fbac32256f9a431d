"""Rows as trainers read them: seeded choices, candidate ids, and columns for batching."""

from collections.abc import Hashable, Sequence
from typing import Any

import datasets
import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset

from conjoin.data.cells import as_id

NEGATIVES = ("negatives", "negative_ids", "negative_modalities")


class EpochRows(Dataset[dict[str, Any]]):
    """A dataset that resamples its random choices in every epoch.

    Each choice depends only on `seed`, `epoch` and the row, not on the number of processes or the point of resumption.
    Subclasses draw from `numpy_random` or `torch_random`. This class itself seeds torch's global generator for rows
    that draw from it.

    Args:
        rows: Rows with a length and an order; if they are `EpochRows`, they follow the epoch.
        seed: Seed of the choices.
    """

    def __init__(self, rows: Any, seed: int = 0) -> None:
        self.rows, self.seed = rows, seed
        self._epoch = 0

    @property
    def epoch(self) -> int:
        """The epoch of the choices; the trainer sets it."""
        return self._epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._epoch = epoch
        if isinstance(self.rows, EpochRows):
            self.rows.epoch = epoch

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self._torch_seed(index))
            return dict(self.rows[index])

    def numpy_random(self, index: int, *salt: int) -> np.random.Generator:
        """Return the generator of a row; each `salt` gives another one."""
        return np.random.default_rng((self.seed, self.epoch, index, *salt))

    def torch_random(self, index: int) -> torch.Generator:
        """Return the torch generator of a row."""
        return torch.Generator().manual_seed(self._torch_seed(index))

    def _torch_seed(self, index: int) -> int:
        return int(np.random.SeedSequence((self.seed, self.epoch, index)).generate_state(1)[0])


class QueryRows(EpochRows):
    """Rows of queries and candidates whose random choices (prompt, positive, negatives) are seeded.

    Args:
        rows: Rows for `conjoin.data.RetrievalCollator`, with a length and an order.
        seed: Seed of the choices.
        negatives: Whether rows keep their negatives.
    """

    def __init__(self, rows: Any, seed: int = 0, negatives: bool = True) -> None:
        super().__init__(rows, seed)
        self.negatives = negatives

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = super().__getitem__(index)
        return row if self.negatives else {name: value for name, value in row.items() if name not in NEGATIVES}


def positives_of(rows: Any) -> Sequence[Any]:
    """Return the id or ids of each row's positives; positives without an id count as distinct.

    Rows that have them all as `positives` are not read.
    """
    rows = _innermost(rows)
    if hasattr(rows, "positives"):
        return rows.positives
    names = _column(rows, "positive_id") or _column(rows, "positive") or [None] * len(rows)
    known = [name if isinstance(name, list | dict) else as_id(name) for name in names]
    return [name if isinstance(name, str) else index for index, name in enumerate(known)]


def sources_of(rows: Any) -> Sequence[Hashable]:
    """Return the dataset of each row.

    Raises:
        ValueError: The rows have no dataset.
    """
    rows = _innermost(rows)
    sources = rows.sources if hasattr(rows, "sources") else _column(rows, "dataset")
    if sources is None:
        raise ValueError("one_dataset_per_batch needs rows with a 'dataset' column")
    return sources


def repeats_of(rows: Any) -> Sequence[float] | None:
    """Return how many times each row is used in an epoch; None for once each."""
    return getattr(_innermost(rows), "repeats", None)


def has_order(rows: Any) -> bool:
    """Whether rows have a length and an order, so that a sampler can batch them."""
    return rows is not None and not isinstance(rows, IterableDataset | datasets.IterableDataset)


def _innermost(rows: Any) -> Any:
    return _innermost(rows.rows) if isinstance(rows, EpochRows) else rows


def _column(rows: Any, name: str) -> list[Any] | None:
    """Return a column of plain values of the rows; None if they lack it."""
    if isinstance(rows, datasets.Dataset):
        return rows[name][:] if isinstance(rows.features.get(name), datasets.Value) else None
    values = [rows[index].get(name) for index in range(len(rows))]
    return None if all(value is None for value in values) else values
