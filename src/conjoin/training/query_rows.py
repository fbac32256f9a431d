"""Rows of queries and candidates as trainers read them: drawn by seed, named by content, dealt into batches."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import datasets
import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset

from conjoin.data import MbeirTraining

from .state_shards import TaughtRows

NEGATIVES = ("negatives", "negative_ids", "negative_modalities")


class DrawnRows(Dataset[dict[str, Any]]):
    """Rows whose random choices (of a prompt, a positive, negatives) depend on `seed`, `epoch` and the row alone.

    So a resumed run sees what the uninterrupted one would have, however many workers read.

    Args:
        rows: Rows for `conjoin.data.RetrievalCollator`, with a length and an order.
        seed: Of the choices.
        negatives: Whether rows keep their negatives.
    """

    def __init__(self, rows: Any, seed: int = 0, negatives: bool = True) -> None:  # noqa: ANN401
        self.rows, self.seed, self.negatives, self.epoch = rows, seed, negatives, 0

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        seed = np.random.SeedSequence((self.seed, self.epoch, index)).generate_state(1)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(int(seed[0]))
            row = dict(self.rows[index])
        return row if self.negatives else {name: value for name, value in row.items() if name not in NEGATIVES}


class NamedCandidates:
    """Puts into a batch the `ids` `(N + M,)` of its N positives and M negatives, so that equal ones are known.

    They are the rows' `positive_id` and `negative_ids`; candidates without ids are named by their text if they are
    nothing but texts.

    Args:
        collator: A `conjoin.data.RetrievalCollator`.
    """

    def __init__(self, collator: Callable[[list[Any]], dict[str, Any]]) -> None:
        self.collator = collator

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Collate a list of rows."""
        batch = self.collator([_named_by_text(row) for row in rows])
        if "candidate_ids" in batch:
            batch["ids"] = batch.pop("candidate_ids")
        return batch


def positives_of(rows: Any) -> Sequence[Any]:  # noqa: ANN401 - any rows with a length
    """What the positives of each row are called; those without a name are all different."""
    rows = _innermost(rows)
    if isinstance(rows, MbeirTraining):
        return rows.positives
    names = _column(rows, "positive_id") or _column(rows, "positive") or [None] * len(rows)
    return [name if isinstance(name, str) else place for place, name in enumerate(names)]


def sources_of(rows: Any) -> Sequence[Hashable]:  # noqa: ANN401 - any rows with a length
    """The dataset of each row.

    Raises:
        ValueError: The rows do not tell.
    """
    rows = _innermost(rows)
    found = rows.sources if isinstance(rows, MbeirTraining) else _column(rows, "dataset")
    if found is None:
        raise ValueError("one_dataset_per_batch needs rows with a 'dataset' column")
    return found


def has_order(rows: Any) -> bool:  # noqa: ANN401 - any rows
    """Whether rows have a length and places, so that they can be dealt into batches."""
    return rows is not None and not isinstance(rows, IterableDataset | datasets.IterableDataset)


def _named_by_text(row: Mapping[str, Any]) -> Mapping[str, Any]:
    negatives = row.get("negatives") or []
    if row.get("positive_id") is not None or not all(isinstance(c, str) for c in [row.get("positive"), *negatives]):
        return row
    return {**row, "positive_id": row["positive"], "negative_ids": negatives}


def _innermost(rows: Any) -> Any:  # noqa: ANN401
    return _innermost(rows.rows) if isinstance(rows, DrawnRows | TaughtRows) else rows


def _column(rows: Any, name: str) -> list[Any] | None:  # noqa: ANN401
    """A column of rows, None if they lack it."""
    if isinstance(rows, datasets.Dataset):
        return rows[name][:] if name in rows.column_names else None
    values = [rows[index].get(name) for index in range(len(rows))]
    return None if all(value is None for value in values) else values
