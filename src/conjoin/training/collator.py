"""From rows of pairs to one batch of model inputs with the ids that tell false negatives apart."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import ProcessorMixin

from conjoin.data import ItemCollator


class PairCollator:
    """Collates rows `{"image", "text", "id"?, "group"?}` into model inputs and `ids` `(N,)`.

    Rows with the same `group` (by default the same `id`) show the same thing, so they are positives in evaluation and
    not negatives of one another in training.
    """

    def __init__(self, processor: ProcessorMixin) -> None:
        self.items = ItemCollator(processor)

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Collate a list of rows."""
        names = [str(row.get("group", row.get("id", index))) for index, row in enumerate(rows)]
        return dict(self.items(rows)) | {"ids": name_ids(names)}


def name_ids(names: Sequence[str]) -> torch.Tensor:
    """Stable 63-bit ids of names, `(N,)` int64, equal exactly where the names are (up to hash collisions)."""
    digests = (hashlib.sha256(name.encode()).digest() for name in names)
    return torch.tensor([int.from_bytes(digest[:8], "big") >> 1 for digest in digests])
