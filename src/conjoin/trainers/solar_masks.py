"""Find and mask the tokens that image and text share: scores, evolutionary mask, segments, samples."""

import math
from collections.abc import Callable
from typing import NamedTuple, cast

import numpy as np
import torch
import torch.nn.functional as F
from scipy.cluster.hierarchy import fcluster, leaders, linkage
from torch import Tensor

from conjoin.losses import AlignmentTerms, LocalScores, ScoreStatistics, Threshold, alignment_terms, qda_threshold
from conjoin.models.joint_encoder import JointEncoderOutput

PATCH_WINDOW, PATCH_STRIDE, WORD_WINDOW = 4, 3, 2
FIRST_CUT, CUT_STEP, MAX_CUTS, MAX_SHARE, MAX_SEGMENTS = 0.45, 0.05, 5, 0.87, 5
"""Of Algorithm 1: the first cosine distance, its change per cut, the cuts, the share of a segment, the segments."""
IMAGES_PER_BLOCK = 32
"""Number of images whose distances are in memory at once."""
ROLES = {
    "positive": "positive: intersection of one masked",
    "image_difference": "negative: difference of image masked",
    "text_difference": "negative: difference of text masked",
    "intersection": "negative: both intersections masked",
}
"""The constructed samples of an anchor, and what is masked in each: one positive, then three negatives."""


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
            raise ValueError(f"expected image-text pairs; rows without {name} tokens: {lacking}")
    tokens = (output.image_tokens, output.text_tokens, output.image_token_mask, output.text_token_mask)
    return PairTokens(*cast("tuple[Tensor, Tensor, Tensor, Tensor]", tokens))


def align(tokens: PairTokens, margin: float = 0.1, reduce_scores_across_devices: bool = False) -> AlignmentTerms:
    """Score local tokens against the other modality's global token, and compute the alignment loss (Eq. 1)."""
    image, text, image_mask, text_mask = tokens
    parts = (text[:, 0], image[:, 1:], image_mask, image[:, 0], text[:, 1:], text_mask)
    return alignment_terms(*parts, margin=margin, reduce_scores_across_devices=reduce_scores_across_devices)


@torch.no_grad()
def window_scores(encode: Callable[[Tensor, Tensor], Tensor], tokens: PairTokens) -> tuple[LocalScores, LocalScores]:
    """Score every patch against its text's embedding, and every word against its image's.

    E_VL embeds windows of the tokens alone: squares of 4 x 4 patches at a stride of 3, and two words. The score of a
    window with an embedding of the other modality is their cosine, minus the mean of this over all rows: a region
    that is like every text says nothing. The score of a token is the mean over the windows that contain it. A single
    patch is a poorer witness than a window, because the contrastive losses train E_VL on sets of tokens, and because
    the patches of a vision tower mix their neighbours.

    Args:
        encode: E_VL: maps tokens `(M, S, d)` and weights `(M, S)` to embeddings `(M, d)`.
        tokens: Of the pairs; the patches of each fill a square grid. Global tokens are not used.

    Returns:
        The scores of patches and of words, with the statistics of matching and other pairs.
    """
    (patches, words), device = (mask.shape[1] for mask in tokens[2:]), tokens.image.device
    side = round(patches**0.5)
    width = min(PATCH_WINDOW, side)
    starts = sorted({*range(0, side - width + 1, PATCH_STRIDE), side - width})  # with those at the far edges
    grid = torch.arange(patches, device=device).view(side, side)
    squares = [grid[top : top + width, left : left + width].flatten() for top in starts for left in starts]
    phrases = torch.arange(words, device=device).unfold(0, min(WORD_WINDOW, words), 1)
    image, text = (tokens.image[:, 1:], tokens.image_mask), (tokens.text[:, 1:], tokens.text_mask)
    wholes = [encode(local, mask.float()) for local, mask in (image, text)]
    return _scores(encode, *image, torch.stack(squares), wholes[1]), _scores(encode, *text, phrases, wholes[0])


