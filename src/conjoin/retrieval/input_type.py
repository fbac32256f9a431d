"""Inputs of a model for items of one input type, and the mean of embeddings under `avg`."""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from transformers import ProcessorMixin

from conjoin.processing import ImageTextProcessor, MllmRetrieverProcessor
from conjoin.processing.input_types import apply_input_type

OWN_PROCESSORS = (ImageTextProcessor, MllmRetrieverProcessor)
Processor = ProcessorMixin | Callable[..., Mapping[str, Any]]


class Inputs(NamedTuple):
    """The model inputs of items.

    Attributes:
        batches: One after the other, each of no more items than a batch.
        counts: The number of embeddings of each item.
    """

    batches: list[dict[str, Any]]
    counts: list[int]


class InputMaker(NamedTuple):
    """Makes model inputs of items of one input type.

    Attributes:
        processor: As `ItemEncoder` takes it.
        input_type: One of `INPUT_TYPES`.
        batch_size: Most items of a batch.
    """

    processor: Processor
    input_type: str
    batch_size: int

    def __call__(
        self, items: Sequence[Any], instructions: Sequence[str | None], ids: Sequence[str | None] | None = None
    ) -> Inputs:
        """Make the inputs of items, each under its instruction; warnings of our processors name their ids."""
        parts = [apply_input_type(item, self.input_type, f"item {place}") for place, item in enumerate(items)]
        given = zip(parts, instructions, ids or [None] * len(parts), strict=True)
        flat = [(part, told, own_id) for some, told, own_id in given for part in some]
        starts = range(0, len(flat), self.batch_size)
        return Inputs([self._batch(flat[start : start + self.batch_size]) for start in starts], list(map(len, parts)))

    def _batch(self, named: Sequence[tuple[Any, str | None, str | None]]) -> dict[str, Any]:
        processor: Any = self.processor
        items, instructions, ids = map(list, zip(*named, strict=True))
        more = {} if all(text is None for text in instructions) else {"instruction": instructions}
        if isinstance(processor, OWN_PROCESSORS) and all(own_id is not None for own_id in ids):
            more["ids"] = ids
        return dict(processor(items, **more))


def own_input_type(processor: Processor) -> str:
    """Return the input type that a processor was saved with; `seq` for those of other packages."""
    return processor.input_type if isinstance(processor, OWN_PROCESSORS) else "seq"


def in_sequence(processor: Processor) -> Processor:
    """Return a processor that leaves several images as they are, since the encoder applies the input type."""
    if own_input_type(processor) == "seq":
        return processor
    other: Any = copy.copy(processor)
    other.input_type = "seq"
    return other


def mean_embeddings(embeddings: np.ndarray, counts: Sequence[int]) -> np.ndarray:
    """Return the mean of each item's embeddings, L2-normalised; those of items with one are unchanged.

    Args:
        embeddings: `(M, D)`, the items one after the other.
        counts: The number of embeddings of each of the N items.

    Returns:
        `(N, D)`; not finite where embeddings cancel out.
    """
    if len(counts) == len(embeddings):
        return embeddings
    starts = np.cumsum([0, *counts[:-1]])
    sums = np.add.reduceat(embeddings, starts, axis=0)
    with np.errstate(invalid="ignore"):
        means = sums / np.linalg.norm(sums, axis=1, keepdims=True)
    return np.where(np.asarray(counts)[:, None] == 1, embeddings[starts], means)
