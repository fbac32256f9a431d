"""Generalized contrastive learning: one loss over the image, text and fused embeddings of every pair (GCL)."""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor, nn

from .checks import check_length, check_matrix, inverse, loss_metrics, unit
from .gather import Gathered, gather_rows, is_distributed
from .kernel import Exclusion, logsumexp
from .temperature import Temperature

MODALITIES = ("image", "text", "fused")
PAIRS = ((0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1))
"""The 6 ordered pairs of different modalities that the loss averages over."""


def gcl(
    image: Tensor,
    text: Tensor,
    fused: Tensor,
    temperature: Tensor | float,
    exclude_self: bool = True,
    exclude_same_modality: bool = False,
    exclude_other_positive: bool = False,
    *,
    gathered: Gathered | None = None,
) -> Tensor:
    """`-1/(6N) sum_j sum_{(a,b)} log( e^{s(a_j, b_j)} / sum_m sum_k e^{s(a_j, m_k)} )`, `s = cos / t`.

    The denominator runs over all modalities m and pairs k except the anchor. In a batch of one pair these are the
    other two embeddings.

    Args:
        image: `(N, D)`, raw.
        text: `(N, D)`, raw.
        fused: `(N, D)`, raw; row j of all three belongs to one image-text pair.
        temperature: Positive float, or 0-d tensor to learn.
        exclude_self: Leave the anchor out of its own denominator.
        exclude_same_modality: Leave out everything of the anchor's modality.
        exclude_other_positive: For the pair (a, b), leave the third embedding of the same j out.
        gathered: Result of `gather_rows(image, text, fused, ids=..., present=...)`: the rows of all devices, and what
            each shows; rows of one id are not each other's negatives. `present` `(N, 3)` bool says which of image,
            text and fused exist: terms that need a missing one are left out of the mean, no denominator holds one,
            and it may be anything.

    Raises:
        ValueError: Shapes do not fit, a present vector is zero or not finite, the temperature is not positive, or no
            row has two of the three.
    """
    scale, count = inverse(temperature), len(image)
    gathered = gathered or Gathered((image, text, fused))
    rows = columns = _Views(*gathered[:3])
    if gathered.positions is not None:
        own = (part.index_select(0, gathered.positions) for part in (columns.ids, columns.present))
        rows = _Views((image, text, fused), *own)
    number = len(PAIRS) * columns.count
    if not columns.complete:
        number = int(torch.stack([columns.has(a, b) for a, b in PAIRS]).sum())
    if not number:
        raise ValueError("no row has two of image, text and fused: there is nothing to contrast")

    # Log-sum-exp of each embedding to those of all other pairs, minus infinity where it is missing.
    if columns is rows and gathered.ids is None and rows.complete:
        exclusion = Exclusion(diagonals=(-2 * count, -count, 0, count, 2 * count))
    else:
        exclusion = Exclusion(labels=((rows.ids[rows.index % count], columns.ids[columns.index % columns.count]),))
    if exclude_same_modality:
        modalities = rows.index // count, columns.index // columns.count
        exclusion = exclusion._replace(labels=(*exclusion.labels, modalities))
    negatives = logsumexp(rows.vectors, None if columns is rows else columns.vectors, scale, exclusion)
    if not rows.complete:
        negatives = negatives.new_full((3 * count,), float("-inf")).index_put((rows.index,), negatives)

    @cache
    def score(a: int, b: int) -> Tensor:
        """Scaled similarities `(N,)` of two embeddings of one pair, minus infinity where one is missing."""
        scores = (rows.units[a] * rows.units[b]).sum(-1) * scale
        return scores if rows.complete else scores.masked_fill(~rows.has(a, b), float("-inf"))

    terms = []
    for a, b in PAIRS:
        members = [b] + [3 - a - b] * (not exclude_other_positive)
        members += [a] * (not (exclude_self or exclude_same_modality))
        scores = [score(min(a, member), max(a, member)) for member in members]
        denominator, positive = torch.stack([negatives.view(3, -1)[a], *scores], dim=1), scores[0]
        if not rows.complete:
            denominator, positive = denominator[rows.has(a, b)], positive[rows.has(a, b)]
        terms.append(denominator.logsumexp(1) - positive)
    return torch.cat(terms).sum() / (number * count / columns.count)


