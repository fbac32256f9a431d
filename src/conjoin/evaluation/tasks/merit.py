"""MERIT: queries that interleave several images with text, against all products of a split.

"R@k" in the published tables is a hit rate: any right product among the first k.
"""

import math
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from conjoin.data import MeritItems, MeritProducts, MeritQuery, MeritQueryRows, merit_queries
from conjoin.data.merit import ood_subsets, ood_values, read_captions, subset_names
from conjoin.evaluation.benchmark import DTYPE, Benchmark, flag, group_table, run_tasks
from conjoin.evaluation.report.page import EXAMPLES_NOTE, HIT_RATE_NOTE, metric_name, task_examples
from conjoin.evaluation.results import Headline, Metric, Results, TableRow
from conjoin.evaluation.task import EvaluateOptions, RetrievalTask, Rows, TaskScores, evaluate_task
from conjoin.retrieval import ItemEncoder

PARTS = ("image", "title")
"""What an ablation leaves out of queries and products (Fig. 6)."""
RUN_DEPTH = 100
"""Products of each query in the run file."""

_LANGUAGE_NOTE = "The language of all products that a query shows and of all that answer it."
_OOD_NOTE = (
    "language: all products of the query, its answers and its hard negatives have the language. attribute: a "
    "condition of the query. class: any of these products is of the class. A query is in one subset of each at most."
)


def merit_task(
    data: str | Path,
    *,
    split: str = "test",
    subsets: Sequence[str] | None = None,
    exclude_query_products: bool = False,
    without: Sequence[str] = (),
    captions: str | Path | None = None,
) -> RetrievalTask:
    """Read MERIT; all files are checked before anything is encoded.

    Args:
        data: The root of MERIT, or of the miniature that `experiments/mini_merit.py` writes.
        split: `"test"`, or in a miniature also `"validation"`.
        subsets: Score only the queries of these subsets, such as `"language:th"`; all queries when None.
        exclude_query_products: Leave the products that a query shows out of its ranking. As published, they stay.
        without: Of `PARTS`: replace all images by captions, remove all titles.
        captions: A file for `read_captions`; `data/captions.jsonl` when None.

    Returns:
        The task; its groups are `"language"` (`"several"` if those of a query's products differ, Table 6), `"subset"`
        and `"size"`, the number of products in the query.

    Raises:
        FileNotFoundError: A file is missing.
        ValueError: A malformed query or product (it is named), an unknown subset or part, or no query in the subsets.
    """
    unknown = [part for part in without if part not in PARTS]
    if unknown:
        raise ValueError(f"without={unknown[0]!r}; expected some of {', '.join(PARTS)}")
    data = Path(data)
    products = MeritProducts(data, split)
    path = Path(captions or data / "captions.jsonl")
    if "image" in without and captions is None and not path.is_file():
        raise FileNotFoundError(
            f"no such file: {str(path)!r}; without images, --captions must name a file of captions"
        )
    texts = read_captions(path) if "image" in without else None
    items = MeritItems(products, texts, titles="title" not in without)
    queries = merit_queries(data, products)
    values = ood_values(data)
    names = subset_names(values)
    unknown = [name for name in subsets or () if name not in names]
    if unknown:
        raise ValueError(f"unknown subset {unknown[0]!r}; expected some of {', '.join(names)}")
    held = {query.id: ood_subsets(query, products, values) for query in queries}
    by_subset = {
        name: [id_ for id_, its in held.items() if name in its]
        for name in dict.fromkeys(names if subsets is None else subsets)
    }
    named = {id_ for ids in by_subset.values() for id_ in ids}
    kept = [query for query in queries if subsets is None or query.id in named]
    if not kept:
        raise ValueError(f"none of the {len(queries)} queries is in {', '.join(subsets or ())}")

    def group(name_of: Callable[[MeritQuery], str]) -> dict[str, list[str]]:
        """Ids of queries by name, `"several"` last."""
        by_name: dict[str, list[str]] = {}
        for query in kept:
            by_name.setdefault(name_of(query), []).append(query.id)
        return {name: by_name[name] for name in sorted(by_name, key=lambda name: (name == "several", name))}

    def language(query: MeritQuery) -> str:
        languages = {products[pid].language for pid in (*query.products, *query.positives)}
        return languages.pop() if len(languages) == 1 else "several"

    folder = "-".join([split, *(f"without-{part}" for part in PARTS if part in without)])
    by_id = {query.id: query for query in queries}
    return RetrievalTask(
        split,
        Rows(f"{folder}/queries", MeritQueryRows(items, queries), lookup=lambda id_: items.query(by_id[id_])),
        (Rows(f"{folder}/products", items, lookup=items.product),),
        {query.id: query.positives for query in kept},
        excluded={query.id: query.products for query in kept} if exclude_query_products else {},
        groups={
            "language": group(language),
            "size": group(lambda query: str(len(query.products))),
            "subset": by_subset,
        },
        run_depth=RUN_DEPTH,
    )


