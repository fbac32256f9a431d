"""Generalized contrastive learning: one loss over the image, text and fused embeddings of every pair (GCL)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from conjoin.ops import Exclusion, cross_logsumexp, local_positions, ring_logsumexp, self_logsumexp

from .checks import check_length, check_matrix, inverse, row_places, unit

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
    gathered: tuple[Tensor, Tensor, Tensor] | None = None,
    gathered_present: Tensor | None = None,
    gathered_ids: Tensor | None = None,
    positions: Tensor | None = None,
    ring: bool = False,
) -> Tensor:
    """`-1/(6N) sum_j sum_{(a,b)} log( e^{s(a_j, b_j)} / sum_m sum_k e^{s(a_j, m_k)} )`, `s = cos / t`.

    The denominator runs over all modalities m and pairs k but the anchor; in a batch of one pair, over its other two.

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
        gathered: The three matrices `(M, D)` of all devices, as columns for the local rows.
        gathered_present: `(M, 3)` for them; the mean over devices is then the mean over all terms.
        gathered_ids: `(M,)` for them.
        positions: `(N,)` where the local rows stand in the gathered ones.
        ring: The other ranks' rows pass by ungathered, see `ring_logsumexp`; nothing may be missing then.

    Raises:
        ValueError: Shapes do not fit, a present vector is zero or not finite, the temperature is not positive, a pair
            is unknown, `gathered` comes without `positions`, or no term is left.
    """
    scale = inverse(temperature)
    if ring and ids is None:
        ids = local_positions(len(image), image.device)
    local = columns = _Rows((image, text, fused), present, ids)
    if ring and (gathered is not None or not local.present.all()):
        raise ValueError("ring=True takes neither gathered columns nor missing modalities (present)")
    if gathered is not None:
        without_ids = ids is not None and gathered_ids is None
        if positions is None or without_ids or (present is None) != (gathered_present is None):
            raise ValueError("gathered needs positions, gathered_ids beside ids and gathered_present beside present")
        columns = _Rows(gathered, gathered_present, gathered_ids, names="gathered ")
        positions = row_places(len(image), gathered[0], positions, "rows")
    count = columns.count_terms(pairs)
    negatives = _negatives(local, columns, positions, scale, exclude_same_modality, ring)
    terms = _terms(local, negatives, scale, pairs, exclude_self or exclude_same_modality, exclude_other_positive)
    return terms.sum() / (count * len(image) / columns.count)


def check_pairs(pairs: Sequence[tuple[str, str]]) -> None:
    """Check that `pairs` are some of `PAIRS`.

    Raises:
        ValueError: They are not, or there are none.
    """
    if not pairs or any(tuple(pair) not in PAIRS for pair in pairs):
        raise ValueError(f"pairs={list(pairs)}: expected some of {PAIRS}")


def _negatives(
    local: "_Rows",
    columns: "_Rows",
    positions: Tensor | None,
    scale: Tensor | float,
    exclude_same_modality: bool,
    ring: bool,
) -> Tensor:
    """Log-sum-exp of each embedding to those of all other pairs, minus infinity where it is missing: `(3, N)`."""
    pair_ids = columns.pair_ids if positions is None else columns.pair_ids[positions]
    exclusion = Exclusion(pair_ids[local.pair_of], columns.ids)
    if exclude_same_modality:
        exclusion = exclusion._replace(row_groups=local.groups, column_groups=columns.groups)
    if ring:
        found, _ = ring_logsumexp(local.vectors, columns.vectors, scale, exclusion)
    elif columns is local:
        found = self_logsumexp(local.vectors, scale, exclusion)
    else:
        found, _ = cross_logsumexp(local.vectors, columns.vectors, scale, exclusion)
    return found.new_full((3 * local.count,), float("-inf")).index_put((local.index,), found).view(3, -1)


def _terms(
    local: "_Rows",
    negatives: Tensor,
    scale: Tensor | float,
    pairs: Sequence[tuple[str, str]],
    exclude_self: bool,
    exclude_other_positive: bool,
) -> Tensor:
    """The terms of all pairs in one row; the pair's own embeddings join the `negatives` `(3, N)` here."""
    own = local.own_scores(scale)
    terms = []
    for a, b in pairs:
        first, second = MODALITIES.index(a), MODALITIES.index(b)
        denominator = [negatives[first], own[first][second]]
        if not exclude_other_positive:
            denominator.append(own[first][3 - first - second])
        if not exclude_self:
            denominator.append(own[first][first])
        both = local.present[:, first] & local.present[:, second]
        terms.append(torch.stack(denominator, dim=1)[both].logsumexp(1) - own[first][second][both])
    return torch.cat(terms)


class _Rows:
    """The present ones of the 3N embeddings, modality by modality, as unit vectors with ids and groups."""

    def __init__(
        self,
        matrices: Sequence[Tensor],
        present: Tensor | None,
        ids: Tensor | None,
        names: str = "",
    ) -> None:
        for name, matrix in zip(MODALITIES, matrices, strict=True):
            check_matrix(matrix, names + name, matrices[0], same_rows=True)
        count, device = len(matrices[0]), matrices[0].device
        if present is not None and present.shape != (count, 3):
            raise ValueError(f"{names}present has shape {tuple(present.shape)}, expected ({count}, 3)")
        if ids is not None:
            check_length(ids, f"{names}ids", count)
        self.count = count
        self.present = torch.ones(count, 3, dtype=torch.bool, device=device) if present is None else present.bool()
        self.pair_ids = torch.arange(count, device=device) if ids is None else ids
        self.index = self.present.T.flatten().nonzero().squeeze(1)
        self.pair_of, self.groups = self.index % count, self.index // count
        self.ids = self.pair_ids[self.pair_of]
        missing = not self.present.all()
        if missing:  # a constant stands in for what is missing, which may be zero or NaN
            matrices = [m.where(p[:, None], 1.0) for m, p in zip(matrices, self.present.T, strict=True)]
        self.full = torch.stack([unit(m, names + n) for m, n in zip(matrices, MODALITIES, strict=True)])
        self.vectors = self.full.flatten(0, 1)
        if missing:
            self.vectors = self.vectors[self.index]

    def count_terms(self, pairs: Sequence[tuple[str, str]]) -> int:
        """How many (row, pair) have both modalities.

        Raises:
            ValueError: None has, or a pair is unknown.
        """
        check_pairs(pairs)
        has = dict(zip(MODALITIES, self.present.T, strict=True))
        count = sum(int((has[a] & has[b]).sum()) for a, b in pairs)
        if not count:
            raise ValueError("no row has both modalities of any pair: there is nothing to contrast")
        return count

    def own_scores(self, scale: Tensor | float) -> list[list[Tensor]]:
        """`[a][b]`: scaled similarity of each pair's a to its own b, `(N,)`; minus infinity where one is missing."""
        scores: list[list[Tensor]] = [[torch.empty(0)] * 3 for _ in range(3)]
        for a in range(3):
            for b in range(a, 3):
                missing = ~(self.present[:, a] & self.present[:, b])
                cosines = (self.full[a] * self.full[b]).sum(-1)
                scores[a][b] = scores[b][a] = (cosines * scale).masked_fill(missing, float("-inf"))
        return scores
