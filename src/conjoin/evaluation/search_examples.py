"""Searches to look at: queries with their first results, for the report (SOLAR Fig. 8, 9)."""

from collections.abc import Collection, Sequence

import torch.nn.functional as F
from torch import Tensor

from .results import Example, Hit, Shown


def search_examples(
    queries: Sequence[Shown],
    query_embeddings: Tensor,
    gallery: Sequence[Shown],
    gallery_embeddings: Tensor,
    relevant: Sequence[Collection[int]],
    k: int = 5,
) -> list[Example]:
    """Rank the gallery for each query by cosine similarity and keep the first `k`.

    Args:
        queries: What a reader sees of the Q queries.
        query_embeddings: `(Q, D)`.
        gallery: The same of the G candidates.
        gallery_embeddings: `(G, D)`.
        relevant: For each query the places of the right candidates in the gallery.
        k: Results shown.

    Returns:
        Examples for `Results.examples`; the rank of the first right candidate counts ties against it.

    Raises:
        ValueError: The numbers do not fit, or a query has no right candidate.
    """
    sizes = {"queries": (len(queries), len(query_embeddings)), "gallery": (len(gallery), len(gallery_embeddings))}
    for name, (shown, embedded) in sizes.items():
        if shown != embedded:
            raise ValueError(f"{name}: {shown} items are shown, but {embedded} embedded")
    if len(relevant) != len(queries) or not all(relevant):
        raise ValueError("relevant must name at least one candidate for every query")
    scores = F.normalize(query_embeddings.float(), dim=1) @ F.normalize(gallery_embeddings.float(), dim=1).T
    examples = []
    for query, row, right in zip(queries, scores, relevant, strict=True):
        best = row[list(right)].max()
        rank = 1 + int((row >= best).sum()) - sum(bool(row[place] >= best) for place in right)
        hits = [
            Hit(gallery[place], score, place in right)
            for score, place in zip(*(found.tolist() for found in row.topk(min(k, len(gallery)))), strict=True)
        ]
        examples.append(Example(query, hits, rank, len(gallery)))
    return examples
