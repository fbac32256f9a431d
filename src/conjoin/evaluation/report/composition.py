"""How composed queries are distributed, as tables and as one HTML page."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from conjoin.data.make.composition.compose import DISTRIBUTION_FILE, MARKER
from conjoin.evaluation.report.page import render_report
from conjoin.evaluation.results import Curve, Metric, Results, Table, TableRow

REPORT_FILE = "report.html"

_ATTRIBUTE_COLUMNS = {
    "products": "products with it",
    "conventional": "conventional sampling",
    "drawn": "all samplers",
    "kept": "kept",
}
_LANGUAGE_COLUMNS = {
    "products": "products",
    "conventional": "conventional sampling",
    "drawn": "all samplers",
    "kept": "kept",
    "positives": "positives",
    "instructions": "instructions",
}
_BEFORE_AND_AFTER = {"drawn": "before filtering", "kept": "after"}


def write_distribution_report(folder: str | Path) -> Path:
    """Write `report.html` of a folder that `compose_queries` wrote, beside its queries, and return its path.

    Raises:
        FileNotFoundError: There are no composed queries.
    """
    folder = Path(folder)
    counts = json.loads((folder / DISTRIBUTION_FILE).read_text(encoding="utf-8"))
    made_with = json.loads((folder / MARKER).read_text(encoding="utf-8"))
    return render_report(distribution_results(counts, made_with), folder / REPORT_FILE)


def distribution_results(counts: Mapping[str, Mapping[str, Any]], made_with: Mapping[str, Any]) -> Results:
    """The distribution of each split as tables and curves.

    Args:
        counts: What `distribution.json` holds.
        made_with: What `composition.json` holds.
    """
    tables = [_overview(counts)]
    for split, of_split in counts.items():
        tables += _tables(split, of_split)
    return Results(
        title="Composed queries",
        summary="How the conditions of the queries are distributed. Conventional sampling alone is the state before "
        "attribute-uniform and high-similarity sampling; kept queries are those after filtering.",
        seed=made_with["seed"],
        dataset={split: f"{of_split['products']:,} products" for split, of_split in counts.items()},
        config={name: value for name, value in made_with.items() if name not in ("seed", "version")},
        tables=tables,
        curves=[_curve(split, of_split["attributes"]) for split, of_split in counts.items()],
    )


def _overview(counts: Mapping[str, Mapping[str, Any]]) -> Table:
    rows: list[TableRow] = []
    for split, of_split in counts.items():
        before, after = (of_split["evenness"][name] for name in ("conventional", "kept"))
        evenness = [None if value is None else round(value, 3) for value in (before, after)]
        negatives = round(of_split["hard_negatives"] / of_split["kept"], 1)
        rows.append([split, of_split["products"], of_split["kept"], of_split["duplicates"], negatives, *evenness])
    columns = [
        "split",
        "products",
        "queries",
        "duplicates",
        "hard negatives each",
        "evenness before",
        "evenness after",
    ]
    note = (
        "Evenness: the entropy of the attributes of the conditions over its maximum, 1 if all are as frequent; "
        "before: conventional sampling alone."
    )
    return Table("Queries", columns, rows, note)


def _tables(split: str, of_split: Mapping[str, Any]) -> list[Table]:
    by_attribute = _shares(f"Attributes, {split}", "attribute", of_split["attributes"], _ATTRIBUTE_COLUMNS)
    by_language = _shares(f"Languages, {split}", "language", of_split["languages"], _LANGUAGE_COLUMNS)
    rejected = sorted(of_split["rejected"].items(), key=lambda pair: (-pair[1], pair[0]))
    positives = sorted(((int(least), count) for least, count in of_split["positives"].items()))
    return [
        _noted(by_attribute, "In % of all conditions; of the products with any attribute, in the first column."),
        _noted(by_language, "In % of the products of the queries; of products, positives and instructions likewise."),
        _shares(f"Number of conditions, {split}", "conditions", of_split["conditions"], _BEFORE_AND_AFTER),
        _shares(f"Samplers, {split}", "sampler", of_split["samplers"], _BEFORE_AND_AFTER),
        Table(f"Positives, {split}", ["at least", "queries"], [[least, count] for least, count in positives]),
        Table(
            f"Draws that made no query, {split}", ["reason", "draws"], [[reason, count] for reason, count in rejected]
        ),
    ]


def _shares(title: str, name: str, counts: Mapping[str, Mapping[str, int]], columns: Mapping[str, str]) -> Table:
    """A table of the shares of each key, the most frequent of the last column first."""
    keys = list(dict.fromkeys(key for column in columns for key in counts[column]))
    last = counts[list(columns)[-1]]
    keys.sort(key=lambda key: (-last.get(key, 0), key))
    totals = {column: sum(counts[column].values()) for column in columns}
    rows: list[TableRow] = [
        [key, *(_share(counts[column].get(key, 0), totals[column]) for column in columns)] for key in keys
    ]
    return Table(title, [name, *columns.values()], rows)


def _share(count: int, total: int) -> Metric | None:
    return Metric(count / total) if total else None


def _noted(table: Table, note: str) -> Table:
    return Table(table.title, table.columns, table.rows, note)


def _curve(split: str, counts: Mapping[str, Mapping[str, int]]) -> Curve:
    series = {_ATTRIBUTE_COLUMNS[name]: _ranked(list(counts[name].values())) for name in ("conventional", "kept")}
    return Curve(f"Share of each attribute in %, {split}", series, "rank of the attribute")


def _ranked(counts: Sequence[int]) -> list[list[float]]:
    total = sum(counts)
    return [[rank, 100 * count / total] for rank, count in enumerate(sorted(counts, reverse=True), start=1)]
