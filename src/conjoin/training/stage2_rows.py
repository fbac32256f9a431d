"""Rows of stage 2: each anchor with its mined negatives and, if asked for, an augmented version of itself."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import datasets
import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from conjoin.processing import load_image
from conjoin.retrieval import MinedNegatives

from .feature_cache import CachedFeatures


class Stage2Rows(Dataset[dict[str, Any]]):
    """Rows `{"anchor", "mined", "augmented"}` over rows of pairs; two steps of a run draw different negatives.

    The draw depends on `seed`, `epoch` and the row alone, so a resumed run sees what the uninterrupted one would have.

    Args:
        rows: Pairs, or their `CachedFeatures`.
        ids: The id of every row, as mining knew it.
        mined: Where hard negatives come from; None for none.
        per_anchor: Negatives to draw; an anchor with fewer repeats itself, marked as absent.
        augment: Makes the augmented version's image from the anchor's; `CachedFeatures` take another stored copy
            instead. None for no such version.
        augmented: Whether each row has an augmented version.
        seed: Seed of the draws.
        candidates: The pairs, with an `id`, that the negatives were mined from; the rows themselves when None.

    Raises:
        ValueError: The ids do not fit the rows, nothing was mined for one of them, or cached features are to be mixed
            with candidates; on reading a row, a negative of it is not among the candidates.
    """

    def __init__(
        self,
        rows: Any,  # noqa: ANN401
        ids: Sequence[str],
        mined: MinedNegatives | None = None,
        per_anchor: int = 2,
        augment: Callable[[Image.Image], Image.Image] | None = None,
        augmented: bool = False,
        seed: int = 0,
        candidates: datasets.Dataset | None = None,
    ) -> None:
        if len(ids) != len(rows):
            raise ValueError(f"{len(ids)} ids for {len(rows)} rows")
        if candidates is not None and isinstance(rows, CachedFeatures):
            raise ValueError("rows are cached features, but candidates are not; leave one of the two out")
        without = None if mined is None or not per_anchor else next((name for name in ids if name not in mined), None)
        if mined is not None and without is not None:
            raise ValueError(f"nothing was mined for {without!r}: {str(mined.path)!r} is of other rows")
        self.rows, self.ids, self.mined, self.per_anchor = rows, list(ids), mined, per_anchor
        self.augment, self.augmented, self.seed = augment, augmented, seed
        self.candidates = rows if candidates is None else candidates
        names = self.ids if candidates is None else candidates["id"]
        self._places = {str(name): index for index, name in enumerate(names)}
        self._epoch = 0

    @property
    def epoch(self) -> int:
        """Which epoch the draws are for; cached features follow."""
        return self._epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._epoch = epoch
        if isinstance(self.rows, CachedFeatures):
            self.rows.epoch = epoch

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        seed = np.random.SeedSequence((self.seed, self.epoch, index)).generate_state(1)
        generator = torch.Generator().manual_seed(int(seed[0]))
        anchor = self.rows[index]
        row: dict[str, Any] = {"anchor": anchor, "mined": [], "found": []}
        if self.mined is not None and self.per_anchor:
            drawn = self.mined.draw(self.ids[index], self.per_anchor, generator)
            missing = self.per_anchor - len(drawn)
            row["mined"] = [self.candidates[self._place(name, index)] for name in drawn] + [anchor] * missing
            row["found"] = [True] * len(drawn) + [False] * missing
        if self.augmented:
            row["augmented"] = [self._augment(anchor, index, generator)]
        return row

    def _place(self, name: str, index: int) -> int:
        if name not in self._places:
            raise ValueError(
                f"row {index} ({self.ids[index]!r}): its mined negative {name!r} is not in the data that it "
                "should be drawn from"
            )
        return self._places[name]

    def _augment(self, anchor: dict[str, Any], index: int, generator: torch.Generator) -> dict[str, Any]:
        if isinstance(self.rows, CachedFeatures):
            return self.rows.draw(index, 1 + int(torch.randint(2**31, (), generator=generator)))
        image = anchor["image"]
        if self.augment is not None:
            image = self.augment(load_image(image, f"row {index} ({self.ids[index]!r})"))
        return {**anchor, "image": image, "text": anchor.get("alternative_text") or anchor["text"]}


class Stage2Collator:
    """Collates `Stage2Rows` into the anchors' model inputs and, prefixed `mined_` and `augmented_`, the others'.

    The latter are `(N, K, ...)`; `mined_rows_mask` `(N, K)` tells which exist. Plain rows of pairs pass through.

    Args:
        collator: Of rows of pairs.
    """

    def __init__(self, collator: Callable[[list[Any]], dict[str, Any]]) -> None:
        self.collator = collator

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Collate a list of rows."""
        if "anchor" not in rows[0]:
            return self.collator(list(rows))
        batch = self.collator([row["anchor"] for row in rows])
        for role in ("mined", "augmented"):
            others = [other for row in rows for other in row.get(role, [])]
            if others:
                collated = self.collator(others)
                collated.pop("ids", None)
                batch |= {f"{role}_{name}": _per_row(value, len(rows)) for name, value in collated.items()}
        if rows[0]["mined"]:
            batch["mined_rows_mask"] = torch.tensor([row["found"] for row in rows])
        return batch


def _per_row(value: Tensor, rows: int) -> Tensor:
    return value.unflatten(0, (rows, -1))