def _scores(
    encode: Callable[[Tensor, Tensor], Tensor], local: Tensor, mask: Tensor, windows: Tensor, other: Tensor
) -> LocalScores:
    """Return the scores of the tokens `local`, in `windows` `(W, S)` of positions, with the embeddings `other`."""
    (rows, length), number = mask.shape, len(windows)
    weights = mask[:, windows].float()  # (N, W, S)
    filled = weights.sum(2, keepdim=True)
    # As much weight as the whole view has, so that CLS keeps its share; an empty window gets any, and counts nowhere.
    weights = torch.where(filled > 0, weights * mask.sum(1)[:, None, None] / filled.clamp(min=1), 1.0)
    embedded = encode(local[:, windows].flatten(0, 1), weights.flatten(0, 1)).unflatten(0, (rows, number))
    covers = torch.zeros(number, length, device=windows.device).scatter(1, windows, 1.0) * (filled > 0)  # (N, W, T)
    share = covers / covers.sum(1, keepdim=True).clamp(min=1)
    unit, others = (F.normalize(embeddings.float(), dim=-1) for embeddings in (embedded, other))
    similar = torch.einsum("nwd,md->nmw", unit, others)
    scores = torch.einsum("nmw,nwt->nmt", similar - similar.mean(1, keepdim=True), share)
    matched = scores.diagonal(dim1=0, dim2=1).T * mask
    matching = torch.eye(rows, dtype=torch.bool, device=matched.device)[..., None]
    exists = mask[:, None].expand_as(scores)
    return LocalScores(matched, _statistics(scores, exists & matching), _statistics(scores, exists & ~matching))


def _statistics(scores: Tensor, chosen: Tensor) -> ScoreStatistics:
    n = chosen.sum().to(scores.dtype)
    mean = (scores * chosen).sum() / n.clamp(min=1)
    return ScoreStatistics(n, mean, ((scores - mean) * chosen).square().sum())


def fit_threshold(scores: LocalScores) -> Threshold:
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
    tau, fallback = fit_threshold(scores)
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


