"""Symmetric triplets: a query item, an item that means the same, and one that only looks or sounds alike."""

import hashlib
from collections.abc import Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import datasets

from conjoin.data.emoji_names import GENDER_WORDS, EmojiConcept, emoji_concepts, name_words
from conjoin.data.emoji_sample import load_emoji
from conjoin.data.json_lines import JsonLines
from conjoin.data.pair_sources import open_table
from conjoin.data.pairs import check_ids, resolve_image_path, unknown_column
from conjoin.processing.item_inputs import check_text

TRIPLET_ROLES = ("query", "positive", "negative", "variant")
TRIPLET_FEATURES = datasets.Features(
    {"id": datasets.Value("string")}
    | {
        f"{role}_{part}": datasets.Image(decode=False) if part == "image" else datasets.Value("string")
        for role in TRIPLET_ROLES
        for part in ("image", "text")
    }
)
"""`id`, then `{role}_image` and `{role}_text` for query, positive, negative and the optional variant of the query."""


def symmetric_triplets(
    split: str = "test",
    *,
    query_style: str = "twemoji",
    positive_style: str = "openmoji",
    same_name: bool = False,
    skin_tones: bool = False,
    cache_dir: str | Path | None = None,
) -> datasets.Dataset:
    """Compose triplets from the emoji sample, columns `TRIPLET_FEATURES` (the variant is null).

    The query is a concept in one style with its name. The positive is the same concept in the other style under its
    other name. The negative, in the positive's style and under its other name too, is the most confusable concept of
    the split: the one that differs only in gender, else only in skin tone, else of the same kind with the most words
    in common. So in a pool of triplets the positive alone shows what the query shows.

    Args:
        split: `"train"`, `"validation"` or `"test"`.
        query_style: Style of the query's image.
        positive_style: Style of the images of positive and negative.
        same_name: Also take concepts that have one name only; query and positive then share it.
        skin_tones: Also take skin-tone variants as negatives.
        cache_dir: Instead of the cache folder of `datasets`.

    Raises:
        ImportError: The `sample` extra is not installed.
        ValueError: Unknown split or style, or one style for both.
    """
    if query_style == positive_style:
        raise ValueError(f"query_style and positive_style are both {query_style!r}; the two must differ")
    rows = load_emoji(split, styles=(query_style, positive_style), skin_tones=skin_tones, cache_dir=cache_dir)
    images = images_by_style(rows)
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
            }
        )
    return datasets.Dataset.from_list(triplets, features=TRIPLET_FEATURES)


def load_triplets(path: str | PathLike[str]) -> datasets.Dataset:
    """Load triplets from a JSON-lines file (or a CSV), columns `TRIPLET_FEATURES`.

    Each line is an object with `query_image`, `query_text`, `positive_image`, `positive_text`, `negative_image` and
    `negative_text`; optionally `id` (the row number otherwise), `variant_image` and `variant_text`. Images are paths
    relative to the folder of the file, or URLs. An image or a text may be null, but not both of one item.

    Raises:
        FileNotFoundError: The file, or an image that it names, does not exist; the message names line and field.
        ValueError: A column is missing, an item is empty, a field is of another type (line and field are named), an id
            occurs twice, or the file has no rows.
    """
    path = Path(path).expanduser()
    if path.suffix.lower() in (".jsonl", ".ndjson"):
        rows, unit, first = list(JsonLines(path)), "line", 1
    else:
        rows, unit, first = open_table(path).to_list(), "row", 0
    if not rows:
        raise ValueError(f"{str(path)!r} has no triplets")
    columns = list(dict.fromkeys(key for row in rows for key in row))
    for column in TRIPLET_FEATURES:
        if column not in columns and column != "id" and not column.startswith("variant"):
            raise unknown_column(column, columns)
    triplets = []
    for index, row in enumerate(rows):
        row_id = str(index if row.get("id") is None else row["id"])
        triplets.append(_triplet(row_id, row, path.parent, f"{unit} {index + first} (id {row_id!r})"))
    check_ids([triplet["id"] for triplet in triplets])
    return datasets.Dataset.from_list(triplets, features=TRIPLET_FEATURES)


def images_by_style(rows: datasets.Dataset) -> dict[str, dict[str, Any]]:
    """Arrange the pictures of the emoji sample as style, then concept, to undecoded image."""
    images: dict[str, dict[str, Any]] = {style: {} for style in rows.unique("style")}
    for row in rows.cast_column("image", datasets.Image(decode=False)):
        images[row["style"]][row["concept"]] = row["image"]
    return images


def without_gender(words: Iterable[str]) -> tuple[str, ...]:
    """`words` without those that tell a gender or leave it open."""
    return tuple(word for word in words if word not in GENDER_WORDS)


def _confusability(concept: EmojiConcept, other: EmojiConcept) -> tuple[float, ...]:
    """How good a hard negative `other` is, greater is better; ties are broken by a fixed hash."""
    words, other_words = name_words(concept.text), name_words(other.text)
    is_other_gender = other.gender != concept.gender and without_gender(words) == without_gender(other_words)
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


def _triplet(row_id: str, row: Mapping[str, Any], folder: Path, name: str) -> dict[str, Any]:
    triplet: dict[str, Any] = {"id": row_id}
    for role in TRIPLET_ROLES:
        image_field, text_field = f"{role}_image", f"{role}_text"
        image, text = row.get(image_field), row.get(text_field)
        if image is None and text is None and role != "variant":
            raise ValueError(f"{name}: both {image_field} and {text_field} are null")
        if not isinstance(image, str | None):
            raise ValueError(f"{name}, {image_field}: expected a path or a URL, got {image!r:.80}")
        triplet[image_field] = None if image is None else resolve_image_path(image, folder, f"{name}, {image_field}")
        triplet[text_field] = None if text is None else check_text(text, f"{name}, {text_field}")
    return triplet
