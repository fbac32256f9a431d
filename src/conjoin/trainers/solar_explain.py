"""Show what image and text share: heat maps of one pair (SOLAR Fig. 12-14) and charts of scores (Fig. 11)."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike, NDArray
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from conjoin.evaluation.report.page import write_page
from conjoin.evaluation.results import Curve, picture
from conjoin.processing.input_types import apply_input_type, concatenated
from conjoin.trainers.solar_masks import ROLES, construct_samples, segment_patches

MODALITIES = {"image": "patches against text", "text": "words against image"}
Word = tuple[str, tuple[int, int, int] | None]
"""A word and its background colour; None for a masked word."""
PANEL_PIXELS, SHORTEST_SIDE = 640, 280
"""Most pixels of a picture's side in the page; fewest of any picture, which is enlarged by a whole factor."""
_COLD, _MIDDLE, _WARM, _MASKED = (38, 84, 168), (236, 236, 232), (196, 42, 36), (128, 128, 128)
_SEGMENTS = np.array(
    [(230, 159, 0), (86, 180, 233), (0, 158, 115), (240, 228, 66), (0, 114, 178), (213, 94, 0), (204, 121, 167)]
)
_MARGIN, _LINE = 10, 24


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
    (images,), (texts,) = output.image_tokens.float().cpu(), output.text_tokens.float().cpu()
    local = output.text_token_mask[0].cpu()
    return Explanation(
        Image.fromarray(levels[: rows * patch_size, : columns * patch_size].numpy()),
        (rows, columns),
        F.cosine_similarity(texts[:1], images[1:], dim=-1),
        images[1:],
        _words(processor.tokenizer, text.strip(), batch["input_ids"][0].cpu(), local),
        F.cosine_similarity(images[:1], texts[1:], dim=-1)[local],
        float(output.embeddings[0] @ output.embeddings[1]),
    )


@torch.no_grad()
def score_populations(model: Any, processor: Any, pairs: Sequence[Any]) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the scores S⁺ of matching pairs and S⁻ of all others in one batch, the input of stage 1's thresholds.

    Args:
        model: A joint encoder.
        processor: Its processor.
        pairs: N items `{"image", "text"}`; several images of one are concatenated.

    Returns:
        Positive and negative scores, 1-d, of `"image"` (l_cls against V') and `"text"` (v_cls against L').

    Raises:
        ValueError: The model is not a joint encoder, there are fewer than two pairs, or a pair lacks image or text.
    """
    if len(pairs) < 2:
        raise ValueError(f"{len(pairs)} pairs have no scores between different pairs; expected at least 2")
    _, output = _embed(model, processor, concatenated(pairs, "cat"))
    masks = output.image_token_mask, output.text_token_mask
    if None in masks or not all(mask.any(1).all() for mask in masks):
        raise ValueError("every item must have an image and a text")
    images, texts = (F.normalize(tokens.float(), dim=-1).cpu() for tokens in (output.image_tokens, output.text_tokens))
    populations = {}
    for name, whole, local, mask in (("image", texts, images, masks[0]), ("text", images, texts, masks[1])):
        scores = torch.einsum("id,jtd->ijt", whole[:, 0], local[:, 1:])
        matching = torch.eye(len(pairs), dtype=torch.bool)[..., None] & mask.cpu()
        populations[name] = (scores[matching], scores[mask.cpu().expand_as(matching) & ~matching])
    return populations


def render_explanation(
    explanation: Explanation,
    out: str | os.PathLike[str],
    *,
    image_threshold: float | None = None,
    text_threshold: float | None = None,
    curves: Sequence[Curve] = (),
    seed: int = 0,
) -> Path:
    """Write `explanation.png` and `explanation.html`, a self-contained page without scripts.

    With both thresholds, they also show the samples that stage 2 would construct.

    Args:
        explanation: Output of `explain_pair`.
        out: Output folder; created if necessary.
        image_threshold: tau_V; patches above it are the intersection.
        text_threshold: tau_L.
        curves: Additional charts, from `score_histogram`, `distribution_curves` ...
        seed: Of the samples.

    Returns:
        The path of the page.
    """
    shown, grid, words = explanation.picture, explanation.grid, explanation.words
    image_scores, text_scores = explanation.image_scores, explanation.text_scores
    segments = segment_patches(explanation.patches[None])
    colours = [warmth(value) for value in relative(text_scores)]

    def kept(keep: Tensor) -> list[Word]:
        return [(word, colour if k else None) for word, colour, k in zip(words, colours, keep.tolist(), strict=True)]

    panels = [
        ("image", masked_picture(shown, torch.ones_like(image_scores), grid)),
        ("patches like the text", heat_map(shown, image_scores, grid)),
    ]
    lines = [("words like the image", kept(torch.ones_like(text_scores)))]
    if image_threshold is not None:
        panels.append((f"above {image_threshold:.3f}", heat_map(shown, image_scores, grid, image_threshold)))
    if text_threshold is not None:
        lines.append((f"above {text_threshold:.3f}", kept(text_scores > text_threshold)))
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
                lines.append((name, kept(text[0] > 0)))
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    strip(panels, lines).save(folder / "explanation.png")
    return write_page(
        "conjoin.trainers",
        "solar_explain.html.j2",
        folder / "explanation.html",
        curves,
        panels=[(caption, picture(image, PANEL_PIXELS)) for caption, image in panels],
        lines=lines,
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


def _words(tokenizer: Any, text: str, input_ids: Tensor, local: Tensor) -> list[str]:
    """Return the text piece of each local token, or the token's name if the piece is empty or unknown."""
    names = tokenizer.convert_ids_to_tokens(input_ids[local].tolist())
    if not tokenizer.is_fast:
        return names
    options = {"truncation": True, "return_offsets_mapping": True, "split_special_tokens": True}
    offsets = tokenizer(text, max_length=len(input_ids), **options)["offset_mapping"]
    pieces = [text[first:last].strip() for first, last in offsets] + [""] * (len(local) - len(offsets))
    kept = [piece for piece, keep in zip(pieces, local, strict=True) if keep]
    return [piece or name for piece, name in zip(kept, names, strict=True)]


