"""Rows of queries and candidates with a seed for the mask of each row."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from conjoin.data.training_rows import QueryRows

SEED = "mask_seed"


class SeededRows(QueryRows):
    """Adds `mask_seed` to each row: another one in every epoch, the same on any number of processes."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return super().__getitem__(index) | {SEED: int(self.numpy_random(index, 1).integers(2**62))}


class SeedCollator:
    """Adds `mask_seeds` `(N,)` to a batch of rows that have seeds.

    Args:
        collator: Collates the rest.
    """

    def __init__(self, collator: Callable[[list[Any]], dict[str, Any]]) -> None:
        self.collator = collator

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        batch = self.collator(list(rows))
        if rows and SEED in rows[0]:
            batch["mask_seeds"] = torch.tensor([row[SEED] for row in rows])
        return batch
