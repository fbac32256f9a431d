"""InfoNCE and its relatives as pure functions: raw embeddings in, a scalar out, no N x M matrix in between."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from conjoin.ops import Exclusion, cross_logsumexp, grouped_logsumexp, local_positions, ring_logsumexp

from .checks import check_length, check_matrix, inverse, row_places, unit


class LossTerms(NamedTuple):
    """A loss, and how many candidates a row lost on average for exceeding the false-negative margin."""

    loss: Tensor
    masked: Tensor


def info_nce(
    queries: Tensor,
    candidates: Tensor,
    temperature: Tensor | float,
    *,
    positive_indices: Tensor | None = None,
    candidate_ids: Tensor | None = None,
    false_negative_margin: float | None = None,
    ring: bool = False,
) -> Tensor:
    """InfoNCE from queries to candidates: `-mean_i log softmax_j(cos(q_i, c_j) / t)` at the positive.

    A batch of one query and one candidate has no negatives: the loss is 0 and so are its gradients.

    Args:
        queries: `(N, D)`, raw.
        candidates: `(M, D)`; by default the positive of query i is candidate i, and M >= N.
        temperature: Positive float, or 0-d tensor to learn.
        positive_indices: `(N,)` where each query's positive stands among the candidates (gathered from all devices,
            say).
        candidate_ids: `(M,)` integers naming what each candidate shows; candidates with the id of a query's positive
            are not its negatives.
        false_negative_margin: Candidates whose cosine exceeds the positive's by more than this are not negatives.
        ring: The candidates are this rank's own, those of the other ranks pass by and are negatives too; see
            `ring_logsumexp`. Any `candidate_ids` must then be comparable across ranks.

    Raises:
        ValueError: Shapes do not fit, a vector is zero or not finite, or the temperature is not positive.
    """
    return info_nce_terms(
        queries, candidates, temperature, None, None, positive_indices, candidate_ids, false_negative_margin, ring
    ).loss


def symmetric_info_nce(
    a: Tensor,
    b: Tensor,
    temperature: Tensor | float,
    *,
    gathered_a: Tensor | None = None,
    gathered_b: Tensor | None = None,
    positive_indices: Tensor | None = None,
    gathered_ids: Tensor | None = None,
    false_negative_margin: float | None = None,
    ring: bool = False,
) -> Tensor:
    """The mean of `info_nce` in both directions (CLIP; SOLAR Eq. 3).

    Args:
        a: `(N, D)`, raw.
        b: `(N, D)`; row i belongs to row i of `a`.
        temperature: Positive float, or 0-d tensor to learn.
        gathered_a: `(M, D)` the rows of `a` of all devices, the candidates of `b`; `a` itself by default.
        gathered_b: `(M, D)` likewise.
        positive_indices: `(N,)` where the local rows stand in the gathered ones.
        gathered_ids: `(M,)` integers naming what each pair shows; pairs of one id are not each other's negatives.
        false_negative_margin: See `info_nce`.
        ring: See `info_nce`; nothing is gathered then, and the ids are the local rows'.

    Raises:
        ValueError: As `info_nce`, or `a` and `b` differ in shape.
    """
    return symmetric_terms(
        a, b, temperature, gathered_a, gathered_b, positive_indices, gathered_ids, false_negative_margin, ring
    ).loss


def symmetric_terms(
    a: Tensor,
    b: Tensor,
    temperature: Tensor | float,
    gathered_a: Tensor | None = None,
    gathered_b: Tensor | None = None,
    positive_indices: Tensor | None = None,
    gathered_ids: Tensor | None = None,
    false_negative_margin: float | None = None,
    ring: bool = False,
) -> LossTerms:
    """`symmetric_info_nce` with its count of false negatives."""
    check_matrix(a, "a")
    check_matrix(b, "b", a, same_rows=True)
    rest = (None, None, positive_indices, gathered_ids, false_negative_margin, ring)
    forth = info_nce_terms(a, b if gathered_b is None else gathered_b, temperature, *rest)
    back = info_nce_terms(b, a if gathered_a is None else gathered_a, temperature, *rest)
    return LossTerms((forth.loss + back.loss) / 2, (forth.masked + back.masked) / 2)


def mac(
    queries: Tensor,
    candidates: Tensor,
    candidate_modality: Tensor,
    temperature: Tensor | float,
    hard_temperature: Tensor | float,
    *,
    positive_indices: Tensor | None = None,
    candidate_ids: Tensor | None = None,
    false_negative_margin: float | None = None,
) -> Tensor:
    """Modality-adaptive contrastive loss (PUMA Alg. 1).

    Scores of candidates in the modality of the query's own target, the positive included, are divided by
    `hard_temperature`, the others by `temperature`. Equal temperatures give InfoNCE; swapping them is the paper's
    reverse-MAC ablation.

    Args:
        queries: `(N, D)`, raw.
        candidates: `(M, D)`, raw.
        candidate_modality: `(M,)` integers.
        temperature: For candidates of another modality than the target's.
        hard_temperature: For those of the same, see `mac_hard_temperature`.
        positive_indices: `(N,)` as in `info_nce`.
        candidate_ids: `(M,)` as in `info_nce`.
        false_negative_margin: As in `info_nce`.

    Raises:
        ValueError: As `info_nce`, or `candidate_modality` does not have one entry per candidate.
    """
    check_length(candidate_modality, "candidate_modality", len(candidates))
    return info_nce_terms(
        queries,
        candidates,
        temperature,
        hard_temperature,
        candidate_modality,
        positive_indices,
        candidate_ids,
        false_negative_margin,
    ).loss


def mac_hard_temperature(
    temperature: float, decay: float, progress: float, round_to: int | None = None, hold_after: float | None = None
) -> float:
    """The intra-modality temperature `t0 * exp(-decay * progress)` of PUMA's MAC-loss.

    Args:
        temperature: t0 > 0.
        decay: lambda, 0.2 in the paper's recipe (Table 12); 0 keeps t0.
        progress: Share of training done, in [0, 1].
        round_to: Round to this many decimals, as the authors' code does (3).
        hold_after: Reach the end of the decay at this share of training and stay (0.5 in the authors' code).

    Raises:
        ValueError: An argument is out of range, or rounding leaves zero.
    """
    inverse(temperature)
    if not 0.0 <= progress <= 1.0:
        raise ValueError(f"progress={progress} must lie in [0, 1]")
    if hold_after is not None:
        if not 0.0 < hold_after <= 1.0:
            raise ValueError(f"hold_after={hold_after} must lie in (0, 1]")
        progress = min(progress / hold_after, 1.0)
    value = temperature * math.exp(-decay * progress)
    if round_to is not None:
        value = round(value, round_to)
        inverse(value, f"temperature rounded to {round_to} decimals")
    return value


def multi_positive(
    anchors: Tensor,
    positives: Tensor,
    negatives: Tensor,
    temperature: Tensor | float,
    positive_mask: Tensor | None = None,
    negative_mask: Tensor | None = None,
    *,
    gathered_anchors: Tensor | None = None,
    gathered_valid: Tensor | None = None,
    gathered_ids: Tensor | None = None,
    positions: Tensor | None = None,
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
        gathered_anchors: `(M, D)` the anchors of all devices; the local ones by default.
        gathered_valid: `(M,)` bool, which of them have a valid positive, so that the mean over devices is the mean
            over all valid anchors; by default the mean is over the local ones.
        gathered_ids: `(M,)` integers naming what each anchor shows; those of one id are not each other's negatives.
        positions: `(N,)` where the local anchors stand in the gathered ones.

    Raises:
        ValueError: Shapes do not fit, a valid vector is zero or not finite, or the temperature is not positive.
    """
    check_matrix(anchors, "anchors")
    scale = inverse(temperature)
    rows = unit(anchors, "anchors")
    columns = rows
    if gathered_anchors is not None:
        check_matrix(gathered_anchors, "gathered_anchors", anchors)
        columns = unit(gathered_anchors, "gathered_anchors")
    places = row_places(len(rows), columns, positions, "anchors")
    ids = column_ids(columns, gathered_ids, "gathered_ids")
    others, _ = cross_logsumexp(rows, columns, scale, Exclusion(ids[places], ids))
    pulled = _own_scores(rows, positives, positive_mask, scale, "positive")
    pushed = _own_scores(rows, negatives, negative_mask, scale, "negative")
    valid = pulled.isfinite().any(1)
    together = torch.cat([pulled, pushed, others[:, None]], dim=1)[valid]
    terms = together.logsumexp(1) - pulled[valid].logsumexp(1)
    if gathered_valid is None:
        return terms.sum() / max(len(terms), 1)
    check_length(gathered_valid, "gathered_valid", len(columns))
    return terms.sum() / (gathered_valid.sum().clamp(min=1) * len(rows) / len(columns))


def _own_scores(anchors: Tensor, own: Tensor, mask: Tensor | None, scale: Tensor | float, name: str) -> Tensor:
    """Scaled similarities of each anchor to its own vectors `(N, K, D)`, minus infinity where masked: `(N, K)`."""
    if own.ndim != 3 or own.shape[0] != len(anchors) or own.shape[2] != anchors.shape[1]:
        expected = f"({len(anchors)}, *, {anchors.shape[1]})"
        raise ValueError(f"{name}s has shape {tuple(own.shape)}, expected {expected}")
    if mask is not None:
        if mask.shape != own.shape[:2]:
            raise ValueError(f"{name}_mask has shape {tuple(mask.shape)}, expected {tuple(own.shape[:2])}")
        # Masked vectors may be zero: let a constant stand in for them, so that no NaN enters the gradient.
        own = torch.where(mask.bool()[..., None], own, torch.ones_like(own))
    scores = (anchors[:, None] * unit(own, f"{name}s")).sum(-1) * scale
    return scores if mask is None else scores.masked_fill(~mask.bool(), float("-inf"))


def info_nce_terms(
    queries: Tensor,
    candidates: Tensor,
    temperature: Tensor | float,
    hard_temperature: Tensor | float | None = None,
    modality: Tensor | None = None,
    positive_indices: Tensor | None = None,
    candidate_ids: Tensor | None = None,
    false_negative_margin: float | None = None,
    ring: bool = False,
) -> LossTerms:
    """`mean_i (logaddexp(negatives_i, s_i) - s_i)`, `s_i` the positive's score; arguments of `info_nce` and `mac`."""
    check_matrix(queries, "queries")
    check_matrix(candidates, "candidates", queries)
    scale = inverse(temperature)
    q, c = unit(queries, "queries"), unit(candidates, "candidates")
    places = row_places(len(q), c, positive_indices, "queries")
    if ring and candidate_ids is None:
        candidate_ids = local_positions(len(c), c.device)
    ids = column_ids(c, candidate_ids, "candidate_ids")
    cosine = (q * c[places]).sum(-1)
    thresholds = None if false_negative_margin is None else (cosine + false_negative_margin).detach()
    exclusion = Exclusion(ids[places], ids, thresholds=thresholds)
    if modality is None or hard_temperature is None:
        negatives, masked = (ring_logsumexp if ring else cross_logsumexp)(q, c, scale, exclusion)
        positive = cosine * scale
    else:
        hard_scale = inverse(hard_temperature, "hard_temperature")
        negatives, masked = grouped_logsumexp(q, c, scale, hard_scale, modality[places], modality, exclusion)
        positive = cosine * hard_scale
    return LossTerms((torch.logaddexp(negatives, positive) - positive).mean(), masked.float().mean())


def column_ids(columns: Tensor, ids: Tensor | None, name: str) -> Tensor:
    """The ids of the columns, checked; all different by default."""
    if ids is None:
        return torch.arange(len(columns), device=columns.device)
    check_length(ids, name, len(columns))
    return ids
