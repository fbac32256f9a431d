"""MERIT: queries that interleave several images with text, against all products of a split.

"R@k" in the published tables is a hit rate: any right product among the first k. A wrong product that ties with the
best right one counts as better.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from conjoin.data import MeritItems, MeritProducts, MeritQuery, MeritQueryRows, merit_queries
from conjoin.data.interleaved import row_item
from conjoin.data.merit.layout import ood_subsets, ood_values, subset_names
from conjoin.data.merit.rows import read_captions
from conjoin.evaluation.ranking import rank_of_relevant, tie_tolerance
from conjoin.evaluation.results import Example, Hit, Shown
from conjoin.evaluation.run_file import write_qrels, write_run
from conjoin.retrieval import ItemEncoder, Reranker, SearchResult, encode_collection, rerank, search_exactly

PARTS = ("image", "title")
"""What an ablation leaves out of queries and products (Fig. 6)."""

CUT_OFFS: tuple[int, ...] = (1, 5, 10)
RUN_DEPTH = 100
"""Products of each query in the run file."""

_EXAMPLES = 8
_EXAMPLE_HITS = 5


@dataclass(frozen=True)
class MeritScores:
    """What the tables are made of, for N queries.

    Attributes:
        queries: The queries.
        ranks: `(N,)` rank of the best right product, from 1; the pool's size if it is not among those found.
        pool: Number of products that each query searches, its own included.
        languages: For each query the language of its products and positives; `"several"` if they differ (Table 6).
        subsets: For each query the subsets of the out-of-distribution tests that it is in.
        names: All these subsets in order.
        examples: Some searches.
    """

    queries: list[MeritQuery]
    ranks: torch.Tensor
    pool: int
    languages: list[str]
    subsets: list[list[str]]
    names: list[str]
    examples: list[Example]


def evaluate_merit(
    encoder: ItemEncoder,
    data: str | Path,
    out: str | Path,
    *,
    split: str = "test",
    subsets: Sequence[str] | None = None,
    exclude_query_products: bool = False,
    without: Sequence[str] = (),
    captions: str | Path | None = None,
    dtype: Literal["float32", "float16"] = "float32",
    show_progress: bool = True,
    reranker: Reranker | None = None,
    rerank_top: int = RUN_DEPTH,
) -> MeritScores:
    """Evaluate an encoder on MERIT; an interrupted evaluation resumes with the vectors that are on disk.

    Vectors go to `out/collections`, those of all queries whichever are scored. The first products of every query go to
    `out/runs` (a TREC run file), the right ones to `out/qrels`. All files are checked before anything is encoded.

    Args:
        encoder: The model; its input type says how it takes a query of several images.
        data: The root of MERIT, or of the miniature that `make_mini_merit` writes.
        out: Folder to write to.
        split: `"test"`, or in a miniature also `"validation"`.
        subsets: Score only the queries of these subsets, such as `"language:th"`; all queries when None.
        exclude_query_products: Leave the products that a query shows out of its ranking. As published, they stay.
        without: Of `PARTS`: replace all images by captions, remove all titles.
        captions: A file for `read_captions`; `data/captions.jsonl` when None.
        dtype: Of the stored vectors, as in `encode_collection`.
        show_progress: Show progress bars.
        reranker: Sorts the first products of each query again, in scores and run files.
        rerank_top: How many of them.

    Raises:
        FileNotFoundError: A file is missing.
        ValueError: A malformed query or product (it is named), an unknown subset or part, or no query in the subsets.
    """
    unknown = [part for part in without if part not in PARTS]
    if unknown:
        raise ValueError(f"without={unknown[0]!r}; expected some of {', '.join(PARTS)}")
    data, out = Path(data), Path(out)
    products = MeritProducts(data, split)
    texts = _captions(data, captions) if "image" in without else None
    items = MeritItems(products, texts, titles="title" not in without)
    queries = merit_queries(data, products)
    kept, where, names = _chosen(data, products, queries, subsets)
    folder = out / "collections" / "-".join([split, *(f"without-{part}" for part in PARTS if part in without)])
    encode = partial(encode_collection, encoder=encoder, sync=True, dtype=dtype, show_progress=show_progress)
    # the queries first: a model that takes no several images says so before a large pool is encoded
    asked = encode(MeritQueryRows(items, queries), uri=folder / "queries")
    pool = encode(items, uri=folder / "products")
    queries = [queries[place] for place in kept]
    vectors = asked.vectors([query.id for query in queries])
    own = max(len(query.products) for query in queries) if exclude_query_products else 0
    # a tie longer than this holds more wrong products than the last cut-off
    depth = (
        max(RUN_DEPTH, rerank_top if reranker else 0, max(CUT_OFFS) + max(len(query.positives) for query in queries))
        + own
    )
    found = search_exactly(pool, vectors, depth, device=encoder.device)
    if exclude_query_products:
        shown = [[pid in query.conditions for pid in ids] for query, ids in zip(queries, found.ids, strict=True)]
        found = found._replace(scores=np.where(shown, -np.inf, found.scores))
    if reranker is not None:
        rows = map(items.query, queries)
        asked_for = [
            row_item({part: row[part] for part in ("image", "text") if part in row}, row["id"]) for row in rows
        ]
        found = rerank(found, asked_for, items.product, reranker, rerank_top, show_progress=show_progress)
    _write_run(out, split, queries, found)
    ranks = _ranks(queries, found, len(products))
    languages = [_language(query, products) for query in queries]
    examples = _examples(items, queries, found, ranks)
    return MeritScores(queries, ranks, len(products), languages, where, names, examples)


def _captions(data: Path, path: str | Path | None) -> dict[str, str]:
    own = data / "captions.jsonl"
    if path is None and not own.is_file():
        raise FileNotFoundError(f"no such file: {str(own)!r}; without images, --captions must name a file of captions")
    return read_captions(own if path is None else path)


def _chosen(
    data: Path, products: MeritProducts, queries: Sequence[MeritQuery], subsets: Sequence[str] | None
) -> tuple[list[int], list[list[str]], list[str]]:
    """Return the places of the queries to score, the subsets that each is in, and the names of all subsets."""
    values = ood_values(data)
    names = subset_names(values)
    unknown = [name for name in subsets or () if name not in names]
    if unknown:
        raise ValueError(f"unknown subset {unknown[0]!r}; expected some of {', '.join(names)}")
    where = [ood_subsets(query, products, values) for query in queries]
    kept = [place for place, found in enumerate(where) if subsets is None or not set(subsets).isdisjoint(found)]
    if not kept:
        raise ValueError(f"none of the {len(queries)} queries is in {', '.join(subsets or ())}")
    return kept, [where[place] for place in kept], names if subsets is None else list(dict.fromkeys(subsets))


def _ranks(queries: Sequence[MeritQuery], found: SearchResult, pool: int) -> torch.Tensor:
    right = [[pid in query.positives for pid in ids] for query, ids in zip(queries, found.ids, strict=True)]
    relevant, scores = torch.tensor(right), torch.from_numpy(found.scores)
    ranks = torch.full((len(queries),), pool)
    hit = relevant.any(dim=1)
    if hit.any():
        ranks[hit] = rank_of_relevant(scores[hit], relevant[hit], tie_tolerance(torch.float32))
    return ranks


def _language(query: MeritQuery, products: MeritProducts) -> str:
    languages = {products[pid].language for pid in (*query.products, *query.positives)}
    return languages.pop() if len(languages) == 1 else "several"


def _write_run(out: Path, split: str, queries: Sequence[MeritQuery], found: SearchResult) -> None:
    """Write the first products of each query, and the right ones."""
    for folder in ("runs", "qrels"):
        (out / folder).mkdir(parents=True, exist_ok=True)
    rankings = {
        query.id: [pair for pair in zip(ids, scores, strict=True) if np.isfinite(pair[1])][:RUN_DEPTH]
        for query, ids, scores in zip(queries, found.ids, found.scores.tolist(), strict=True)
    }
    write_run(out / "runs" / f"{split}.txt", rankings, "conjoin")
    write_qrels(out / "qrels" / f"{split}.txt", {query.id: dict.fromkeys(query.positives, 1) for query in queries})


def _examples(
    items: MeritItems, queries: Sequence[MeritQuery], found: SearchResult, ranks: torch.Tensor
) -> list[Example]:
    """Show some queries, evenly spread, with their first products."""
    examples = []
    for place in dict.fromkeys(np.linspace(0, len(queries) - 1, _EXAMPLES).astype(int).tolist()):
        query, row = queries[place], items.query(queries[place])
        item = row_item({part: row[part] for part in ("image", "text") if part in row}, query.where)
        pairs = zip(found.ids[place], found.scores[place].tolist(), strict=True)
        hits = [
            Hit(Shown.from_item(items.product(pid)), score, pid in query.positives)
            for pid, score in islice((pair for pair in pairs if np.isfinite(pair[1])), _EXAMPLE_HITS)
        ]
        title = f"query {query.id}"
        examples.append(Example(Shown.from_item(item), hits, int(ranks[place]), len(items), title))
    return examples
