"""Scenes: pictures of objects, and texts that name some of them, with the truth of what both share.

    python experiments/scenes.py runs/scenes --objects 100 --train 12000 --distractors 4000

`scenes.md` is their data card. It needs the extra `sample`.
"""

import argparse
import hashlib
import io
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from made import is_made, made_with, write_settings
from numpy.typing import NDArray
from PIL import Image

from conjoin.data import EDITS, emoji_concepts
from conjoin.data.emoji.sample import EMOJI_STYLES, EmojiConcept, draw_svg, emoji_drawings, name_words
from conjoin.progress import progress
from conjoin.storage import atomic_path, publish_folder, text_digest, write_text

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
SCENE_SIZE = 168
"""Side of the pictures in pixels."""
_CELL = SCENE_SIZE // 2
_SIZES = (0.55, 0.95)
_QUALITY = 92
Item = TypeVar("Item")
NEGATIVES = ("image_content", "text_content")
"""Hard negatives of (picture O, text M): (O, O) and (M, M). Both lack an object of the query."""
SAME_UNION = "other_intersection"
"""A further negative: the same objects in all, of which picture and text share others."""
_EDIT_ODDS = (0.5, 0.25, 0.25)
"""Of `EDITS`: the text names another object in place of one, one more, or one fewer than the picture."""
_MAX_SHARED = 3
_SPLITS = ("test", "validation", *("train",) * 8)
PHRASES = {
    "en": (
        ("in this picture you can see {}", "the {}", " and "),
        ("a small picture with {} in front of a plain background", "{}", " and "),
        ("{} stand side by side in one drawing", "the {}", " and "),
        ("there are several things here to look at: {}", "{}", " as well as "),
        ("someone has drawn {} for a children's book", "the {}", " together with the "),
        ("{}, all of them on the same page", "{}", " and "),
    ),
    "de": (
        ("auf diesem Bild sieht man Folgendes: {}", "{}", " und "),
        ("{} sind zusammen in einer Zeichnung zu sehen", "{}", " sowie "),
        ("ein kleines Bild mit {} auf einfarbigem Grund", "{}", " und "),
    ),
    "es": (
        ("en esta imagen se puede ver lo siguiente: {}", "{}", " y "),
        ("un dibujo pequeño con {} sobre un fondo liso", "{}", " y "),
        ("{}, todo en la misma página de un libro", "{}", " y también "),
    ),
    "fr": (
        ("sur cette image on peut voir : {}", "{}", " et "),
        ("un petit dessin avec {} sur un fond uni", "{}", " et "),
        ("{}, le tout sur la même page d'un livre", "{}", " ainsi que "),
    ),
    "id": (
        ("dalam gambar ini Anda dapat melihat {}", "{}", " dan "),
        ("sebuah gambar kecil dengan {} di latar belakang polos", "{}", " dan "),
        ("{}, semuanya ada di halaman yang sama", "{}", " serta "),
    ),
    "it": (
        ("in questa immagine si può vedere quanto segue: {}", "{}", " e "),
        ("un piccolo disegno con {} su uno sfondo semplice", "{}", " e "),
        ("{}, tutto sulla stessa pagina di un libro", "{}", " e anche "),
    ),
    "pt": (
        ("nesta imagem é possível ver o seguinte: {}", "{}", " e "),
        ("um pequeno desenho com {} sobre um fundo liso", "{}", " e "),
        ("{}, tudo na mesma página de um livro", "{}", " e também "),
    ),
}
"""By language: frames of a list, the form of a name in the list, and the words before its last entry."""
SHARED, PRIVATE, NEITHER = 1, 0, -1
MARKER = "scenes.json"
TEST_SETS = ("known", "unseen")
"""Objects of the training scenes in compositions that training has not, and objects that training has not."""
_VERSION = 2
_GROUP = 500
_OBJECTS_OF = {
    "known": {"validation": "train", "test": "train"},
    "unseen": {"validation": "validation", "test": "test"},
}
_VARIANT_ODDS = 0.25
_PLACED = pa.list_(pa.struct([("object", pa.string()), ("box", pa.list_(pa.float32()))]))
_NAMED = pa.list_(pa.struct([("object", pa.string()), ("start", pa.int32()), ("end", pa.int32())]))
_SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("image", pa.struct([("bytes", pa.binary()), ("path", pa.string())])),
        ("text", pa.string()),
        ("alternative_text", pa.string()),
        ("image_objects", _PLACED),
        ("text_objects", _NAMED),
    ]
)


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


