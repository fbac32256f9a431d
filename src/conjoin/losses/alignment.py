"""Global-to-local alignment (SOLAR Eq. 1), and the statistics of its scores that the QDA threshold is fitted to."""

from typing import NamedTuple

import torch
from torch import Tensor

from .checks import check_local, check_matrix, check_norms, fill_masked, unit
from .gather import gather_with_gradient, is_distributed

BLOCK_ENTRIES = 2**22
"""Scores of S- that are held at a time."""


class ScoreStatistics(NamedTuple):
    """Sufficient statistics of a population of scores: three 0-d tensors without gradient.

    Sum and sum of squares would say the same, but lose a deviation that is small beside the mean.

    Args:
        n: How many scores.
        mean: Their mean, 0 of an empty population.
        scatter: The sum of their squared distances from it.
    """

    n: Tensor
    mean: Tensor
    scatter: Tensor

    @property
    def std(self) -> Tensor:
        """The deviation of the fitted Gaussian (divided by n), 0 of an empty population."""
        return (self.scatter / self.n.clamp(min=1)).sqrt()


class LocalScores(NamedTuple):
    """How one modality's local tokens agree with global tokens of the other.

    Args:
        scores: `(N, T)` cosines with the global token of the own sample; 0 where either is missing. No gradient.
        positive: The population S+: `scores` of all samples.
        negative: The population S-: cosines with the global tokens of all other samples of the batch.
    """

    scores: Tensor
    positive: ScoreStatistics
    negative: ScoreStatistics


class AlignmentTerms(NamedTuple):
    """The alignment loss, and what it computed on the way.

    Args:
        loss: `L_GLA = L_L2V + L_V2L`, a scalar.
        image: S_L2V: patches against the global tokens of texts.
        text: S_V2L: text tokens against the global tokens of images.
    """

    loss: Tensor
    image: LocalScores
    text: LocalScores


def global_to_local_alignment(
    text_global: Tensor,
    image_local: Tensor,
    image_mask: Tensor,
    image_global: Tensor,
    text_local: Tensor,
    text_mask: Tensor,
    margin: float = 0.1,
) -> Tensor:
    """`[mean(S-) + margin - mean(S+)]_+` of both directions, added (SOLAR Eq. 1).

    The means run over all local tokens of all pairs of the batch: S+ joins the local tokens of a sample with its own
    global token of the other modality, S- with those of all other samples. A direction without S- (one sample) or
    without S+ adds 0, and so do its gradients.

    Args:
        text_global: `(N, D)` l_cls, raw.
        image_local: `(N, P, D)` V', raw.
        image_mask: `(N, P)` bool, which patches exist; the others may hold anything. A sample without any has no
            image: its `image_global` takes no part.
        image_global: `(N, D)` v_cls, raw.
        text_local: `(N, T, D)` L', raw.
        text_mask: `(N, T)` bool; special tokens are not local tokens.
        margin: delta, 0.1 in the paper (Fig. 10).

    Raises:
        ValueError: Shapes do not fit, or a vector that takes part is zero or not finite.
    """
    tokens = (text_global, image_local, image_mask, image_global, text_local, text_mask)
    return alignment_terms(*tokens, margin=margin).loss


def alignment_terms(
    *tokens: Tensor, margin: float = 0.1, reduce_scores_across_devices: bool = False
) -> AlignmentTerms:
    """`global_to_local_alignment` with the scores and the statistics that masks are made of (SOLAR App. C.1).

    Args:
        tokens: The six tensors of `global_to_local_alignment`, in its order.
        margin: delta.
        reduce_scores_across_devices: Make the statistics those of all ranks together (App. G.1). Scores are never
            exchanged, and the loss stays the device's own.
    """
    text_global, image_local, image_mask, image_global, text_local, text_mask = tokens
    check_matrix(text_global, "text_global")
    check_matrix(image_global, "image_global", text_global, same_rows=True)
    check_local(image_local, "image_local", text_global)
    check_local(text_local, "text_local", text_global)
    with torch.autocast(text_global.device.type, enabled=False):
        has_image, has_text = image_mask.bool().any(1), text_mask.bool().any(1)
        images = unit(fill_masked(image_global, has_image, "image_global"), "image_global") * has_image[:, None]
        texts = unit(fill_masked(text_global, has_text, "text_global"), "text_global") * has_text[:, None]
        image_loss, image = _direction(texts, has_text, image_local, image_mask, margin, "image_local")
        text_loss, text = _direction(images, has_image, text_local, text_mask, margin, "text_local")
    if reduce_scores_across_devices and is_distributed():
        image, text = _join_ranks(image, text)
    return AlignmentTerms(image_loss + text_loss, image, text)


