"""The modality-adaptive contrastive loss, and the schedule of its second temperature."""

import math

from torch import Tensor

from .checks import check_length, check_matrix, exclude_own, inverse, own_columns, unit
from .info_nce_loss import mean_cross_entropy
from .kernel import logsumexp


def mac(
    queries: Tensor,
    candidates: Tensor,
    candidate_modality: Tensor,
    temperature: Tensor | float,
    hard_temperature: Tensor | float,
    *,
    positive_indices: Tensor | None = None,
    candidate_ids: Tensor | None = None,
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

    Raises:
        ValueError: As `info_nce`, or `candidate_modality` does not have one entry per candidate.
    """
    check_matrix(queries, "queries")
    check_matrix(candidates, "candidates", queries)
    check_length(candidate_modality, "candidate_modality", len(candidates))
    scale, hard_scale = inverse(temperature), inverse(hard_temperature, "hard_temperature")
    q, c = unit(queries, "queries"), unit(candidates, "candidates")
    exclusion = exclude_own(c, len(q), positive_indices, candidate_ids, "queries")
    groups = own_columns(candidate_modality, len(q), positive_indices), candidate_modality
    negatives = logsumexp(q, c, scale, exclusion, groups, hard_scale)
    return mean_cross_entropy(negatives, (q * own_columns(c, len(q), positive_indices)).sum(-1) * hard_scale)


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
