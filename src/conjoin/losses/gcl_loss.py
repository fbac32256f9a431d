"""Generalized contrastive learning: one loss over the image, text and fused embeddings of every pair (GCL)."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from conjoin.ops import Exclusion, Gathered, cross_logsumexp, gather_rows, is_distributed, self_logsumexp

from .checks import check_length, check_matrix, check_positions, inverse, masked_negatives, own_columns, unit
from .temperature import Temperature

MODALITIES = ("image", "text", "fused")
PAIRS = tuple((a, b) for a in MODALITIES for b in MODALITIES if a != b)
"""The 6 ordered pairs of different modalities that the loss sums over."""


@dataclass(frozen=True)
class GclOptions:
    """What the denominators of `gcl` leave out, and which terms it averages.

    Args:
        exclude_self: Leave the anchor out of its own denominator.
        exclude_same_modality: Leave out everything of the anchor's modality.
        exclude_other_positive: For the pair (a, b), leave the third embedding of the same j out.
        pairs: The ordered modality pairs to average over; all six by default.

    Raises:
        ValueError: A pair is unknown, or there is none.
    """

    exclude_self: bool = True
    exclude_same_modality: bool = False
    exclude_other_positive: bool = False
    pairs: Sequence[tuple[str, str]] = PAIRS

    def __post_init__(self) -> None:
        if not self.pairs or any(tuple(pair) not in PAIRS for pair in self.pairs):
            raise ValueError(f"pairs={list(self.pairs)}: expected some of {PAIRS}")


def gcl(
    image: Tensor,
    text: Tensor,
    fused: Tensor,
    temperature: Tensor | float,
    exclude_self: bool = True,
    exclude_same_modality: bool = False,
    exclude_other_positive: bool = False,
    pairs: Sequence[tuple[str, str]] = PAIRS,
) -> Tensor:
    """`-1/(6N) sum_j sum_{(a,b)} log( e^{s(a_j, b_j)} / sum_m sum_k e^{s(a_j, m_k)} )`, `s = cos / t`.

    The denominator runs over all modalities m and pairs k except the anchor. In a batch of one pair these are the
    other two embeddings. `GclLoss` also takes ids, missing modalities and the rows of other devices.

    Args:
        image: `(N, D)`, raw.
        text: `(N, D)`, raw.
        fused: `(N, D)`, raw; row j of all three belongs to one image-text pair.
        temperature: Positive float, or 0-d tensor to learn.
        exclude_self: As for `GclOptions`, like the next three.
        exclude_same_modality: Leave out everything of the anchor's modality.
        exclude_other_positive: Leave out the third embedding of the pair.
        pairs: The ordered modality pairs to average over.

    Raises:
        ValueError: Shapes do not fit, a vector is zero or not finite, the temperature is not positive, or a pair is
            unknown.
    """
    options = GclOptions(exclude_self, exclude_same_modality, exclude_other_positive, pairs)
    return gcl_of_rows(GclRows((image, text, fused)), temperature, options)


def gcl_of_rows(
    rows: "GclRows", temperature: Tensor | float, options: GclOptions, gathered: Gathered | None = None
) -> Tensor:
    """Return `gcl` of rows that may have ids or lack modalities.

    Args:
        rows: The local rows.
        temperature: As for `gcl`.
        options: As for `gcl`.
        gathered: The rows of all devices as columns, with three matrices, and with `ids` and `present` `(M, 3)` if the
            local rows have them; the mean over devices is then the mean over all terms.

    Raises:
        ValueError: As `gcl`; or `gathered` does not fit the rows or lacks what they have, or no term is left.
    """
    scale = inverse(temperature)
    columns, positions = rows, None
    if gathered is not None:
        if (rows.has_ids and gathered.ids is None) or rows.has_present != (gathered.present is not None):
            raise ValueError("gathered needs ids beside ids, and present beside present")
        columns = GclRows(gathered.vectors, gathered.ids, gathered.present, names="gathered ")
        positions = gathered.positions
        check_positions(rows.count, gathered.vectors[0], positions, "rows")
    count = columns.count_terms(options.pairs)
    negatives = _negatives(rows, columns, positions, scale, options.exclude_same_modality)
    return _sum_terms(rows, negatives, scale, options) / (count * rows.count / columns.count)


def _negatives(
    local: "GclRows", columns: "GclRows", positions: Tensor | None, scale: Tensor | float, exclude_same_modality: bool
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


def _sum_terms(rows: "GclRows", negatives: Tensor, scale: Tensor | float, options: GclOptions) -> Tensor:
    """The sum of the terms of all pairs; the pair's own embeddings join the `negatives` `(3, N)` here."""
    scores = _PairScores(rows, scale)
    has_self = not (options.exclude_self or options.exclude_same_modality)
    terms = []
    for a, b in options.pairs:
        first, second = MODALITIES.index(a), MODALITIES.index(b)
        members = [second] + [3 - first - second] * (not options.exclude_other_positive) + [first] * has_self
        denominator = torch.stack([negatives[first], *(scores[first, member] for member in members)], dim=1)
        positive = scores[first, second]
        if rows.present is not None:
            both = rows.present[:, first] & rows.present[:, second]
            denominator, positive = denominator[both], positive[both]
        terms.append(denominator.logsumexp(1) - positive)
    return torch.cat(terms).sum()


