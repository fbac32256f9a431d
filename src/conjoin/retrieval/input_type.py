"""Inputs of a model for items of one input type, and the mean of embeddings under `avg`."""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from transformers import ProcessorMixin

from conjoin.processing import ImageTextProcessor, MllmRetrieverProcessor
from conjoin.processing.input_types import apply_input_type
from conjoin.processing.item_images import image_pixels
from conjoin.processing.item_inputs import ImageSource, item_parts

OWN_PROCESSORS = (ImageTextProcessor, MllmRetrieverProcessor)
Processor = ProcessorMixin | Callable[..., Mapping[str, Any]]


BATCH_PIXELS = 2**27
"""Images of a batch that are decoded at one time, in pixels: 400 MB."""


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
        """Make the inputs of items, each under its instruction; warnings of our processors name their ids.

        Other processors decode all images of a batch before they resize one, as `cat` does, so a batch also ends at
        `BATCH_PIXELS`.
        """
        decodes_one = isinstance(self.processor, OWN_PROCESSORS) and self.input_type != "cat"
        batches: list[dict[str, Any]] = []
        counts: list[int] = []
        batch: list[tuple[Any, str | None, str | None]] = []
        held = 0
        known = ids or [None] * len(items)
        for place, item in enumerate(items):
            parts = apply_input_type(item, self.input_type, f"item {place}")
            counts.append(len(parts))
            for part in parts:
                pixels = 0 if decodes_one else _count_pixels(part)
                if batch and (len(batch) == self.batch_size or held + pixels > BATCH_PIXELS):
                    batches.append(self._batch(batch))
                    batch, held = [], 0
                batch.append((part, instructions[place], known[place]))
                held += pixels
        return Inputs([*batches, self._batch(batch)], counts)

    def _batch(self, named: Sequence[tuple[Any, str | None, str | None]]) -> dict[str, Any]:
        processor: Any = self.processor
        items, instructions, ids = map(list, zip(*named, strict=True))
        more = {} if all(text is None for text in instructions) else {"instruction": instructions}
        if isinstance(processor, OWN_PROCESSORS) and all(own_id is not None for own_id in ids):
            more["ids"] = ids
        return dict(processor(items, **more))


def _count_pixels(item: Any) -> int:  # noqa: ANN401
    """The pixels of the images of an item, by their headers; the processor judges what cannot be read."""
    try:
        parts = item_parts(item)
    except (ValueError, FileNotFoundError):
        return 0
    return sum(image_pixels(part.source) for part in parts if isinstance(part, ImageSource))


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
