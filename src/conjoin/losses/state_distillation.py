"""Self-distillation: the states of a pruned model against those of the full one."""

import torch
import torch.nn.functional as F
from torch import Tensor

from .checks import check_matrix, inverse, unit, widen

DISTILLATION_KINDS = ("mse", "squared_norm", "cosine", "kl")


def self_distillation(
    student_queries: Tensor,
    teacher_queries: Tensor,
    student_candidates: Tensor,
    teacher_candidates: Tensor,
    kind: str = "mse",
    *,
    temperature: float = 0.05,
) -> Tensor:
    """Pull the states of a pruned model to those of the full one (PUMA Eq. 2 and Table 10).

    Args:
        student_queries: `(N, D)` states before normalisation.
        teacher_queries: `(N, D)`; no gradient flows to the teacher.
        student_candidates: `(N, D)`.
        teacher_candidates: `(N, D)`.
        kind: `"mse"`, the squared difference averaged over batch and dimensions, queries plus candidates (the text and
            the authors' code); `"squared_norm"`, averaged over the batch and summed over dimensions (Eq. 2 to the
            letter, D times as large); `"cosine"`, one minus the cosine; `"kl"`, KL(teacher || student) of the softmax
            over each query's cosines with all candidates, averaged over queries. Only the latter two normalise.
        temperature: Of the softmax of `"kl"`; that of PUMA's contrastive term.

    Raises:
        ValueError: The kind is unknown, shapes do not fit, or a vector to normalise is zero or not finite.
    """
    if kind not in DISTILLATION_KINDS:
        raise ValueError(f"unknown kind {kind!r}; expected one of {DISTILLATION_KINDS}")
    check_matrix(student_queries, "student_queries")
    check_matrix(student_candidates, "student_candidates", student_queries, same_rows=True)
    check_matrix(teacher_queries, "teacher_queries", student_queries, same_rows=True)
    check_matrix(teacher_candidates, "teacher_candidates", student_queries, same_rows=True)
    sides = [(student_queries, teacher_queries.detach()), (student_candidates, teacher_candidates.detach())]
    if kind in ("mse", "squared_norm"):
        factor = student_queries.shape[1] if kind == "squared_norm" else 1
        terms = [(widen(student) - widen(teacher)).square().mean() * factor for student, teacher in sides]
        return terms[0] + terms[1]
    units = [(unit(student, "student"), unit(teacher, "teacher")) for student, teacher in sides]
    if kind == "cosine":
        terms = [(1 - (student * teacher).sum(1)).mean() for student, teacher in units]
        return terms[0] + terms[1]
    scale = inverse(temperature)
    with torch.autocast(student_queries.device.type, enabled=False):
        student, teacher = ((q @ c.T * scale).log_softmax(1) for q, c in zip(*units, strict=True))
    return F.kl_div(student, teacher, reduction="batchmean", log_target=True)