class _PairScores:
    """Scaled similarities `(N,)` of two embeddings of one pair, minus infinity where one is missing."""

    def __init__(self, rows: "GclRows", scale: Tensor | float) -> None:
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


class GclRows:
    """The existing ones of the 3N embeddings, modality by modality, as unit vectors with ids and groups.

    Args:
        matrices: Image, text and fused `(N, D)`, raw.
        ids: `(N,)` integers naming what each row shows; rows of one id are not each other's negatives.
        present: `(N, 3)` bool, which of image, text and fused exist; terms that need a missing one are left out of the
            mean, no denominator holds one, and it may be anything. All exist by default.
        names: Put before the names of the arguments in error messages.

    Raises:
        ValueError: Shapes do not fit, or a present vector is zero or not finite.
    """

    def __init__(
        self, matrices: Sequence[Tensor], ids: Tensor | None = None, present: Tensor | None = None, names: str = ""
    ) -> None:
        for name, matrix in zip(MODALITIES, matrices, strict=True):
            check_matrix(matrix, names + name, matrices[0], same_rows=True)
        count, device = len(matrices[0]), matrices[0].device
        if present is not None and present.shape != (count, 3):
            raise ValueError(f"{names}present has shape {tuple(present.shape)}, expected ({count}, 3)")
        if ids is not None:
            check_length(ids, f"{names}ids", count)
        self.count, self.has_ids, self.has_present = count, ids is not None, present is not None
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
        exclude_self: As for `GclOptions`, like the next three.
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
        self.options = GclOptions(exclude_self, exclude_same_modality, exclude_other_positive, pairs)
        self.temperature = Temperature(temperature, learn_temperature)

    def forward(
        self, image: Tensor, text: Tensor, fused: Tensor, ids: Tensor | None = None, present: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Return `gcl_loss` and the metrics `temperature` and, with `ids`, `masked_negatives`.

        Args:
            image: As for `gcl`, like the next two.
            text: `(N, D)`, raw.
            fused: `(N, D)`, raw.
            ids: As for `GclRows`, like `present`.
            present: `(N, 3)` bool.
        """
        temperature = self.temperature()
        if present is None and is_distributed():  # the rows of another device may lack something, and all gather alike
            present = torch.ones(len(image), 3, dtype=torch.bool, device=image.device)
        rows = GclRows((image, text, fused), ids, present)
        gathered = gather_rows(image, text, fused, ids=ids, present=present)
        loss = gcl_of_rows(rows, temperature, self.options, gathered)
        metrics = {"temperature": temperature.detach()}
        if ids is not None:
            metrics["masked_negatives"] = masked_negatives(ids)
        return {"gcl_loss": loss} | metrics
