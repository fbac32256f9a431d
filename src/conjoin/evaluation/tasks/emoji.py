"""The embedded sample as a benchmark: unseen emoji concepts, two artists, nine modality combinations."""

import itertools
from argparse import Namespace
from dataclasses import dataclass, replace
from pathlib import Path

import datasets
import torch

from conjoin.data import load_emoji, symmetric_triplets
from conjoin.data.emoji.sample import emoji_concepts
from conjoin.evaluation.benchmark import Benchmark, complete, flag, read_options
from conjoin.evaluation.results import Cell, Results, Symmetric
from conjoin.evaluation.symmetric import TripletVectors, evaluate_symmetric
from conjoin.evaluation.task import EvaluateOptions, RetrievalTask, Rows, TaskScores, evaluate_tasks
from conjoin.retrieval import ItemEncoder

PARTS = ("image", "text", "image+text")
_CUT_OFFS = (1, 5, 10, 50)
_STYLES = ("twemoji", "openmoji")


@dataclass
class EmojiScores:
    """The scores of `evaluate_emoji`.

    Args:
        combinations: One cell per setting, query modality and candidate modality.
        symmetric: Of the symmetric image+text protocol.
        candidates: The rows of the gallery, one per concept, in the gallery's style.
        queries: The rows of the queries: the same concepts in the same order, in the other style.
        searches: The scores of each task, see `emoji_tasks`.
    """

    combinations: list[Cell]
    symmetric: Symmetric
    candidates: datasets.Dataset
    queries: datasets.Dataset
    searches: list[TaskScores]

    def search(self, query: str, candidates: str) -> TaskScores:
        """The scores of one modality combination in its own gallery."""
        return next(each for each in self.searches if each.task.name == f"local {query} → {candidates}")


def emoji_tasks(queries: datasets.Dataset, gallery: datasets.Dataset) -> list[RetrievalTask]:
    """Return one task for each setting (local, global), query modality and candidate modality.

    A query is a concept's name, its picture by the other artist, or both. A candidate is the picture by the gallery's
    artist, the concept's other name (its only name if it has one), or both. Where query and candidate both have
    text, only concepts with two names are queries: string equality would find the others.

    Args:
        queries: The concepts in one style.
        gallery: The same concepts in the same order in the other style.
    """
    asked_rows = {name: Rows(f"queries-{name}", queries.select_columns(["id", *name.split("+")])) for name in PARTS}
    corpus = {}
    for name in PARTS:
        ids = [f"{name}/{id_}" for id_ in gallery["id"][:]]
        rows = gallery.remove_columns("id").add_column("id", ids).select_columns(["id", *name.split("+")])
        corpus[name] = Rows(name, rows)
    is_named_twice = [text is not None for text in gallery["alternative_text"]]
    pairs = list(zip(queries["id"][:], gallery["id"][:], is_named_twice, strict=True))
    tasks = []
    for setting, query, target in itertools.product(("local", "global"), PARTS, PARTS):
        keeps_all = "text" not in query or "text" not in target
        qrels = {id_: [f"{target}/{answer}"] for id_, answer, has_two in pairs if keeps_all or has_two}
        searched = (corpus[target],) if setting == "local" else tuple(corpus.values())
        tasks.append(RetrievalTask(f"{setting} {query} → {target}", asked_rows[query], searched, qrels))
    return tasks


