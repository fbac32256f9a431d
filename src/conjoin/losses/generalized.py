"""Generalized contrastive learning: one loss over the image, text and fused embeddings of every pair (GCL)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from conjoin.ops import Exclusion, cross_logsumexp, self_logsumexp

from .checks import check_matrix, inverse, unit

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
) -> Tensor:
    """`-1/(6N) sum_j sum_{(a,b)} log( e^{s(a_j, b_j)} / sum_m sum_k e^{s(a_j, m_k)} )`, `s = cos / t`.

    The denominator runs over the embeddings of all three modalities m and all pairs k, the anchor itself left out.

    Args:
        image: `(N, D)`, raw.
        text: `(N, D)`.
        fused: `(N, D)`; row j of all three belongs to one image-text pair.
        temperature: Positive float, or 0-d tensor to learn.
        exclude_self: Leave the anchor out of its own denominator.
        exclude_same_modality: Leave out everything of the anchor's modality.
        exclude_other_positive: For the pair (a, b), leave the third embedding of the same j out.
        pairs: The ordered modality pairs to average over; all six by default.
        present: `(N, 3)` bool, which of image, text and fused exist for each row; terms that need a missing one are
            left out, and the mean divides by the others. All by default.
        ids: `(N,)` integers naming what each row shows; rows of one id are not each other's negatives.
        gathered: The three matrices `(M, D)` of all devices, as columns for the local rows.
        gathered_present: `(M, 3)` for them.
        gathered_ids: `(M,)` for them.
        positions: `(N,)` where the local rows stand in the gathered ones.

    Returns:
        A scalar; 0 without gradient for a single pair whose two embeddings are all there is.

    Raises:
        ValueError: Shapes do not fit, a present vector is zero or not finite, the temperature is not positive, or no
            term is left.
    """
    local = _Rows((image, text, fused), present, ids)
    scale = inverse(temperature)
    if gathered is None:
        exclusion = Exclusion(local.ids, local.ids, local.groups, local.groups, exclude_same_modality)
        found = self_logsumexp(local.vectors, scale, exclusion)
    else:
        if positions is None:
            raise ValueError("positions of the local rows are needed with gathered columns")
        columns = _Rows(gathered, gathered_present, gathered_ids, names="gathered ")
        row_ids = columns.pair_ids[positions][local.pair_of]
        exclusion = Exclusion(row_ids, columns.ids, local.groups, columns.groups, exclude_same_modality)
        found = cross_logsumexp(local.vectors, columns.vectors, scale, exclusion)
    negatives = found.new_full((3 * len(image),), float("-inf")).index_put((local.index,), found).view(3, -1)
    own = local.own_scores(scale)
    terms = []
    for a, b in pairs:
        first, second = MODALITIES.index(a), MODALITIES.index(b)
        third = 3 - first - second
        denominator = [negatives[first], own[first][second]]
        if not exclude_other_positive:
            denominator.append(own[first][third])
        if not exclude_self and not exclude_same_modality:
            denominator.append(own[first][first])
        both = local.present[:, first] & local.present[:, second]
        stacked = torch.stack(denominator, dim=1)[both]
        terms.append(stacked.logsumexp(1) - own[first][second][both])
    values = torch.cat(terms)
    if not len(values):
        raise ValueError("no row has both modalities of any pair: there is nothing to contrast")
    return values.mean()


class _Rows:
    """The present ones of the 3N embeddings, modality by modality, as unit vectors with ids and groups."""

    def __init__(
        self,
        matrices: tuple[Tensor, Tensor, Tensor],
        present: Tensor | None,
        ids: Tensor | None,
        names: str = "",
    ) -> None:
        for name, matrix in zip(MODALITIES, matrices, strict=True):
            check_matrix(matrix, names + name, matrices[0], same_rows=True)
        count, device = len(matrices[0]), matrices[0].device
        if present is not None and present.shape != (count, 3):
            raise ValueError(f"{names}present has shape {tuple(present.shape)}, expected ({count}, 3)")
        self.present = torch.ones(count, 3, dtype=torch.bool, device=device) if present is None else present.bool()
        self.pair_ids = torch.arange(count, device=device) if ids is None else ids
        self.index = self.present.T.flatten().nonzero().squeeze(1)
        self.pair_of = self.index % count
        self.groups = self.index // count
        self.ids = self.pair_ids[self.pair_of]
        parts = [unit(m[p], names + n) for m, p, n in zip(matrices, self.present.T, MODALITIES, strict=True)]
        self.vectors = torch.cat(parts)

    def own_scores(self, scale: Tensor | float) -> list[list[Tensor]]:
        """`[a][b]`: scaled similarity of each pair's a to its own b, `(N,)`; minus infinity where one is missing."""
        full = self.vectors.new_zeros(3 * len(self.present), self.vectors.shape[1])
        full = full.index_copy(0, self.index, self.vectors).view(3, len(self.present), -1)
        scores: list[list[Tensor]] = [[torch.empty(0)] * 3 for _ in range(3)]
        for a in range(3):
            for b in range(a, 3):
                missing = ~(self.present[:, a] & self.present[:, b])
                scores[a][b] = scores[b][a] = ((full[a] * full[b]).sum(-1) * scale).masked_fill(missing, float("-inf"))
        return scores
