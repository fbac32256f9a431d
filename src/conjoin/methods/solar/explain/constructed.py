"""Construct the samples of stage 2 for one pair, for visualisation."""

from collections.abc import Mapping

import torch
from torch import Tensor

from conjoin.methods.solar.masking.samples import construct_samples
from conjoin.methods.solar.masking.segments import segment_patches

from .pair import Explanation, MaskedSample

ROLES = {
    "positive": "positive: intersection of one masked",
    "image_difference": "negative: difference of image masked",
    "text_difference": "negative: difference of text masked",
    "intersection": "negative: both intersections masked",
}


def construct_masked(
    explanation: Explanation, thresholds: Mapping[str, float | None], seed: int = 0
) -> tuple[Tensor, list[MaskedSample]]:
    """Return the segment `(P,)` of each patch and, if both thresholds are known, the samples of stage 2.

    Args:
        explanation: Scores of the pair.
        thresholds: Thresholds of `"image"` and `"text"`.
        seed: Seed of the sampling.
    """
    segments = segment_patches(explanation.patches[None])
    image_threshold, text_threshold = thresholds["image"], thresholds["text"]
    if image_threshold is None or text_threshold is None:
        return segments[0], []
    built = construct_samples(
        explanation.image_scores[None],
        torch.ones(1, len(explanation.image_scores), dtype=torch.bool),
        image_threshold,
        explanation.text_scores[None],
        torch.ones(1, len(explanation.text_scores), dtype=torch.bool),
        text_threshold,
        segments,
        torch.Generator().manual_seed(seed),
    )
    samples = [
        MaskedSample(name, built.image_weights[role, 0], built.text_weights[role, 0])
        for role, name in enumerate(ROLES.values())
        if built.valid[role, 0]
    ]
    return segments[0], samples
