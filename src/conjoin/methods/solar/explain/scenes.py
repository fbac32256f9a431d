"""Draw what a joint encoder finds shared in a scene beside what is shared in truth."""

from collections.abc import Mapping
from typing import Any

from PIL import Image

from conjoin.data.make.scenes import SHARED
from conjoin.methods.solar.explain.pictures import (
    Word,
    boxed_picture,
    heat_map,
    masked_picture,
    relative,
    strip,
    warmth,
)
from conjoin.methods.solar.explain.truth import ScoredTokens


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
        ("truth: red is shared", boxed_picture(picture, boxes)),
        ("patches like the text", heat_map(picture, patches.scores.numpy(), grid)),
        ("what the mask keeps", masked_picture(picture, patches.above.float().numpy(), grid)),
    ]
    return strip(panels, _lines(scene["text"], tokens, tokenizer))


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
