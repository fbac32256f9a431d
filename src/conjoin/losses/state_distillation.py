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
    teachers = (teacher_queries.detach(), teacher_candidates.detach())
    if kind == "kl":
        return _row_divergence((student_queries, student_candidates), teachers, temperature)
    term = {"mse": _mean_square, "squared_norm": _squared_norm, "cosine": _one_minus_cosine}[kind]
    return term(student_queries, teachers[0]) + term(student_candidates, teachers[1])


def _mean_square(student: Tensor, teacher: Tensor) -> Tensor:
    return (widen(student) - widen(teacher)).square().mean()


def _squared_norm(student: Tensor, teacher: Tensor) -> Tensor:
    return _mean_square(student, teacher) * student.shape[1]


def _one_minus_cosine(student: Tensor, teacher: Tensor) -> Tensor:
    return (1 - (unit(student, "student") * unit(teacher, "teacher")).sum(1)).mean()


def _row_divergence(students: tuple[Tensor, Tensor], teachers: tuple[Tensor, Tensor], temperature: float) -> Tensor:
    """KL divergence of the rows of similarities between queries and candidates."""
    scale = inverse(temperature)
    rows = []
    for name, (queries, candidates) in (("student", students), ("teacher", teachers)):
        q, c = unit(queries, f"{name}_queries"), unit(candidates, f"{name}_candidates")
        with torch.autocast(q.device.type, enabled=False):
            rows.append((q @ c.T * scale).log_softmax(1))
    return F.kl_div(rows[0], rows[1], reduction="batchmean", log_target=True)
