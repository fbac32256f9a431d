"""MERIT: queries that interleave several images with text, against all products of a split.

"R@k" in the published tables is a hit rate: any right product among the first k. A wrong product that ties with the
best right one counts as better.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from conjoin.data import MeritItems, MeritProducts, MeritQuery, merit_queries
from conjoin.data.merit.layout import ood_subsets, ood_values, subset_names
from conjoin.data.merit.rows import read_captions
from conjoin.evaluation.ranking import rank_of_relevant, tie_tolerance
from conjoin.evaluation.run_file import write_qrels, write_run
from conjoin.progress import progress
from conjoin.retrieval import ItemEncoder, SearchResult, encode_corpus, search_store

PARTS = ("image", "title")
"""What an ablation leaves out of queries and products (Fig. 6)."""

CUT_OFFS = (1, 5, 10)
RUN_DEPTH = 100
"""Products of each query in the run file."""

_BATCHES_AT_ONCE = 16


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
    """

    queries: list[MeritQuery]
    ranks: torch.Tensor
    pool: int
    languages: list[str]
    subsets: list[list[str]]
    names: list[str]


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
    dtype: str = "float32",
    show_progress: bool = True,
) -> MeritScores:
    """Evaluate an encoder on MERIT; an interrupted evaluation resumes with the product vectors that are on disk.

    Vectors go to `out/stores`, the first products of every query to `out/runs` (a TREC run file), the right ones to
    `out/qrels`. All files and queries are checked before anything is encoded.

    Args:
        encoder: The model; its input type says how it takes a query of several images.
        data: The root of MERIT, or of the miniature that `make_mini_merit` writes.
        out: Folder to write to.
        split: `"test"`, or in a miniature also `"validation"`.
        subsets: Score only the queries of these subsets, such as `"language:th"`; all queries when None.
        exclude_query_products: Leave the products that a query shows out of its ranking. As published, they stay.
        without: Of `PARTS`: replace all images by captions, remove all titles.
        captions: A file for `read_captions`; `data/captions.jsonl` when None.
        dtype: Of the stored vectors, as in `encode_corpus`.
        show_progress: Show progress bars.

    Raises:
        FileNotFoundError: A file is missing.
        ValueError: A malformed query or product (it is named), an unknown subset or part, or no query in the subsets.
    """
    unknown = [part for part in without if part not in PARTS]
    if unknown:
        raise ValueError(f"without={unknown[0]!r}; expected some of {', '.join(PARTS)}")
    data, out = Path(data), Path(out)
    products = MeritProducts(data, split)
    texts = read_captions(captions or data / "captions.jsonl") if "image" in without else None
    items = MeritItems(products, texts, titles="title" not in without)
    queries, where, names = _chosen(data, products, subsets)
    folder = out / "stores" / "-".join([split, *(f"without-{part}" for part in PARTS if part in without)])
    store = encode_corpus(items, encoder, folder, dtype=dtype, show_progress=show_progress)
    vectors = _encode_queries(encoder, items, queries, show_progress)
    own = max(len(query.products) for query in queries) if exclude_query_products else 0
    # a tie longer than this holds more wrong products than the last cut-off
    depth = max(RUN_DEPTH, max(CUT_OFFS) + max(len(query.positives) for query in queries)) + own
    found = search_store(store, vectors, k=depth, device=encoder.device)
    if exclude_query_products:
        shown = [[pid in query.conditions for pid in ids] for query, ids in zip(queries, found.ids, strict=True)]
        found = found._replace(scores=np.where(shown, -np.inf, found.scores))
    _write_run(out, split, queries, found)
    languages = [_language(query, products) for query in queries]
    return MeritScores(queries, _ranks(queries, found, len(products)), len(products), languages, where, names)


def _chosen(
    data: Path, products: MeritProducts, subsets: Sequence[str] | None
) -> tuple[list[MeritQuery], list[list[str]], list[str]]:
    """Return the queries to score, the subsets that each is in, and the names of all subsets."""
    values = ood_values(data)
    names = subset_names(values)
    unknown = [name for name in subsets or () if name not in names]
    if unknown:
        raise ValueError(f"unknown subset {unknown[0]!r}; expected some of {', '.join(names)}")
    queries = merit_queries(data, products)
    where = [ood_subsets(query, products, values) for query in queries]
    if subsets is None:
        return queries, where, names
    kept = [place for place, found in enumerate(where) if not set(subsets).isdisjoint(found)]
    if not kept:
        raise ValueError(f"no query of {queries[0].where.rpartition(',')[0]} is in {', '.join(subsets)}")
    return [queries[place] for place in kept], [where[place] for place in kept], list(subsets)


def _encode_queries(
    encoder: ItemEncoder, items: MeritItems, queries: Sequence[MeritQuery], show_progress: bool
) -> np.ndarray:
    """Return the vectors `(N, D)` of the queries, whose images are in memory for some batches at once."""
    step = _BATCHES_AT_ONCE * encoder.batch_size
    vectors = []
    with progress(total=len(queries), desc="queries", unit="query", show=show_progress) as bar:
        for start in range(0, len(queries), step):
            some = queries[start : start + step]
            names = [f"{query.id} ({query.where})" for query in some]
            vectors.append(encoder.encode([items.query(query) for query in some], names, on_batch=bar.update))
    return np.concatenate(vectors)


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
