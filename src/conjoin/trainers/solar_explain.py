"""Show what image and text share: heat maps, segments and constructed samples of one pair (SOLAR Fig. 12-14)."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from PIL import Image
from torch import Tensor

from conjoin.evaluation.report import write_page
from conjoin.evaluation.results import picture
from conjoin.processing.input_types import apply_input_type
from conjoin.trainers.solar_masks import ROLES, align, construct_samples, fit_threshold, pair_tokens, segment_patches
from conjoin.trainers.solar_teachers import tokenize_with_spans

PANEL_PIXELS, SHORTEST_SIDE = 640, 280
"""Most pixels of a picture's side in the page; fewest of any picture, which is enlarged by a whole factor."""
_COLD, _MIDDLE, _WARM, _MASKED = (38, 84, 168), (236, 236, 232), (196, 42, 36), (128, 128, 128)
_SEGMENTS = np.array(
    [(230, 159, 0), (86, 180, 233), (0, 158, 115), (240, 228, 66), (0, 114, 178), (213, 94, 0), (204, 121, 167)]
)


@dataclass(frozen=True)
class Explanation:
    """The scores of one pair.

    Args:
        picture: The model's input image: resized and cropped to the patch grid.
        grid: Rows and columns of patches.
        image_scores: `(P,)` cosines between l_cls and each patch of V'.
        patches: `(P, d)` V'.
        words: The text piece of each of the T local tokens.
        text_scores: `(T,)` cosines between v_cls and each token of L'.
        similarity: Cosine between the image embedding and the text embedding.
    """

    picture: Image.Image
    grid: tuple[int, int]
    image_scores: Tensor
    patches: Tensor
    words: list[str]
    text_scores: Tensor
    similarity: float


