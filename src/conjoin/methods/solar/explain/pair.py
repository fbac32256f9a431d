"""Show which image parts a joint encoder finds in the text, and vice versa (SOLAR Fig. 12-14)."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from conjoin.evaluation.report.page import write_page
from conjoin.evaluation.results import Curve, picture
from conjoin.methods.solar.explain.pictures import Word, heat_map, masked_picture, relative, segment_map, strip, warmth
from conjoin.methods.solar.masking import construct_samples, segment_patches
from conjoin.processing.input_types import apply_input_type, concatenated

PANEL_PIXELS = 640
ROLES = {
    "positive": "positive: intersection of one masked",
    "image_difference": "negative: difference of image masked",
    "text_difference": "negative: difference of text masked",
    "intersection": "negative: both intersections masked",
}


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


class MaskedSample(NamedTuple):
    """A constructed sample of the pair: its name and its token weights `(P,)` and `(T,)` in [0, 1]."""

    name: str
    image_weights: Tensor
    text_weights: Tensor


@torch.no_grad()
def explain_pair(model: Any, processor: Any, image: Any, text: str) -> Explanation:  # noqa: ANN401
    """Score every patch of `image` against `text` and every token of `text` against `image`.

    Args:
        model: A joint encoder.
        processor: Its processor.
        image: An image, or a list of images, which are concatenated into one picture (input type `cat`).
        text: The text.

    Raises:
        ValueError: The model is not a joint encoder.
    """
    _check_joint_encoder(model)
    batch = processor(apply_input_type({"image": image, "text": text}, "cat")).to(model.device)
    output = model(**batch, views=("image", "text"), output_tokens=True)
    patch_size = model.config.vision_config.patch_size
    grid = tuple(side // patch_size for side in batch["pixel_values"].shape[-2:])
    seen = _denormalise(batch["pixel_values"][0].cpu(), processor.image_processor)
    seen = seen.crop((0, 0, grid[1] * patch_size, grid[0] * patch_size))
    local = output.text_token_mask[0].cpu()
    scores = _cosines(output.text_tokens[0, :1], output.image_tokens[0, 1:])
    text_scores = _cosines(output.image_tokens[0, :1], output.text_tokens[0, 1:])[local]
    words = _words(processor, text.strip(), batch["input_ids"][0].cpu(), local)
    unit = output.embeddings
    return Explanation(
        seen, (grid[0], grid[1]), scores, output.image_tokens[0, 1:].float().cpu(), words, text_scores,
        float(unit[0] @ unit[1]),
    )  # fmt: skip


@torch.no_grad()
def score_populations(model: Any, processor: Any, pairs: Sequence[Any]) -> dict[str, tuple[Tensor, Tensor]]:  # noqa: ANN401
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
    _check_joint_encoder(model)
    if len(pairs) < 2:
        raise ValueError(f"{len(pairs)} pairs have no scores between different pairs; expected at least 2")
    output = model(**processor(concatenated(pairs, "cat")).to(model.device), views=("image",), output_tokens=True)
    if output.text_tokens is None or not (output.image_token_mask.any(1) & output.text_token_mask.any(1)).all():
        raise ValueError("every item must have an image and a text")
    parts = {
        "image": (output.text_tokens, output.image_tokens, output.image_token_mask),
        "text": (output.image_tokens, output.text_tokens, output.text_token_mask),
    }
    populations = {}
    for name, (of_global, of_local, mask) in parts.items():
        unit = F.normalize(of_local[:, 1:].float(), dim=-1)
        scores = torch.einsum("id,jtd->ijt", F.normalize(of_global[:, 0].float(), dim=-1), unit).cpu()
        matching = torch.eye(len(pairs), dtype=torch.bool)[..., None] & mask.cpu()
        populations[name] = (scores[matching], scores[mask.cpu().expand_as(matching) & ~matching])
    return populations


def render_explanation(
    explanation: Explanation,
    out: str | os.PathLike[str],
    *,
    image_threshold: float | None = None,
    text_threshold: float | None = None,
    segments: Tensor | None = None,
    samples: Sequence[MaskedSample] = (),
    curves: Sequence[Curve] = (),
) -> Path:
    """Write `explanation.png` and `explanation.html`, a self-contained page without scripts.

    Args:
        explanation: Output of `explain_pair`.
        out: Output folder; created if necessary.
        image_threshold: tau_V; patches above it are the intersection.
        text_threshold: tau_L.
        segments: `(P,)` segment of each patch.
        samples: Constructed samples.
        curves: Additional charts, from `score_histogram`, `threshold_course`, ...

    Returns:
        The path of the page.
    """
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    panels = _panels(explanation, image_threshold, segments, samples)
    lines = _lines(explanation, text_threshold, samples)
    strip(panels, lines).save(folder / "explanation.png")
    return write_page(
        "conjoin.methods.solar.explain",
        "explain.html.j2",
        folder / "explanation.html",
        curves,
        panels=[(caption, picture(image, PANEL_PIXELS)) for caption, image in panels],
        lines=lines,
        words=[
            (word, float(score), warmth(value))
            for word, score, value in zip(
                explanation.words, explanation.text_scores, relative(explanation.text_scores), strict=True
            )
        ],
        similarity=explanation.similarity,
        thresholds={"image": image_threshold, "text": text_threshold},
    )


def _panels(
    explanation: Explanation, threshold: float | None, segments: Tensor | None, samples: Sequence[MaskedSample]
) -> list[tuple[str, Image.Image]]:
    shown, grid, scores = explanation.picture, explanation.grid, explanation.image_scores.numpy()
    panels = [
        ("image", masked_picture(shown, torch.ones(len(scores)).numpy(), grid)),
        ("patches like the text", heat_map(shown, scores, grid)),
    ]
    if threshold is not None:
        panels.append((f"above {threshold:.3f}", heat_map(shown, scores, grid, threshold)))
    if segments is not None:
        panels.append((f"{int(segments.max()) + 1} segments", segment_map(shown, segments.numpy(), grid)))
    return panels + [(name, masked_picture(shown, image.numpy(), grid)) for name, image, _ in samples]


def _lines(
    explanation: Explanation, threshold: float | None, samples: Sequence[MaskedSample]
) -> list[tuple[str, list[Word]]]:
    """Return captions and words with their colours; None for masked words."""
    colours = [warmth(value) for value in relative(explanation.text_scores.numpy())]
    every: list[Word] = list(zip(explanation.words, colours, strict=True))
    lines: list[tuple[str, list[Word]]] = [("words like the image", every)]
    if threshold is not None:
        kept = (explanation.text_scores > threshold).tolist()
        lines.append((f"above {threshold:.3f}", _left(every, kept)))
    return lines + [(name, _left(every, (text > 0).tolist())) for name, _, text in samples]


def _left(words: list[Word], kept: Sequence[bool]) -> list[Word]:
    return [(word, colour if keep else None) for (word, colour), keep in zip(words, kept, strict=True)]


def _words(processor: Any, text: str, input_ids: Tensor, local: Tensor) -> list[str]:  # noqa: ANN401
    """Return the text piece of each local token, or the token's name if the piece is empty or unknown."""
    tokenizer = processor.tokenizer
    names = tokenizer.convert_ids_to_tokens(input_ids[local].tolist())
    if not tokenizer.is_fast:
        return names
    options = {"truncation": True, "return_offsets_mapping": True, "split_special_tokens": True}
    offsets = tokenizer(text, max_length=len(input_ids), **options)["offset_mapping"]
    pieces = [text[first:last].strip() for first, last in offsets] + [""] * (len(local) - len(offsets))
    return [
        piece or name
        for piece, name in zip([p for p, keep in zip(pieces, local, strict=True) if keep], names, strict=True)
    ]


