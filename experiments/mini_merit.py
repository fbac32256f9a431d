"""A miniature MERIT: products and queries made of the emoji sample, in the layout of the published data."""

import argparse
import hashlib
import io
import json
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from made import check_queries, is_made, write_settings
from PIL import Image

from conjoin import load_emoji
from conjoin.data import PRODUCT_FEATURES, emoji_concepts
from conjoin.data.emoji.sample import EMOJI_STYLES, GENDER_WORDS, EmojiConcept, name_words
from conjoin.data.merit import query_file
from conjoin.progress import progress
from conjoin.storage import publish_folder, write_text

MARKER = "mini_merit.json"
HELD_OUT = {
    "language": ("id", "de", "pt"),
    "attribute": ("gender", "skin tone"),
    "class": ("food", "animal", "transport"),
}
"""What the out-of-distribution tests of the miniature hold out."""
_VERSION = 2
_SPLITS = {"train": "train", "validation": "validation", "test": "test"}
_CONDITIONS = {2: 0.75, 3: 0.10, 4: 0.15}
"""Numbers of conditions and their shares before filtering (App. A.3.1)."""
_MOST_POSITIVES = 0.05
"""Of the pool; a query with more is dropped."""
_HARD_NEGATIVES = 5
_ONE_LANGUAGE = 0.5
"""Share of the queries that ask for titles in one language, and show products with such titles."""
_TRIES = 50
_LANGUAGE_NAMES = {"en": "English", "es": "Spanish", "id": "Indonesian", "de": "German", "pt": "Portuguese"}
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


def make_mini_merit(
    out: str | Path,
    *,
    train_queries: int = 10000,
    validation_queries: int = 500,
    test_queries: int = 1000,
    seed: int = 0,
    cache_dir: str | Path | None = None,
    show_progress: bool = False,
) -> Path:
    """Write the miniature to `out`; where it already is, nothing is done.

    It is made beside `out` and moved there when it is whole. Concepts, and with them all products of a concept, never
    cross splits; a drawing is in one split.

    Args:
        out: The folder to make.
        train_queries: Queries for training, as the next two for validation and test. There may be fewer, if the
            catalogue has no more.
        validation_queries: Validation, a split that the published data lacks.
        test_queries: Test.
        seed: Of the queries.
        cache_dir: Instead of the cache folder of `datasets`.
        show_progress: Show progress bars.

    Raises:
        FileExistsError: `out` is there and is something else.
        ImportError: The `sample` extra is not installed.
        ValueError: A number of queries is not positive.
    """
    limits = {"train": train_queries, "validation": validation_queries, "test": test_queries}
    check_queries(limits)
    out = Path(out)
    settings = {"version": _VERSION, "seed": seed, "queries": limits}
    if is_made(out, MARKER, settings, "this miniature of MERIT"):
        return out
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    (partial / "data").mkdir(parents=True)
    captions: list[str] = []
    first_id, drawn = 1, set[bytes]()
    for number, (split, limit) in enumerate(limits.items()):
        products = list(_mini_products(split, first_id, drawn, cache_dir, show_progress))
        first_id += len(products)
        _write_products(partial, split, products)
        captions += [json.dumps({"idx": each.row["idx"], "caption": each.caption}) for each in products]
        queries = _Sampler(products, np.random.default_rng([seed, number])).sample(limit)
        write_text(query_file(partial, split), "".join(json.dumps(query) + "\n" for query in queries))
    write_text(partial / "captions.jsonl", "".join(f"{line}\n" for line in captions))
    write_text(partial / "ood.json", json.dumps(HELD_OUT, indent=1) + "\n")
    write_settings(partial / MARKER, settings)
    publish_folder(partial, out)
    return out


def _write_products(folder: Path, split: str, products: Sequence[MiniProduct]) -> None:
    columns: dict[str, list[Any]] = {
        name: [each.row[name] for each in products] for name in ("title", "idx", "class", "country", "language")
    }
    columns["image"] = [{"bytes": each.image, "path": None} for each in products]
    columns["attribute"] = [json.dumps(each.attributes) for each in products]
    table = datasets.Dataset.from_dict({name: columns[name] for name in PRODUCT_FEATURES}, features=PRODUCT_FEATURES)
    table.to_parquet(str(folder / f"data/{split}-00000-of-00001.parquet"))


@dataclass
class _Query:
    """A query in numbers: the product that shows each condition, the answers and what nearly is one."""

    conditions: dict[str, int]
    positives: np.ndarray
    negatives: list[int]
    language: str | None