@torch.no_grad()
def explain_pair(model: Any, processor: Any, image: Any, text: str) -> Explanation:
    """Score every patch of `image` against `text` and every token of `text` against `image`.

    Args:
        model: A joint encoder.
        processor: Its processor.
        image: An image, or a list of images, which are concatenated into one picture (input type `cat`).
        text: The text.

    Raises:
        ValueError: The model is not a joint encoder.
    """
    batch, output = _embed(model, processor, apply_input_type({"image": image, "text": text}, "cat"))
    patch_size, (pixels,) = model.config.vision_config.patch_size, batch["pixel_values"].cpu()
    rows, columns = (side // patch_size for side in pixels.shape[-2:])
    mean, std = (
        torch.tensor(statistic)[:, None, None]
        for statistic in (processor.image_processor.image_mean, processor.image_processor.image_std)
    )
    levels = ((pixels * std + mean) * 255).round().clamp(0, 255).to(torch.uint8).permute(1, 2, 0)
    _, patches, words = align(pair_tokens(output))
    local = output.text_token_mask[0].cpu()
    return Explanation(
        Image.fromarray(levels[: rows * patch_size, : columns * patch_size].numpy()),
        (rows, columns),
        patches.scores[0].cpu(),
        output.image_tokens[0, 1:].float().cpu(),
        _words(processor, text.strip(), batch["input_ids"][0].cpu(), local),
        words.scores[0].cpu()[local],
        float(output.embeddings[0] @ output.embeddings[1]),
    )


@torch.no_grad()
def fit_thresholds(model: Any, processor: Any, pairs: Sequence[Any]) -> dict[str, float]:
    """Return tau of `"image"` and `"text"`, fitted to one batch of pairs as in stage 1.

    Args:
        model: A joint encoder.
        processor: Its processor.
        pairs: N items `{"image", "text"}`; several images of one are concatenated.

    Raises:
        ValueError: The model is not a joint encoder, there are fewer than two pairs, or a pair lacks image or text.
    """
    if len(pairs) < 2:
        raise ValueError(f"{len(pairs)} pairs have no scores between different pairs; expected at least 2")
    _, output = _embed(model, processor, [apply_input_type(pair, "cat")[0] for pair in pairs])
    scores = align(pair_tokens(output))
    return {
        name: float(fit_threshold(part).threshold) for name, part in zip(("image", "text"), scores[1:], strict=True)
    }


def render_explanation(
    explanation: Explanation,
    out: str | os.PathLike[str],
    *,
    image_threshold: float | None = None,
    text_threshold: float | None = None,
    seed: int = 0,
) -> Path:
    """Write `explanation.html`, a self-contained page without scripts.

    With both thresholds, it also shows the samples that stage 2 would construct.

    Args:
        explanation: Output of `explain_pair`.
        out: Output folder; created if necessary.
        image_threshold: tau_V; patches above it are the intersection.
        text_threshold: tau_L.
        seed: Of the samples.

    Returns:
        The path of the page.
    """
    shown, grid, words = explanation.picture, explanation.grid, explanation.words
    image_scores, text_scores = explanation.image_scores, explanation.text_scores
    segments = segment_patches(explanation.patches[None])
    colours = [warmth(value) for value in relative(text_scores)]

    panels = [
        ("image", masked_picture(shown, torch.ones_like(image_scores), grid)),
        ("patches like the text", heat_map(shown, image_scores, grid)),
    ]
    lines = []
    if image_threshold is not None:
        panels.append((f"above {image_threshold:.3f}", masked_picture(shown, image_scores > image_threshold, grid)))
    if text_threshold is not None:
        lines.append((f"above {text_threshold:.3f}", text_scores > text_threshold))
    panels.append((f"{int(segments.max()) + 1} segments", segment_map(shown, segments[0], grid)))
    if image_threshold is not None and text_threshold is not None:
        patches, tokens = (
            (scores[None], torch.ones(1, len(scores), dtype=torch.bool), threshold)
            for scores, threshold in ((image_scores, image_threshold), (text_scores, text_threshold))
        )
        built = construct_samples(*patches, *tokens, segments, torch.Generator().manual_seed(seed))
        for name, image, text, valid in zip(ROLES.values(), *built, strict=True):
            if valid:
                panels.append((name, masked_picture(shown, image[0], grid)))
                lines.append((name, text[0] > 0))
    return write_page(
        "trainers/solar_explain.html.j2",
        Path(out) / "explanation.html",
        panels=[(caption, picture(image, PANEL_PIXELS)) for caption, image in panels],
        lines=[(caption, list(zip(words, colours, keep.tolist(), strict=True))) for caption, keep in lines],
        words=list(zip(words, text_scores.tolist(), colours, strict=True)),
        similarity=explanation.similarity,
        thresholds={"image": image_threshold, "text": text_threshold},
    )


def _embed(model: Any, processor: Any, items: Sequence[Any]) -> tuple[Any, Any]:
    """Return the inputs and the output, with tokens, of a joint encoder."""
    if model.config.model_type != "joint_encoder":
        raise ValueError(f"only a joint encoder has local scores, got {type(model).__name__}")
    batch = processor(items).to(model.device)
    return batch, model(**batch, views=("image", "text"), output_tokens=True)


def _words(processor: Any, text: str, input_ids: Tensor, local: Tensor) -> list[str]:
    """Return the text piece of each local token, or the token's name if the piece is empty."""
    limits = (processor.max_text_length, processor.text_padding)
    _, (spans,) = tokenize_with_spans(processor.tokenizer, [text], *limits)
    names, inked = processor.tokenizer.convert_ids_to_tokens(input_ids[local].tolist()), "".join(text.split())
    return [inked[first:last] or name for (first, last), name in zip(spans[local].tolist(), names, strict=True)]


# Pictures


def heat_map(picture: Image.Image, scores: ArrayLike, grid: tuple[int, int]) -> Image.Image:
    """Draw high scores in warm and low scores in cold colours.

    Args:
        picture: The model's input image.
        scores: `(P,)`, row-major.
        grid: Rows and columns of patches.
    """
    colours = np.array([warmth(value) for value in relative(scores)])
    return _blend(picture, colours, np.full(len(colours), 0.55), grid)


def segment_map(picture: Image.Image, segments: ArrayLike, grid: tuple[int, int]) -> Image.Image:
    """Draw each segment in its own colour; `segments` `(P,)` are integers from 0."""
    colours = _SEGMENTS[np.asarray(segments) % len(_SEGMENTS)]
    return _blend(picture, colours, np.full(len(colours), 0.5), grid)


def masked_picture(picture: Image.Image, weights: ArrayLike, grid: tuple[int, int]) -> Image.Image:
    """Cover patches of weight 0 with grey; `weights` `(P,)` are in [0, 1]."""
    alphas = 1 - np.asarray(weights, dtype=float)
    return _blend(picture, np.tile(_MASKED, (len(alphas), 1)), alphas, grid)


def _blend(picture: Image.Image, colours: NDArray, alphas: NDArray, grid: tuple[int, int]) -> Image.Image:
    """Blend `colours` `(P, 3)` over the patches of the enlarged picture, with opacity `alphas` `(P,)`."""
    scale = max(1, -(-SHORTEST_SIDE // min(picture.size)))
    size, resample = (picture.width * scale, picture.height * scale), Image.Resampling.NEAREST
    over, opacity = (
        Image.fromarray(values.reshape(*grid, *values.shape[1:]).astype(np.uint8)).resize(size, resample)
        for values in (colours, np.round(255 * alphas))
    )
    return Image.composite(over, picture.convert("RGB").resize(size, resample), opacity)


def relative(scores: ArrayLike) -> NDArray[np.float64]:
    """Scale scores linearly to 0 (lowest) to 1 (highest); 0.5 if all are equal."""
    values = np.asarray(scores, dtype=float)
    span = np.ptp(values)
    return (values - values.min()) / span if span > 0 else np.full_like(values, 0.5)


def warmth(value: float) -> tuple[int, int, int]:
    """Return the colour of a relative score, from cold (0) to warm (1)."""
    ends, share = ((_COLD, _MIDDLE), 2 * value) if value < 0.5 else ((_MIDDLE, _WARM), 2 * value - 1)
    red, green, blue = (round(low + share * (high - low)) for low, high in zip(*ends, strict=True))
    return red, green, blue
