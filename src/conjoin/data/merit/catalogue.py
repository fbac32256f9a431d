"""The catalogue of the miniature: a product for each drawing of the emoji sample, with attributes and a title."""

import hashlib
import io
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from PIL import Image

from conjoin.data.emoji.art import EMOJI_STYLES
from conjoin.data.emoji.names import GENDER_WORDS, EmojiConcept, emoji_concepts, name_words
from conjoin.data.emoji.sample import load_emoji
from conjoin.progress import progress

LANGUAGES = {"en": "SG", "es": "MX", "id": "ID", "de": "DE", "pt": "BR"}
"""Of the titles, and the country where a product with such a title is sold."""

_CLASSES = (
    ("food", "2615 1f32d-1f32f 1f345-1f37f 1f950-1f96f 1f9c0-1f9cb 1fad0-1fadd"),
    ("plant", "2618 1f330-1f344 1f490 1f940 1fab4 1fabb 1fabe"),
    ("animal", "1f400-1f43f 1f577-1f578 1f638-1f640 1f648-1f64a 1f980-1f9ae 1fab0-1fab3 1fabc 1fabf 1facc-1facf"),
    ("sky", "2600-2604 26c4-26c8 2744 2b50 1f300-1f301 1f304-1f308 1f30a-1f32c"),
    ("place", "26e9-26f2 26fa 1f303 1f309 1f3d4-1f3df 1f3e0-1f3f0 1f54b-1f54d 1f5fb-1f5ff 1f6d5-1f6d9"),
    ("transport", "26f4-26f5 2708 1f3cd-1f3ce 1f680-1f6a4 1f6b2 1f6e5-1f6fc"),
    ("sport", "26bd-26be 26f7-26f8 1f3bd-1f3c9 1f3cf-1f3d3 1f3f8-1f3f9 1f945-1f94f"),
    ("instrument", "1f3b5-1f3bc 1f941 1fa87-1fa8a 1fa95 1fa97-1fa98"),
    ("clothing", "1f451-1f462 1f97b-1f97f 1f9e2-1f9e6 1fa70-1fa74"),
    ("clock", "231a-231b 23f0-23f3 1f550-1f567 1f570"),
    ("office", "2702-2712 1f4bb-1f4fd 1f587-1f58d 1f5a5-1f5de"),
    (
        "symbol",
        "0-26ff 2714-2b55 3030-1f251 1f4a0 1f4a2 1f4a4-1f4af 1f500-1f506 1f517-1f524 1f52f-1f53d 1f549 1f54e "
        "1f6ab-1f6d1 1f7e0-1f7f0",
    ),
)
"""Classes of the things that emoji depict, by code points; the first range that holds a thing counts."""

_PALETTE = (
    ("red", 210, 45, 50), ("orange", 240, 145, 30), ("yellow", 252, 205, 75), ("green", 95, 165, 70),
    ("green", 170, 215, 115), ("blue", 65, 145, 220), ("blue", 10, 50, 130), ("purple", 150, 95, 190),
    ("pink", 240, 150, 185), ("brown", 130, 85, 60), ("beige", 240, 205, 170), ("black", 45, 50, 55),
    ("gray", 150, 160, 165),
)  # fmt: skip
"""Names of colours, each with one RGB value or more."""

_COLOURS = tuple(dict.fromkeys(name for name, *_ in _PALETTE))
_SIDE = 36
_BLACK_COUNTS_LESS = 4
_HAIR = {"1f9b0": "red hair", "1f9b1": "curly hair", "1f9b2": "bald", "1f9b3": "white hair"}
_NO_SUBGROUP = {
    *GENDER_WORDS, *_COLOURS, "with", "in", "of", "and", "on", "no", "the", "up", "down", "left", "right", "facing",
    "white", "light", "grey", "large", "small", "medium", "open", "closed", "flag", "for", "face", "tone", "skin",
}  # fmt: skip
_SIBLINGS = 3
"""Concepts of a class that share a word of their names, at least, so that the word is a subgroup."""


@dataclass(frozen=True)
class MiniProduct:
    """A product of the miniature.

    Attributes:
        row: As in the published files, without the image.
        image: A PNG.
        caption: What a captioner could say of the image, in English.
        attributes: Values by name.
    """

    row: dict[str, str]
    image: bytes
    caption: str
    attributes: dict[str, str]


