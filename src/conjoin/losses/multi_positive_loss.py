"""The contrastive loss of anchors with several positives and negatives of their own."""

import torch
from torch import Tensor

from conjoin.ops import Gathered, cross_logsumexp, self_logsumexp

from .checks import check_length, check_matrix, check_norms, check_positions, exclude_own, inverse, unit, widen


def multi_positive(
    anchors: Tensor,
    positives: Tensor,
    negatives: Tensor,
    temperature: Tensor | float,
    positive_mask: Tensor | None = None,
    negative_mask: Tensor | None = None,
    *,
    ids: Tensor | None = None,
    gathered: Gathered | None = None,
) -> Tensor:
    """`-mean_i log(sum_{P_i} e^{cos/t} / sum_{P_i + N_i} e^{cos/t})` (SOLAR Eq. 5, with its minus sign).

    N_i is the anchor's own negatives and the other anchors of the batch. Anchors without a valid positive are left
    out and the mean divides by the others; with none at all the loss is 0 and so are its gradients.

    Args:
        anchors: `(N, D)`, raw.
        positives: `(N, P, D)` each anchor's own, raw.
        negatives: `(N, K, D)` each anchor's own, raw; K may be 0.
        temperature: Positive float, or 0-d tensor to learn.
        positive_mask: `(N, P)` bool, which positives exist; masked ones may hold anything.
        negative_mask: `(N, K)` bool.
        ids: `(N,)` integers naming what each anchor shows; those of one id are not each other's negatives.
        gathered: The anchors of all devices, with `ids` if the local ones have them; `present` `(M,)` says which have
            a valid positive, so that the mean over devices is the mean over all valid anchors.

    Raises:
        ValueError: Shapes do not fit, a valid vector is zero or not finite, or the temperature is not positive.
    """
    check_matrix(anchors, "anchors")
    scale = inverse(temperature)
    rows = columns = unit(anchors, "anchors")
    if gathered is None:
        others = self_logsumexp(rows, scale, exclude_own(rows, len(rows), None, ids, "ids"))
    else:
        if ids is not None and gathered.ids is None:
            raise ValueError("gathered needs ids beside ids")
        check_matrix(gathered.vectors[0], "gathered anchors", anchors)
        columns = unit(gathered.vectors[0], "gathered anchors")
        check_positions(len(rows), columns, gathered.positions, "anchors")
        exclusion = exclude_own(columns, len(rows), gathered.positions, gathered.ids, "gathered ids")
        others = cross_logsumexp(rows, columns, scale, exclusion)
    pulled = _own_scores(rows, positives, positive_mask, scale, "positive")
    pushed = _own_scores(rows, negatives, negative_mask, scale, "negative")
    valid = pulled.isfinite().any(1)
    together = torch.cat([pulled, pushed, others[:, None]], dim=1)[valid]
    terms = together.logsumexp(1) - pulled[valid].logsumexp(1)
    if gathered is None or gathered.present is None:
        return terms.sum() / max(len(terms), 1)
    check_length(gathered.present, "gathered present", len(columns))
    return terms.sum() / (gathered.present.sum().clamp(min=1) * len(rows) / len(columns))


def _own_scores(anchors: Tensor, vectors: Tensor, mask: Tensor | None, scale: Tensor | float, name: str) -> Tensor:
    """Scaled similarities of each anchor to its own vectors `(N, K, D)`, minus infinity where masked: `(N, K)`."""
    if vectors.ndim != 3 or vectors.shape[0] != len(anchors) or vectors.shape[2] != anchors.shape[1]:
        expected = f"({len(anchors)}, *, {anchors.shape[1]})"
        raise ValueError(f"{name}s has shape {tuple(vectors.shape)}, expected {expected}")
    if mask is not None:
        if mask.shape != vectors.shape[:2]:
            raise ValueError(f"{name}_mask has shape {tuple(mask.shape)}, expected {tuple(vectors.shape[:2])}")
        # Masked vectors may be zero: a constant replaces them, so that no NaN enters the gradient.
        vectors = torch.where(mask.bool()[..., None], vectors, torch.ones_like(vectors))
    vectors = widen(vectors)
    scores = (anchors[:, None] * vectors).sum(-1) / check_norms(vectors.norm(dim=-1), f"{name}s") * scale
    return scores if mask is None else scores.masked_fill(~mask.bool(), float("-inf"))