def mask_schedule(
    progress: float, schedule: str = "linear", mask_warmup_ratio: float = 0.5, mask_start_ratio: float = 0.0
) -> float:
    """Return rho of the evolutionary mask: 1 until `mask_start_ratio`, then down to 0 at `mask_warmup_ratio`.

    Args:
        progress: Completed share of training, in [0, 1].
        schedule: `"linear"` (the paper's) or `"cosine"`.
        mask_warmup_ratio: Progress at which rho reaches 0, in [0, 1]; 0 gives the hard mask from the start (Table 3).
        mask_start_ratio: Progress at which rho begins to decay, at most `mask_warmup_ratio`.
    """
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
    """
    shared = (scores > threshold) & exists
    best = scores.masked_fill(~exists, -math.inf).argmax(1, keepdim=True)
    shared = shared.scatter(1, best, shared.gather(1, best) | ~shared.any(1, keepdim=True))
    return rho + (1.0 - rho) * shared.to(scores.dtype)


@torch.no_grad()
def segment_patches(features: Tensor) -> Tensor:
    """Cluster each image's patches by average linkage of cosine distances, cut at an adaptive height (Algorithm 1).

    The cut starts at `FIRST_CUT`. If a segment has more than `MAX_SHARE` of the patches, the cut decreases by
    `CUT_STEP`; otherwise, if there are more than `MAX_SEGMENTS` segments, it increases by it. The search stops after
    `MAX_CUTS` cuts, so more segments are possible. The tree does not depend on the cut: it is built once per image.

    Args:
        features: `(N, P, D)` V', raw; a zero vector has distance 1 to every other vector.

    Returns:
        `(N, P)` integers, the segment of each patch; the segments of an image are numbered from 0 without gaps.

    Raises:
        ValueError: A feature is NaN or infinite.
    """
    labels = torch.zeros(features.shape[:2], dtype=torch.long)
    count = features.shape[1]
    rows, columns = np.triu_indices(count, 1)
    for start in range(0, len(features) if count > 1 else 0, IMAGES_PER_BLOCK):
        block = features[start : start + IMAGES_PER_BLOCK].to(torch.promote_types(features.dtype, torch.float32))
        with torch.autocast(block.device.type, enabled=False):
            products = block @ block.mT
        norms = products.diagonal(dim1=1, dim2=2).sqrt().clamp(min=torch.finfo(products.dtype).tiny)
        distances = (1 - products / norms[:, :, None] / norms[:, None]).clamp_(min=0)
        for image, condensed in enumerate(distances.cpu().numpy()[:, rows, columns].astype(np.float64), start):
            tree, cut = linkage(condensed, "average"), FIRST_CUT
            for _ in range(MAX_CUTS):
                segments = fcluster(tree, cut, "distance")
                sizes = np.bincount(segments)[1:]
                if sizes.max() / count > MAX_SHARE:
                    cut -= CUT_STEP
                elif len(sizes) > MAX_SEGMENTS:
                    cut += CUT_STEP
                else:
                    break
            roots, names = leaders(tree, segments)
            numbers = np.argsort(names[np.argsort(roots)])  # by the order of merges
            labels[image] = torch.from_numpy(numbers[segments - 1])
    return labels.to(features.device)


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
    """
    if segments is None:
        segments = torch.arange(image_scores.shape[1], device=image_scores.device).expand_as(image_scores)
    present = image_mask.bool()
    counts = torch.zeros_like(image_scores).scatter_add(1, segments, present.to(image_scores.dtype))
    totals = torch.zeros_like(image_scores).scatter_add(1, segments, torch.where(present, image_scores, 0.0))
    exists, segment_scores = counts > 0, totals / counts.clamp(min=1)
    image_in, image_out = exists & (segment_scores > image_threshold), exists & (segment_scores < image_threshold)
    words = text_mask.bool()
    text_in, text_out = words & (text_scores > text_threshold), words & (text_scores < text_threshold)
    has_image, has_text = image_in.any(1), text_in.any(1)
    coin = _uniform((len(image_scores),), image_scores.device, generator) < 0.5
    from_image = has_image & (coin | ~has_text)
    both = has_image & has_text
    one, out, two = (_draw(part, generator) for part in (image_in, image_out, image_in))
    dropped_segments = torch.stack([one & from_image[:, None], out, torch.zeros_like(out), two & both[:, None]])
    one, out, two = (_draw(part, generator) for part in (text_in, text_out, text_in))
    dropped_tokens = torch.stack([one & ~from_image[:, None], torch.zeros_like(out), out, two & both[:, None]])
    dropped_patches = dropped_segments.gather(2, segments.expand(len(ROLES), -1, -1)) & present
    valid = torch.stack([has_image | has_text, image_out.any(1), text_out.any(1), both])
    return ConstructedSamples((~dropped_patches).float(), (~dropped_tokens).float(), valid)


def mask_pixels(pixel_values: Tensor, image_weights: Tensor, patch_size: int) -> Tensor:
    """Set masked patches to the mean pixel, which is 0 after normalisation.

    Args:
        pixel_values: `(N, 3, H, W)`, normalised.
        image_weights: `(N, P)`, P = (H // patch_size) * (W // patch_size), row-major.
        patch_size: Side of a patch in pixels; pixels right of and below the patch grid stay unchanged.
    """
    grid = tuple(length // patch_size for length in pixel_values.shape[-2:])
    weights = image_weights.to(pixel_values.dtype).unflatten(1, grid)
    weights = weights.repeat_interleave(patch_size, 1).repeat_interleave(patch_size, 2)[:, None]
    masked = pixel_values.clone()
    masked[..., : weights.shape[2], : weights.shape[3]] *= weights
    return masked


def _draw(candidates: Tensor, generator: torch.Generator | None) -> Tensor:
    """Sample the candidates `(N, K)` to mask: each with its row's probability, and at least one per row."""
    count, width = candidates.shape
    draws = _uniform((count, width + 1), candidates.device, generator)
    probability, draws = draws[:, :1], draws[:, 1:].masked_fill(~candidates, 2.0)
    return candidates & ((draws < probability) | (draws == draws.amin(1, keepdim=True)))


def _uniform(shape: tuple[int, ...], device: torch.device, generator: torch.Generator | None) -> Tensor:
    source = device if generator is None else generator.device
    return torch.rand(shape, generator=generator, device=source).to(device)