def draw_scene(
    objects: tuple[str, ...], artist: str, generator: np.random.Generator
) -> tuple[bytes, list[dict[str, object]]]:
    """Draw one to four objects, each in a random quarter at a random size and place.

    Returns:
        The JPEG file, and the box of each object: `{"object", "box": [left, top, right, bottom]}`, as fractions of
        the picture.
    """
    picture = _background(generator)
    boxes: list[dict[str, object]] = []
    for name, cell in zip(objects, generator.permutation(4), strict=False):
        size = int(_CELL * generator.uniform(*_SIZES))
        left, top = (int(edge * _CELL + generator.integers(_CELL - size + 1)) for edge in divmod(int(cell), 2))
        sprite = _sprite(name, artist).resize((size, size), Image.Resampling.BICUBIC)
        picture.paste(sprite, (left, top), sprite)
        box = (left, top, left + size, top + size)
        boxes.append({"object": name, "box": [round(edge / SCENE_SIZE, 4) for edge in box]})
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", quality=_QUALITY)
    return buffer.getvalue(), boxes


def _background(generator: np.random.Generator) -> Image.Image:
    """A light plain colour, gradient, stripes or noise."""
    kind = generator.integers(4)
    first, second = generator.integers(150, 256, size=(2, 3)).astype(np.float32)
    ramp = np.linspace(0, 1, SCENE_SIZE, dtype=np.float32)
    share = np.zeros((SCENE_SIZE, SCENE_SIZE), dtype=np.float32)
    if kind == 1:
        share += ramp[:, None] if generator.integers(2) else ramp
    elif kind == 2:
        share += (ramp * generator.integers(3, 9) % 1 > 0.5) * 0.3
    elif kind == 3:
        share += generator.random((SCENE_SIZE, SCENE_SIZE), dtype=np.float32) * 0.3
    return Image.fromarray((first + (second - first) * share[..., None]).astype(np.uint8))


@lru_cache(maxsize=4096)
def _sprite(concept: str, artist: str) -> Image.Image:
    """The drawing of an object, transparent around it."""
    return draw_svg(_drawings(artist)[concept], background=None).convert("RGBA")


@lru_cache(maxsize=2)
def _drawings(artist: str) -> dict[str, str]:
    return emoji_drawings(artist, [row.concept for row in scene_objects()])


@dataclass(frozen=True)
class Composition:
    """The objects of a scene, as tuples of objects in no particular order.

    Attributes:
        shared: In the picture and in the text, 1 to 3.
        image_only: In the picture alone, 0 or 1.
        text_only: In the text alone, 0 or 1.
    """

    shared: tuple[str, ...]
    image_only: tuple[str, ...]
    text_only: tuple[str, ...]

    @property
    def image(self) -> tuple[str, ...]:
        """All objects of the picture."""
        return self.shared + self.image_only

    @property
    def text(self) -> tuple[str, ...]:
        """All objects of the text."""
        return self.shared + self.text_only

    @property
    def split(self) -> str:
        """`"train"`, `"validation"` or `"test"`: a function of the set of all objects, so no set is in two splits."""
        objects = " ".join(sorted({*self.image, *self.text}))
        return _SPLITS[int(hashlib.sha256(objects.encode()).hexdigest()[:8], 16) % len(_SPLITS)]

    def exchanged(self) -> "Composition":
        """The positive: the picture shows what the text named, and the text names what the picture showed."""
        return Composition(self.shared, self.text_only, self.image_only)

    def negatives(self) -> list[str]:
        """The kinds of `NEGATIVES` that lack an object of this composition.

        The text of an "add" edit names all objects, so (M, M) lacks none; "remove" mirrors it.
        """
        lacking = {"image_content": self.text_only, "text_content": self.image_only}
        return [kind for kind in NEGATIVES if lacking[kind]]

    def negative(self, kind: str, generator: np.random.Generator) -> "Composition":
        """Return a negative of `kind`; the intersection of `SAME_UNION` has the same size as this one's."""
        if kind == "image_content":
            return Composition(self.image, (), ())
        if kind == "text_content":
            return Composition(self.text, (), ())
        content = self.shared + self.image_only + self.text_only
        others = [part for part in combinations(content, len(self.shared)) if {*part} != {*self.shared}]
        shared = others[generator.integers(len(others))]
        private = shuffled([name for name in content if name not in shared], generator)
        cut = len(self.image_only)
        return Composition(shared, tuple(private[:cut]), tuple(private[cut:]))