# Pictures


def heat_map(
    picture: Image.Image, scores: ArrayLike, grid: tuple[int, int], threshold: float | None = None
) -> Image.Image:
    """Draw high scores in warm and low scores in cold colours; patches not above `threshold` turn pale.

    Args:
        picture: The model's input image.
        scores: `(P,)`, row-major.
        grid: Rows and columns of patches.
        threshold: Scores above it keep their colour; None keeps all.
    """
    colours = np.array([warmth(value) for value in relative(scores)])
    shown = _blend(picture, colours, np.full(len(colours), 0.55), grid)
    if threshold is None:
        return shown
    pale = np.where(np.asarray(scores, dtype=float) > threshold, 0.0, 0.75)
    return _blend(shown, np.full((len(colours), 3), 255), pale, grid)


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


def strip(panels: Sequence[tuple[str, Image.Image]], lines: Sequence[tuple[str, Sequence[Word]]]) -> Image.Image:
    """Draw captioned pictures in a row, with captioned lines of coloured words below.

    Args:
        panels: Captions and pictures.
        lines: Captions and words.
    """
    font = ImageFont.load_default(13)
    widths = [max(shown.width, round(font.getlength(caption))) + _MARGIN for caption, shown in panels]
    width, y = sum(widths) + _MARGIN, _LINE + max(shown.height for _, shown in panels) + 2 * _MARGIN
    placed: list[tuple[float, int, Word]] = []
    for caption, words in lines:
        placed.append((_MARGIN, y, (caption, (255, 255, 255))))
        x, y = float(width), y
        for word in words:
            size = font.getlength(word[0]) + 12
            if x + size > width:
                x, y = _MARGIN, y + _LINE
            placed.append((x, y, word))
            x += size
        y += _LINE
    canvas = Image.new("RGB", (width, y + _MARGIN), "white")
    draw = ImageDraw.Draw(canvas)
    for (caption, shown), x in zip(panels, np.cumsum([_MARGIN, *widths]).tolist(), strict=False):
        draw.text((x, _MARGIN), caption, "black", font)
        canvas.paste(shown, (x, _MARGIN + _LINE))
    for x, y, (piece, colour) in placed:
        box = (x, y, x + font.getlength(piece) + 8, y + _LINE - 6)
        draw.rounded_rectangle(box, 4, colour)
        ink = _MASKED if colour is None else "white" if sum(colour) < 380 else "black"
        draw.text((x + 4, y + 1), piece, ink, font)
        if colour is None:
            draw.line((x + 2, y + _LINE // 2 - 3, box[2] - 2, y + _LINE // 2 - 3), _MASKED)
    return canvas


# Charts


def score_histogram(
    positive: ArrayLike, negative: ArrayLike, threshold: float | None = None, title: str = "Scores", bins: int = 40
) -> Curve:
    """Plot the score densities of matching (S⁺) and other pairs (S⁻), with the threshold as a vertical line."""
    scores = {"S⁺": np.asarray(positive, dtype=float).ravel(), "S⁻": np.asarray(negative, dtype=float).ravel()}
    every = np.concatenate(list(scores.values()))
    edges = np.linspace(every.min(), max(every.max(), every.min() + 1e-6), bins + 1)
    middles = (edges[:-1] + edges[1:]) / 2
    lines = {name: (middles, np.histogram(values, edges, density=True)[0]) for name, values in scores.items()}
    return _with_threshold(lines, threshold, title)


def distribution_curves(log: Sequence[Mapping[str, float]], snapshots: int = 3) -> list[Curve]:
    """Plot all charts of a stage-1 log: means and threshold over training, and Gaussians at evenly spaced steps.

    Raises:
        ValueError: The log is not from stage 1.
    """
    curves = []
    for modality in MODALITIES:
        entries = _stage1_entries(log, modality)
        chosen = np.unique(np.linspace(0, len(entries) - 1, min(snapshots, len(entries))).round().astype(int))
        curves += [threshold_course(log, modality), *(_gaussians(entries[index], modality) for index in chosen)]
    return curves


def threshold_course(log: Sequence[Mapping[str, float]], modality: str = "image") -> Curve:
    """Plot the means of both populations and the threshold over training."""
    names, entries = {"μ⁺": "positive_mean", "μ⁻": "negative_mean", "τ": "threshold"}, _stage1_entries(log, modality)
    series = {label: [[each["step"], each[f"{modality}_{name}"]] for each in entries] for label, name in names.items()}
    return Curve(f"Mean scores and threshold: {MODALITIES[modality]}", series)


def _gaussians(entry: Mapping[str, float], modality: str, points: int = 81) -> Curve:
    """Plot the Gaussians of both populations and the threshold of one entry of a stage-1 log."""
    populations = {
        label: (entry[f"{modality}_{sign}_mean"], max(entry[f"{modality}_{sign}_std"], 1e-6))
        for label, sign in (("S⁺", "positive"), ("S⁻", "negative"))
    }
    ends = [mean + sign * 4 * std for mean, std in populations.values() for sign in (-1, 1)]
    x = np.linspace(min(ends), max(ends), points)
    lines = {
        name: (x, np.exp(-(((x - mean) / std) ** 2) / 2) / (std * math.sqrt(2 * math.pi)))
        for name, (mean, std) in populations.items()
    }
    title = f"{MODALITIES[modality]}, step {int(entry.get('step', 0))}"
    return _with_threshold(lines, entry[f"{modality}_threshold"], title)


def last_thresholds(log: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the last tau of each modality in a stage-1 log."""
    return {modality: float(_stage1_entries(log, modality)[-1][f"{modality}_threshold"]) for modality in MODALITIES}


def read_log(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Load a training log from a `recipe.json` or a `trainer_state.json`.

    Raises:
        ValueError: The file has another format.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        entries = content.get("log", content.get("log_history"))
    except (ValueError, AttributeError):
        entries = None
    if not isinstance(entries, list):
        raise ValueError(f"{path}: expected JSON with a list of log entries under 'log' or 'log_history'")
    return entries


def _stage1_entries(log: Sequence[Mapping[str, float]], modality: str) -> list[Mapping[str, float]]:
    entries = [entry for entry in log if f"{modality}_threshold" in entry and f"{modality}_positive_mean" in entry]
    if not entries:
        raise ValueError(f"none of {len(log)} log entries has scores of the {modality}; is it a log of stage 1?")
    return entries


def _with_threshold(lines: Mapping[str, tuple[NDArray, NDArray]], threshold: float | None, title: str) -> Curve:
    series = {name: np.stack((x, y), axis=1).tolist() for name, (x, y) in lines.items()}
    if threshold is not None:
        top = max(float(y.max()) for _, y in lines.values())
        series[f"τ = {threshold:.3f}"] = [[threshold, 0.0], [threshold, top]]
    return Curve(title, series, "cosine")
