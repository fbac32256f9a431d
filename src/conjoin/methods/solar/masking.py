"""Find and mask the tokens that image and text share: scores of windows, evolutionary mask, segments, samples."""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from scipy.cluster.hierarchy import linkage
from torch import Tensor

from conjoin.losses import LocalScores, ScoreStatistics

SCHEDULES = ("linear", "cosine")
PATCH_WINDOW, PATCH_STRIDE, WORD_WINDOW = 4, 3, 2
IMAGES_PER_BLOCK = 32
"""Number of images whose distances are in memory at once."""
ROLES = ("positive", "image_difference", "text_difference", "intersection")
"""The masked part of each constructed sample: the intersection in one modality (the other keeps it), the difference of
the image, the difference of the text, or the intersection in both. The first is a positive, the others negatives."""


class Modality(NamedTuple):
    """One modality of N pairs.

    Args:
        tokens: `(N, T, d)` local tokens, the input of E_VL.
        mask: `(N, T)` bool, True for the tokens that exist.
        embeddings: `(N, d)` the embedding of this modality alone, raw.
    """

    tokens: Tensor
    mask: Tensor
    embeddings: Tensor


@torch.no_grad()
def window_scores(
    encode: Callable[[Tensor, Tensor], Tensor], image: Modality, text: Modality
) -> tuple[LocalScores, LocalScores]:
    """Score every patch against its text's embedding, and every word against its image's.

    E_VL embeds windows of the tokens alone: squares of 4 x 4 patches at a stride of 3, and two words. The score of a
    window with an embedding of the other modality is their cosine, minus the mean of this over all rows: a region
    that is like every text says nothing. The score of a token is the mean over the windows that contain it. A single
    patch is a poorer witness than a window, because the contrastive losses train E_VL on sets of tokens, and because
    the patches of a vision tower mix their neighbours.

    Args:
        encode: E_VL: maps tokens `(M, S, d)` and weights `(M, S)` to embeddings `(M, d)`.
        image: The images; the patches of each fill a square grid.
        text: The texts, of the same rows.

    Returns:
        The scores of patches and of words, with the statistics of matching and other pairs.

    Raises:
        ValueError: The patches do not fill a square.
    """
    patches, words, device = image.tokens.shape[1], text.tokens.shape[1], image.tokens.device
    side = round(patches**0.5)
    if side * side != patches:
        raise ValueError(f"window scores need a square grid of patches, got {patches} patches")
    width = min(PATCH_WINDOW, side)
    starts = sorted({*range(0, side - width + 1, PATCH_STRIDE), side - width})  # with those at the far edges
    grid = torch.arange(patches, device=device).view(side, side)
    squares = [grid[top : top + width, left : left + width].flatten() for top in starts for left in starts]
    phrases = torch.arange(words, device=device).unfold(0, min(WORD_WINDOW, words), 1)
    return _scores(encode, image, torch.stack(squares), text), _scores(encode, text, phrases, image)


def _scores(
    encode: Callable[[Tensor, Tensor], Tensor], local: Modality, windows: Tensor, other: Modality
) -> LocalScores:
    """Return the scores of `local`'s tokens with the embeddings of `other`, in `windows` `(W, S)` of positions."""
    (rows, length), number = local.mask.shape, len(windows)
    count = local.mask.sum(1, keepdim=True)
    weights = local.mask[:, windows].float()  # (N, W, S)
    filled = weights.sum(2, keepdim=True)
    # As much weight as the whole view has, so that CLS keeps its share; an empty window gets any, and counts nowhere.
    weights = torch.where(filled > 0, weights * count[..., None] / filled.clamp(min=1), 1.0)
    embedded = encode(local.tokens[:, windows].flatten(0, 1), weights.flatten(0, 1)).unflatten(0, (rows, number))
    covers = torch.zeros(number, length, device=windows.device).scatter(1, windows, 1.0) * (filled > 0)  # (N, W, T)
    share = covers / covers.sum(1, keepdim=True).clamp(min=1)
    similar = torch.einsum("nwd,md->nmw", _unit(embedded), _unit(other.embeddings))
    scores = torch.einsum("nmw,nwt->nmt", similar - similar.mean(1, keepdim=True), share)
    matched = scores.diagonal(dim1=0, dim2=1).T * local.mask
    matching = torch.eye(rows, dtype=torch.bool, device=matched.device)[..., None]
    exists = local.mask[:, None].expand_as(scores)
    return LocalScores(matched, _statistics(scores, exists & matching), _statistics(scores, exists & ~matching))


