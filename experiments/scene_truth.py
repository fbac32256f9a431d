"""How well the scores of a stage-1 model find what picture and text share, against the truth of scenes."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from scenes import PRIVATE, SHARED, shared_patches, shared_tokens
from torch import Tensor
from transformers import ProcessorMixin

from conjoin import JointEncoderModel
from conjoin.trainers import CachedFeatures, collate_features
from conjoin.trainers.solar_explain import heat_map, masked_picture, relative, warmth
from conjoin.trainers.solar_masks import align, fit_threshold, pair_tokens, window_scores

Word = tuple[str, tuple[int, int, int] | None]
"""A word and its background colour; None for a masked word."""
GREY, MARGIN, LINE = (128, 128, 128), 10, 24


class ScoredTokens(NamedTuple):
    """The patches or the text tokens of one scene.

    Args:
        scores: `(T,)` local scores.
        above: `(T,)` bool, above the threshold.
        truth: `(T,)` of `SHARED`, `PRIVATE` and `NEITHER`.
    """

    scores: Tensor
    above: Tensor
    truth: Tensor


def score_intersection(
    model: JointEncoderModel,
    processor: ProcessorMixin,
    rows: Sequence[Mapping[str, Any]],
    batch_size: int = 64,
    features: CachedFeatures | None = None,
    scores: Literal["global", "windows"] = "global",
) -> dict[str, float]:
    """Score the local scores and masks of a joint encoder on scenes.

    Args:
        model: A joint encoder after stage 1.
        processor: Its processor.
        rows: Scenes with `image`, `text`, `image_objects` and `text_objects`.
        batch_size: Most rows per batch; thresholds are fitted to the scores of a batch, as in training.
        features: The tower features of the rows; None runs the towers, and then every row needs its `image`.
        scores: Those of global tokens or of windows, as in `SolarStage1Config`.

    Returns:
        `patch_auroc` and `token_auroc`: the chance that a token of a shared object scores above a token of a private
        one of the same scene (App. H); 0.5 is chance. `patch_iou` and `token_iou`: intersection over union of the
        tokens above the threshold with those of shared objects. `patch_shared_kept`, `patch_private_kept` and so on:
        how many of such tokens are above the threshold.

    Raises:
        ValueError: No scene has shared and private objects.
    """
    pairs: dict[str, list[tuple[float, float]]] = {"patch": [], "token": []}
    overlaps: dict[str, list[float]] = {"patch": [], "token": []}
    kept: dict[str, list[bool]] = defaultdict(list)
    for scene in score_scenes(model, processor, rows, batch_size, features, scores):
        for kind, tokens in scene.items():
            pairs[kind].append(_wins(tokens.scores[tokens.truth == SHARED], tokens.scores[tokens.truth == PRIVATE]))
            overlaps[kind].append(_overlap(tokens.above, tokens.truth))
            for part, truth in (("shared", SHARED), ("private", PRIVATE)):
                kept[f"{kind}_{part}_kept"] += tokens.above[tokens.truth == truth].tolist()
    results: dict[str, float] = {}
    for kind, wins in pairs.items():
        won, compared = map(sum, zip(*wins, strict=True))
        if not compared:
            raise ValueError(f"no scene has a {kind} of a shared and one of a private object")
        results |= {f"{kind}_auroc": won / compared, f"{kind}_iou": float(np.mean(overlaps[kind]))}
    return results | {name: float(np.mean(values)) for name, values in kept.items()}


@torch.inference_mode()
def score_scenes(
    model: JointEncoderModel,
    processor: ProcessorMixin,
    rows: Sequence[Mapping[str, Any]],
    batch_size: int = 64,
    features: CachedFeatures | None = None,
    scores: Literal["global", "windows"] = "global",
) -> Iterator[dict[str, ScoredTokens]]:
    """Yield the scores of every scene: `patch` and `token`; the arguments are those of `score_intersection`."""
    model.eval()
    batches = -(-len(rows) // batch_size)  # of equal sizes: a last one of a single scene would have no other pairs
    for start, end in pairwise(len(rows) * number // max(1, batches) for number in range(batches + 1)):
        chosen = rows[start:end]
        if features is None:
            inputs = processor([{"image": row["image"], "text": row["text"]} for row in chosen])
        else:
            inputs = collate_features([features[index] for index in range(start, end)])["pairs"]
        inputs = {name: value.to(model.device) for name, value in inputs.items()}
        tokens = pair_tokens(model(**inputs, views=(), output_tokens=True))
        image, text = window_scores(model.vl_encoder, tokens) if scores == "windows" else align(tokens)[1:]
        truths = _truths(processor, chosen, tokens.image_mask.shape[1], tokens.text_mask.shape[1])
        scored: list[list[ScoredTokens]] = []
        for local, truth in zip((image, text), truths, strict=True):
            above = (local.scores > fit_threshold(local).threshold).cpu()
            width = truth.shape[1]  # the words of cached features may have more padding
            parts = zip(local.scores[:, :width].cpu(), above[:, :width], truth, strict=True)
            scored.append([ScoredTokens(*part) for part in parts])
        for patches, words in zip(*scored, strict=True):
            yield {"patch": patches, "token": words}


def _truths(
    processor: Any,  # noqa: ANN401
    rows: Sequence[Mapping[str, Any]],
    patches: int,
    width: int,
) -> tuple[Tensor, Tensor]:
    """The truth of patches `(N, P)` and of tokens `(N, T)`."""
    options = {"padding": True, "truncation": True, "return_offsets_mapping": True}
    encoded = processor.tokenizer([row["text"] for row in rows], **options)
    objects = [(row["image_objects"], row["text_objects"]) for row in rows]
    images = [shared_patches(*each, grid=round(patches**0.5)) for each in objects]
    texts = [
        shared_tokens(*each, offsets[:width]) for each, offsets in zip(objects, encoded["offset_mapping"], strict=True)
    ]
    return torch.from_numpy(np.stack(images)), torch.from_numpy(np.stack(texts))


def _wins(shared: Tensor, private: Tensor) -> tuple[float, float]:
    """How many pairs the shared tokens win, ties half, and how many there are."""
    difference = shared[:, None] - private
    return float((difference > 0).sum() + 0.5 * (difference == 0).sum()), float(difference.numel())


def _overlap(above: Tensor, truth: Tensor) -> float:
    """Intersection over union with the tokens of shared objects."""
    shared = truth == SHARED
    return float((above & shared).sum() / (above | shared).sum().clamp(min=1))


def draw_scene_scores(
    picture: Image.Image,
    scene: Mapping[str, Any],
    scored: Mapping[str, ScoredTokens],
    tokenizer: Any,  # noqa: ANN401
) -> Image.Image:
    """Draw the boxes of the truth, the scores of patches and words, and what the mask keeps.

    Args:
        picture: Of the scene.
        scene: Its `text`, `image_objects` and `text_objects`.
        scored: An entry of `score_scenes`.
        tokenizer: Of the model.
    """
    patches, tokens = scored["patch"], scored["token"]
    side = round(len(patches.scores) ** 0.5)
    grid = (side, side)
    named = {entry["object"] for entry in scene["text_objects"]}
    boxes = [(entry["box"], entry["object"] in named) for entry in scene["image_objects"]]
    panels = [
        ("truth: red is shared", _boxed(picture, boxes)),
        ("patches like the text", heat_map(picture, patches.scores.numpy(), grid)),
        ("what the mask keeps", masked_picture(picture, patches.above.float().numpy(), grid)),
    ]
    return strip(panels, _lines(scene["text"], tokens, tokenizer))


def _boxed(picture: Image.Image, boxes: Sequence[tuple[Sequence[float], bool]]) -> Image.Image:
    """Draw boxes, `[left, top, right, bottom]` as fractions: of what is shared in warm, of the rest in cold."""
    shown = masked_picture(picture, np.ones(1), (1, 1))  # enlarged
    draw = ImageDraw.Draw(shown)
    for (left, top, right, bottom), is_shared in boxes:
        corners = (left * shown.width, top * shown.height, right * shown.width, bottom * shown.height)
        draw.rectangle(corners, outline=warmth(float(is_shared)), width=4)
    return shown


def _lines(text: str, tokens: ScoredTokens, tokenizer: Any) -> list[tuple[str, list[Word]]]:  # noqa: ANN401
    """The tokens by their truth, by their scores, and those that the mask keeps; None for the others."""
    offsets = tokenizer(text, truncation=True, return_offsets_mapping=True)["offset_mapping"]
    token_indices = [index for index, (start, end) in enumerate(offsets) if end > start]
    words = [text[slice(*offsets[index])] for index in token_indices]
    colours = [warmth(value) for value in relative(tokens.scores[token_indices].numpy())]
    kept = {
        "truth: what the picture shows": (tokens.truth[token_indices] == SHARED).tolist(),
        "words like the picture": [True] * len(token_indices),
        "what the mask keeps": tokens.above[token_indices].tolist(),
    }
    return [
        (caption, [(word, colour if keep else None) for word, colour, keep in zip(words, colours, keeps, strict=True)])
        for caption, keeps in kept.items()
    ]


def strip(panels: Sequence[tuple[str, Image.Image]], lines: Sequence[tuple[str, Sequence[Word]]]) -> Image.Image:
    """Draw captioned pictures in a row, with captioned lines of coloured words below.

    Args:
        panels: Captions and pictures.
        lines: Captions and words.
    """
    font = ImageFont.load_default(13)
    widths = [max(shown.width, round(font.getlength(caption))) + MARGIN for caption, shown in panels]
    width, y = sum(widths) + MARGIN, LINE + max(shown.height for _, shown in panels) + 2 * MARGIN
    placed: list[tuple[float, int, Word]] = []
    for caption, words in lines:
        placed.append((MARGIN, y, (caption, (255, 255, 255))))
        x, y = float(width), y
        for word in words:
            size = font.getlength(word[0]) + 12
            if x + size > width:
                x, y = MARGIN, y + LINE
            placed.append((x, y, word))
            x += size
        y += LINE
    canvas = Image.new("RGB", (width, y + MARGIN), "white")
    draw = ImageDraw.Draw(canvas)
    for (caption, shown), x in zip(panels, np.cumsum([MARGIN, *widths]).tolist(), strict=False):
        draw.text((x, MARGIN), caption, "black", font)
        canvas.paste(shown, (x, MARGIN + LINE))
    for x, y, (piece, colour) in placed:
        box = (x, y, x + font.getlength(piece) + 8, y + LINE - 6)
        draw.rounded_rectangle(box, 4, colour)
        ink = GREY if colour is None else "white" if sum(colour) < 380 else "black"
        draw.text((x + 4, y + 1), piece, ink, font)
        if colour is None:
            draw.line((x + 2, y + LINE // 2 - 3, box[2] - 2, y + LINE // 2 - 3), GREY)
    return canvas
