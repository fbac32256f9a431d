"""Generalized contrastive learning: one loss over the image, text and fused embeddings of every pair (GCL)."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from conjoin.ops import Exclusion, Gathered, cross_logsumexp, gather_rows, is_distributed, self_logsumexp

from .checks import check_length, check_matrix, check_positions, inverse, masked_negatives, own_columns, unit
from .temperature import Temperature

MODALITIES = ("image", "text", "fused")
PAIRS = tuple((a, b) for a in MODALITIES for b in MODALITIES if a != b)
"""The 6 ordered pairs of different modalities that the loss sums over."""


def gcl(
    image: Tensor,
    text: Tensor,
    fused: Tensor,
    temperature: Tensor | float,
    exclude_self: bool = True,
    exclude_same_modality: bool = False,
    exclude_other_positive: bool = False,
    *,
    pairs: Sequence[tuple[str, str]] = PAIRS,
    present: Tensor | None = None,
    ids: Tensor | None = None,
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
        pairs: The ordered modality pairs to average over; all six by default.
        present: `(N, 3)` bool, which of image, text and fused exist; terms that need a missing one are left out of the
            mean, no denominator holds one, and it may be anything. All exist by default.
        ids: `(N,)` integers naming what each row shows; rows of one id are not each other's negatives.
        gathered: The rows of all devices as columns, with three matrices, and with `ids` and `present` `(M, 3)` if the
            local rows have them; the mean over devices is then the mean over all terms.

    Raises:
        ValueError: Shapes do not fit, a present vector is zero or not finite, the temperature is not positive, a pair
            is unknown, `gathered` lacks what the local rows have, or no term is left.
    """
    scale = inverse(temperature)
    check_pairs(pairs)
    local = columns = _Rows((image, text, fused), present, ids)
    if gathered is not None:
        if (ids is not None and gathered.ids is None) or (present is None) != (gathered.present is None):
            raise ValueError("gathered needs ids beside ids, and present beside present")
        columns = _Rows(gathered.vectors, gathered.present, gathered.ids, names="gathered ")
        check_positions(len(image), gathered.vectors[0], gathered.positions, "rows")
    count = columns.count_terms(pairs)
    positions = None if gathered is None else gathered.positions
    negatives = _negatives(local, columns, positions, scale, exclude_same_modality)
    terms = _sum_terms(local, negatives, scale, pairs, exclude_self or exclude_same_modality, exclude_other_positive)
    return terms / (count * len(image) / columns.count)


def check_pairs(pairs: Sequence[tuple[str, str]]) -> None:
    """Check that `pairs` are some of `PAIRS`.

    Raises:
        ValueError: They are not, or there are none.
    """
    if not pairs or any(tuple(pair) not in PAIRS for pair in pairs):
        raise ValueError(f"pairs={list(pairs)}: expected some of {PAIRS}")


def _negatives(
    local: "_Rows", columns: "_Rows", positions: Tensor | None, scale: Tensor | float, exclude_same_modality: bool
) -> Tensor:
    """Log-sum-exp of each embedding to those of all other pairs, minus infinity where it is missing: `(3, N)`."""
    if columns is local and local.regular:
        count = local.count
        exclusion = Exclusion(diagonals=(-2 * count, -count, 0, count, 2 * count))
    else:
        pair_ids = own_columns(columns.pair_ids, local.count, None if columns is local else positions)
        exclusion = Exclusion(ids=(pair_ids[local.index % local.count], columns.ids))
    if exclude_same_modality:
        exclusion = exclusion._replace(groups=(local.groups, columns.groups))
    if columns is local:
        logsumexp = self_logsumexp(local.vectors, scale, exclusion)
    else:
        logsumexp = cross_logsumexp(local.vectors, columns.vectors, scale, exclusion)
    if local.present is not None:
        logsumexp = logsumexp.new_full((3 * local.count,), float("-inf")).index_put((local.index,), logsumexp)
    return logsumexp.view(3, -1)


def _sum_terms(
    local: "_Rows",
    negatives: Tensor,
    scale: Tensor | float,
    pairs: Sequence[tuple[str, str]],
    exclude_self: bool,
    exclude_other_positive: bool,
) -> Tensor:
    """The sum of the terms of all pairs; the pair's own embeddings join the `negatives` `(3, N)` here."""
    scores = _PairScores(local, scale)
    terms = []
    for a, b in pairs:
        first, second = MODALITIES.index(a), MODALITIES.index(b)
        members = [second] + [3 - first - second] * (not exclude_other_positive) + [first] * (not exclude_self)
        denominator = torch.stack([negatives[first], *(scores[first, member] for member in members)], dim=1)
        positive = scores[first, second]
        if local.present is not None:
            both = local.present[:, first] & local.present[:, second]
            denominator, positive = denominator[both], positive[both]
        terms.append(denominator.logsumexp(1) - positive)
    return torch.cat(terms).sum()