def _unit(embeddings: Tensor) -> Tensor:
    return F.normalize(embeddings.float(), dim=-1)


def _statistics(scores: Tensor, chosen: Tensor) -> ScoreStatistics:
    n = chosen.sum().to(scores.dtype)
    mean = (scores * chosen).sum() / n.clamp(min=1)
    return ScoreStatistics(n, mean, ((scores - mean) * chosen).square().sum())


def mask_schedule(
    progress: float, schedule: str = "linear", mask_warmup_ratio: float = 0.5, mask_start_ratio: float = 0.0
) -> float:
    """Return rho of the evolutionary mask: 1 until `mask_start_ratio`, then down to 0 at `mask_warmup_ratio`.

    Args:
        progress: Completed share of training, in [0, 1].
        schedule: `"linear"` (the paper's) or `"cosine"`.
        mask_warmup_ratio: Progress at which rho reaches 0, in [0, 1]; 0 gives the hard mask from the start (Table 3).
        mask_start_ratio: Progress at which rho begins to decay, at most `mask_warmup_ratio`.

    Raises:
        ValueError: An argument is out of range or the schedule is unknown.
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"unknown schedule {schedule!r}; expected one of {SCHEDULES}")
    if not 0.0 <= progress <= 1.0:
        raise ValueError(f"progress={progress} must lie in [0, 1]")
    if not 0.0 <= mask_warmup_ratio <= 1.0:
        raise ValueError(f"mask_warmup_ratio={mask_warmup_ratio} must lie in [0, 1]")
    if not 0.0 <= mask_start_ratio <= mask_warmup_ratio:
        raise ValueError(f"mask_start_ratio={mask_start_ratio} must lie in [0, mask_warmup_ratio={mask_warmup_ratio}]")
    if progress >= mask_warmup_ratio:
        return 0.0
    if progress <= mask_start_ratio:
        return 1.0
    done = (progress - mask_start_ratio) / (mask_warmup_ratio - mask_start_ratio)
    return 1.0 - done if schedule == "linear" else (1.0 + math.cos(math.pi * done)) / 2


def evolutionary_mask(scores: Tensor, exists: Tensor, threshold: Tensor | float, rho: float) -> Tensor:
    """Return `M = rho + (1 - rho) M^`, the weights of local tokens in E_VL, without gradient; `M^ = [S > threshold]`.

    A row without a score above the threshold keeps its best token: otherwise all such rows would share one embedding.

    Args:
        scores: `(N, T)`.
        exists: `(N, T)` bool, True for tokens that exist.
        threshold: 0-d threshold from `qda_threshold`.
        rho: Value in [0, 1] from `mask_schedule`; 0 gives the hard mask.

    Raises:
        ValueError: Rho is outside [0, 1].
    """
    if not 0.0 <= rho <= 1.0:
        raise ValueError(f"rho={rho} must lie in [0, 1]")
    shared = (scores > threshold) & exists
    best = scores.masked_fill(~exists, -math.inf).argmax(1, keepdim=True)
    shared = shared.scatter(1, best, shared.gather(1, best) | ~shared.any(1, keepdim=True))
    return rho + (1.0 - rho) * shared.to(scores.dtype)


@torch.no_grad()
def segment_patches(
    features: Tensor,
    threshold: float = 0.45,
    step: float = 0.05,
    max_rounds: int = 5,
    max_share: float = 0.87,
    max_segments: int = 5,
) -> Tensor:
    """Cluster each image's patches by average linkage of cosine distances, cut at an adaptive height (Algorithm 1).

    The cut starts at `threshold`. If a segment has more than `max_share` of the patches, the cut decreases by `step`;
    otherwise, if there are more than `max_segments` segments, it increases by `step`. The search stops after
    `max_rounds` cuts. The tree does not depend on the cut, so it is built once per image.

    Args:
        features: `(N, P, D)` V', raw; a zero vector has distance 1 to every other vector.
        threshold: Cosine distance of the first cut.
        step: Change of the cut per round.
        max_rounds: Maximum number of cuts, at least one.
        max_share: Maximum share of patches in one segment.
        max_segments: Maximum segments in one image; more are possible if `max_rounds` ends the search.

    Returns:
        `(N, P)` integers, the segment of each patch; the segments of an image are numbered from 0 without gaps.

    Raises:
        ValueError: The shape or an argument is invalid, or a feature is NaN or infinite.
    """
    if features.ndim != 3:
        raise ValueError(f"features has shape {tuple(features.shape)}, expected (N, P, D)")
    if max_rounds < 1:
        raise ValueError(f"max_rounds={max_rounds} must be at least 1")
    labels = torch.zeros(features.shape[:2], dtype=torch.long)
    if features.shape[1] > 1:
        for start in range(0, len(features), IMAGES_PER_BLOCK):
            trees = _trees(features[start : start + IMAGES_PER_BLOCK])
            merges = _adaptive_cut(trees, threshold, step, max_rounds, max_share, max_segments)
            labels[start : start + IMAGES_PER_BLOCK] = torch.from_numpy(_cut(trees, merges))
    return labels.to(features.device)


def _trees(features: Tensor) -> NDArray[np.float64]:
    """Return the merges of each image `(n, P - 1, 4)`, sorted by height, in the format of scipy's `linkage`."""
    features = features.to(torch.promote_types(features.dtype, torch.float32))
    with torch.autocast(features.device.type, enabled=False):
        products = features @ features.mT
    norms = products.diagonal(dim1=1, dim2=2).sqrt().clamp(min=torch.finfo(products.dtype).tiny)
    distances = (1 - products / norms[:, :, None] / norms[:, None]).clamp_(min=0)
    rows, columns = np.triu_indices(features.shape[1], 1)
    condensed = distances.cpu().numpy()[:, rows, columns].astype(np.float64)
    if not np.isfinite(condensed).all():
        raise ValueError("features must be finite, and so must the dot products of any two features of an image")
    return np.stack([linkage(image, "average") for image in condensed])