def evaluate_merit(
    encoder: ItemEncoder,
    data: str | Path,
    out: str | Path,
    options: EvaluateOptions | None = None,
    **which: Any,  # noqa: ANN401 - of `merit_task`
) -> TaskScores:
    """Evaluate an encoder on MERIT; an interrupted evaluation resumes with the vectors that are on disk.

    Args:
        encoder: The model; its input type says how it takes a query of several images.
        data: As for `merit_task`.
        out: Folder to write to: vectors (those of all queries whichever are scored), run files and judgements.
        options: Type of the vectors, reranker and so on.
        which: Further arguments of `merit_task`.
    """
    return evaluate_task(encoder, merit_task(data, **which), out, options)


def merit_results(scores: TaskScores, seed: int = 0) -> Results:
    """The scores as `Results`: all queries, by language, by subset, and by number of products in the query."""
    task, subsets = scores.task, scores.task.groups["subset"]
    tables = [
        group_table([scores], "language", "By language", "language", note=_LANGUAGE_NOTE),
        group_table([scores], "size", "By number of products in the query", "products", report_only=True),
    ]
    if any(subsets.values()):  # a catalogue of the user's own has none
        table = group_table([scores], "subset", "Out-of-distribution subsets", "subset", note=_OOD_NOTE)
        tables.insert(1, replace(table, rows=_with_averages(table.rows)))
    return Results(
        title="MERIT",
        summary="Queries that interleave the images and titles of several products with text. Each searches all "
        f"{task.size:,} products of the split. {HIT_RATE_NOTE} MRR@10 counts ranks up to 10.",
        seed=seed,
        headline=[
            Headline(metric_name(name), metric, f"{len(scores.ids):,} queries")
            for name, metric in scores.metrics().items()
        ],
        tables=tables,
        examples=task_examples([scores], 8),
        examples_note=f"{EXAMPLES_NOTE} [1], [2] stand for the images.",
    )


def _with_averages(subsets: Sequence[list[Any]]) -> list[TableRow]:
    """The subsets, each kind followed by the mean of its subsets as in Table 7; empty subsets have no score."""
    rows: list[TableRow] = []
    for kind in dict.fromkeys(row[0].partition(":")[0] for row in subsets):
        members = [row for row in subsets if row[0].partition(":")[0] == kind]
        rows += members
        scored = [row[2:] for row in members if row[1]]
        if len(scored) > 1:
            columns = [[metric.value for metric in column] for column in zip(*scored, strict=True)]
            means = [Metric(math.fsum(column) / len(scored)) for column in columns]
            rows.append([f"average, {kind}", sum(row[1] for row in members), *means])
    return rows


def _tasks(args: Namespace) -> list[RetrievalTask]:
    which = {name: vars(args)[name] for name in ("split", "exclude_query_products", "without", "captions")}
    return [merit_task(args.data, subsets=args.subset, **which)]


def _report(scores: list[TaskScores], args: Namespace) -> Results:
    results = merit_results(scores[0], args.seed)
    size = scores[0].task.size
    results.dataset = {"name": "MERIT", "folder": str(args.data), "split": args.split, "products": size}
    results.config = {
        "subsets": args.subset or "all",
        "without": args.without or "nothing",
        "query products": "left out" if args.exclude_query_products else "in the pool",
    }
    return results


BENCHMARK = Benchmark(
    "merit",
    "MERIT: queries of several images and texts; also writes run files; --data is its root folder",
    run_tasks(_tasks, _report),
    (
        flag(
            "--split",
            "validation is part of a miniature (default: test)",
            choices=("test", "validation"),
            default="test",
        ),
        flag(
            "--subset",
            "only the queries of these out-of-distribution subsets, e.g. language:th class:drink (default: all)",
            nargs="+",
            metavar="NAME",
        ),
        flag(
            "--exclude-query-products",
            "leave the products that a query shows out of its ranking (as published, they stay)",
            action="store_true",
        ),
        flag(
            "--without",
            "ablations, in queries and products: image: captions in place of images; title: no titles",
            nargs="+",
            choices=PARTS,
            default=[],
        ),
        flag("--captions", "JSON lines of idx and caption (default: captions.jsonl of the data)", metavar="FILE"),
        DTYPE,
    ),
    reranks=True,
)
