"""Rows of stage 2: each anchor with its mined negatives and an optional augmented version."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import datasets
import torch
from PIL import Image

from conjoin.data import EpochRows
from conjoin.data.row_images import map_images
from conjoin.processing import load_image
from conjoin.retrieval import MinedNegatives
from conjoin.training.features import CachedFeatures


class SolarStage2Rows(EpochRows):
    """Rows `{"anchor", "mined", "augmented"}` built from rows of pairs; every epoch resamples the negatives.

    Args:
        rows: Pairs, or their `CachedFeatures`.
        ids: The id of every row, as used in mining.
        mined: The mined hard negatives, or None.
        per_anchor: Negatives sampled per anchor; missing negatives are filled with the anchor and marked as absent.
        augment: Augments the anchor's image for the augmented version; None keeps the image. `CachedFeatures` use
            another stored copy instead.
        augmented: Whether each row has an augmented version.
        seed: Seed of the sampling.
        candidates: The pairs, with an `id`, that the negatives were mined from; None for `rows`.

    Raises:
        ValueError: The ids do not match the rows, a row has no mined negatives, or cached features are combined with
            candidates. On reading a row: one of its negatives is not in the candidates.
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
            raise ValueError("rows are cached features, but candidates are not; remove one of the two")
        without = None if mined is None or not per_anchor else next((name for name in ids if name not in mined), None)
        if mined is not None and without is not None:
            raise ValueError(f"nothing was mined for {without!r}: {str(mined.path)!r} is of other rows")
        super().__init__(rows, seed)
        self.ids, self.mined, self.per_anchor = list(ids), mined, per_anchor
        self.augment, self.augmented = augment, augmented
        self.candidates = rows if candidates is None else candidates
        names = self.ids if candidates is None else candidates["id"]
        self._indices = {str(name): index for index, name in enumerate(names)}

    def __getitem__(self, index: int) -> dict[str, Any]:
        generator = self.torch_random(index)
        anchor = self.rows[index]
        row: dict[str, Any] = {"anchor": anchor, "mined": [], "exists": []}
        if self.mined is not None and self.per_anchor:
            drawn = self.mined.draw(self.ids[index], self.per_anchor, generator)
            missing = self.per_anchor - len(drawn)
            row["mined"] = [self.candidates[self._candidate_index(name, index)] for name in drawn] + [anchor] * missing
            row["exists"] = [True] * len(drawn) + [False] * missing
        if self.augmented:
            row["augmented"] = [self._augment(anchor, index, generator)]
        return row

    def _candidate_index(self, name: str, index: int) -> int:
        if name not in self._indices:
            raise ValueError(
                f"row {index} ({self.ids[index]!r}): its mined negative {name!r} is not in the data that "
                "negatives are sampled from"
            )
        return self._indices[name]

    def _augment(self, anchor: dict[str, Any], index: int, generator: torch.Generator) -> dict[str, Any]:
        if isinstance(self.rows, CachedFeatures):
            return self.rows.choose(index, 1 + int(torch.randint(2**31, (), generator=generator)))
        image, augment = anchor["image"], self.augment
        if augment is not None:
            name = f"row {index} ({self.ids[index]!r})"
            image = map_images(lambda single: augment(load_image(single, name)), image)
        return {**anchor, "image": image, "text": anchor.get("alternative_text") or anchor["text"]}


class SolarStage2Collator:
    """Collates `SolarStage2Rows` into the parts `pairs` (the anchors, N rows), `mined` (N·K rows) and `augmented`.

    `mined_mask` `(N, K)` is True for mined items that exist. Plain rows of pairs are collated as usual.

    Args:
        collator: Collator of rows of pairs.
    """

    def __init__(self, collator: Callable[[list[Any]], dict[str, Any]]) -> None:
        self.collator = collator

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        if "anchor" not in rows[0]:
            return self.collator(list(rows))
        batch = self.collator([row["anchor"] for row in rows])
        for role in ("mined", "augmented"):
            others = [other for row in rows for other in row.get(role, [])]
            if others:
                batch[role] = self.collator(others)["pairs"]
        if rows[0]["mined"]:
            batch["mined_mask"] = torch.tensor([row["exists"] for row in rows])
        return batch
