"""Queries with right and wrong candidates: what a reader gives for each, and the training rows drawn from it."""

from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import datasets
import torch
from torch.utils.data import Dataset

from conjoin.data.columns import undecoded
from conjoin.data.pair_sources import PairSource, open_source


class Candidate(NamedTuple):
    """A candidate of a query.

    Attributes:
        id: Equal for equal candidates.
        item: As processors take it.
        modality: `text`, `image` or `image,text`.
    """

    id: str
    item: Any
    modality: str


class QueryRow(NamedTuple):
    """A query and all its candidates, as a reader gives them.

    Attributes:
        id: Of the query.
        query: An item, as processors take it.
        positives: The right candidates, at least one; a reader may give names that `QueryDataset.candidate` looks up.
        negatives: The wrong ones, likewise.
        instruction: A text, or a function from the modality of the positive to prompts to draw from.
        variant: The query in other words, if there is one; training does not use it.
        kind: Of the negatives, likewise.
    """

    id: str
    query: Any
    positives: Sequence[Any]
    negatives: Sequence[Any] = ()
    instruction: str | Callable[[str], Sequence[str]] | None = None
    variant: Any = None
    kind: str | None = None


class QueryDataset(Dataset[dict[str, Any]]):
    """Training rows of queries for `RetrievalCollator`. A subclass fills the attributes and defines `read`.

    A row has `id`, `query` and `positive` (items), `instruction`, `negatives` (a list of items), `positive_id`,
    `negative_ids`, `target_modality`, `negative_modalities` and `dataset`. Each access draws one of several positives,
    negatives and prompts with torch's generator.

    Args:
        hard_negatives: Negatives of each row. A query with fewer repeats them, one without any has none.

    Attributes:
        positives: Ids of all positives of each row, for `RetrievalBatchSampler`.
        sources: The dataset of each row, likewise.

    Raises:
        ValueError: `hard_negatives` is negative.
    """

    repeats_negatives: ClassVar[bool] = True

    def __init__(self, hard_negatives: int) -> None:
        if hard_negatives < 0:
            raise ValueError(f"hard_negatives={hard_negatives}; expected 0 or more")
        self.hard_negatives = hard_negatives
        self.positives: list[tuple[Any, ...]] = []
        self.sources: list[Hashable] = []

    def read(self, index: int) -> QueryRow:
        """Read and check a row."""
        raise NotImplementedError

    def candidate(self, name: Any) -> Candidate:
        """Return the candidate of this name in a row; the name itself, if it is the candidate."""
        candidate: Candidate = name
        return candidate

    def __len__(self) -> int:
        return len(self.positives)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.draw(self.read(index), index)

    def draw(self, row: QueryRow, index: int) -> dict[str, Any]:
        """Draw the positive, the negatives and the prompt of a row."""
        count = self.hard_negatives if self.repeats_negatives else min(self.hard_negatives, len(row.negatives))
        positive, *negatives = map(self.candidate, _draw(row.positives, 1) + _draw(row.negatives, count))
        instruction = row.instruction
        if callable(instruction):
            (instruction,) = _draw(instruction(positive.modality), 1)
        return {
            "id": row.id,
            "query": row.query,
            "instruction": instruction,
            "positive": positive.item,
            "positive_id": positive.id,
            "negatives": [negative.item for negative in negatives],
            "negative_ids": [negative.id for negative in negatives],
            "target_modality": positive.modality,
            "negative_modalities": [negative.modality for negative in negatives],
            "dataset": self.sources[index],
        }


def open_rows(source: PairSource, split: str = "train") -> tuple[Any, Path | None]:
    """Open rows by number, with the folder of their images.

    Raises:
        FileNotFoundError: No such file.
        ValueError: The source has no rows or no length, cannot be read, or has no such split.
    """
    table, folder = open_source(source, split, streaming=False, only="image")
    if not isinstance(table, datasets.Dataset):
        raise ValueError(f"expected a dataset with a length, got {type(table).__name__}")
    if not len(table):
        raise ValueError(f"{source!r:.200} is empty: it has no rows")
    return undecoded(table), folder


def _draw(options: Sequence[Any], count: int) -> list[Any]:
    """Return `count` options in random order, each once before any repeats; none of no options."""
    order = torch.randperm(len(options)).tolist()
    return [options[order[index % len(order)]] for index in range(count if order else 0)]
