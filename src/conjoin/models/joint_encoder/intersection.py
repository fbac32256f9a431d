"""Which patches and words of an item image and text share, by windows around them (not in the paper)."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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

    @classmethod
    def encode(cls, encode: Callable[[Tensor, Tensor], Tensor], tokens: Tensor, mask: Tensor) -> "Modality":
        """Embed the local tokens of `[global; local]` tokens `(N, 1 + T, d)` by E_VL."""
        return cls(tokens[:, 1:], mask, encode(tokens[:, 1:], mask.float()))


class IntersectionMasks(nn.Module):
    """Masks of what picture and text of an item share, of each item by itself.

    `conjoin.methods.solar.fit_intersection` takes from a batch of pairs what training takes from its batch. Then the
    mask of an item does not depend on the items beside it: a query and a candidate can be masked at different times.

    Attributes:
        image_centre: `(d,)` mean unit embedding of pictures.
        text_centre: `(d,)` mean unit embedding of texts.
        image_threshold: 0-d, of patches; infinite until it is fitted.
        text_threshold: 0-d, of words.
    """

    image_centre: Tensor
    text_centre: Tensor
    image_threshold: Tensor
    text_threshold: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        for name in ("image", "text"):
            self.register_buffer(f"{name}_centre", torch.zeros(width))
            self.register_buffer(f"{name}_threshold", torch.full((), math.inf))

    @torch.no_grad()
    def forward(
        self, encode: Callable[[Tensor, Tensor], Tensor], image: Modality, text: Modality
    ) -> tuple[Tensor, Tensor]:
        """Return the masks `(N, P)` and `(N, T)`: 1 for shared tokens, else 0.

        The best token stays if no score of a row is above the threshold.

        Args:
            encode: E_VL: maps tokens `(M, S, d)` and weights `(M, S)` to embeddings `(M, d)`.
            image: The images; the patches of each fill a square grid.
            text: The texts, of the same rows.

        Raises:
            ValueError: The patches do not fill a square.
        """
        patches, words = own_window_scores(encode, image, text, (self.image_centre, self.text_centre))
        shared = above(patches, image.mask, self.image_threshold), above(words, text.mask, self.text_threshold)
        return shared[0].float(), shared[1].float()


def above(scores: Tensor, exists: Tensor, threshold: Tensor | float) -> Tensor:
    """Return where scores `(N, T)` of existing tokens are above a threshold, and the best token of a row with none."""
    shared = (scores > threshold) & exists
    best = scores.masked_fill(~exists, -math.inf).argmax(1, keepdim=True)
    return shared.scatter(1, best, shared.gather(1, best) | ~shared.any(1, keepdim=True))


@torch.no_grad()
def own_window_scores(
    encode: Callable[[Tensor, Tensor], Tensor], image: Modality, text: Modality, centres: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Score the tokens of each row by itself: the scores of `window_scores` for one row, whatever the others are.

    Args:
        encode: As for `IntersectionMasks`.
        image: The images.
        text: The texts, of the same rows.
        centres: The mean unit embeddings `(d,)` of images and of texts, in place of the means over the rows.

    Returns:
        `(N, P)` scores of patches and `(N, T)` of words.

    Raises:
        ValueError: The patches do not fill a square.
    """
    scores = []
    for local, windows, other, centre in (
        (image, squares(image), text, centres[1]), (text, phrases(text), image, centres[0])
    ):  # fmt: skip
        embedded, share = embed_windows(encode, local, windows)
        similar = torch.einsum("nwd,nd->nw", embedded, unit(other.embeddings) - centre)
        scores.append(torch.einsum("nw,nwt->nt", similar, share) * local.mask)
    return scores[0], scores[1]


def embed_windows(
    encode: Callable[[Tensor, Tensor], Tensor], local: Modality, windows: Tensor
) -> tuple[Tensor, Tensor]:
    """Return unit embeddings of the windows `(N, W, d)`, and each window's share of each token's score `(N, W, T)`."""
    (rows, length), number = local.mask.shape, windows.shape[0]  # len() would be a constant of an exported graph
    count = local.mask.sum(1, keepdim=True)
    weights = local.mask[:, windows].float()  # (N, W, S)
    filled = weights.sum(2, keepdim=True)
    # As much weight as the whole view has, so that CLS keeps its share; an empty window gets any, and counts nowhere.
    weights = torch.where(filled > 0, weights * count[..., None] / filled.clamp(min=1), 1.0)
    embedded = encode(local.tokens[:, windows].flatten(0, 1), weights.flatten(0, 1)).unflatten(0, (rows, number))
    covers = torch.zeros(number, length, device=windows.device).scatter(1, windows, 1.0)
    covers = covers * (filled > 0)  # (N, W, T)
    return unit(embedded), covers / covers.sum(1, keepdim=True).clamp(min=1)


def unit(embeddings: Tensor) -> Tensor:
    """Return float32 vectors of length 1."""
    return F.normalize(embeddings.float(), dim=-1)


def squares(image: Modality) -> Tensor:
    """Return the patches of each window `(W, S)`: all squares at the stride, and those at the far edges."""
    patches, device = image.tokens.shape[1], image.tokens.device
    side = round(patches**0.5)
    if side * side != patches:
        raise ValueError(f"window scores need a square grid of patches, got {patches} patches")
    width = min(PATCH_WINDOW, side)
    starts = sorted({*range(0, side - width + 1, PATCH_STRIDE), side - width})
    grid = torch.arange(patches, device=device).view(side, side)
    return torch.stack([grid[top : top + width, left : left + width].flatten() for top in starts for left in starts])


def phrases(text: Modality) -> Tensor:
    """Return the positions of each window of successive words `(W, S)`."""
    words, device = text.tokens.shape[1], text.tokens.device
    width = min(WORD_WINDOW, words)
    return torch.arange(words, device=device).unfold(0, width, 1)
