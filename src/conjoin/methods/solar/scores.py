"""The scores of stage 1: which tokens of an image and a text show what both have."""

from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional

from conjoin.losses import AlignmentTerms, LocalScores, alignment_terms
from conjoin.methods.solar.masking.evolutionary import evolutionary_mask
from conjoin.methods.solar.masking.threshold import Threshold, qda_threshold
from conjoin.methods.solar.masking.windows import Modality, own_window_scores, window_scores
from conjoin.models.joint_encoder import JointEncoderModel, JointEncoderOutput

SCORES = ("global", "windows")


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
        text[:, 0], image[:, 1:], image_mask, image[:, 0], text[:, 1:], text_mask, margin,
        reduce_scores_across_devices=reduce_scores_across_devices,
    )  # fmt: skip


@torch.no_grad()
def score_windows(encoder: JointEncoderModel, tokens: PairTokens) -> tuple[LocalScores, LocalScores]:
    """Return the window scores of a batch of pairs, patches first, by the encoder's E_VL on local tokens."""
    return window_scores(encoder.vl_encoder, *_modalities(encoder, tokens))


def _modalities(encoder: JointEncoderModel, tokens: PairTokens) -> tuple[Modality, Modality]:
    image, text = (
        Modality(states[:, 1:], exists, encoder.vl_encoder(states[:, 1:], exists.float()))
        for states, exists in ((tokens.image, tokens.image_mask), (tokens.text, tokens.text_mask))
    )
    return image, text


class IntersectionMasks(NamedTuple):
    """Masks of what picture and text of an item share, of each item by itself (not in the paper).

    `fit` takes from a batch of pairs what training takes from its batch. Then the mask of an item does not depend on
    the items beside it, so a query and a candidate can be masked at different times.

    Args:
        image_centre: `(d,)` mean unit embedding of pictures.
        text_centre: `(d,)` mean unit embedding of texts.
        image_threshold: 0-d, of patches.
        text_threshold: 0-d, of words.
    """

    image_centre: Tensor
    text_centre: Tensor
    image_threshold: Tensor
    text_threshold: Tensor

    @classmethod
    @torch.no_grad()
    def fit(cls, encoder: JointEncoderModel, tokens: PairTokens) -> "IntersectionMasks":
        """Take centres and thresholds from pairs of the training data, some hundreds."""
        image, text = _modalities(encoder, tokens)
        scores = window_scores(encoder.vl_encoder, image, text)
        centres = (functional.normalize(part.embeddings.float(), dim=-1).mean(0) for part in (image, text))
        return cls(*centres, *(threshold_of(each).threshold for each in scores))

    @torch.no_grad()
    def __call__(self, encoder: JointEncoderModel, tokens: PairTokens) -> dict[str, Tensor]:
        """Return 1 for shared tokens, else 0: the model's inputs `image_weights` `(N, P)`, `text_weights` `(N, T)`.

        The best token stays if no score of a row is above the threshold.
        """
        image, text = _modalities(encoder, tokens)
        scores = own_window_scores(encoder.vl_encoder, image, text, (self.image_centre, self.text_centre))
        return {
            "image_weights": evolutionary_mask(scores[0], tokens.image_mask, self.image_threshold, 0.0),
            "text_weights": evolutionary_mask(scores[1], tokens.text_mask, self.text_threshold, 0.0),
        }


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