def draw_composition(objects: Sequence[str], split: str, generator: np.random.Generator) -> Composition:
    """Draw a composition of `split` from at least five different `objects`."""
    while True:
        edit = EDITS[generator.choice(len(EDITS), p=_EDIT_ODDS)]
        shared = int(generator.integers(1, _MAX_SHARED + 1))
        names = [objects[index] for index in generator.choice(len(objects), size=shared + 2, replace=False)]
        image_only = () if edit == "add" else (names[shared],)
        text_only = () if edit == "remove" else (names[shared + 1],)
        composition = Composition(tuple(names[:shared]), image_only, text_only)
        if composition.split == split:
            return composition


def shuffled(values: Sequence[Item], generator: np.random.Generator) -> list[Item]:
    """Return `values` in random order."""
    return [values[index] for index in generator.permutation(len(values))]


@dataclass(frozen=True)
class Wording:
    """A phrase and an order: the same wording of other objects differs in their names alone.

    Attributes:
        language: Of `PHRASES`.
        phrase: Number of the phrase.
        seed: Of the order.
    """

    language: str
    phrase: int
    seed: int

    @classmethod
    def draw(
        cls, languages: Sequence[str], generator: np.random.Generator, other_than: "Wording | None" = None
    ) -> "Wording":
        """Draw a wording whose phrase is not that of `other_than`."""
        language = languages[int(generator.integers(len(languages)))]
        numbers = list(range(len(PHRASES[language])))
        if other_than is not None and other_than.language == language:
            numbers.remove(other_than.phrase)
        return cls(language, int(generator.choice(numbers)), int(generator.integers(2**31)))

    def write(self, objects: Sequence[str], names: dict[str, dict[str, str]]) -> tuple[str, list[dict[str, object]]]:
        """Return a text that names `objects`, and the span of each: `{"object", "start", "end"}` in characters."""
        frame, form, last = PHRASES[self.language][self.phrase]
        before, after = frame.split("{}")
        text, spans = before, []
        for number, name in enumerate(shuffled(objects, np.random.default_rng(self.seed))):
            if number:
                text += last if number == len(objects) - 1 else ", "
            head, tail = form.split("{}") if number == 0 or not last.endswith("the ") else ("", "")
            start = len(text) + len(head)
            text += head + names[name][self.language] + tail
            spans.append({"object": name, "start": start, "end": start + len(names[name][self.language])})
        return text + after, spans


def shared_patches(
    image_objects: Sequence[Mapping[str, Any]], text_objects: Sequence[Mapping[str, Any]], grid: int
) -> NDArray[np.int8]:
    """Return `(grid * grid,)`, row-major: `SHARED` or `PRIVATE` by the box around a patch's centre, else `NEITHER`."""
    named = {entry["object"] for entry in text_objects}
    centres = (np.arange(grid) + 0.5) / grid
    truth = np.full((grid, grid), NEITHER, dtype=np.int8)
    for entry in image_objects:
        left, top, right, bottom = entry["box"]
        rows, columns = (centres > top) & (centres < bottom), (centres > left) & (centres < right)
        truth[np.ix_(rows, columns)] = SHARED if entry["object"] in named else PRIVATE
    return truth.reshape(-1)


def shared_tokens(
    image_objects: Sequence[Mapping[str, Any]],
    text_objects: Sequence[Mapping[str, Any]],
    offsets: Sequence[tuple[int, int]],
) -> NDArray[np.int8]:
    """Return `(T,)`: `SHARED` or `PRIVATE` for tokens of a name, `NEITHER` for the other words and special tokens.

    Args:
        image_objects: The objects of the picture.
        text_objects: The objects of the text with their spans.
        offsets: The characters of each token, as `return_offsets_mapping` of a tokenizer gives them.
    """
    shown = {entry["object"] for entry in image_objects}
    truth = np.full(len(offsets), NEITHER, dtype=np.int8)
    for entry in text_objects:
        for index, (start, end) in enumerate(offsets):
            if start < entry["end"] and end > entry["start"] and end > start:
                truth[index] = SHARED if entry["object"] in shown else PRIVATE
    return truth


