"""The embedded sample: all nine modality combinations on concepts of no training split, and symmetric triplets.

A query is a concept's name, its picture by one artist, or both; a candidate is the picture by another artist, the
concept's other name, or both. Avg of triplets: see the benchmark "symmetric". Ties are failures.
"""

import itertools
from dataclasses import dataclass
from typing import Any, Literal

import datasets

from conjoin.data import load_emoji, symmetric_triplets
from conjoin.data.emoji.sample import emoji_concepts
from conjoin.evaluation.benchmark import Task
from conjoin.evaluation.task import Cell, Rows
from conjoin.evaluation.tasks.symmetric import triplet_cell

PARTS = ("image", "text", "image+text")
_TITLES = {
    "local": "Local: the gallery holds one modality",
    "global": "Global: the gallery holds all modalities, and only the named one is right",
}


@dataclass(kw_only=True)
class EmojiOptions:
    """Which concepts are queries, and how they are drawn and named.

    Args:
        split: Concepts to evaluate on.
        query_style: Artist of the queries' pictures.
        gallery_style: Artist of the gallery's pictures.
        language: Language of the names in the queries, such as de; the gallery has English names.
    """

    split: Literal["test", "validation"] = "test"
    query_style: Literal["twemoji", "openmoji"] = "openmoji"
    gallery_style: Literal["twemoji", "openmoji"] = "twemoji"
    language: str = "en"


def emoji_rows(options: EmojiOptions) -> tuple[datasets.Dataset, datasets.Dataset]:
    """The concepts as queries, and the same concepts in the same order as candidates.

    A query is a concept's name, its picture by the other artist, or both. A candidate is the picture by the gallery's
    artist, the concept's other name (its only name if it has one), or both.

    Raises:
        ValueError: Both styles are the same, or the language is unknown.
    """
    styles = (options.query_style, options.gallery_style)
    if styles[0] == styles[1]:
        raise ValueError(f"queries and gallery are both drawn by {styles[0]!r}; choose two styles")
    drawn = load_emoji(options.split, styles=styles[::-1])
    rows: dict[str, dict[str, int]] = {style: {} for style in styles}
    for row, (style, concept) in enumerate(zip(drawn["style"], drawn["concept"], strict=True)):
        rows[style][concept] = row
    shared = [concept for concept in rows[styles[0]] if concept in rows[styles[1]]]
    queries, gallery = (drawn.select([of_style[concept] for concept in shared]) for of_style in rows.values())
    names = [other or text for other, text in zip(gallery["alternative_text"], gallery["text"], strict=True)]
    gallery = gallery.remove_columns("text").add_column("text", names)
    if options.language != "en":  # every concept then has two names
        translated = {concept.concept: concept.text for concept in emoji_concepts(options.language)}
        texts = [translated[concept] for concept in queries["concept"]]
        queries = queries.remove_columns("text").add_column("text", texts)
        gallery = gallery.remove_columns("alternative_text").add_column("alternative_text", names)
    return queries, gallery


def emoji_cells(options: EmojiOptions) -> list[Cell]:
    """One cell for each setting (local, global), query modality and candidate modality, and one of triplets.

    Where query and candidate both have text, only concepts with two names are queries: string equality would find the
    others. All candidates are encoded once; a local gallery is the part of one modality.
    """
    queries, gallery = emoji_rows(options)
    asked = {part: Rows(f"queries-{part}", queries.select_columns(["id", *part.split("+")])) for part in PARTS}
    candidates: list[dict[str, Any]] = []
    for part in PARTS:
        plain = gallery.cast_column("image", datasets.Image(decode=False))
        candidates += [{"id": f"{part}/{row['id']}"} | {name: row[name] for name in part.split("+")} for row in plain]
    corpus = Rows("gallery", candidates)
    pools = {part: [row["id"] for row in candidates if row["id"].startswith(f"{part}/")] for part in PARTS}
    named_twice = [text is not None for text in gallery["alternative_text"]]
    pairs = list(zip(queries["id"][:], gallery["id"][:], named_twice, strict=True))
    cells = []
    for setting, query, target in itertools.product(_TITLES, PARTS, PARTS):
        keeps_all = "text" not in query or "text" not in target
        qrels = {id_: [f"{target}/{answer}"] for id_, answer, has_two in pairs if keeps_all or has_two}
        among = pools[target] if setting == "local" else None
        name = f"{setting} {query} → {target}"
        cells.append(Cell(name, asked[query], corpus, qrels, among, section=_TITLES[setting]))
    styles: dict[str, Any] = {"query_style": options.gallery_style, "positive_style": options.query_style}
    return [*cells, triplet_cell("emoji triplets", symmetric_triplets(options.split, **styles))]


TASK = Task(
    "emoji",
    "The emoji sample",
    str(__doc__),
    EmojiOptions,
    emoji_cells,
    ks=(1, 5, 10, 50),
    headline=("hit_rate@10",),
    averages=True,
)
