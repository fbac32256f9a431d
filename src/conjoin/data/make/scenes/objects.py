"""The objects of scenes: emoji that depict one thing, with a name in every language and a drawing by two artists."""

from dataclasses import dataclass
from functools import lru_cache

from conjoin.data.emoji.art import EMOJI_STYLES, emoji_drawings
from conjoin.data.emoji.names import EmojiConcept, emoji_concepts, name_words

ARTISTS = EMOJI_STYLES

_FIRST_PICTOGRAPH = 0x1F300
_MAX_WORDS = 3
_SYMBOL_WORDS = {
    "arrow", "arrows", "baggage", "bell", "button", "cat", "chart", "circle", "circled", "clockwise", "closed",
    "cloud", "control", "customs", "decorative", "diamond", "dim", "face", "fuel", "globe", "good", "heart",
    "hearts", "icon", "incoming", "input", "left", "locked", "luggage", "map", "mark", "moon", "muted", "no", "non",
    "oclock", "oncoming", "open", "outbox", "part", "pointed", "potable", "prohibited", "room", "sign", "speaker",
    "square", "suit", "sun", "symbol", "symbols", "thirty", "unlocked", "zodiac",
}  # fmt: skip
"""Words in the names of signs, of abstract things, and of things that differ from each other by a detail only."""


@dataclass(frozen=True)
class SceneObject:
    """A thing that scenes show and name.

    Attributes:
        concept: Code point of the emoji.
        split: The emoji sample's split of the concept.
        names: Name by language.
    """

    concept: str
    split: str
    names: dict[str, str]


@lru_cache(maxsize=8)
def scene_objects(languages: tuple[str, ...] = ("en",)) -> tuple[SceneObject, ...]:
    """List the objects, in the order of the emoji sample.

    Raises:
        ImportError: The `sample` extra is not installed.
        ValueError: Unknown language.
    """
    names = {language: {row.concept: row.text for row in emoji_concepts(language)} for language in languages}
    concepts = [concept for concept in emoji_concepts() if _is_object(concept)]
    for artist in ARTISTS:
        drawn = emoji_drawings(artist, [concept.concept for concept in concepts])
        concepts = [concept for concept in concepts if concept.concept in drawn]
    return tuple(
        SceneObject(row.concept, row.split, {language: names[language][row.concept] for language in languages})
        for row in concepts
    )


def _is_object(concept: EmojiConcept) -> bool:
    words = name_words(concept.text)
    return (
        concept.kind == "other"
        and "-" not in concept.concept
        and int(concept.concept, 16) >= _FIRST_PICTOGRAPH
        and len(words) <= _MAX_WORDS
        and not _SYMBOL_WORDS.intersection(words)
    )
