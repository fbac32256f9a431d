"""The embedded sample: all nine modality combinations on concepts of no training split, and symmetric triplets.

A query is a concept's name, its picture by one artist, or both; a candidate is the picture by another artist, the
concept's other name, or both. Avg of triplets: see the benchmark "symmetric". Ties are failures.
"""

import itertools
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from conjoin.evaluation.tasks import Cell, Rows, Task

if TYPE_CHECKING:
    import datasets

PARTS = ("image", "text", "image+text")
_TITLES = {
    "local": "Local: the gallery holds one modality",
    "global": "Global: the gallery holds all modalities, and only the named one is right",
    "any": "Any: the gallery holds all modalities, and each of the concept is right",
    "once": "Once: the gallery holds each concept in one modality, drawn at random",
}


@dataclass(kw_only=True)
class EmojiOptions:
    """Which concepts are queries, and how they are named.

    Args:
        split: Concepts to evaluate on.
        language: Language of the names in the queries, such as de; the gallery has English names.
    """

    split: Literal["test", "validation"] = "test"
    language: str = "en"


def emoji_rows(options: EmojiOptions) -> "tuple[datasets.Dataset, datasets.Dataset]":
    """The concepts as queries, and the same concepts in the same order as candidates.

    A query is a concept's name, its picture by OpenMoji, or both. A candidate is the picture by Twemoji, the concept's
    other name (its only name if it has one), or both.

    Raises:
        ValueError: The language is unknown.
    """
    from conjoin.data.emoji.sample import emoji_concepts, load_emoji

    drawn = load_emoji(options.split, styles=("twemoji", "openmoji"))
    row_of = {drawing: row for row, drawing in enumerate(zip(drawn["style"], drawn["concept"], strict=True))}
    shared = [concept for style, concept in row_of if style == "openmoji" and ("twemoji", concept) in row_of]
    queries, gallery = (drawn.select([row_of[style, name] for name in shared]) for style in ("openmoji", "twemoji"))
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

    Two more settings have one cell for each query modality: any, where each candidate of the concept is right, and
    once, where the gallery has one of them.

    Where query and candidate both have text, only concepts with two names are queries: string equality would find the
    others. All candidates are encoded once; a local gallery is the part of one modality.
    """
    from conjoin.data import symmetric_triplets
    from conjoin.data.columns import undecoded
    from conjoin.evaluation.tasks.symmetric import triplet_cell

    queries, gallery = emoji_rows(options)
    asked = {part: Rows(f"queries-{part}", queries.select_columns(["id", *part.split("+")])) for part in PARTS}
    candidates: list[dict[str, Any]] = []
    for part in PARTS:
        columns = undecoded(gallery).select_columns(["id", *part.split("+")])
        candidates += [row | {"id": f"{part}/{row['id']}"} for row in columns]
    corpus = Rows("gallery", candidates)
    pools = {part: [row["id"] for row in candidates if row["id"].startswith(f"{part}/")] for part in PARTS}
    named_twice = [text is not None for text in gallery["alternative_text"]]
    pairs = list(zip(queries["id"][:], gallery["id"][:], named_twice, strict=True))
    cells = []

    def keeps(query: str, target: str, has_two_names: bool) -> bool:
        return has_two_names or "text" not in query or "text" not in target.partition("/")[0]

    for setting, query, target in itertools.product(("local", "global"), PARTS, PARTS):
        qrels = {id_: [f"{target}/{answer}"] for id_, answer, has_two in pairs if keeps(query, target, has_two)}
        among = pools[target] if setting == "local" else None
        name = f"{setting} {query} → {target}"
        cells.append(Cell(name, asked[query], corpus, qrels, among, section=_TITLES[setting]))
    drawn = random.Random(0).choices(PARTS, k=len(pairs))
    pool = [f"{target}/{answer}" for target, (_, answer, _) in zip(drawn, pairs, strict=True)]
    for query in PARTS:
        every = {
            id_: [f"{part}/{answer}" for part in PARTS]
            for id_, answer, has_two in pairs
            if keeps(query, "text", has_two)
        }
        one = {id_: [name] for (id_, _, has_two), name in zip(pairs, pool, strict=True) if keeps(query, name, has_two)}
        cells.append(Cell(f"any {query}", asked[query], corpus, every, section=_TITLES["any"]))
        cells.append(Cell(f"once {query}", asked[query], corpus, one, pool, section=_TITLES["once"]))
    return [*cells, triplet_cell("emoji triplets", symmetric_triplets(options.split))]


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
