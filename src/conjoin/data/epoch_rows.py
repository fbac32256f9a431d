"""Rows whose random choices are a function of (seed, epoch, row), so a resumed run sees the same rows."""

from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset


class EpochRows(Dataset[dict[str, Any]]):
    """A dataset that resamples its random choices in every epoch.

    Each choice depends only on `seed`, `epoch` and the row, not on the number of processes or the point of resumption.
    Subclasses draw from `numpy_random` or `torch_random`. This class itself seeds torch's global generator for rows
    that draw from it.

    Args:
        rows: Rows with a length and an order; if they are `EpochRows`, they follow the epoch.
        seed: Seed of the choices.
    """

    def __init__(self, rows: Any, seed: int = 0) -> None:  # noqa: ANN401 - any rows with a length
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
