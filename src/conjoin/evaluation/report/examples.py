"""Example searches for the report: queries with their first results (SOLAR Fig. 8, 9)."""

from collections.abc import Collection, Sequence

import torch.nn.functional as F
from torch import Tensor

from conjoin.evaluation.results import Example, Hit, Shown
from conjoin.evaluation.task import TaskScores

EXAMPLES_NOTE = "Queries evenly spaced in the data, then queries whose first result is wrong."
_EXAMPLES = 12


def task_examples(scores: Sequence[TaskScores], spread: int | None = None) -> list[Example]:
    """Some searches of each task, then as many whose first result is wrong.

    Args:
        scores: Of the tasks.
        spread: Queries of each task, evenly spaced; None for three, or one where there are many tasks.
    """
    spread = min(3, max(1, _EXAMPLES // max(len(scores), 1))) if spread is None else spread
    examples: list[Example] = []
    for each in scores:
        chosen = each.spread(spread)
        examples += each.examples([*chosen, *(id_ for id_ in each.spread(spread, missed=True) if id_ not in chosen)])
    return examples


def search_examples(
    queries: Sequence[Shown],
    query_embeddings: Tensor,
    gallery: Sequence[Shown],
    gallery_embeddings: Tensor,
    relevant: Sequence[Collection[int]],
    k: int = 5,
    title: str = "",
) -> list[Example]:
    """Rank the gallery for each query by cosine similarity and keep the first `k`.

    Args:
        queries: The Q queries as the report shows them.
        query_embeddings: `(Q, D)`.
        gallery: The G candidates as the report shows them.
        gallery_embeddings: `(G, D)`.
        relevant: For each query the positions of the right candidates in the gallery.
        k: Number of results shown.
        title: Of every example.

    Returns:
        One example per query, for `Results.examples`. In the rank of the first right candidate, ties count as better.

    Raises:
        ValueError: Items and embeddings differ in number, or a query has no right candidate.
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
        rank = 1 + int((row >= best).sum()) - sum(bool(row[index] >= best) for index in right)
        hits = [
            Hit(gallery[index], score, index in right)
            for score, index in zip(*(part.tolist() for part in row.topk(min(k, len(gallery)))), strict=True)
        ]
        examples.append(Example(query, hits, rank, len(gallery), title))
    return examples