def _direction(
    globals_: Tensor, has_global: Tensor, local: Tensor, mask: Tensor, margin: float, name: str
) -> tuple[Tensor, LocalScores]:
    """The hinge of one direction, and its scores.

    A mean of cosines is a product of sums of unit vectors, so S- needs no matrix of N x N x T for its mean. Nor are
    the local tokens copied to be normalised: their inverse norms go with them, zero at padding.

    Args:
        globals_: `(N, D)` unit, or zero where the sample lacks the modality.
        has_global: `(N,)` bool, which are not zero.
        local: `(N, T, D)`, raw.
        mask: `(N, T)` bool.
        margin: delta.
        name: Of `local`, in messages.
    """
    exists, local = mask.bool(), fill_masked(local, mask, name)
    inverse_norms = exists / check_norms(local.norm(dim=-1), name)
    scores = torch.bmm(local, globals_[:, :, None]).squeeze(2) * inverse_norms
    pulled, together = scores.sum(), torch.einsum("nt,ntd->d", inverse_norms, local) @ globals_.sum(0)
    num_pulled = (exists & has_global[:, None]).sum()
    num_pushed = exists.sum() * has_global.sum() - num_pulled
    pushed = (together - pulled) * (num_pushed > 0)
    means = pulled / num_pulled.clamp(min=1), pushed / num_pushed.clamp(min=1)
    loss = (means[1] + margin - means[0]).relu() * ((num_pulled > 0) & (num_pushed > 0))
    with torch.no_grad():
        scatter = ((scores - means[0]) * (exists & has_global[:, None])).square().sum()
        positive = ScoreStatistics(num_pulled.to(scores.dtype), means[0].detach(), scatter)
        # S- in blocks of samples: distances from a value near its mean are exact where squares of scores are not.
        size, sums = max(1, BLOCK_ENTRIES // max(1, exists.numel())), globals_.new_zeros(2)
        for start in range(0, len(local), size):
            scales = inverse_norms[start : start + size]
            distances = ((local[start : start + size] * scales[..., None]) @ globals_.T).sub_(means[1])
            distances.diagonal(start, 0, 2).zero_()  # a sample's own scores are S+
            present = has_global.to(globals_.dtype)
            rows = torch.stack([distances @ present, distances.square_() @ present])
            sums = sums + (rows * (scales > 0)).sum((1, 2))
        n = num_pushed.to(scores.dtype)
        shift = sums[0] / n.clamp(min=1)
        negative = ScoreStatistics(n, means[1] + shift, (sums[1] - n * shift.square()).clamp(min=0))
    return loss, LocalScores(scores.detach(), positive, negative)


def _join_ranks(*parts: LocalScores) -> list[LocalScores]:
    """Replace the statistics by those of the populations of all ranks, in one exchange."""
    statistics = torch.stack([torch.stack([torch.stack([*sign]) for sign in part[1:]]) for part in parts])
    counts, means, scatters = gather_with_gradient(statistics[None]).unbind(-1)
    n = counts.sum(0)
    mean = (counts * means).sum(0) / n.clamp(min=1)
    scatter = (scatters + counts * (means - mean).square()).sum(0)
    return [
        LocalScores(part.scores, *(ScoreStatistics(*sign) for sign in signs))
        for part, signs in zip(parts, torch.stack([n, mean, scatter], dim=2), strict=True)
    ]