class _PairScores:
    """Scaled similarities `(N,)` of two embeddings of one pair, minus infinity where one is missing."""

    def __init__(self, rows: "_Rows", scale: Tensor | float) -> None:
        self.rows, self.scale = rows, scale
        self.computed: dict[tuple[int, int], Tensor] = {}

    def __getitem__(self, modalities: tuple[int, int]) -> Tensor:
        a, b = sorted(modalities)
        if (a, b) not in self.computed:
            scores = (self.rows.full[a] * self.rows.full[b]).sum(-1) * self.scale
            if self.rows.present is not None:
                scores = scores.masked_fill(~(self.rows.present[:, a] & self.rows.present[:, b]), float("-inf"))
            self.computed[a, b] = scores
        return self.computed[a, b]


class _Rows:
    """The existing ones of the 3N embeddings, modality by modality, as unit vectors with ids and groups."""

    def __init__(
        self, matrices: Sequence[Tensor], present: Tensor | None, ids: Tensor | None, names: str = ""
    ) -> None:
        for name, matrix in zip(MODALITIES, matrices, strict=True):
            check_matrix(matrix, names + name, matrices[0], same_rows=True)
        count, device = len(matrices[0]), matrices[0].device
        if present is not None and present.shape != (count, 3):
            raise ValueError(f"{names}present has shape {tuple(present.shape)}, expected ({count}, 3)")
        if ids is not None:
            check_length(ids, f"{names}ids", count)
        self.count = count
        self.present = None if present is None or present.all() else present.bool()
        self.regular = ids is None and self.present is None
        self.pair_ids = torch.arange(count, device=device) if ids is None else ids
        self.index = torch.arange(3 * count, device=device)
        if self.present is not None:
            self.index = self.index[self.present.T.flatten()]
            matrices = [  # a constant replaces what is missing, which may be zero or NaN
                matrix.where(exists[:, None], 1.0) for matrix, exists in zip(matrices, self.present.T, strict=True)
            ]
        self.full = [unit(matrix, names + name) for matrix, name in zip(matrices, MODALITIES, strict=True)]
        vectors = torch.cat(self.full)
        self.vectors = vectors if self.present is None else vectors[self.index]

    @property
    def ids(self) -> Tensor:
        """The pair id of each existing embedding."""
        return self.pair_ids[self.index % self.count]

    @property
    def groups(self) -> Tensor:
        """The modality of each existing embedding."""
        return self.index // self.count

    def count_terms(self, pairs: Sequence[tuple[str, str]]) -> int:
        """How many (row, pair) have both modalities.

        Raises:
            ValueError: None has.
        """
        if self.present is None:
            return self.count * len(pairs)
        has = dict(zip(MODALITIES, self.present.T, strict=True))
        count = int(torch.stack([has[a] & has[b] for a, b in pairs]).sum())
        if not count:
            raise ValueError("no row has both modalities of any pair: there is nothing to contrast")
        return count


class GclLoss(nn.Module):
    """Generalized contrastive loss over image, text and fused embeddings, negatives from all devices.

    Args:
        temperature: Softmax temperature, or its start.
        learn_temperature: Train it.
        exclude_self: See `gcl`, as the next three.
        exclude_same_modality: Leave the anchor's modality out of its denominator.
        exclude_other_positive: Leave the third embedding of the pair out.
        pairs: Ordered modality pairs to average over.

    Raises:
        ValueError: A pair is unknown.
    """

    def __init__(
        self,
        temperature: float = 0.07,
        learn_temperature: bool = True,
        exclude_self: bool = True,
        exclude_same_modality: bool = False,
        exclude_other_positive: bool = False,
        pairs: Sequence[tuple[str, str]] = PAIRS,
    ) -> None:
        super().__init__()
        check_pairs(pairs)
        self.temperature = Temperature(temperature, learn_temperature)
        self.flags: dict[str, Any] = {
            "exclude_self": exclude_self,
            "exclude_same_modality": exclude_same_modality,
            "exclude_other_positive": exclude_other_positive,
        }
        self.pairs = tuple(pairs)

    def forward(
        self, image: Tensor, text: Tensor, fused: Tensor, ids: Tensor | None = None, present: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Return `gcl_loss` and the metrics `temperature` and, with `ids`, `masked_negatives`; arguments as `gcl`."""
        temperature = self.temperature()
        if present is None and is_distributed():  # the rows of another device may lack something, and all gather alike
            present = torch.ones(len(image), 3, dtype=torch.bool, device=image.device)
        rows: dict[str, Any] = {"present": present, "ids": ids}
        gathered = gather_rows(image, text, fused, **rows)
        loss = gcl(image, text, fused, temperature, **self.flags, pairs=self.pairs, **rows, gathered=gathered)
        metrics = {"temperature": temperature.detach()}
        if ids is not None:
            metrics["masked_negatives"] = masked_negatives(ids)
        return {"gcl_loss": loss} | metrics