def mini_products(
    split: str, first_id: int, drawn: set[bytes], cache_dir: str | Path | None = None, show_progress: bool = False
) -> Iterator[MiniProduct]:
    """Yield the products of a split of the emoji sample: each concept in each skin tone by each artist.

    Concepts of two skin tones are skipped, and so are the drawings in `drawn`, to which each one is added. A title is
    the concept's name without its skin tone, which only the image shows. The language of a title is a function of the
    drawing.

    Raises:
        ImportError: The `sample` extra is not installed.
    """
    names, concepts, subgroups = _names(), _concepts(), _subgroups()
    rows = load_emoji(split, styles=EMOJI_STYLES, skin_tones=True, cache_dir=cache_dir)
    rows = rows.cast_column("image", datasets.Image(decode=False))
    number = first_id
    for row in progress(rows, desc=f"{split} products", unit="product", show=show_progress):
        concept = concepts[row["concept"]]
        is_pair = concept.base not in names["en"] or "+" in (concept.skin_tone or "")
        if is_pair or row["image"]["bytes"] in drawn:
            continue
        drawn.add(row["image"]["bytes"])
        digest = hashlib.sha256(row["id"].encode()).digest()
        language = list(LANGUAGES)[digest[0] % len(LANGUAGES)]
        found = _attributes(concept, row["style"], row["image"]["bytes"], subgroups)
        facts = {
            "title": names[language][concept.base],
            "idx": str(number),
            "class": class_of(concept),
            "country": LANGUAGES[language],
            "language": language,
        }
        yield MiniProduct(facts, row["image"]["bytes"], f"a drawing of {concept.text}", found)
        number += 1


def class_of(concept: EmojiConcept) -> str:
    """Return `person`, `face`, `flag`, or the class of a thing."""
    if concept.kind == "keycap":
        return "symbol"
    if concept.kind != "other":
        return concept.kind
    point = int(concept.concept.split("-")[0], 16)
    for name, ranges in _CLASSES:
        for span in ranges.split():
            start, _, end = span.partition("-")
            if int(start, 16) <= point <= int(end or start, 16):
                return name
    return "object"


def dominant_colour(png: bytes) -> str:
    """Return the colour of most pixels of a drawing on white; black, as of outlines, only if there is little else."""
    with Image.open(io.BytesIO(png)) as image:
        pixels = np.asarray(image.convert("RGB").resize((_SIDE, _SIDE)), dtype=np.int64).reshape(-1, 3)
    drawn = pixels[pixels.min(axis=1) < 235]
    if not len(drawn):
        return "white"
    distances = ((drawn[:, None] - np.array([values for _, *values in _PALETTE])) ** 2).sum(axis=2)
    counts = Counter(_PALETTE[place][0] for place in distances.argmin(axis=1))
    return max(_COLOURS, key=lambda name: counts[name] / (_BLACK_COUNTS_LESS if name == "black" else 1))


def _attributes(concept: EmojiConcept, style: str, png: bytes, subgroups: dict[str, str]) -> dict[str, str]:
    hair = next((name for point, name in _HAIR.items() if point in concept.concept.split("-")), None)
    if hair is None and "blond" in concept.text:
        hair = "blond hair"
    found: dict[str, Any] = {
        "color": dominant_colour(png),
        "drawing style": style,
        "subgroup": subgroups.get(concept.base),
        "gender": concept.gender,
        "skin tone": concept.skin_tone,
        "hair": hair,
    }
    return {name: value for name, value in found.items() if value is not None}


@cache
def _names() -> dict[str, dict[str, str]]:
    """Return the name of each concept without a skin tone, by language."""
    return {language: {each.concept: each.text for each in emoji_concepts(language)} for language in LANGUAGES}


@cache
def _concepts() -> dict[str, EmojiConcept]:
    return {each.concept: each for each in emoji_concepts(skin_tones=True)}


@cache
def _subgroups() -> dict[str, str]:
    """Return for each base the word of its English name that most other names of its class share, if some do."""
    words = {
        concept.base: (class_of(concept), {word for word in name_words(concept.text) if len(word) > 1} - _NO_SUBGROUP)
        for concept in _concepts().values()
        if concept.concept == concept.base
    }
    counts = Counter((kind, word) for kind, found in words.values() for word in found)
    best = {
        base: max(((counts[kind, word], word) for word in found), default=(0, ""))
        for base, (kind, found) in words.items()
    }
    return {base: word for base, (count, word) in best.items() if count >= _SIBLINGS}
