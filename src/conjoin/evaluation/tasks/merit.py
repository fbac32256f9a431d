"""MERIT: queries that interleave the images and titles of several products with text, against all products of a split.

R@k: a right product among the first k; MRR@10 counts ranks up to 10. Wrong candidates that tie with the best right one
count as better. By language: of all products that a query shows and of all that answer it. By subset: language: all
products of the query, its answers and its hard negatives have the language; attribute: a condition of the query;
class: any of these products is of the class. A query is in one subset of each at most. In examples, [1],
[2] stand for images.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from conjoin.evaluation.tasks import Cell, Rows, Task

if TYPE_CHECKING:
    from conjoin.evaluation.benchmark import CellScores
    from conjoin.evaluation.results import Table, TableRow

PARTS = ("image", "title")
"""What an ablation leaves out of queries and products (Fig. 6)."""
ERRORS = ("right", "category error", "attribute error", "visual or detail error")
"""Of the first result; the first that holds counts."""
OTHERS = "others"
"""The attribute of a query whose conditions are not known."""
_ERRORS_NOTE = (
    "Category: no right product has the class of the first result. Attribute: it lacks one that the query names. "
    "Visual or detail: class and attributes fit, and it is not among the right ones."
)


@dataclass(kw_only=True)
class MeritOptions:
    """Which queries of MERIT.

    Args:
        data: Root folder of MERIT, or of the miniature that experiments/mini_merit.py writes.
        split: Validation is part of a miniature.
        subset: Only the queries of these out-of-distribution subsets, e.g. language:th class:drink (default: all).
        exclude_query_products: Leave the products that a query shows out of its ranking (as published, they stay).
        without: Ablations, in queries and products: image: captions in place of images; title: no titles.
        captions: JSON lines of idx and caption (default: captions.jsonl of the data).
    """

    data: str
    split: Literal["test", "validation"] = "test"
    subset: list[str] | None = None
    exclude_query_products: bool = False
    without: list[str] = field(default_factory=list)
    captions: str | None = None


def merit_cells(options: MeritOptions) -> list[Cell]:
    """Read MERIT; all files are checked before anything is encoded.

    The groups of the cell are `"language"` (`"several"` if those of a query's products differ, Table 6) and `"subset"`
    (Table 7).

    Raises:
        FileNotFoundError: A file is missing.
        ValueError: A malformed query or product (it is named), an unknown subset or part, or no query in the subsets.
    """
    from conjoin.data import MeritItems, MeritProducts, MeritQueryRows, merit_queries
    from conjoin.data.merit import ood_subsets, ood_values, read_captions, subset_names

    data, without = Path(options.data), options.without
    if not set(without) <= set(PARTS):
        raise ValueError(f"without {without}; expected some of {', '.join(PARTS)}")
    products = MeritProducts(data, options.split)
    captions = read_captions(options.captions or data / "captions.jsonl") if "image" in without else None
    items = MeritItems(products, captions, titles="title" not in without)
    queries = merit_queries(data, products)
    by_id = {query.id: query for query in queries}
    values = ood_values(data)
    names = subset_names(values)
    unknown = [name for name in options.subset or () if name not in names]
    if unknown:
        raise ValueError(f"unknown subset {unknown[0]!r}; expected some of {', '.join(names)}")
    subsets: dict[str, list[str]] = {name: [] for name in options.subset or names}
    for query in queries:
        for name in subsets.keys() & ood_subsets(query, products, values):
            subsets[name].append(query.id)
    chosen = set().union(*subsets.values())
    kept = [query for query in queries if options.subset is None or query.id in chosen]
    if not kept:
        raise ValueError(f"none of the {len(queries)} queries is in {', '.join(options.subset or ())}")

    languages: dict[str, list[str]] = {}
    for query in kept:
        named = {products[pid].language for pid in (*query.products, *query.positives)}
        languages.setdefault(named.pop() if len(named) == 1 else "several", []).append(query.id)
    in_order = sorted(languages.items(), key=lambda each: (each[0] == "several", each[0]))
    groups = {"language": dict(in_order)}
    if any(subsets.values()):  # a catalogue of the user's own has none
        groups["subset"] = subsets
    folder = "-".join([options.split, *(f"without-{part}" for part in PARTS if part in without)])
    return [
        Cell(
            options.split,
            Rows(f"{folder}/queries", MeritQueryRows(items, queries), lookup=lambda id_: items.query(by_id[id_])),
            Rows(f"{folder}/products", items, lookup=items.product),
            {query.id: query.positives for query in kept},
            excluded={query.id: query.products for query in kept} if options.exclude_query_products else {},
            groups=groups,
        )
    ]


def error_table(scores: "Sequence[CellScores]") -> "list[Table]":
    """What is wrong with the first results, as far as classes and attributes tell (Sec. 3.4, App. E.5).

    The paper's visual and detail errors, which people told apart, are one row.
    """
    import numpy as np

    from conjoin.evaluation.results import Metric, Table

    tables = []
    for each in scores:
        rows: Any = each.cell.queries.rows
        queries, products, reasons = {query.id: query for query in rows.queries}, rows.items.products, list[str]()
        for id_, rank, names, points in zip(each.ids, each.ranks, *each.results, strict=True):
            query, first = queries[id_], products[names[int(np.argmax(points))]]
            asked = [pair for wanted in query.conditions.values() for pair in wanted.items() if pair[0] != OTHERS]
            holds = (
                rank == 1,
                first.kind not in {products[pid].kind for pid in query.positives},
                any(first.attributes.get(name) != value for name, value in asked),
                True,
            )
            reasons.append(ERRORS[holds.index(True)])
        shares: list[TableRow] = [
            [name, Metric.from_values([float(reason == name) for reason in reasons])] for name in ERRORS
        ]
        tables.append(Table("First results", ["", "share"], shares, _ERRORS_NOTE))
    return tables


TASK = Task(
    "merit",
    "MERIT",
    str(__doc__),
    MeritOptions,
    merit_cells,
    headline=("hit_rate@1", "hit_rate@5", "hit_rate@10", "mrr@10"),
    tables=error_table,
)
