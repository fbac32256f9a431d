"""Symmetric triplets of the emoji sample: two drawings of one concept, and a concept that only looks similar."""

import hashlib
from collections.abc import Iterable
from typing import Any

import datasets

from conjoin.data.emoji.sample import EMOJI_STYLES, GENDER_WORDS, EmojiConcept, emoji_concepts, load_emoji, name_words
from conjoin.data.triplets import TRIPLET_FEATURES


def symmetric_triplets(split: str = "test") -> datasets.Dataset:
    """Compose triplets from the emoji sample, columns `TRIPLET_FEATURES` (variant and kind are null).

    The query is a concept as Twemoji draws it, with its name. The positive is the same concept as OpenMoji draws it,
    with its other name. The negative, also of OpenMoji and with its other name, is the most confusable concept of the
    split: it differs only in gender, else it has the same kind and the most words in common. A concept with one name
    has no triplet. In a pool of triplets, only the positive shows the concept of the query.

    Args:
        split: `"train"`, `"validation"` or `"test"`.

    Raises:
        ImportError: The `sample` extra is not installed.
        ValueError: Unknown split.
    """
    ours, theirs = map(images_by_style(load_emoji(split)).__getitem__, EMOJI_STYLES)
    concepts = [concept for concept in emoji_concepts() if concept.concept in ours.keys() & theirs.keys()]
    triplets = []
    for concept in concepts:
        if not concept.alternative_text:
            continue
        negative = max(concepts, key=lambda other: _confusability(concept, other))
        items = {
            "query": (ours[concept.concept], concept.text),
            "positive": (theirs[concept.concept], concept.alternative_text),
            "negative": (theirs[negative.concept], negative.alternative_text or negative.text),
            "variant": (None, None),
        }
        triplet = {"id": f"{concept.concept}/{'-'.join(EMOJI_STYLES)}", "kind": None}
        for role, (image, text) in items.items():
            triplet |= {f"{role}_image": image, f"{role}_text": text}
        triplets.append(triplet)
    return datasets.Dataset.from_list(triplets, features=TRIPLET_FEATURES)


def images_by_style(rows: datasets.Dataset) -> dict[str, dict[str, Any]]:
    """Return the undecoded images of the emoji sample by style and concept."""
    images: dict[str, dict[str, Any]] = {style: {} for style in rows.unique("style")}
    for row in rows.cast_column("image", datasets.Image(decode=False)):
        images[row["style"]][row["concept"]] = row["image"]
    return images


def _without_gender(words: Iterable[str]) -> tuple[str, ...]:
    """Return `words` without gender words and their neutral forms."""
    return tuple(word for word in words if word not in GENDER_WORDS)


def _confusability(concept: EmojiConcept, other: EmojiConcept) -> tuple[float, ...]:
    """Return the rank key of `other` as a hard negative, greater is better; a fixed hash breaks ties."""
    words, other_words = name_words(concept.text), name_words(other.text)
    is_other_gender = other.gender != concept.gender and _without_gender(words) == _without_gender(other_words)
    shared = len({*words} & {*other_words}) / len({*words} | {*other_words})
    tie = int(hashlib.sha256(f"{concept.concept} {other.concept}".encode()).hexdigest()[:8], 16)
    return (other.concept != concept.concept, is_other_gender, other.kind == concept.kind, shared, tie)