def _adaptive_cut(
    trees: NDArray[np.float64], threshold: float, step: float, max_rounds: int, max_share: float, max_segments: int
) -> NDArray[np.intp]:
    """Return how many merges of each tree Algorithm 1 applies, `(n,)`.

    After m merges there are P - m segments; the largest has the maximum size that these merges produced.
    """
    heights, num_patches = trees[:, :, 2], trees.shape[1] + 1
    largest = np.maximum.accumulate(np.pad(trees[:, :, 3], ((0, 0), (1, 0)), constant_values=1), axis=1)
    cut = np.full(len(trees), threshold)
    for _ in range(max_rounds):
        merges = (heights <= cut[:, None]).sum(axis=1)
        too_large = largest[np.arange(len(trees)), merges] / num_patches > max_share
        too_many = ~too_large & (num_patches - merges > max_segments)
        cut = cut + step * too_many - step * too_large  # an image that needs neither keeps its cut
    return merges


def _cut(trees: NDArray[np.float64], merges: NDArray[np.intp]) -> NDArray[np.intp]:
    """Return the segment of each patch `(n, P)` after the first `merges` merges of each tree."""
    count, num_merges, _ = trees.shape
    num_patches = num_merges + 1
    parents = np.tile(np.arange(num_patches + num_merges), (count, 1))
    for side in (0, 1):
        children = trees[:, :, side].astype(np.intp)
        done = np.arange(num_merges) < merges[:, None]
        np.put_along_axis(parents, children, np.where(done, num_patches + np.arange(num_merges), children), axis=1)
    for _ in range(math.ceil(math.log2(num_patches))):  # each round doubles the number of levels climbed
        parents = np.take_along_axis(parents, parents, axis=1)
    roots = parents[:, :num_patches]
    used = np.zeros_like(parents)
    np.put_along_axis(used, roots, 1, axis=1)
    return np.take_along_axis(used.cumsum(axis=1) - 1, roots, axis=1)


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
