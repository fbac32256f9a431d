"""Names and attributes of the emoji concepts, read as data from the `emoji` wheel, without pictures or rendering.

A *concept* is a fully-qualified emoji; its id is its code points in lower-case hexadecimal without U+FE0F, joined by
`-`. Its *base* is that id without the skin tones U+1F3FB to U+1F3FF. The split is a fixed function of the base, so a
concept and all its skin-tone variants are in the same split.
"""

import hashlib
import json
import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conjoin.data.emoji.wheels import wheel_folder

EMOJI_LANGUAGES = ("en", "ar", "de", "es", "fa", "fr", "id", "it", "ja", "ko", "pt", "ru", "tr", "zh")
"""The languages with a name for every concept in the `emoji` wheel."""

SKIN_TONES = {"1f3fb": "light", "1f3fc": "medium-light", "1f3fd": "medium", "1f3fe": "medium-dark", "1f3ff": "dark"}

GENDER_WORDS = {"woman", "women", "girl", "man", "men", "boy", "person", "people"}
"""Words of English names that give a gender or a neutral form."""

_FULLY_QUALIFIED = 2
_GENDER_MARKS = {"female": {"woman", "women", "girl", "♀"}, "male": {"man", "men", "boy", "♂"}}
_GENDER_SIGNS = {"2640": "♀", "2642": "♂"}
_PEOPLE_WORDS = {"person", "people", "family"}
_FLAGS = {"1f38c", "1f3c1", "1f3f3", "1f3f4", "1f6a9"}


@dataclass(frozen=True)
class EmojiConcept:
    """One concept: its code points, its names and the attributes derived from them.

    Attributes:
        concept: Code points, such as `1f44b-1f3fd`.
        base: `concept` without skin tones, such as `1f44b`.
        text: The name in words.
        alternative_text: A name in other words, if the source has one.
        kind: `"flag"`, `"keycap"`, `"person"` (people and body parts), `"face"` or `"other"`.
        skin_tone: `"light"` ... `"dark"`, two of them joined by `+` for a pair, or None.
        gender: `"female"`, `"male"`, `"mixed"` or None.
    """

    concept: str
    base: str
    text: str
    alternative_text: str | None
    kind: str
    skin_tone: str | None
    gender: str | None

    @property
    def split(self) -> str:
        """`"train"`, `"validation"` or `"test"`."""
        return split_of(self.base)


def split_of(base: str) -> str:
    """Return the split of a base concept by SHA-256 modulo 10: 0-1 test, 2 validation, 3-9 train."""
    bucket = int(hashlib.sha256(base.encode()).hexdigest()[:8], 16) % 10
    return "test" if bucket < 2 else "validation" if bucket == 2 else "train"


def normalise_code_points(name: str) -> str:
    """Convert a file name of code points to the concept id: `0023-FE0F-20E3` becomes `23-20e3`."""
    points = (f"{int(point, 16):x}" for point in name.split("-"))
    return "-".join(point for point in points if point != "fe0f")


def emoji_concepts(language: str = "en", skin_tones: bool = False) -> list[EmojiConcept]:
    """List the fully-qualified emoji with their names in `language`, in the order of the source.

    Args:
        language: One of `EMOJI_LANGUAGES`.
        skin_tones: Whether to include skin-tone variants besides the base concepts.

    Raises:
        ImportError: The `sample` extra is not installed.
        ValueError: Unknown language.
    """
    if language not in EMOJI_LANGUAGES:
        raise ValueError(f"unknown language {language!r}; the emoji package has {', '.join(EMOJI_LANGUAGES)}")
    folder = wheel_folder("emoji") / "unicode_codes"
    entries = {
        key: value for key, value in _read(folder / "emoji.json").items() if value["status"] == _FULLY_QUALIFIED
    }
    names = {key: value["en"] for key, value in entries.items()}
    if language != "en":
        translations = _read(folder / f"emoji_{language}.json")
        names = {key: translations[key] for key in entries}
    people = _people(entries)
    taken = {name_words(name) for name in names.values()}
    concepts = []
    for key, entry in entries.items():
        points = _points(key)
        base = _base(points)
        if not skin_tones and base != points:
            continue
        aliases = [_spaced(alias) for alias in entry.get("alias", ())] if language == "en" else []
        text, alternative = _texts(_spaced(names[key]), aliases, taken)
        tones = [SKIN_TONES[point] for point in points if point in SKIN_TONES]
        words = {*name_words(entry["en"]), *(_GENDER_SIGNS.get(point, "") for point in points[1:])}
        kind = _kind(points, words, base in people)
        concepts.append(
            EmojiConcept(
                concept="-".join(points),
                base="-".join(base),
                text=text,
                alternative_text=alternative,
                kind=kind,
                skin_tone="+".join(tones) or None,
                gender=_gender(words) if kind == "person" else None,
            )
        )
    return concepts


def name_words(text: str) -> tuple[str, ...]:
    """Split a name into plain words, for comparison: no case, accents, punctuation or apostrophes."""
    plain = "".join(c for c in unicodedata.normalize("NFKD", text.casefold()) if not unicodedata.combining(c))
    return tuple(re.findall(r"[^\W_]+", re.sub(r"[’'.]", "", plain)))


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def _points(characters: str) -> tuple[str, ...]:
    return tuple(f"{ord(c):x}" for c in characters if c != "\ufe0f")


def _base(points: Sequence[str]) -> tuple[str, ...]:
    return tuple(point for point in points if point not in SKIN_TONES)


def _spaced(name: str) -> str:
    return name.strip(":").replace("_", " ")


def _texts(name: str, aliases: Sequence[str], taken: set[tuple[str, ...]]) -> tuple[str, str | None]:
    """Choose the name and the alternative name.

    The source names a flag by its country and has "flag for ..." as an alias. The alias describes the picture, so the
    two are swapped. An alias is an alternative name if its words differ from the name, it is not the name of another
    concept, and it is not a shortcode such as `clock930` or `x`.
    """
    flag = next((alias for alias in aliases if alias.startswith("flag for ")), None)
    if flag:
        return flag, name
    for alias in aliases:
        words = name_words(alias)
        is_same = set(words) == set(name_words(name)) or "".join(words) == "".join(name_words(name))
        is_code = len(alias) < 2 or re.search(r"[a-z]\d|\d[a-z]", alias)
        if not is_same and not is_code and words not in taken:
            return name, alias
    return name, None


def _people(entries: Iterable[str]) -> set[tuple[str, ...]]:
    """Return the bases that have a skin-tone or a gender-sign variant."""
    people = set()
    for points in map(_points, entries):
        if _base(points) != points:
            people.add(_base(points))
        if len(points) == 3 and points[2] in _GENDER_SIGNS:
            people.add(points[:1])
    return people


def _gender(words: set[str]) -> str | None:
    found = [gender for gender, marks in _GENDER_MARKS.items() if words & marks]
    return "mixed" if len(found) == 2 else found[0] if found else None


def _kind(points: Sequence[str], words: set[str], is_person: bool) -> str:
    if points[0] in _FLAGS or 0x1F1E6 <= int(points[0], 16) <= 0x1F1FF:
        return "flag"
    if points[-1] == "20e3":
        return "keycap"
    if is_person or words & _PEOPLE_WORDS:
        return "person"
    return "face" if "face" in words else "other"
