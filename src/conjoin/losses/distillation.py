"""Distillation of the structure of similarities from a frozen teacher (SOLAR's LD and GD)."""

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .checks import check_matrix, check_norms, fill_masked, widen

CHUNK_ENTRIES = 2**22
"""Similarities between tokens that are held at a time: 64 samples of 256 tokens."""


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
        shapes = f"student {tuple(student.shape)}, teacher {tuple(teacher.shape)}"
        raise ValueError(f"{shapes}: expected (N, T, D) and (N, T, D')")
    parts = (fill_masked(student, mask, "student"), fill_masked(teacher.detach(), mask, "teacher"), mask.bool())
    size = max(1, CHUNK_ENTRIES // max(1, student.shape[1]) ** 2)
    if len(student) <= size:
        correlation, usable = _token_correlations(*parts, 0)
    else:
        chunks = zip(*(part.split(size) for part in parts), range(0, len(student), size), strict=True)
        results = [checkpoint(_token_correlations, *chunk, use_reentrant=False) for chunk in chunks]
        correlation, usable = (torch.cat(column) for column in zip(*results, strict=True))
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
    matrices = _cosines(widen(student), "student"), _cosines(widen(teacher.detach()), "teacher")
    correlation, defined = _pearson(matrices[0].flatten(), matrices[1].flatten(), others.flatten())
    return (1 - correlation) * defined


def _cosines(vectors: Tensor, name: str) -> Tensor:
    """Cosines `(..., T, T)` of `(..., T, D)`, in full precision under autocast too."""
    with torch.autocast(vectors.device.type, enabled=False):
        products = vectors @ vectors.mT
    norms = check_norms(products.diagonal(dim1=-2, dim2=-1).sqrt(), name)
    return products / (norms[..., :, None] * norms[..., None, :])


def _token_correlations(student: Tensor, teacher: Tensor, mask: Tensor, start: int) -> tuple[Tensor, Tensor]:
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
