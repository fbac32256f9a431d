"""The contrastive loss of anchors with several positives and negatives of their own."""

import torch
from torch import Tensor

from .checks import check_length, check_local, check_matrix, check_norms, exclude_own, fill_masked, inverse, unit
from .gather import Gathered
from .kernel import logsumexp


def multi_positive(
    anchors: Tensor,
    positives: Tensor,
    negatives: Tensor,
    temperature: Tensor | float,
    positive_mask: Tensor | None = None,
    negative_mask: Tensor | None = None,
    *,
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
        gathered: Result of `gather_rows(anchors, ids=..., present=...)`: the anchors of all devices, what each shows,
            and which have a valid positive, so that the mean over devices is the mean over all valid anchors.

    Raises:
        ValueError: Shapes do not fit, a valid vector is zero or not finite, or the temperature is not positive.
    """
    check_matrix(anchors, "anchors")
    scale = inverse(temperature)
    rows = columns = unit(anchors, "anchors")
    (others,), ids, present, positions = gathered or Gathered((anchors,))
    if positions is not None:
        check_matrix(others, "gathered anchors", anchors)
        columns = unit(others, "gathered anchors")
    exclusion = exclude_own(columns, len(rows), positions, ids, "anchors")
    among = logsumexp(rows, None if positions is None else columns, scale, exclusion)
    pulled = _own_scores(rows, positives, positive_mask, scale, "positives")
    pushed = _own_scores(rows, negatives, negative_mask, scale, "negatives")
    valid = pulled.isfinite().any(1)
    together = torch.cat([pulled, pushed, among[:, None]], dim=1)[valid]
    terms = together.logsumexp(1) - pulled[valid].logsumexp(1)
    if positions is None or present is None:
        return terms.sum() / max(len(terms), 1)
    check_length(present, "gathered present", len(columns))
    return terms.sum() / (present.sum().clamp(min=1) * len(rows) / len(columns))


def _own_scores(anchors: Tensor, vectors: Tensor, mask: Tensor | None, scale: Tensor | float, name: str) -> Tensor:
    """Scaled similarities of each anchor to its own vectors `(N, K, D)`, minus infinity where masked: `(N, K)`."""
    check_local(vectors, name, anchors)
    mask = vectors.new_ones(vectors.shape[:2], dtype=torch.bool) if mask is None else mask
    vectors = fill_masked(vectors, mask, name)
    scores = (anchors[:, None] * vectors).sum(-1) / check_norms(vectors.norm(dim=-1), name) * scale
    return scores.masked_fill(~mask.bool(), float("-inf"))
