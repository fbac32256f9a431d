"""The scores of stage 1: which tokens of an image and a text show what both have."""

from typing import NamedTuple, cast

import torch
from torch import Tensor

from conjoin.losses import AlignmentTerms, LocalScores, Threshold, alignment_terms, qda_threshold
from conjoin.methods.solar.masking import Modality, evolutionary_mask, window_scores
from conjoin.models.joint_encoder import JointEncoderModel, JointEncoderOutput

SCORES = ("global", "windows")


def check_scores(scores: str, reduce_scores_across_devices: bool) -> None:
    """Make sure that a configuration's scores exist, and can be reduced if they are to be.

    Raises:
        ValueError: They are unknown, or those of windows, which every device has for itself.
    """
    if scores not in SCORES:
        raise ValueError(f"scores={scores!r}; expected one of {SCORES}")
    if scores == "windows" and reduce_scores_across_devices:
        raise ValueError('reduce_scores_across_devices=True needs scores="global", got scores="windows"')


class PairTokens(NamedTuple):
    """Adapter tokens of image-text pairs.

    Args:
        image: `(N, 1 + P, d)` [v_cls; V'].
        text: `(N, 1 + T, d)` [l_cls; L'].
        image_mask: `(N, P)` bool, True for the tokens of V' that exist.
        text_mask: `(N, T)` bool, True for the tokens of L' that exist.
    """

    image: Tensor
    text: Tensor
    image_mask: Tensor
    text_mask: Tensor


def pair_tokens(output: JointEncoderOutput) -> PairTokens:
    """Return the tokens of a batch of pairs.

    Raises:
        ValueError: A row has no local image token or no local text token.
    """
    for name, mask in (("image", output.image_token_mask), ("text", output.text_token_mask)):
        if mask is None or not mask.any(1).all():
            lacking = "all" if mask is None else (~mask.any(1)).nonzero().flatten().tolist()[:5]
            raise ValueError(f"SOLAR trains on image-text pairs; rows without {name} tokens: {lacking}")
    tokens = (output.image_tokens, output.text_tokens, output.image_token_mask, output.text_token_mask)
    return PairTokens(*cast("tuple[Tensor, Tensor, Tensor, Tensor]", tokens))


def align(tokens: PairTokens, margin: float = 0.1, reduce_scores_across_devices: bool = False) -> AlignmentTerms:
    """Score local tokens against the other modality's global token, and compute the alignment loss (Eq. 1)."""
    image, text, image_mask, text_mask = tokens
    return alignment_terms(
        text[:, 0], image[:, 1:], image_mask, image[:, 0], text[:, 1:], text_mask,
        margin=margin, reduce_scores_across_devices=reduce_scores_across_devices,
    )  # fmt: skip


@torch.no_grad()
def score_windows(encoder: JointEncoderModel, tokens: PairTokens) -> tuple[LocalScores, LocalScores]:
    """Return the window scores of a batch of pairs, patches first, by the encoder's E_VL on local tokens."""
    parts = [
        Modality(local[:, 1:], exists, encoder.vl_encoder(local[:, 1:], exists.float()))
        for local, exists in ((tokens.image, tokens.image_mask), (tokens.text, tokens.text_mask))
    ]
    return window_scores(encoder.vl_encoder, *parts)


def threshold_of(scores: LocalScores) -> Threshold:
    """Return tau, where the Gaussians fitted to both populations have equal density (App. C.1)."""
    positive, negative = scores.positive, scores.negative
    return qda_threshold(positive.mean, positive.std, negative.mean, negative.std)


def separation(scores: LocalScores) -> Tensor:
    """P(s+ > s-) for scores drawn from the Gaussians fitted to both populations: 0.5 is chance."""
    positive, negative = scores.positive, scores.negative
    deviation = (positive.std.square() + negative.std.square()).sqrt().clamp(min=1e-12)
    return torch.special.ndtr((positive.mean - negative.mean) / deviation)


def mask_tokens(scores: LocalScores, exists: Tensor, rho: float, name: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the evolutionary mask `(N, T)` of one modality and its metrics."""
    tau, fallback = threshold_of(scores)
    above = (scores.scores > tau) & exists
    metrics = {
        f"{name}_threshold": tau,
        f"{name}_threshold_fallback": fallback,
        f"{name}_shared_rate": above.sum() / exists.sum().clamp(min=1),
        f"{name}_empty_rate": (~above.any(1)).float().mean(),
        f"{name}_separation": separation(scores),
    }
    for sign, population in (("positive", scores.positive), ("negative", scores.negative)):
        metrics |= {f"{name}_{sign}_mean": population.mean, f"{name}_{sign}_std": population.std}
    return evolutionary_mask(scores.scores, exists, tau, rho), metrics
