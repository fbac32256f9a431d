"""Construct positives and negatives by masking parts of the anchor (SOLAR Sec. 4.2 and App. D.3)."""

from typing import NamedTuple

import torch
from torch import Tensor

ROLES = ("positive", "image_difference", "text_difference", "intersection")
"""The masked part of each constructed sample: the intersection in one modality (the other keeps it), the difference of
the image, the difference of the text, or the intersection in both. The first is a positive, the others negatives."""


class ConstructedSamples(NamedTuple):
    """One sample per anchor and role, given as weights of the anchor's tokens.

    To mask features, pass `weights.flatten(0, 1)` to a joint encoder as `image_weights` and `text_weights`, with the
    anchors' features repeated four times. To mask the towers' inputs, use `mask_pixels` and
    `attention_mask * text_weights`. The transposes of `valid[:1]` and `valid[1:]` are the masks of `multi_positive`.

    Args:
        image_weights: `(4, N, P)` float, 0 for masked patches, else 1; roles in the order of `ROLES`.
        text_weights: `(4, N, T)` float; 1 at special tokens and padding, which are never masked.
        valid: `(4, N)` bool, True for samples that exist. An invalid sample is a copy of its anchor.
    """

    image_weights: Tensor
    text_weights: Tensor
    valid: Tensor


def construct_samples(
    image_scores: Tensor,
    image_mask: Tensor,
    image_threshold: Tensor | float,
    text_scores: Tensor,
    text_mask: Tensor,
    text_threshold: Tensor | float,
    segments: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> ConstructedSamples:
    """Sample a positive and three negatives for each anchor.

    Tokens with a score above the threshold form the intersection, tokens below it the difference. A patch has the mean
    score of its segment. Each token or segment of the part to mask is masked with a probability sampled from U(0, 1)
    per sample; at least one is always masked. The positive masks image or text with equal probability, or the only
    modality that has an intersection. A sample with nothing to mask is invalid.

    Args:
        image_scores: `(N, P)` cosines between each patch and the text's global token.
        image_mask: `(N, P)` bool, True for patches that exist.
        image_threshold: tau_V from `qda_threshold`.
        text_scores: `(N, T)` cosines between each text token and the image's global token.
        text_mask: `(N, T)` bool, True for local tokens, False for special tokens and padding.
        text_threshold: tau_L from `qda_threshold`.
        segments: `(N, P)` integers in [0, P) from `segment_patches`; by default every patch is its own segment.
        generator: Generator of the random numbers.

    Raises:
        ValueError: The shapes do not match.
    """
    _check_shapes(image_scores, image_mask, text_scores, text_mask, segments)
    if segments is None:
        segments = torch.arange(image_scores.shape[1], device=image_scores.device).expand_as(image_scores)
    segment_scores, exists = _segment_means(image_scores, image_mask.bool(), segments)
    image_in, image_out = exists & (segment_scores > image_threshold), exists & (segment_scores < image_threshold)
    text_in, text_out = (
        text_mask.bool() & kind for kind in (text_scores > text_threshold, text_scores < text_threshold)
    )
    has_image, has_text = image_in.any(1), text_in.any(1)
    coin = _uniform((len(image_scores),), image_scores.device, generator) < 0.5
    from_image = has_image & (coin | ~has_text)
    both = has_image & has_text
    dropped_segments = torch.stack(
        [
            _draw(image_in, generator) & from_image[:, None],
            _draw(image_out, generator),
            torch.zeros_like(image_in),
            _draw(image_in, generator) & both[:, None],
        ]
    )
    dropped_tokens = torch.stack(
        [
            _draw(text_in, generator) & ~from_image[:, None],
            torch.zeros_like(text_in),
            _draw(text_out, generator),
            _draw(text_in, generator) & both[:, None],
        ]
    )
    dropped_patches = dropped_segments.gather(2, segments.expand(len(ROLES), -1, -1)) & image_mask.bool()
    valid = torch.stack([has_image | has_text, image_out.any(1), text_out.any(1), both])
    return ConstructedSamples((~dropped_patches).float(), (~dropped_tokens).float(), valid)


def mask_pixels(pixel_values: Tensor, image_weights: Tensor, patch_size: int) -> Tensor:
    """Set masked patches to the mean pixel, which is 0 after normalisation.

    Args:
        pixel_values: `(N, 3, H, W)`, normalised.
        image_weights: `(N, P)`, P = (H // patch_size) * (W // patch_size), row-major.
        patch_size: Side of a patch in pixels; pixels right of and below the patch grid stay unchanged.

    Raises:
        ValueError: The number of weights differs from the number of patches.
    """
    grid = tuple(length // patch_size for length in pixel_values.shape[-2:])
    if image_weights.shape != (len(pixel_values), grid[0] * grid[1]):
        expected = (len(pixel_values), grid[0] * grid[1])
        raise ValueError(f"image_weights has shape {tuple(image_weights.shape)}, expected {expected}")
    weights = image_weights.to(pixel_values.dtype).unflatten(1, grid)
    weights = weights.repeat_interleave(patch_size, 1).repeat_interleave(patch_size, 2)[:, None]
    masked = pixel_values.clone()
    masked[..., : weights.shape[2], : weights.shape[3]] *= weights
    return masked


def _segment_means(scores: Tensor, exists: Tensor, segments: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean score of each segment's patches `(N, P)`, and the mask of existing segments."""
    counts = torch.zeros_like(scores).scatter_add(1, segments, exists.to(scores.dtype))
    totals = torch.zeros_like(scores).scatter_add(1, segments, torch.where(exists, scores, 0.0))
    return totals / counts.clamp(min=1), counts > 0


def _draw(candidates: Tensor, generator: torch.Generator | None) -> Tensor:
    """Sample the candidates `(N, K)` to mask: each with its row's probability, and at least one per row."""
    count, width = candidates.shape
    draws = _uniform((count, width + 1), candidates.device, generator)
    probability, draws = draws[:, :1], draws[:, 1:].masked_fill(~candidates, 2.0)
    return candidates & ((draws < probability) | (draws == draws.amin(1, keepdim=True)))


def _uniform(shape: tuple[int, ...], device: torch.device, generator: torch.Generator | None) -> Tensor:
    source = device if generator is None else generator.device
    return torch.rand(shape, generator=generator, device=source).to(device)


def _check_shapes(
    image_scores: Tensor, image_mask: Tensor, text_scores: Tensor, text_mask: Tensor, segments: Tensor | None
) -> None:
    if image_scores.ndim != 2 or text_scores.ndim != 2 or len(image_scores) != len(text_scores):
        raise ValueError(
            f"image_scores and text_scores have shapes {tuple(image_scores.shape)} and {tuple(text_scores.shape)}, "
            "expected (N, P) and (N, T)"
        )
    for name, mask, scores in (
        ("image_mask", image_mask, image_scores),
        ("text_mask", text_mask, text_scores),
        ("segments", image_mask if segments is None else segments, image_scores),
    ):
        if mask.shape != scores.shape:
            raise ValueError(f"{name} has shape {tuple(mask.shape)}, expected {tuple(scores.shape)}")
