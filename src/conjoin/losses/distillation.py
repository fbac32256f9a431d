"""Distillation from frozen teachers: structure of similarities (SOLAR's LD and GD), and PUMA's self-distillation."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .checks import check_matrix, check_norms, fill_masked, inverse, unit, widen

CHUNK_ENTRIES = 2**22
"""Similarities between tokens that are held at a time: 64 samples of 256 tokens."""

DISTILLATION_KINDS = ("mse", "squared_norm", "cosine", "kl")


def local_distillation(student: Tensor, teacher: Tensor, mask: Tensor) -> Tensor:
    """One minus the correlation of student's and teacher's similarities between a sample's tokens (SOLAR's L_LD).

    Of every token: Pearson's correlation between its cosines with all other tokens of the sample for the student, and
    those for the teacher; the mean over the sample's tokens, then over samples. Widths may differ. A token whose
    cosines are all alike has no correlation and is left out; so is a sample without any other token, as one with
    fewer than three tokens. If nothing is left the loss is 0 and so are its gradients.

    Memory is bounded in the number of samples: a large batch is cut into chunks, which backward computes again.

    Args:
        student: `(N, T, D)`, raw.
        teacher: `(N, T, D')`, raw; no gradient flows to it.
        mask: `(N, T)` bool, the tokens to compare; the others may hold anything.

    Raises:
        ValueError: Shapes do not fit, or a vector that the mask keeps is zero or not finite.
    """
    if student.ndim != 3 or teacher.ndim != 3 or student.shape[:2] != teacher.shape[:2]:
        raise ValueError(
            f"student and teacher have shapes {tuple(student.shape)} and {tuple(teacher.shape)}, "
            "expected (N, T, D) and (N, T, D')"
        )
    parts = (fill_masked(student, mask, "student"), fill_masked(teacher.detach(), mask, "teacher"), mask.bool())
    size = max(1, CHUNK_ENTRIES // max(1, student.shape[1]) ** 2)
    if len(student) <= size:
        correlation, usable = _token_correlations(*parts)
    else:
        starts = range(0, len(student), size)
        chunks = zip(*(part.split(size) for part in parts), starts, strict=True)
        found = [checkpoint(_token_correlations, *chunk, use_reentrant=False) for chunk in chunks]
        correlation, usable = (torch.cat(column) for column in zip(*found, strict=True))
    return ((1 - correlation) * usable).sum() / usable.sum().clamp(min=1)


def global_distillation(student: Tensor, teacher: Tensor) -> Tensor:
    """One minus the correlation of the off-diagonal cosines of two batches of embeddings (SOLAR's L_GD).

    Where the cosines of either are all alike, as those of two samples, the loss is 0 and so are its gradients.

    Args:
        student: `(N, D)`, raw: the unmasked embedding before the projection head.
        teacher: `(N, D')`, raw; no gradient flows to it.

    Raises:
        ValueError: Shapes do not fit, or a vector is zero or not finite.
    """
    check_matrix(student, "student")
    check_matrix(teacher, "teacher")
    if len(student) != len(teacher):
        raise ValueError(f"teacher has {len(teacher)} rows, expected {len(student)}")
    others = ~torch.eye(len(student), dtype=torch.bool, device=student.device)
    matrices = [_cosines(widen(student), "student"), _cosines(widen(teacher.detach()), "teacher")]
    correlation, defined = _pearson(matrices[0].flatten(), matrices[1].flatten(), others.flatten())
    return (1 - correlation) * defined


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


def _cosines(vectors: Tensor, name: str) -> Tensor:
    """Cosines `(..., T, T)` of `(..., T, D)`, in full precision under autocast too."""
    with torch.autocast(vectors.device.type, enabled=False):
        products = vectors @ vectors.mT
    norms = check_norms(products.diagonal(dim1=-2, dim2=-1).sqrt(), name)
    return products / (norms[..., :, None] * norms[..., None, :])


def _token_correlations(student: Tensor, teacher: Tensor, mask: Tensor, start: int = 0) -> tuple[Tensor, Tensor]:
    """Mean correlation over the tokens of each sample, and which samples have one: `(n,)` and `(n,)` bool.

    `start` is where the samples stand in the batch, for messages.
    """
    others = mask[:, :, None] & mask[:, None] & ~torch.eye(mask.shape[1], dtype=torch.bool, device=mask.device)
    where = f"[{start}:]" if start else ""
    correlation, defined = _pearson(_cosines(student, f"student{where}"), _cosines(teacher, f"teacher{where}"), others)
    count = defined.sum(1)
    return (correlation * defined).sum(1) / count.clamp(min=1), count > 0


def _pearson(a: Tensor, b: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Pearson's correlation along the last dimension where `mask` holds, and where it is defined; else 0.

    It is not where the masked values of `a` or `b` are alike up to their rounding.
    """
    count = mask.sum(-1, keepdim=True).clamp(min=1)
    a, b = ((x - (x * mask).sum(-1, keepdim=True) / count) * mask for x in (a, b))
    variances = [x.square().sum(-1) / count[..., 0] for x in (a, b)]
    least = [(32 * torch.finfo(x.dtype).eps) ** 2 for x in (a, b)]
    defined = (variances[0] > least[0]) & (variances[1] > least[1])
    deviations = torch.where(defined, variances[0] * variances[1], 1.0).sqrt()
    covariance = torch.where(defined, (a * b).sum(-1) / count[..., 0], 0.0)
    return covariance / deviations, defined


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
