"""The evaluation that the embedded sample carries: unseen emoji concepts, two artists, nine modality combinations."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import torch

from conjoin.data import load_emoji, symmetric_triplets
from conjoin.evaluation.combinations import Embedded, evaluate_combinations
from conjoin.evaluation.results import Cell, Symmetric
from conjoin.evaluation.symmetric import evaluate_symmetric
from conjoin.retrieval import EmbeddingStore, ItemEncoder, encode_corpus

PARTS = {"image": ("image",), "text": ("text",), "image,text": ("image", "text")}


@dataclass
class EmojiBenchmark:
    """What `evaluate_emoji` measured, and the vectors it measured it on.

    Args:
        combinations: One cell per setting, query and candidate modality.
        symmetric: The symmetric image+text protocol.
        candidates: The rows of the gallery, one per concept in the gallery's style.
        queries: The rows of the queries, the same concepts in the same order in the other style.
        query_embeddings: By modality, `(N, D)`.
        stores: By modality, the gallery's embedding store.
    """

    combinations: list[Cell]
    symmetric: Symmetric
    candidates: datasets.Dataset
    queries: datasets.Dataset
    query_embeddings: dict[str, torch.Tensor]
    stores: dict[str, EmbeddingStore]


def evaluate_emoji(
    encoder: ItemEncoder,
    folder: str | Path,
    *,
    split: str = "test",
    query_style: str = "openmoji",
    gallery_style: str = "twemoji",
    seed: int = 0,
    show_progress: bool = True,
) -> EmojiBenchmark:
    """Evaluate an encoder on the concepts of a split, all of them the gallery in one style.

    A query is a concept's name, its picture by the other artist, or both. A candidate is the picture by the gallery's
    artist, the concept's other name (its only name where it has one), or both. Where query and candidate both have
    text, only concepts with two names are asked for: the others would be found by string equality.

    Args:
        encoder: The model.
        folder: Where the gallery's embedding stores go.
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
    drawn = load_emoji(split, styles=(gallery_style, query_style))
    rows = {style: _one_style(drawn, style) for style in (query_style, gallery_style)}
    concepts = [concept for concept in rows[query_style]["concept"] if concept in set(rows[gallery_style]["concept"])]
    queries, gallery = (_in_order(rows[style], concepts) for style in (query_style, gallery_style))
    named_twice = [text is not None for text in gallery["alternative_text"]]
    other_names = [other or text for other, text in zip(gallery["alternative_text"], gallery["text"], strict=True)]
    candidates = _with_texts(gallery, other_names)
    stores = {
        name: encode_corpus(
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
    return EmojiBenchmark(
        evaluate_combinations(
            {name: Embedded(vectors, concepts) for name, vectors in query_embeddings.items()},
            {name: Embedded(torch.from_numpy(store.load()[1]), concepts) for name, store in stores.items()},
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
        stores,
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
    """The symmetric protocol over composed triplets; each one's pool is all positives and negatives.

    Args:
        encoder: The model.
        split: `"validation"` or `"test"`.
        query_style: Artist of the queries' pictures.
        positive_style: Artist of the others.
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


def _one_style(rows: datasets.Dataset, style: str) -> datasets.Dataset:
    return rows.select([index for index, found in enumerate(rows["style"]) if found == style])


def _in_order(rows: datasets.Dataset, concepts: Sequence[str]) -> datasets.Dataset:
    place = {concept: index for index, concept in enumerate(rows["concept"])}
    return rows.select([place[concept] for concept in concepts])


def _with_texts(rows: datasets.Dataset, texts: Sequence[str]) -> datasets.Dataset:
    return rows.remove_columns("text").add_column("text", list(texts))


def _item(row: Mapping[str, Any], columns: Sequence[str]) -> dict[str, Any]:
    return {column: row[column] for column in columns}
