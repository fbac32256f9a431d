"""Scores of patches and words from the embeddings of the windows around them (not in the paper)."""

from collections.abc import Callable

import torch
from torch import Tensor

from conjoin.losses import LocalScores, ScoreStatistics
from conjoin.models.joint_encoder.intersection import Modality, embed_windows, phrases, squares, unit


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
    return _all_scores(encode, image, squares(image), text), _all_scores(encode, text, phrases(text), image)


def _all_scores(
    encode: Callable[[Tensor, Tensor], Tensor], local: Modality, windows: Tensor, other: Modality
) -> LocalScores:
    """Return the scores of `local`'s tokens with the embeddings of `other`, in `windows` `(W, S)` of positions."""
    embedded, share = embed_windows(encode, local, windows)
    similar = torch.einsum("nwd,md->nmw", embedded, unit(other.embeddings))
    similar = similar - similar.mean(1, keepdim=True)
    scores = torch.einsum("nmw,nwt->nmt", similar, share)
    own = scores.diagonal(dim1=0, dim2=1).T * local.mask
    matching = torch.eye(len(own), dtype=torch.bool, device=own.device)[..., None]
    exists = local.mask[:, None].expand_as(scores)
    return LocalScores(own, _statistics(scores, exists & matching), _statistics(scores, exists & ~matching))


def _statistics(scores: Tensor, chosen: Tensor) -> ScoreStatistics:
    n = chosen.sum().to(scores.dtype)
    mean = (scores * chosen).sum() / n.clamp(min=1)
    return ScoreStatistics(n, mean, ((scores - mean) * chosen).square().sum())
