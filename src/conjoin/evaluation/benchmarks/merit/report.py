"""MERIT scores as `Results`."""

import math
from collections.abc import Sequence
from dataclasses import replace

from conjoin.evaluation.metrics import chance_hit_rate, chance_mrr
from conjoin.evaluation.report.table import HIT_RATE_NOTE
from conjoin.evaluation.results import Headline, Metric, Results, Table, TableRow

from .evaluate import CUT_OFFS, MeritScores

_COLUMNS = ["n", *(f"R@{k}" for k in CUT_OFFS), "MRR@10"]
_LANGUAGE_NOTE = "The language of all products that a query shows and of all that answer it."
_OOD_NOTE = (
    "language: all products of the query, its answers and its hard negatives have the language. attribute: a "
    "condition of the query. class: any of these products is of the class. A query is in one subset of each at most."
)


def merit_results(scores: MeritScores, seed: int = 0) -> Results:
    """The scores as `Results`: all queries, by language, by subset, and by number of products in the query."""
    everything = range(len(scores.queries))
    overall = _metrics(scores, everything, seed)
    languages = sorted(set(scores.languages) - {"several"}) + ["several"] * ("several" in scores.languages)
    sizes = sorted({len(query.products) for query in scores.queries})
    tables = [
        Table(
            "By language",
            ["language", *_COLUMNS],
            [
                _row(scores, name, [place for place in everything if scores.languages[place] == name], seed)
                for name in languages
            ],
            _LANGUAGE_NOTE,
        ),
        Table(
            "By number of products in the query",
            ["products", *_COLUMNS],
            [
                _row(
                    scores,
                    str(size),
                    [place for place in everything if len(scores.queries[place].products) == size],
                    seed,
                )
                for size in sizes
            ],
            report_only=True,
        ),
    ]
    if any(scores.subsets):  # a catalogue of the user's own has none
        title = "Out-of-distribution subsets"
        tables.insert(1, Table(title, ["subset", *_COLUMNS], _subset_rows(scores, seed), _OOD_NOTE))
    return Results(
        title="MERIT",
        summary="Queries that interleave the images and titles of several products with text. Each searches all "
        f"{scores.pool:,} products of the split. {HIT_RATE_NOTE} MRR@10 counts ranks up to 10.",
        seed=seed,
        headline=[Headline(name, metric, f"{len(everything):,} queries") for name, metric in overall.items()],
        tables=tables,
        examples=scores.examples,
        examples_note="Evenly spread over the queries; [1], [2] mark the places of the images.",
    )


def _subset_rows(scores: MeritScores, seed: int) -> list[TableRow]:
    """The subsets, each kind followed by the mean of its subsets as in Table 7; empty subsets have no score."""
    rows: list[TableRow] = []
    for kind in dict.fromkeys(name.partition(":")[0] for name in scores.names):
        names = [name for name in scores.names if name.partition(":")[0] == kind]
        members = [[place for place, found in enumerate(scores.subsets) if name in found] for name in names]
        rows += [_row(scores, name, places, seed) for name, places in zip(names, members, strict=True)]
        found = [_metrics(scores, places, seed) for places in members if places]
        if len(found) > 1:
            means = [Metric(math.fsum(each[name].value for each in found) / len(found)) for name in found[0]]
            rows.append([f"average, {kind}", sum(map(len, members)), *means])
    return rows


def _row(scores: MeritScores, label: str, places: Sequence[int], seed: int) -> TableRow:
    """A row of a table, whose chance is left out for width."""
    if not places:
        return [label, 0, *[None] * (len(_COLUMNS) - 1)]
    values = [replace(metric, chance=None) for metric in _metrics(scores, places, seed).values()]
    return [label, len(places), *values]


def _metrics(scores: MeritScores, places: Sequence[int], seed: int) -> dict[str, Metric]:
    """R@k and MRR@10 of some queries, with intervals and chance."""
    ranks = scores.ranks[list(places)].double()
    counts = [len(scores.queries[place].positives) for place in places]
    metrics = {
        f"R@{k}": Metric.from_values((ranks <= k).double(), chance_hit_rate(counts, scores.pool, k), seed=seed)
        for k in CUT_OFFS
    }
    last = CUT_OFFS[-1]
    reciprocal = (1 / ranks) * (ranks <= last)
    return metrics | {f"MRR@{last}": Metric.from_values(reciprocal, chance_mrr(counts, scores.pool, last), seed=seed)}
