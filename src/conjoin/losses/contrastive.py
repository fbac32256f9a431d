"""InfoNCE and its relatives as pure functions: raw embeddings in, a scalar out, no N x M matrix in between."""

import torch
from torch import Tensor

from conjoin.ops import Exclusion, cross_logsumexp

from .checks import check_matrix, inverse, unit


def info_nce(
    queries: Tensor,
    candidates: Tensor,
    temperature: Tensor | float,
    *,
    positives: Tensor | None = None,
    candidate_ids: Tensor | None = None,
    false_negative_margin: float | None = None,
) -> Tensor:
    """InfoNCE from queries to candidates: `-mean_i log softmax_j(cos(q_i, c_j) / t)` at the positive.

    A batch of one query and one candidate has no negatives: the loss is 0, without gradient.

    Args:
        queries: `(N, D)`, raw.
        candidates: `(M, D)`, M >= N; by default the positive of query i is candidate i.
        temperature: Positive float, or 0-d tensor to learn.
        positives: `(N,)` where each query's positive stands among the candidates (gathered from all devices, say).
        candidate_ids: `(M,)` integers naming what each candidate shows; candidates with the id of a query's positive
            are not its negatives.
        false_negative_margin: Candidates more similar than the positive by more than this are not negatives.

    Raises:
        ValueError: Shapes do not fit, a vector is zero or not finite, or the temperature is not positive.
    """
    return _one_direction(
        queries, candidates, inverse(temperature), None, None, positives, candidate_ids, false_negative_margin
    )


def symmetric_info_nce(
    a: Tensor,
    b: Tensor,
    temperature: Tensor | float,
    *,
    gathered_a: Tensor | None = None,
    gathered_b: Tensor | None = None,
    positives: Tensor | None = None,
    gathered_ids: Tensor | None = None,
    false_negative_margin: float | None = None,
) -> Tensor:
    """The mean of `info_nce` in both directions (CLIP; SOLAR Eq. 3).

    Args:
        a: `(N, D)`, raw.
        b: `(N, D)`; row i belongs to row i of `a`.
        temperature: Positive float, or 0-d tensor to learn.
        gathered_a: `(M, D)` the rows of `a` of all devices, the candidates of `b`; `a` itself by default.
        gathered_b: `(M, D)` likewise.
        positives: `(N,)` where the local rows stand in the gathered ones.
        gathered_ids: `(M,)` integers naming what each pair shows; pairs of one id are not each other's negatives.
        false_negative_margin: See `info_nce`.

    Raises:
        ValueError: As `info_nce`, or `a` and `b` differ in shape.
    """
    check_matrix(a, "a")
    check_matrix(b, "b", a, same_rows=True)
    extras = {"positives": positives, "candidate_ids": gathered_ids, "false_negative_margin": false_negative_margin}
    forth = info_nce(a, b if gathered_b is None else gathered_b, temperature, **extras)
    back = info_nce(b, a if gathered_a is None else gathered_a, temperature, **extras)
    return (forth + back) / 2