class _Sampler:
    """Conventional uniform sampling (App. A.3.1): conditions of a random product, each shown by another product."""

    def __init__(self, products: Sequence[MiniProduct], generator: np.random.Generator) -> None:
        self.products = products
        self.generator = generator
        self.names = sorted({name for each in products for name in each.attributes})
        self.values = {name: np.array([each.attributes.get(name, "") for each in products]) for name in self.names}
        self.kinds = np.array([each.row["class"] for each in products])
        self.languages = np.array([each.row["language"] for each in products])
        has = np.array([(self.values[name] != "").sum() for name in self.names])
        self.weights = dict(zip(self.names, 1 / np.sqrt(has), strict=True))  # frequent keys are damped
        sizes = np.array(list(_CONDITIONS.values()))
        self.sizes = sizes / sizes.sum()

    def sample(self, limit: int) -> list[dict[str, Any]]:
        """Return at most `limit` different queries, as rows of the file."""
        rows: dict[str, dict[str, Any]] = {}
        for _ in range(limit * _TRIES):
            if len(rows) == limit:
                break
            query = self._draw()
            if query is not None:
                row = self._row(query)
                rows.setdefault(json.dumps(row["query"]) + row["query instruction"], row)
        return list(rows.values())

    def _draw(self) -> _Query | None:
        """Draw a query; None if it has no answer, too many answers, or a condition that no product can show."""
        target = int(self.generator.integers(len(self.products)))
        names = [name for name in self.names if self.values[name][target]]
        size = int(self.generator.choice(list(_CONDITIONS), p=self.sizes))
        if size > len(names):
            return None
        weights = np.array([self.weights[name] for name in names])
        chosen = [str(name) for name in self.generator.choice(names, size, replace=False, p=weights / weights.sum())]
        language = str(self.languages[target]) if self.generator.random() < _ONE_LANGUAGE else None
        allowed = np.full(len(self.products), True) if language is None else self.languages == language
        same = {name: self.values[name] == self.values[name][target] for name in chosen}
        shown: dict[str, int] = {}
        for name in chosen:
            # it differs in the other conditions, so that no single product shows two of them
            fits = allowed & same[name] & ~np.any([same[other] for other in chosen if other != name], axis=0)
            fits[list(shown.values())] = False
            indices = np.flatnonzero(fits)
            if not len(indices):
                return None
            shown[name] = int(self.generator.choice(indices))
        inside = allowed & (self.kinds == self.kinds[target])
        positives = np.flatnonzero(inside & np.all(list(same.values()), axis=0))
        if not 0 < len(positives) < _MOST_POSITIVES * len(self.products):
            return None
        return _Query(shown, positives, self._negatives(inside, same, shown), language)

    def _negatives(self, inside: np.ndarray, same: dict[str, np.ndarray], shown: dict[str, int]) -> list[int]:
        """Draw products of the class that satisfy all conditions but one, evenly over the conditions."""
        misses = []
        for name in same:
            others = np.all([same[other] for other in same if other != name], axis=0)
            indices = np.setdiff1d(np.flatnonzero(inside & others & ~same[name]), list(shown.values()))
            misses.append(self.generator.permutation(indices).tolist())
        mixed = [indices[turn] for turn in range(_HARD_NEGATIVES) for indices in misses if turn < len(indices)]
        return mixed[:_HARD_NEGATIVES]

    def _row(self, query: _Query) -> dict[str, Any]:
        """Return a query as the published files have it: ids are integers but for the keys of `query`."""
        ids = [int(each.row["idx"]) for each in self.products]
        texts = [
            f"the same {name} as <Product {number}> <image>\n{self.products[index].row['title']} </Product {number}>"
            for number, (name, index) in enumerate(query.conditions.items(), start=1)
        ]
        titled = "" if query.language is None else f" with a title in {_LANGUAGE_NAMES[query.language]}"
        kind = self.kinds[query.positives[0]]
        return {
            "query": {
                str(ids[index]): {name: str(self.values[name][index])} for name, index in query.conditions.items()
            },
            "pos_candidate": [ids[index] for index in query.positives],
            "hard_negative": [ids[index] for index in query.negatives],
            "query instruction": f"Find a product of {kind}{titled} that has {' and '.join(texts)}.",
        }


def _mini_products(
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
        attributes = _attributes(concept, row["style"], row["image"]["bytes"], subgroups)
        facts = {
            "title": names[language][concept.base],
            "idx": str(number),
            "class": class_of(concept),
            "country": LANGUAGES[language],
            "language": language,
        }
        yield MiniProduct(facts, row["image"]["bytes"], f"a drawing of {concept.text}", attributes)
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
    counts = Counter(_PALETTE[index][0] for index in distances.argmin(axis=1))
    return max(_COLOURS, key=lambda name: counts[name] / (_BLACK_COUNTS_LESS if name == "black" else 1))


def _attributes(concept: EmojiConcept, style: str, png: bytes, subgroups: dict[str, str]) -> dict[str, str]:
    hair = next((name for point, name in _HAIR.items() if point in concept.concept.split("-")), None)
    if hair is None and "blond" in concept.text:
        hair = "blond hair"
    attributes: dict[str, Any] = {
        "color": dominant_colour(png),
        "drawing style": style,
        "subgroup": subgroups.get(concept.base),
        "gender": concept.gender,
        "skin tone": concept.skin_tone,
        "hair": hair,
    }
    return {name: value for name, value in attributes.items() if value is not None}


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
    counts = Counter((kind, word) for kind, candidates in words.values() for word in candidates)
    best = {
        base: max(((counts[kind, word], word) for word in candidates), default=(0, ""))
        for base, (kind, candidates) in words.items()
    }
    return {base: word for base, (count, word) in best.items() if count >= _SIBLINGS}


def main() -> None:
    """Write the miniature."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", help="folder to make")
    for split, default in (("train", 10000), ("validation", 500), ("test", 1000)):
        parser.add_argument(f"--{split}-queries", type=int, default=default, metavar="N", help="at most")
    options = vars(parser.parse_args())
    print(f"MERIT in miniature in {make_mini_merit(options.pop('out'), **options)}")


if __name__ == "__main__":
    main()