@dataclass(frozen=True)
class ScenePart:
    """A part of the data set: its number for the random draws, its composition split, and its objects by split."""

    number: int
    split: str
    objects: tuple[str, ...]


def make_scenes(
    out: str | Path,
    *,
    train: int = 20000,
    distractors: int = 20000,
    triplets: int = 600,
    objects: int | None = None,
    languages: Sequence[str] = ("en",),
    seed: int = 0,
    show_progress: bool = False,
) -> Path:
    """Write scenes to `out`, always the same for the same arguments and versions of the drawing libraries.

    A scene is a picture of one to four objects and a text that names one to four: they share one to three, and the
    text names another object in place of one, one more, or one fewer. Row `i` depends on the seed and `i` alone.

    * `train.parquet`, `distractors.parquet`: rows for `load_pairs`, with `image_objects` (boxes) and `text_objects`
      (character spans). Half of the distractors show known objects, half unseen ones.
    * `{validation,test}_{known,unseen}.jsonl`: rows for `load_triplets`, with the kind of the negative and the same
      truth for each role. In the positive, the other artist draws what the text named, and the text names what the
      picture showed. The negative, in the positive's style, is one of `NEGATIVES`: it lacks an object of the query.
      A quarter of the queries have a variant: the negative's wording with the query's objects.
    * `test_{known,unseen}_same_union.jsonl`: the same queries and positives with a negative of `SAME_UNION`.

    A finished file is not made again, so an interrupted call resumes by files.

    Args:
        out: The folder to make.
        train: Training scenes.
        distractors: Further candidates for both test sets.
        triplets: Triplets of each test set; validation has half as many.
        objects: Known objects, chosen by a hash; all 528 when None. Fewer are learned in fewer steps.
        languages: Of the texts, of `PHRASES`.
        seed: Of all draws.
        show_progress: Show progress bars.

    Raises:
        FileExistsError: `out` is there and is something else.
        ImportError: The `sample` extra is not installed.
        ValueError: A number is not positive, or a language is unknown.
    """
    counts = {"train": train, "distractors": distractors, "triplets": triplets}
    for name, value, least in (*((name, value, 2) for name, value in counts.items()), ("objects", objects, 5)):
        if value is not None and value < least:
            raise ValueError(f"{name}={value} must be at least {least}")
    unknown = [language for language in languages if language not in PHRASES]
    if unknown or not languages:
        raise ValueError(f"languages={list(languages)}; expected some of {', '.join(PHRASES)}")
    out, asked = Path(out), tuple(languages)
    settings = {"version": _VERSION, "seed": seed, "languages": [*asked], "objects": objects, **counts}
    if is_made(out, MARKER, settings, "these scenes"):
        return out
    partial = out.with_name(out.name + ".partial")
    if partial.is_dir() and made_with(partial / MARKER) != settings:
        shutil.rmtree(partial)
    partial.mkdir(parents=True, exist_ok=True)
    write_settings(partial / MARKER, settings)
    _Maker(partial, objects, asked, seed, show_progress).make(train, distractors, triplets)
    publish_folder(partial, out)
    return out