def mac(
    queries: Tensor,
    candidates: Tensor,
    candidate_modality: Tensor,
    temperature: Tensor | float,
    hard_temperature: Tensor | float,
    *,
    positives: Tensor | None = None,
    candidate_ids: Tensor | None = None,
) -> Tensor:
    """Modality-adaptive contrastive loss (PUMA Alg. 1).

    Scores of candidates in the modality of the query's own target, the positive included, are divided by
    `hard_temperature`, the others by `temperature`. Equal temperatures give InfoNCE; swapping them is the paper's
    reverse-MAC ablation.

    Args:
        queries: `(N, D)`, raw.
        candidates: `(M, D)`.
        candidate_modality: `(M,)` integers.
        temperature: For candidates of another modality than the target's.
        hard_temperature: For those of the same, see `mac_hard_temperature`.
        positives: `(N,)` as in `info_nce`.
        candidate_ids: `(M,)` as in `info_nce`.

    Raises:
        ValueError: As `info_nce`, or `candidate_modality` does not have one entry per candidate.
    """
    if candidate_modality.shape != (len(candidates),):
        raise ValueError(
            f"candidate_modality has shape {tuple(candidate_modality.shape)}, expected ({len(candidates)},)"
        )
    return _one_direction(
        queries,
        candidates,
        inverse(temperature),
        inverse(hard_temperature, "hard_temperature"),
        candidate_modality,
        positives,
        candidate_ids,
        None,
    )


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
    value = float(temperature * torch.tensor(-decay * progress, dtype=torch.float64).exp())
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
    anchor_positions: Tensor | None = None,
    gathered_ids: Tensor | None = None,
) -> Tensor:
    """`-mean_i log(sum_{P_i} e^{cos/t} / sum_{P_i + N_i} e^{cos/t})` (SOLAR Eq. 5, with its minus sign).

    N_i is the anchor's own negatives and the other anchors of the batch. Anchors without a valid positive are left
    out and the mean divides by the others; with none at all the loss is 0.

    Args:
        anchors: `(N, D)`, raw.
        positives: `(N, P, D)` each anchor's own.
        negatives: `(N, K, D)` each anchor's own; K may be 0.
        temperature: Positive float, or 0-d tensor to learn.
        positive_mask: `(N, P)` bool, which positives exist; masked ones may hold anything.
        negative_mask: `(N, K)` bool.
        gathered_anchors: `(M, D)` the anchors of all devices; the local ones by default.
        anchor_positions: `(N,)` where the local anchors stand in them.
        gathered_ids: `(M,)` integers naming what each anchor shows; those of one id are not each other's negatives.

    Raises:
        ValueError: Shapes do not fit, a valid vector is zero or not finite, or the temperature is not positive.
    """
    check_matrix(anchors, "anchors")
    for name, tensor in (("positives", positives), ("negatives", negatives)):
        if tensor.ndim != 3 or tensor.shape[0] != len(anchors) or tensor.shape[2] != anchors.shape[1]:
            expected = f"({len(anchors)}, *, {anchors.shape[1]})"
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected {expected}")
    scale = inverse(temperature)
    normed = unit(anchors, "anchors")
    keys = normed if gathered_anchors is None else unit(gathered_anchors, "gathered_anchors")
    places = torch.arange(len(anchors), device=anchors.device) if anchor_positions is None else anchor_positions
    ids = torch.arange(len(keys), device=keys.device) if gathered_ids is None else gathered_ids
    others = cross_logsumexp(normed, keys, scale, Exclusion(ids[places], ids))
    pulled = _own_scores(normed, positives, positive_mask, scale, "positives").logsumexp(1)
    valid = pulled.isfinite()
    if not valid.any():
        return pulled.new_zeros(()) + 0.0 * normed.sum()
    pushed = _own_scores(normed, negatives, negative_mask, scale, "negatives")
    everything = torch.cat([pulled[:, None], pushed, others[:, None]], dim=1)[valid].logsumexp(1)
    return (everything - pulled[valid]).mean()


def _own_scores(anchors: Tensor, own: Tensor, mask: Tensor | None, scale: Tensor | float, name: str) -> Tensor:
    """Scaled similarities of each anchor to its own vectors `(N, K, D)`, minus infinity where masked: `(N, K)`."""
    if mask is not None:
        # Masked vectors may be zero: let a constant stand in for them, so that no NaN enters the gradient.
        own = torch.where(mask.bool()[..., None], own, torch.ones_like(own))
    scores = torch.einsum("nd,nkd->nk", anchors, unit(own, name)) * scale
    return scores if mask is None else scores.masked_fill(~mask.bool(), float("-inf"))


def _one_direction(
    queries: Tensor,
    candidates: Tensor,
    scale: Tensor | float,
    group_scale: Tensor | float | None,
    modality: Tensor | None,
    positives: Tensor | None,
    candidate_ids: Tensor | None,
    margin: float | None,
) -> Tensor:
    """`mean_i (logaddexp(negatives_i, s_i) - s_i)`, `s_i` the positive's score."""
    check_matrix(queries, "queries")
    check_matrix(candidates, "candidates", queries)
    if positives is None:
        if len(candidates) < len(queries):
            raise ValueError(f"{len(queries)} queries but only {len(candidates)} candidates")
        positives = torch.arange(len(queries), device=queries.device)
    q, c = unit(queries, "queries"), unit(candidates, "candidates")
    ids = torch.arange(len(c), device=c.device) if candidate_ids is None else candidate_ids
    cosine = (q * c[positives]).sum(-1)
    exclusion = Exclusion(
        ids[positives],
        ids,
        None if modality is None else modality[positives],
        modality,
        thresholds=None if margin is None else (cosine + margin).detach(),
    )
    negatives = cross_logsumexp(q, c, scale, exclusion, group_scale=group_scale)
    positive = cosine * (scale if group_scale is None else group_scale)
    return (torch.logaddexp(negatives, positive) - positive).mean()
