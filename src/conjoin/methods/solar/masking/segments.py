"""Segment an image by clustering its patches (SOLAR Algorithm 1)."""

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

IMAGES_PER_BLOCK = 32
"""Number of images whose distances are in memory at once."""


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
        ImportError: scipy is not installed.
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
    try:
        from scipy.cluster.hierarchy import linkage
    except ImportError as error:
        raise ImportError('segment_patches needs scipy: pip install "conjoin[train]"') from error
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