class _Maker:
    def __init__(
        self, folder: Path, known: int | None, languages: tuple[str, ...], seed: int, show_progress: bool
    ) -> None:
        objects = scene_objects(languages)
        self.folder, self.languages, self.seed, self.show = folder, languages, seed, show_progress
        self.names = {row.concept: row.names for row in objects}
        self.by_split = {
            split: tuple(row.concept for row in objects if row.split == split)
            for split in ("train", "validation", "test")
        }
        self.by_split["train"] = tuple(sorted(self.by_split["train"], key=text_digest)[:known])

    def make(self, train: int, distractors: int, triplets: int) -> None:
        """Write every file that is not there."""
        known, unseen = self.by_split["train"], self.by_split["test"]
        self._pairs("train", train, [ScenePart(0, "train", known)])
        self._pairs("distractors", distractors, [ScenePart(1, "test", known), ScenePart(2, "test", unseen)])
        for number, (split, kind) in enumerate([(s, k) for s in ("validation", "test") for k in TEST_SETS], start=3):
            part = ScenePart(number, split, self.by_split[_OBJECTS_OF[kind][split]])
            self._triplets(f"{split}_{kind}", triplets if split == "test" else triplets // 2, part)
            if split == "test":
                self._triplets(f"{split}_{kind}_same_union", triplets, part, SAME_UNION)

    def _pairs(self, name: str, count: int, parts: list[ScenePart]) -> None:
        path = self.folder / f"{name}.parquet"
        if path.exists():
            return
        numbers = progress(range(count), desc=name, unit="scene", show=self.show)
        with atomic_path(path) as temporary, pq.ParquetWriter(temporary, _SCHEMA) as writer:
            rows: list[dict[str, Any]] = []
            for number in numbers:
                rows.append(self._pair(f"{name}-{number:07d}", number, parts[number % len(parts)]))
                if len(rows) == _GROUP or number == count - 1:
                    writer.write_table(pa.Table.from_pylist(rows, _SCHEMA))
                    rows.clear()

    def _pair(self, id_: str, number: int, part: ScenePart) -> dict[str, Any]:
        generator = np.random.default_rng([self.seed, part.number, number])
        composition = draw_composition(part.objects, part.split, generator)
        wording = Wording.draw(self.languages, generator)
        artist = ARTISTS[generator.integers(len(ARTISTS))]
        content, boxes = draw_scene(tuple(shuffled(composition.image, generator)), artist, generator)
        text, spans = wording.write(composition.text, self.names)
        other, _ = Wording.draw(self.languages, generator, wording).write(composition.text, self.names)
        return {
            "id": id_,
            "image": {"bytes": content, "path": None},
            "text": text,
            "alternative_text": other,
            "image_objects": boxes,
            "text_objects": spans,
        }

    def _triplets(self, name: str, count: int, part: ScenePart, kind: str | None = None) -> None:
        path = self.folder / f"{name}.jsonl"
        if path.exists():
            return
        (self.folder / name).mkdir(exist_ok=True)
        numbers = progress(range(count), desc=name.replace("_", " "), unit="triplet", show=self.show)
        lines = [json.dumps(self._triplet(name, number, part, kind), ensure_ascii=False) for number in numbers]
        write_text(path, "\n".join(lines) + "\n")

    def _triplet(self, name: str, number: int, part: ScenePart, kind: str | None) -> dict[str, Any]:
        draw = [self.seed, part.number, number]
        generator, of_negative = np.random.default_rng(draw), np.random.default_rng([*draw, 1])
        query = draw_composition(part.objects, part.split, generator)
        kind = kind or str(of_negative.choice(query.negatives()))
        first = int(generator.integers(len(ARTISTS)))
        artists = (ARTISTS[first], ARTISTS[1 - first], ARTISTS[1 - first])
        compositions = (query, query.exchanged(), query.negative(kind, of_negative))
        row: dict[str, Any] = {"id": f"{name}-{number:05d}", "kind": kind}
        wording: Wording | None = None
        for role, composition, artist in zip(("query", "positive", "negative"), compositions, artists, strict=True):
            wording = Wording.draw(self.languages, generator, wording)
            row |= self._item(f"{name}/{number:05d}-{role}", role, composition, artist, wording, generator)
        if wording is not None and generator.random() < _VARIANT_ODDS:
            text, spans = wording.write(query.text, self.names)
            row |= {"variant_image": row["query_image"], "variant_text": text, "variant_text_objects": spans}
        return row

    def _item(
        self,
        stem: str,
        role: str,
        composition: Composition,
        artist: str,
        wording: Wording,
        generator: np.random.Generator,
    ) -> dict[str, Any]:
        content, boxes = draw_scene(tuple(shuffled(composition.image, generator)), artist, generator)
        (self.folder / f"{stem}.jpg").write_bytes(content)
        text, spans = wording.write(composition.text, self.names)
        return {
            f"{role}_image": f"{stem}.jpg",
            f"{role}_text": text,
            f"{role}_image_objects": boxes,
            f"{role}_text_objects": spans,
        }


def main() -> None:
    """Make scenes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", help="folder to make")
    for name, default, what in (
        ("train", 20000, "training scenes"),
        ("distractors", 20000, "further candidates of both test sets"),
        ("triplets", 600, "triplets of each test set; validation has half as many"),
        ("objects", None, "known objects; all 528 by default"),
        ("seed", 0, "of all draws"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{what} (default: %(default)s)")
    parser.add_argument("--languages", nargs="+", default=["en"], help="of the texts (default: en)")
    args = vars(parser.parse_args())
    print(f"scenes in {make_scenes(args.pop('out'), **args, show_progress=True)}")


if __name__ == "__main__":
    main()