def evaluate_emoji(
    encoder: ItemEncoder,
    out: str | Path,
    options: EvaluateOptions | None = None,
    *,
    split: str = "test",
    query_style: str = "openmoji",
    gallery_style: str = "twemoji",
    language: str = "en",
) -> EmojiScores:
    """Evaluate an encoder on the concepts of a split; the gallery holds all of them in one style. See `emoji_tasks`.

    Args:
        encoder: The model.
        out: Folder of the vectors.
        options: Seed and so on.
        split: `"validation"` or `"test"`.
        query_style: Artist of the queries' pictures.
        gallery_style: Artist of the gallery's pictures.
        language: Of the names in the queries, one of `EMOJI_LANGUAGES`; those of the gallery are English.

    Raises:
        ValueError: Both styles are the same, or the language is unknown.
    """
    if query_style == gallery_style:
        raise ValueError(f"queries and gallery are both drawn by {query_style!r}; choose two styles")
    options = replace(options or EvaluateOptions(), ks=_CUT_OFFS)
    drawn = load_emoji(split, styles=(gallery_style, query_style))
    rows: dict[str, dict[str, int]] = {query_style: {}, gallery_style: {}}
    for row, (style, concept) in enumerate(zip(drawn["style"], drawn["concept"], strict=True)):
        rows[style][concept] = row
    shared = [concept for concept in rows[query_style] if concept in rows[gallery_style]]
    queries, gallery = (drawn.select([of_style[concept] for concept in shared]) for of_style in rows.values())
    names = [other or text for other, text in zip(gallery["alternative_text"], gallery["text"], strict=True)]
    gallery = gallery.remove_columns("text").add_column("text", names)
    if language != "en":
        translated = {concept.concept: concept.text for concept in emoji_concepts(language)}
        texts = [translated[concept] for concept in queries["concept"]]
        queries = queries.remove_columns("text").add_column("text", texts)
        gallery = gallery.remove_columns("alternative_text").add_column("alternative_text", names)
    searches = evaluate_tasks(encoder, emoji_tasks(queries, gallery), out, options)
    cells = []
    for each in searches:
        setting, query, _, target = each.task.name.split(" ")
        sides = (query.replace("+", ","), target.replace("+", ","))
        cells.append(Cell(setting, *sides, len(each.ids), each.task.size, each.metrics()))
    symmetric = evaluate_emoji_triplets(
        encoder, split, gallery_style, query_style, options.seed, options.show_progress
    )
    return EmojiScores(cells, symmetric, gallery, queries, searches)


def evaluate_emoji_triplets(
    encoder: ItemEncoder, split: str, query_style: str, positive_style: str, seed: int = 0, show_progress: bool = True
) -> Symmetric:
    """Evaluate an encoder by the symmetric protocol on composed triplets; their items are the pool.

    Args:
        encoder: The model.
        split: `"validation"` or `"test"`.
        query_style: Artist of the queries' pictures.
        positive_style: Artist of the pictures of positives and negatives.
        seed: Seed of the bootstrap.
        show_progress: Show a progress bar.
    """
    triplets = symmetric_triplets(split, query_style=query_style, positive_style=positive_style)
    vectors, names = [], []
    for role in ("query", "positive", "negative"):
        items = [{"image": row[f"{role}_image"], "text": row[f"{role}_text"]} for row in triplets]
        encode = encoder.encode_query if role == "query" else encoder.encode_document
        vectors.append(torch.from_numpy(encode(items, show_progress=show_progress)))
        artist = query_style if role == "query" else positive_style
        names.append([f"{item['text']}/{artist}" for item in items])
    anchor, positive, negative = vectors
    embedded = TripletVectors(anchor, positive, negative, ids=list(zip(*names, strict=True)))
    return evaluate_symmetric(embedded, seed=seed, name="emoji triplets")


def _run(encoder: ItemEncoder, args: Namespace, out: Path) -> Results:
    split = {"val": "validation"}.get(args.split, args.split)
    styles = {"query_style": args.query_style, "gallery_style": args.gallery_style, "language": args.language}
    scores = evaluate_emoji(encoder, out, read_options(args), split=split, **styles)
    results = Results(
        title="The emoji sample",
        summary="All nine modality combinations, and symmetric triplets, on concepts that are in no training split.",
        seed=args.seed,
        dataset={"name": "emoji sample", "split": split, "concepts": len(scores.queries)} | styles,
        combinations=scores.combinations,
        symmetric=[scores.symmetric],
    )
    return complete(results, scores.searches[: len(PARTS) ** 2])


_ARTIST = "artist of its pictures (default: %(default)s)"
BENCHMARK = Benchmark(
    "emoji",
    "the embedded sample: nine modality combinations and symmetric triplets; no --data",
    _run,
    (
        flag("--split", "concepts to evaluate on (default: test)", choices=("test", "val"), default="test"),
        flag("--query-style", _ARTIST, choices=_STYLES, default="openmoji"),
        flag("--gallery-style", _ARTIST, choices=_STYLES, default="twemoji"),
        flag(
            "--language",
            "language of the names in the queries, such as de; the gallery has English names (default: en)",
            default="en",
            metavar="CODE",
        ),
    ),
    reads_data="none",
)
