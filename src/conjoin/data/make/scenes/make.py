"""Write scenes: pairs to train on, distractors, and symmetric triplets with the truth of what is shared."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from conjoin.data.make.made import is_made, made_with, write_settings
from conjoin.data.make.scenes.compose import Composition, draw_composition, shuffled
from conjoin.data.make.scenes.draw import draw_scene
from conjoin.data.make.scenes.objects import ARTISTS, scene_objects
from conjoin.data.make.scenes.phrases import PHRASES, Wording
from conjoin.progress import progress
from conjoin.storage import atomic_path, publish_folder, text_digest, write_text

MARKER = "scenes.json"
TEST_SETS = ("known", "unseen")
"""Objects of the training scenes in compositions that training has not, and objects that training has not."""

_VERSION = 1
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

    A scene is a picture of two to four objects and a text that names some of them: they share one to three, and the
    text names another object in place of one, one more, or one fewer. Row `i` depends on the seed and `i` alone.

    * `train.parquet`, `distractors.parquet`: rows for `load_pairs`, with `image_objects` (boxes) and `text_objects`
      (character spans). Half of the distractors show known objects, half unseen ones.
    * `{validation,test}_{known,unseen}.jsonl`: rows for `load_triplets`, with the kind of the negative and the same
      truth for each role. In the positive, the other artist draws what the text named, and the text names what the
      picture showed. The negatives are `NEGATIVES` of `compose`, in the positive's style. A quarter of the queries
      have a variant: the negative's wording with the query's objects.

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

    def _triplets(self, name: str, count: int, part: ScenePart) -> None:
        path = self.folder / f"{name}.jsonl"
        if path.exists():
            return
        (self.folder / name).mkdir(exist_ok=True)
        numbers = progress(range(count), desc=name.replace("_", " "), unit="triplet", show=self.show)
        lines = [json.dumps(self._triplet(name, number, part), ensure_ascii=False) for number in numbers]
        write_text(path, "\n".join(lines) + "\n")

    def _triplet(self, name: str, number: int, part: ScenePart) -> dict[str, Any]:
        generator = np.random.default_rng([self.seed, part.number, number])
        query = draw_composition(part.objects, part.split, generator)
        kinds = query.negatives()
        kind = kinds[generator.integers(len(kinds))]
        first = int(generator.integers(len(ARTISTS)))
        artists = (ARTISTS[first], ARTISTS[1 - first], ARTISTS[1 - first])
        compositions = (query, query.exchanged(), query.negative(kind, generator))
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
