"""Generalized contrastive learning: one loss over the image, text and fused embeddings of every pair (GCL)."""

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import permutations
from typing import Any

import torch
from torch import Tensor, nn

from .checks import check_length, check_matrix, inverse, loss_metrics, unit
from .gather import Gathered, gather_rows, is_distributed
from .kernel import Exclusion, logsumexp
from .temperature import Temperature

MODALITIES = ("image", "text", "fused")
"""The paper's views of a pair."""


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
        ValueError: As `gcl_views`.
    """
    excluded = (exclude_self, exclude_same_modality, exclude_other_positive)
    views = dict(zip(MODALITIES, (image, text, fused), strict=True))
    return gcl_views(views, temperature, *excluded, gathered=gathered)


def gcl_views(
    views: Mapping[str, Tensor],
    temperature: Tensor | float,
    exclude_self: bool = True,
    exclude_same_modality: bool = False,
    exclude_other_positive: bool = False,
    *,
    weights: Sequence[float] | None = None,
    gathered: Gathered | None = None,
) -> Tensor:
    """`gcl` of any views of a row: the mean over the ordered pairs (a, b) of views, each weighted by `w_a w_b`.

    The denominator runs over the embeddings of all views of all rows, whatever their weights.

    Args:
        views: Embeddings `(N, D)`, raw, by name; row j of all belongs to one row of the data.
        temperature: As for `gcl`, like the next three.
        exclude_self: Leave the anchor out of its own denominator.
        exclude_same_modality: Leave out everything of the anchor's view.
        exclude_other_positive: Leave the other embeddings of the row out.
        weights: Of the V views, positive; all 1 by default.
        gathered: As for `gcl`, of these views; `present` is `(N, V)`.

    Raises:
        ValueError: Shapes do not fit, a present vector is zero or not finite, the temperature is not positive, or no
            row has two of the views.
    """
    names, matrices, number = list(views), list(views.values()), len(views)
    scale, count = inverse(temperature), len(matrices[0])
    gathered = gathered or Gathered(matrices)
    rows = columns = _Views(names, gathered.vectors, gathered.ids, gathered.present)
    if gathered.positions is not None:
        own = (part.index_select(0, gathered.positions) for part in (columns.ids, columns.present))
        rows = _Views(names, matrices, *own)
    pairs = list(permutations(range(number), 2))
    shares = {(a, b): 1.0 if weights is None else weights[a] * weights[b] for a, b in pairs}
    total = columns.count * sum(shares.values())
    if not columns.complete:
        total = float(sum(shares[pair] * columns.has(*pair).sum() for pair in pairs))
    if not total:
        raise ValueError(f"no row has two of {', '.join(names[:-1])} and {names[-1]}: there is nothing to contrast")

    # Log-sum-exp of each embedding to those of all other rows, minus infinity where it is missing.
    if columns is rows and gathered.ids is None and rows.complete:
        exclusion = Exclusion(diagonals=tuple(count * offset for offset in range(1 - number, number)))
    else:
        exclusion = Exclusion(labels=((rows.ids[rows.index % count], columns.ids[columns.index % columns.count]),))
    if exclude_same_modality:
        modalities = rows.index // count, columns.index // columns.count
        exclusion = exclusion._replace(labels=(*exclusion.labels, modalities))
    negatives = logsumexp(rows.vectors, None if columns is rows else columns.vectors, scale, exclusion)
    if not rows.complete:
        negatives = negatives.new_full((number * count,), float("-inf")).index_put((rows.index,), negatives)

    @cache
    def score(a: int, b: int) -> Tensor:
        """Scaled similarities `(N,)` of two embeddings of one row, minus infinity where one is missing."""
        scores = (rows.units[a] * rows.units[b]).sum(-1) * scale
        return scores if rows.complete else scores.masked_fill(~rows.has(a, b), float("-inf"))

    terms = []
    for a, b in pairs:
        others = [other for other in range(number) if other not in (a, b)]
        members = [b, *([] if exclude_other_positive else others)]
        members += [a] * (not (exclude_self or exclude_same_modality))
        scores = [score(min(a, member), max(a, member)) for member in members]
        denominator, positive = torch.stack([negatives.view(number, -1)[a], *scores], dim=1), scores[0]
        if not rows.complete:
            denominator, positive = denominator[rows.has(a, b)], positive[rows.has(a, b)]
        terms.append(shares[a, b] * (denominator.logsumexp(1) - positive))
    return torch.cat(terms).sum() / (total * count / columns.count)


class _Views:
    """The VN embeddings of V views of N rows as unit vectors, view by view.

    Args:
        names: Of the views.
        matrices: Of each view `(N, D)`, raw.
        ids: `(N,)` integers naming what each row shows; all different by default.
        present: `(N, V)` bool, which of them exist; all by default.

    Attributes:
        units: The matrices; a constant stands for what is missing, which may be zero or NaN.
        index: Which of the VN exist.
        vectors: Those that exist.
    """

    def __init__(
        self, names: Sequence[str], matrices: Sequence[Tensor], ids: Tensor | None, present: Tensor | None
    ) -> None:
        for name, matrix in zip(names, matrices, strict=True):
            check_matrix(matrix, name, matrices[0], same_rows=True)
        self.count, number, device = len(matrices[0]), len(matrices), matrices[0].device
        self.ids = torch.arange(self.count, device=device) if ids is None else ids
        check_length(self.ids, "ids", self.count)
        self.present = torch.ones(self.count, number, device=device).bool() if present is None else present.bool()
        if self.present.shape != (self.count, number):
            raise ValueError(f"present has shape {tuple(self.present.shape)}, expected ({self.count}, {number})")
        self.complete = present is None or bool(present.all())
        self.index = torch.arange(number * self.count, device=device)
        if not self.complete:
            self.index = self.index[self.present.T.flatten()]
            matrices = [
                matrix.where(exists[:, None], 1.0) for matrix, exists in zip(matrices, self.present.T, strict=True)
            ]
        self.units = [unit(matrix, name) for matrix, name in zip(matrices, names, strict=True)]
        self.vectors = torch.cat(self.units) if self.complete else torch.cat(self.units)[self.index]

    def has(self, a: int, b: int) -> Tensor:
        """Which rows `(N,)` have two views."""
        return self.present[:, a] & self.present[:, b]


class GclLoss(nn.Module):
    """Generalized contrastive loss over image, text and fused embeddings, or other views, negatives from all devices.

    Args:
        temperature: Softmax temperature, or its start.
        learn_temperature: Train it.
        exclude_self: As for `gcl`, like the next two.
        exclude_same_modality: Leave the anchor's modality out of its denominator.
        exclude_other_positive: Leave the third embedding of the pair out.
        views: The weight of each view by name; None for the paper's three.
    """

    def __init__(
        self,
        temperature: float = 0.07,
        learn_temperature: bool = True,
        exclude_self: bool = True,
        exclude_same_modality: bool = False,
        exclude_other_positive: bool = False,
        views: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__()
        self.weights = dict(views or dict.fromkeys(MODALITIES, 1.0))
        self.excluded = (exclude_self, exclude_same_modality, exclude_other_positive)
        self.temperature = Temperature(temperature, learn_temperature)

    def forward(
        self,
        image: Tensor | None = None,
        text: Tensor | None = None,
        fused: Tensor | None = None,
        ids: Tensor | None = None,
        present: Tensor | None = None,
        **others: Tensor,
    ) -> dict[str, Tensor]:
        """Return `gcl_loss` and the metrics `temperature` and, with `ids`, `masked_negatives`.

        Args:
            image: `(N, D)`, raw, like the next two and the embeddings of other views.
            text: As `image`.
            fused: As `image`.
            ids: `(N,)` integers.
            present: `(N, V)` bool, of the views in their order.
            others: Embeddings by the names of views; anything else is not read.

        Raises:
            ValueError: As `gcl_views`, or the embeddings of a view are missing.
        """
        embeddings: dict[str, Any] = {"image": image, "text": text, "fused": fused} | others
        if lacking := [name for name in self.weights if embeddings.get(name) is None]:
            raise ValueError(f"GclLoss takes {lacking[0]!r}, which the batch lacks; its views are {[*self.weights]}")
        views = {name: embeddings[name] for name in self.weights}
        temperature, first = self.temperature(), next(iter(views.values()))
        if present is None and is_distributed():  # the rows of another device may lack something, and all gather alike
            present = torch.ones(len(first), len(views), dtype=torch.bool, device=first.device)
        gathered = gather_rows(*views.values(), ids=ids, present=present)
        weights = list(self.weights.values())
        loss = gcl_views(views, temperature, *self.excluded, weights=weights, gathered=gathered)
        return {"gcl_loss": loss} | loss_metrics(temperature, ids)
