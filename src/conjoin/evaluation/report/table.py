"""Results as plain text for the terminal."""

import textwrap
from collections.abc import Sequence

from conjoin.evaluation.results import Cell, Headline, Metric, Results, Symmetric, Table, TableRow

HIT_RATE_NOTE = "R@k: % of queries with a right candidate among the first k; ties count as failures."
SETTING_TITLES = {
    "local": "Local: the gallery holds one modality",
    "global": "Global: the gallery holds all modalities, and only the named one is right",
    "any": "Any: the gallery holds all modalities, and each of them is right",
}
_SHOWN_METRICS = ("hit_rate@1", "hit_rate@5", "hit_rate@10")
_METRIC_NAMES = {"precision": "Precision", "mean_recall": "mR", "average": "Avg"}


def format_results(results: Results) -> str:
    """Lay out the headline, the combinations, the symmetric runs, and the tables that are not for the report only."""
    parts = [format_table(_headline_table(results.title, results.headline))] if results.headline else []
    parts += [format_combinations(results.combinations)] if results.combinations else []
    parts += [format_table(symmetric_table(results.symmetric))] if results.symmetric else []
    parts += [format_table(table) for table in results.tables if not table.report_only]
    return "\n\n".join(parts)


def format_combinations(cells: Sequence[Cell]) -> str:
    """Lay out what `evaluate_combinations` returns: hit rates at 1, 5 and 10."""
    tables = combination_tables(cells, _SHOWN_METRICS)
    return "\n\n".join([*(format_table(table) for table in tables), HIT_RATE_NOTE])


def format_table(table: Table) -> str:
    """Lay out any table; scores in %, with interval and chance if a score of the column has them."""
    columns: list[list[str]] = []
    for index, name in enumerate(table.columns):
        columns += _text_columns(name, [row[index] for row in table.rows])
    widths = [max(map(len, column)) for column in columns]
    form = "  ".join([f"{{:<{widths[0]}}}", *(f"{{:>{width}}}" for width in widths[1:])])
    lines = [form.format(*row) for row in zip(*columns, strict=True)]
    return "\n".join([table.title, *lines, *textwrap.wrap(table.note, 100)])


def combination_tables(cells: Sequence[Cell], metrics: Sequence[str] | None = None) -> list[Table]:
    """One table per setting, with a row per combination and a column per metric (all metrics when None)."""
    tables = []
    for setting in dict.fromkeys(cell.setting for cell in cells):
        shown = [cell for cell in cells if cell.setting == setting]
        names = list(dict.fromkeys(name for cell in shown for name in cell.metrics)) if metrics is None else metrics
        sizes = " / ".join(f"{size:,}" for size in dict.fromkeys(cell.gallery for cell in shown))
        rows: list[TableRow] = [
            [f"{each.query} → {each.candidates}".replace(",", "+"), each.queries, *map(each.metrics.get, names)]
            for each in shown
        ]
        columns = ["query → candidates", "n", *map(_metric_name, names)]
        tables.append(Table(f"{SETTING_TITLES[setting]} ({sizes} candidates)", columns, rows))
    return tables


def symmetric_table(runs: Sequence[Symmetric]) -> Table:
    """One column per run."""
    names = list(dict.fromkeys(name for run in runs for name in run.metrics))
    rows: list[TableRow] = [
        ["triplets", *(run.triplets for run in runs)],
        ["candidates of each", *(run.pool for run in runs)],
    ]
    rows += [[_metric_name(name), *(run.metrics.get(name) for run in runs)] for name in names]
    return Table("Symmetric triplets", ["", *(run.name for run in runs)], rows)


def plain(value: object) -> str:
    """A fact or a cell of a table as text."""
    if value is None:
        return "–"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def percent(value: float, digits: int = 1) -> str:
    """0.4512 → `"45.1"`."""
    return f"{100 * value:.{digits}f}"


def _metric_name(name: str) -> str:
    """`"hit_rate@10"` → `"R@10"`, as the literature prints it."""
    name = name.replace("hit_rate@", "R@").replace("recall@", "R@").replace("mrr@", "MRR@")
    return _METRIC_NAMES.get(name, name)


def _headline_table(title: str, headline: Sequence[Headline]) -> Table:
    labels = [f"{entry.label} ({entry.detail})" if entry.detail else entry.label for entry in headline]
    return Table(title, ["", "score"], [[label, entry.metric] for label, entry in zip(labels, headline, strict=True)])


def _text_columns(name: str, values: TableRow) -> list[list[str]]:
    """The columns of text that show one column of a table."""
    scores = [value if isinstance(value, Metric) else None for value in values]
    columns = [[name, *(percent(value.value) if isinstance(value, Metric) else plain(value) for value in values)]]
    if any(score and score.low is not None for score in scores):
        columns.append(["95 % CI", *map(_interval, scores)])
    if any(score and score.chance is not None for score in scores):
        columns.append(["chance", *("" if not s or s.chance is None else percent(s.chance) for s in scores)])
    return columns


def _interval(metric: Metric | None) -> str:
    """`"41–48"`, in %; empty without one."""
    if metric is None or metric.low is None or metric.high is None:
        return ""
    return f"{100 * metric.low:.0f}–{100 * metric.high:.0f}"
