import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from conjoin.methods.solar.masking import Modality, window_scores


def _mean(tokens: Tensor, weights: Tensor) -> Tensor:
    """Stands in for E_VL."""
    return (tokens * weights[..., None]).sum(1) / weights.sum(1, keepdim=True)


def _scenes(seed: int = 0) -> tuple[Modality, Modality, Tensor, Tensor]:
    """Eight pictures of 8 x 8 patches with two things, and texts that name one of them and another."""
    generator = torch.Generator().manual_seed(seed)
    things = 2 * torch.eye(24, 24)
    patches, words = (
        torch.randn(8, 64, 24, generator=generator) * 0.1,
        torch.randn(8, 6, 24, generator=generator) * 0.1,
    )
    mask, shared_patches = torch.ones(8, 6, dtype=torch.bool), torch.zeros(8, 64, dtype=torch.bool)
    mask[3, 4:] = False
    for row in range(8):
        grid = patches[row].view(8, 8, 24)
        grid[:4, :4] += things[3 * row]  # shared
        grid[4:, 4:] += things[3 * row + 1]  # of the picture alone
        shared_patches[row].view(8, 8)[:4, :4] = True
        words[row, :2] += things[3 * row]
        words[row, 2:4] += things[3 * row + 2]  # of the text alone
    images = Modality(patches, torch.ones(8, 64, dtype=torch.bool), patches.mean(1))
    texts = Modality(words, mask, (words * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))
    return images, texts, shared_patches, mask


def test_shared_patches_and_words_score_above_private_ones() -> None:
    images, texts, shared, mask = _scenes()
    patches, words = window_scores(_mean, images, texts)
    private = shared.flip(1)
    assert (patches.scores[shared].view(8, -1).mean(1) > patches.scores[private].view(8, -1).mean(1) + 0.2).all()
    assert (words.scores[:, :2].mean(1) > words.scores[:, 2:4].mean(1) + 0.2).all()
    assert (words.scores[~mask] == 0).all()


def test_scores_are_means_over_the_windows_around_a_token() -> None:
    images, texts, _, mask = _scenes(1)
    patches, words = window_scores(_mean, images, texts)
    unit = lambda vectors: F.normalize(vectors, dim=-1)  # noqa: E731
    found = []
    for top in (0, 3, 4):
        for left in (0, 3, 4):
            if top <= 3 < top + 4 and left <= 5 < left + 4:  # the windows that contain patch (3, 5)
                window = images.tokens.view(8, 8, 8, 24)[:, top : top + 4, left : left + 4].reshape(8, 16, 24).mean(1)
                cosines = unit(window) @ unit(texts.embeddings).T
                found.append(cosines.diagonal() - cosines.mean(1))
    torch.testing.assert_close(patches.scores[:, 3 * 8 + 5], torch.stack(found).mean(0))
    last = unit(texts.tokens[3, 3]) @ unit(images.embeddings).T  # the next place is padding
    pair = unit(texts.tokens[3, 2:4].mean(0)) @ unit(images.embeddings).T
    expected = torch.stack([row[3] - row.mean() for row in (pair, last)]).mean()
    torch.testing.assert_close(words.scores[3, 3], expected)
    exists = mask.sum()
    assert words.positive.n == exists and words.negative.n == 7 * exists
    torch.testing.assert_close(words.positive.mean, words.scores[mask].mean())
    torch.testing.assert_close(words.positive.std, words.scores[mask].std(correction=0))


def test_scores_with_all_texts_have_mean_zero() -> None:
    images, texts, _, _ = _scenes(2)
    before = window_scores(_mean, images, texts)[0]
    assert abs(float(before.positive.mean * before.positive.n + before.negative.mean * before.negative.n)) < 1e-3


def test_patches_must_fill_a_square() -> None:
    images, texts, _, _ = _scenes()
    oblong = Modality(images.tokens[:, :60], images.mask[:, :60], images.embeddings)
    with pytest.raises(ValueError, match="square grid of patches, got 60"):
        window_scores(_mean, oblong, texts)
