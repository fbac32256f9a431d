"""The embedded sample as a benchmark: unseen emoji concepts, two artists, nine modality combinations."""

from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import torch

from conjoin.data import load_emoji, symmetric_triplets
from conjoin.evaluation.benchmark import BENCHMARKS, Benchmark
from conjoin.evaluation.combinations import Embedded, evaluate_combinations
from conjoin.evaluation.results import Cell, Results, Symmetric
from conjoin.evaluation.symmetric import evaluate_symmetric
from conjoin.retrieval import Collection, ItemEncoder, encode_collection

PARTS = {"image": ("image",), "text": ("text",), "image,text": ("image", "text")}


@dataclass
class EmojiScores:
    """The scores of `evaluate_emoji` and the vectors behind them.

    Args:
        combinations: One cell per setting, query modality and candidate modality.
        symmetric: Of the symmetric image+text protocol.
        candidates: The rows of the gallery, one per concept, in the gallery's style.
        queries: The rows of the queries: the same concepts in the same order, in the other style.
        query_embeddings: `(N, D)` by modality.
        collections: The gallery's collections by modality.
    """

    combinations: list[Cell]
    symmetric: Symmetric
    candidates: datasets.Dataset
    queries: datasets.Dataset
    query_embeddings: dict[str, torch.Tensor]
    collections: dict[str, Collection]


def evaluate_emoji(
    encoder: ItemEncoder,
    folder: str | Path,
    *,
    split: str = "test",
    query_style: str = "openmoji",
    gallery_style: str = "twemoji",
    seed: int = 0,
    show_progress: bool = True,
) -> EmojiScores:
    """Evaluate an encoder on the concepts of a split; the gallery holds all of them in one style.

    A query is a concept's name, its picture by the other artist, or both. A candidate is the picture by the gallery's
    artist, the concept's other name (its only name if it has one), or both. Where query and candidate both have
    text, only concepts with two names are queries: string equality would find the others.

    Args:
        encoder: The model.
        folder: Folder of the gallery's collections.
        split: `"validation"` or `"test"`.
        query_style: Artist of the queries' pictures.
        gallery_style: Artist of the gallery's pictures.
        seed: Seed of the bootstrap.
        show_progress: Show progress bars.

    Raises:
        ValueError: Both styles are the same.
    """
    if query_style == gallery_style:
        raise ValueError(f"queries and gallery are both drawn by {query_style!r}; choose two styles")
    queries, gallery = _load_both_styles(split, query_style, gallery_style)
    concepts = queries["concept"][:]
    named_twice = [text is not None for text in gallery["alternative_text"]]
    other_names = [other or text for other, text in zip(gallery["alternative_text"], gallery["text"], strict=True)]
    candidates = gallery.remove_columns("text").add_column("text", other_names)
    collections = {
        name: encode_collection(
            candidates.select_columns(["id", *columns]),
            encoder,
            Path(folder) / name.replace(",", "+"),
            show_progress=show_progress,
        )
        for name, columns in PARTS.items()
    }
    query_embeddings = {
        name: torch.from_numpy(encoder.encode([_item(row, columns) for row in queries], show_progress=show_progress))
        for name, columns in PARTS.items()
    }
    with_text = [name for name, columns in PARTS.items() if "text" in columns]
    return EmojiScores(
        evaluate_combinations(
            {name: Embedded(vectors, concepts) for name, vectors in query_embeddings.items()},
            {
                name: Embedded(torch.from_numpy(collection.vectors(candidates["id"][:])), concepts)
                for name, collection in collections.items()
            },
            keep={(query, candidate): named_twice for query in with_text for candidate in with_text},
            seed=seed,
        ),
        evaluate_emoji_triplets(
            encoder,
            split=split,
            query_style=gallery_style,
            positive_style=query_style,
            seed=seed,
            show_progress=show_progress,
        ),
        candidates,
        queries,
        query_embeddings,
        collections,
    )


def evaluate_emoji_triplets(
    encoder: ItemEncoder,
    *,
    split: str = "test",
    query_style: str = "twemoji",
    positive_style: str = "openmoji",
    seed: int = 0,
    show_progress: bool = True,
    name: str = "emoji triplets",
) -> Symmetric:
    """Evaluate an encoder by the symmetric protocol on composed triplets; their items are the pool.

    Args:
        encoder: The model.
        split: `"validation"` or `"test"`.
        query_style: Artist of the queries' pictures.
        positive_style: Artist of the pictures of positives and negatives.
        seed: Seed of the bootstrap.
        show_progress: Show a progress bar.
        name: Of the result.
    """
    triplets = symmetric_triplets(split, query_style=query_style, positive_style=positive_style)
    roles = ("query", "positive", "negative")
    items = [{"image": row[f"{role}_image"], "text": row[f"{role}_text"]} for role in roles for row in triplets]
    vectors = torch.from_numpy(encoder.encode(items, show_progress=show_progress)).chunk(3)
    artists = {role: query_style if role == "query" else positive_style for role in roles}
    names = [[f"{row[f'{role}_text']}/{artists[role]}" for row in triplets] for role in roles]
    anchor, positive, negative = vectors
    return evaluate_symmetric(anchor, positive, negative, ids=list(zip(*names, strict=True)), seed=seed, name=name)


def _load_both_styles(split: str, query_style: str, gallery_style: str) -> tuple[datasets.Dataset, datasets.Dataset]:
    """The concepts that both artists drew, in the same order in both styles."""
    drawn = load_emoji(split, styles=(gallery_style, query_style))
    places: dict[str, dict[str, int]] = {query_style: {}, gallery_style: {}}
    for place, (style, concept) in enumerate(zip(drawn["style"], drawn["concept"], strict=True)):
        places[style][concept] = place
    shared = [concept for concept in places[query_style] if concept in places[gallery_style]]
    queries, gallery = (drawn.select([found[concept] for concept in shared]) for found in places.values())
    return queries, gallery


def _item(row: Mapping[str, Any], columns: Sequence[str]) -> dict[str, Any]:
    return {column: row[column] for column in columns}


def _add_arguments(parser: ArgumentParser) -> None:
    options = parser.add_argument_group("options of emoji")
    options.add_argument(
        "--split", choices=("test", "val"), default="test", help="concepts to evaluate on (default: %(default)s)"
    )
    for role, style in (("query", "openmoji"), ("gallery", "twemoji")):
        options.add_argument(
            f"--{role}-style",
            choices=("twemoji", "openmoji", "noto"),
            default=style,
            help="artist of its pictures; noto needs a font and is in no training split (default: %(default)s)",
        )


def _run(encoder: ItemEncoder, args: Namespace, out: Path) -> Results:
    split = {"val": "validation"}.get(args.split, args.split)
    styles = {"query_style": args.query_style, "gallery_style": args.gallery_style}
    found = evaluate_emoji(
        encoder, out / "collections", split=split, **styles, seed=args.seed, show_progress=not args.quiet
    )
    return Results(
        title="The emoji sample",
        summary="All nine modality combinations, and symmetric triplets, on concepts that are in no training split.",
        seed=args.seed,
        dataset={"name": "emoji sample", "split": split, "concepts": len(found.queries)} | styles,
        combinations=found.combinations,
        symmetric=[found.symmetric],
    )


EMOJI = BENCHMARKS.register(
    Benchmark(
        "emoji",
        "the embedded sample: nine modality combinations and symmetric triplets; no --data",
        _add_arguments,
        _run,
        reads_data="none",
    )
)
