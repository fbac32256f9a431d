"""Symmetric triplets of the emoji sample: two drawings of one concept, and a concept that only looks similar."""

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import permutations
from pathlib import Path
from typing import Any, NamedTuple

import datasets

from conjoin.data.emoji.sample import EMOJI_STYLES, GENDER_WORDS, EmojiConcept, emoji_concepts, load_emoji, name_words
from conjoin.data.triplets import TRIPLET_FEATURES

EDIT_FEATURES = datasets.Features(
    {
        "id": datasets.Value("string"),
        "reference_image": datasets.Image(decode=False),
        "edit_text": datasets.Value("string"),
        "target_image": datasets.Image(decode=False),
        "target_text": datasets.Value("string"),
    }
)
_LONGEST_INSERTION = 3


def symmetric_triplets(
    split: str = "test",
    *,
    query_style: str = "twemoji",
    positive_style: str = "openmoji",
    same_name: bool = False,
    skin_tones: bool = False,
    cache_dir: str | Path | None = None,
) -> datasets.Dataset:
    """Compose triplets from the emoji sample, columns `TRIPLET_FEATURES` (variant and kind are null).

    The query is a concept in one style with its name. The positive is the same concept in the other style with its
    other name. The negative, also in the positive's style and with its other name, is the most confusable concept of
    the split: it differs only in gender, else only in skin tone, else it has the same kind and the most words in
    common. In a pool of triplets, only the positive shows the concept of the query.

    Args:
        split: `"train"`, `"validation"` or `"test"`.
        query_style: Style of the query's image.
        positive_style: Style of the positive's and the negative's image.
        same_name: Include concepts with only one name; query and positive then share it.
        skin_tones: Include skin-tone variants as negatives.
        cache_dir: Cache folder; by default that of `datasets`.

    Raises:
        ImportError: The `sample` extra is not installed.
        ValueError: Unknown split or style, or the two styles are equal.
    """
    if query_style == positive_style:
        raise ValueError(f"query_style and positive_style are both {query_style!r}; the two must differ")
    rows = load_emoji(split, styles=(query_style, positive_style), skin_tones=skin_tones, cache_dir=cache_dir)
    images = _images_by_style(rows)
    drawn = images[query_style].keys() & images[positive_style].keys()
    concepts = [concept for concept in emoji_concepts(skin_tones=skin_tones) if concept.concept in drawn]
    triplets = []
    for concept in concepts:
        if concept.skin_tone or not (concept.alternative_text or same_name):
            continue
        negative = max(concepts, key=lambda other: _confusability(concept, other))
        triplets.append(
            {
                "id": f"{concept.concept}/{query_style}-{positive_style}",
                "query_image": images[query_style][concept.concept],
                "query_text": concept.text,
                "positive_image": images[positive_style][concept.concept],
                "positive_text": concept.alternative_text or concept.text,
                "negative_image": images[positive_style][negative.concept],
                "negative_text": negative.alternative_text or negative.text,
                "variant_image": None,
                "variant_text": None,
                "kind": None,
            }
        )
    return datasets.Dataset.from_list(triplets, features=TRIPLET_FEATURES)


def _images_by_style(rows: datasets.Dataset) -> dict[str, dict[str, Any]]:
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
    return (
        other.concept != concept.concept,
        is_other_gender and other.skin_tone is None,
        other.base == concept.base,
        other.kind == concept.kind,
        shared,
        tie,
    )


class Edit(NamedTuple):
    """A text that changes one concept into a sibling."""

    reference: EmojiConcept
    text: str
    target: EmojiConcept


def edit_triplets(
    split: str, *, styles: Sequence[str] | None = None, skin_tones: bool = True, cache_dir: str | Path | None = None
) -> datasets.Dataset:
    """Compose (reference image, "but ...", target image) from siblings of a split, columns `EDIT_FEATURES`.

    The English names of siblings differ in one thing: the skin tone, the gender, one qualifying word ("but blue
    instead of red") or a few words that one name adds ("but with sweat"). Reference and target have the same style.

    Args:
        split: `"train"`, `"validation"` or `"test"`.
        styles: As for `load_emoji`.
        skin_tones: Whether to include edits of the skin tone.
        cache_dir: Cache folder; by default that of `datasets`.

    Raises:
        ImportError: The `sample` extra is not installed.
        ValueError: Unknown split or style.
    """
    styles = tuple(styles or EMOJI_STYLES)
    rows = load_emoji(split, styles=styles, skin_tones=skin_tones, cache_dir=cache_dir)
    images = _images_by_style(rows)
    edits = find_edits(concept for concept in emoji_concepts(skin_tones=skin_tones) if concept.split == split)
    triplets = [
        {
            "id": f"{edit.reference.concept}/{edit.target.concept}/{style}",
            "reference_image": images[style][edit.reference.concept],
            "edit_text": edit.text,
            "target_image": images[style][edit.target.concept],
            "target_text": edit.target.text,
        }
        for edit in edits
        for style in styles
        if edit.reference.concept in images[style] and edit.target.concept in images[style]
    ]
    return datasets.Dataset.from_list(triplets, features=EDIT_FEATURES)


def find_edits(concepts: Iterable[EmojiConcept]) -> list[Edit]:
    """Find the edits between concepts, one for each pair of reference and target, sorted by their ids."""
    concepts = list(concepts)
    plain = [concept for concept in concepts if not concept.skin_tone and concept.kind not in ("flag", "keycap")]
    edits = [*_tone_edits(concepts), *_replacements(plain), *_insertions(plain)]
    by_pair = {(edit.reference.concept, edit.target.concept): edit for edit in reversed(edits)}  # the first edit wins
    return [by_pair[pair] for pair in sorted(by_pair)]


def _tone_edits(concepts: Sequence[EmojiConcept]) -> Iterator[Edit]:
    bases = {concept.concept: concept for concept in concepts if not concept.skin_tone}
    for concept in concepts:
        if concept.skin_tone and "+" not in concept.skin_tone and concept.base in bases:
            yield Edit(bases[concept.base], f"but with {concept.skin_tone} skin tone", concept)


def _replacements(concepts: Sequence[EmojiConcept]) -> Iterator[Edit]:
    """Yield edits between names that differ in one word, which qualifies the last word or gives the gender."""
    groups: dict[tuple[str, tuple[str, ...]], list[tuple[str, EmojiConcept]]] = defaultdict(list)
    for concept in concepts:
        words = name_words(concept.text)
        for i, word in enumerate(words):
            if len(words) > 1 and (i < len(words) - 1 or word in GENDER_WORDS):
                groups[concept.kind, (*words[:i], "*", *words[i + 1 :])].append((word, concept))
    for group in groups.values():
        for (old, reference), (new, target) in permutations(group, 2):
            if old != new:
                yield Edit(reference, f"but {new} instead of {old}", target)


def _insertions(concepts: Sequence[EmojiConcept]) -> Iterator[Edit]:
    """Yield edits in both directions between names where one adds a few words to the other."""
    named = {(concept.kind, name_words(concept.text)): concept for concept in concepts}
    for (kind, words), longer in named.items():
        for length in range(1, min(_LONGEST_INSERTION, len(words) - 1) + 1):
            for start in range(len(words) - length + 1):
                shorter = named.get((kind, (*words[:start], *words[start + length :])))
                if shorter is not None:
                    added = " ".join(words[start : start + length])
                    yield Edit(shorter, f"but {added}", longer)
                    yield Edit(longer, f"but {_negated(added)}", shorter)


def _negated(words: str) -> str:
    return f"without {words.removeprefix('with ')}" if words.startswith("with ") else f"not {words}"