class _Views:
    """The 3N embeddings of N pairs as unit vectors, modality by modality.

    Args:
        matrices: Image, text and fused `(N, D)`, raw.
        ids: `(N,)` integers naming what each pair shows; all different by default.
        present: `(N, 3)` bool, which of image, text and fused exist; all by default.

    Attributes:
        units: The three matrices; a constant stands for what is missing, which may be zero or NaN.
        index: Which of the 3N exist.
        vectors: Those that exist.
    """

    def __init__(self, matrices: Sequence[Tensor], ids: Tensor | None, present: Tensor | None) -> None:
        for name, matrix in zip(MODALITIES, matrices, strict=True):
            check_matrix(matrix, name, matrices[0], same_rows=True)
        self.count, device = len(matrices[0]), matrices[0].device
        self.ids = torch.arange(self.count, device=device) if ids is None else ids
        check_length(self.ids, "ids", self.count)
        self.present = torch.ones(self.count, 3, device=device).bool() if present is None else present.bool()
        if self.present.shape != (self.count, 3):
            raise ValueError(f"present has shape {tuple(self.present.shape)}, expected ({self.count}, 3)")
        self.complete = present is None or bool(present.all())
        self.index = torch.arange(3 * self.count, device=device)
        if not self.complete:
            self.index = self.index[self.present.T.flatten()]
            matrices = [
                matrix.where(exists[:, None], 1.0) for matrix, exists in zip(matrices, self.present.T, strict=True)
            ]
        self.units = [unit(matrix, name) for matrix, name in zip(matrices, MODALITIES, strict=True)]
        self.vectors = torch.cat(self.units) if self.complete else torch.cat(self.units)[self.index]

    def has(self, a: int, b: int) -> Tensor:
        """Which pairs `(N,)` have two modalities."""
        return self.present[:, a] & self.present[:, b]


class GclLoss(nn.Module):
    """Generalized contrastive loss over image, text and fused embeddings, negatives from all devices.

    Args:
        temperature: Softmax temperature, or its start.
        learn_temperature: Train it.
        exclude_self: As for `gcl`, like the next two.
        exclude_same_modality: Leave the anchor's modality out of its denominator.
        exclude_other_positive: Leave the third embedding of the pair out.
    """

    def __init__(
        self,
        temperature: float = 0.07,
        learn_temperature: bool = True,
        exclude_self: bool = True,
        exclude_same_modality: bool = False,
        exclude_other_positive: bool = False,
    ) -> None:
        super().__init__()
        self.excluded = (exclude_self, exclude_same_modality, exclude_other_positive)
        self.temperature = Temperature(temperature, learn_temperature)

    def forward(
        self, image: Tensor, text: Tensor, fused: Tensor, ids: Tensor | None = None, present: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Return `gcl_loss` and the metrics `temperature` and, with `ids`, `masked_negatives`.

        Args:
            image: As for `gcl`, like the other arguments.
            text: `(N, D)`, raw.
            fused: `(N, D)`, raw.
            ids: `(N,)` integers.
            present: `(N, 3)` bool.
        """
        temperature = self.temperature()
        if present is None and is_distributed():  # the rows of another device may lack something, and all gather alike
            present = torch.ones(len(image), 3, dtype=torch.bool, device=image.device)
        gathered = gather_rows(image, text, fused, ids=ids, present=present)
        loss = gcl(image, text, fused, temperature, *self.excluded, gathered=gathered)
        return {"gcl_loss": loss} | loss_metrics(temperature, ids)
