"""Edits between emoji: a reference, the words that say what is different, and the target."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import permutations
from pathlib import Path
from typing import NamedTuple

import datasets

from conjoin import load_emoji
from conjoin.data import emoji_concepts
from conjoin.data.emoji.sample import EMOJI_STYLES, GENDER_WORDS, EmojiConcept, name_words
from conjoin.data.emoji.triplets import images_by_style

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
    images = images_by_style(rows)
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