def _cosines(pooled: Tensor, tokens: Tensor) -> Tensor:
    return F.cosine_similarity(pooled.float(), tokens.float(), dim=-1).cpu()


def _denormalise(pixels: Tensor, image_processor: Any) -> Image.Image:  # noqa: ANN401
    mean, std = (
        torch.tensor(statistic)[:, None, None] for statistic in (image_processor.image_mean, image_processor.image_std)
    )
    levels = ((pixels * std + mean) * 255).round().clamp(0, 255).to(torch.uint8)
    return Image.fromarray(levels.permute(1, 2, 0).numpy())


def _check_joint_encoder(model: Any) -> None:  # noqa: ANN401
    if model.config.model_type != "joint_encoder":
        raise ValueError(f"only a joint encoder has local scores, got {type(model).__name__}")


def construct_masked(
    explanation: Explanation, thresholds: Mapping[str, float | None], seed: int = 0
) -> tuple[Tensor, list[MaskedSample]]:
    """Return the segment `(P,)` of each patch and, if both thresholds are known, the samples of stage 2.

    Args:
        explanation: Scores of the pair.
        thresholds: Thresholds of `"image"` and `"text"`.
        seed: Seed of the sampling.
    """
    segments = segment_patches(explanation.patches[None])
    image_threshold, text_threshold = thresholds["image"], thresholds["text"]
    if image_threshold is None or text_threshold is None:
        return segments[0], []
    built = construct_samples(
        explanation.image_scores[None],
        torch.ones(1, len(explanation.image_scores), dtype=torch.bool),
        image_threshold,
        explanation.text_scores[None],
        torch.ones(1, len(explanation.text_scores), dtype=torch.bool),
        text_threshold,
        segments,
        torch.Generator().manual_seed(seed),
    )
    samples = [
        MaskedSample(name, built.image_weights[role, 0], built.text_weights[role, 0])
        for role, name in enumerate(ROLES.values())
        if built.valid[role, 0]
    ]
    return segments[0], samples
