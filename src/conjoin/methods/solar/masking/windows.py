"""Scores of patches and words from the embeddings of the windows around them (not in the paper)."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from conjoin.losses import LocalScores, ScoreStatistics

PATCH_WINDOW, PATCH_STRIDE, WORD_WINDOW = 4, 3, 2


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
    return _all_scores(encode, image, _squares(image), text), _all_scores(encode, text, _phrases(text), image)


@torch.no_grad()
def own_window_scores(
    encode: Callable[[Tensor, Tensor], Tensor], image: Modality, text: Modality, centres: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Score the tokens of each row by itself: the scores of `window_scores` for one row, whatever the others are.

    Args:
        encode: As for `window_scores`.
        image: The images.
        text: The texts, of the same rows.
        centres: The mean unit embeddings `(d,)` of images and of texts, in place of the means over the rows.

    Returns:
        `(N, P)` scores of patches and `(N, T)` of words.

    Raises:
        ValueError: The patches do not fill a square.
    """
    found = []
    for local, windows, other, centre in (
        (image, _squares(image), text, centres[1]), (text, _phrases(text), image, centres[0])
    ):  # fmt: skip
        embedded, share = _windows(encode, local, windows)
        similar = torch.einsum("nwd,nd->nw", embedded, _unit(other.embeddings) - centre)
        found.append(torch.einsum("nw,nwt->nt", similar, share) * local.mask)
    return found[0], found[1]


def _all_scores(
    encode: Callable[[Tensor, Tensor], Tensor], local: Modality, windows: Tensor, other: Modality
) -> LocalScores:
    """Return the scores of `local`'s tokens with the embeddings of `other`, through `windows` `(W, S)` of places."""
    embedded, share = _windows(encode, local, windows)
    similar = torch.einsum("nwd,md->nmw", embedded, _unit(other.embeddings))
    similar = similar - similar.mean(1, keepdim=True)
    scores = torch.einsum("nmw,nwt->nmt", similar, share)
    own = scores.diagonal(dim1=0, dim2=1).T * local.mask
    matching = torch.eye(len(own), dtype=torch.bool, device=own.device)[..., None]
    exists = local.mask[:, None].expand_as(scores)
    return LocalScores(own, _statistics(scores, exists & matching), _statistics(scores, exists & ~matching))


def _windows(encode: Callable[[Tensor, Tensor], Tensor], local: Modality, windows: Tensor) -> tuple[Tensor, Tensor]:
    """Return unit embeddings of the windows `(N, W, d)`, and each window's share of each token's score `(N, W, T)`."""
    rows, count = len(local.tokens), local.mask.sum(1, keepdim=True)
    weights = local.mask[:, windows].float()  # (N, W, S)
    filled = weights.sum(2, keepdim=True)
    # As much weight as the whole view has, so that CLS keeps its share; an empty window gets any, and counts nowhere.
    weights = torch.where(filled > 0, weights * count[..., None] / filled.clamp(min=1), 1.0)
    embedded = encode(local.tokens[:, windows].flatten(0, 1), weights.flatten(0, 1)).unflatten(0, (rows, -1))
    covers = torch.zeros(len(windows), local.tokens.shape[1], device=windows.device).scatter(1, windows, 1.0)
    covers = covers * (filled > 0)  # (N, W, T)
    return _unit(embedded), covers / covers.sum(1, keepdim=True).clamp(min=1)


def _unit(embeddings: Tensor) -> Tensor:
    return F.normalize(embeddings.float(), dim=-1)


def _statistics(scores: Tensor, chosen: Tensor) -> ScoreStatistics:
    n = chosen.sum().to(scores.dtype)
    mean = (scores * chosen).sum() / n.clamp(min=1)
    return ScoreStatistics(n, mean, ((scores - mean) * chosen).square().sum())


def _squares(image: Modality) -> Tensor:
    """Return the patches of each window `(W, S)`: all squares at the stride, and those at the far edges."""
    patches, device = image.tokens.shape[1], image.tokens.device
    side = round(patches**0.5)
    if side * side != patches:
        raise ValueError(f"window scores need a square grid of patches, got {patches} patches")
    width = min(PATCH_WINDOW, side)
    starts = sorted({*range(0, side - width + 1, PATCH_STRIDE), side - width})
    grid = torch.arange(patches, device=device).view(side, side)
    return torch.stack([grid[top : top + width, left : left + width].flatten() for top in starts for left in starts])


def _phrases(text: Modality) -> Tensor:
    """Return the places of each window of successive words `(W, S)`."""
    words, device = text.tokens.shape[1], text.tokens.device
    width = min(WORD_WINDOW, words)
    return torch.arange(words, device=device).unfold(0, width, 1)
