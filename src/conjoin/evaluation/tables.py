"""Scores as tables, and tables as plain text for the terminal."""

import itertools
import math
import textwrap
from collections.abc import Sequence
from dataclasses import replace

from conjoin.evaluation.results import Metric, Results, Score, Table, TableRow

WIDTH = 100
"""Columns of a terminal. A wider table shows no chance, then no intervals either; the report has them."""
_METRIC_NAMES = {"precision": "Precision", "mean_recall": "mR", "average": "Avg"}


def score_table(
    title: str, scores: Sequence[Score], by: str | None = None, averages: bool = False, note: str = ""
) -> Table:
    """A table with a row for each score.

    Args:
        title: Of the table.
        scores: Of the rows; all have the same labels.
        by: A label: the rows of each of its values, which follow one another, get a row of their average.
        averages: Whether the last rows are the average over all rows and that of a random order.
        note: Below the table.
    """
    labels = list(scores[0].labels) if scores else []
    names = list(dict.fromkeys(name for score in scores for name in score.metrics))
    rows: list[TableRow] = []

    def add(score: Score) -> None:
        columns = [score.labels.get(label, "") for label in labels]
        numbers = [score.queries, score.candidates or ""]
        rows.append([score.name, *columns, *numbers, *(score.metrics.get(name) for name in names)])

    for value, group in itertools.groupby(scores, key=lambda score: score.labels.get(by or "")):
        members = list(group)
        for score in members:
            add(score)
        if value is not None and sum(bool(score.metrics) for score in members) > 1:
            add(average(f"average, {value}", members))
    if averages:
        add(whole := average("average", scores))
        add(random_order(replace(whole, name="random order")))
    return Table(title, ["", *labels, "n", "candidates", *map(metric_name, names)], rows, note)


def average(name: str, scores: Sequence[Score]) -> Score:
    """The mean of each metric over the scores that have it, without interval."""
    metrics = {}
    for key in dict.fromkeys(key for score in scores for key in score.metrics):
        own = [score.metrics[key] for score in scores if key in score.metrics]
        value = math.fsum(metric.value for metric in own) / len(own)
        metrics[key] = Metric(value, chance=math.fsum(metric.chance or 0.0 for metric in own) / len(own))
    return Score(name, sum(score.queries for score in scores), 0, metrics)


def random_order(score: Score, labels: dict[str, str] | None = None) -> Score:
    """What a random order scores."""
    chance = {name: Metric(metric.chance or 0.0) for name, metric in score.metrics.items()}
    return replace(score, metrics=chance, labels=labels or {})


def format_results(results: Results) -> str:
    """Lay out the headline and the tables that are not for the report only."""
    labels = [f"{each.label} ({each.detail})" if each.detail else each.label for each in results.headline]
    rows: list[TableRow] = [[label, each.metric] for label, each in zip(labels, results.headline, strict=True)]
    tables = [Table(results.title, ["", "score"], rows)] if rows else []
    tables += [table for table in results.tables if not table.report_only]
    return "\n\n".join(map(format_table, tables))


def format_table(table: Table) -> str:
    """Lay out a table; scores in %, with interval and chance if they have them and the width allows it."""
    for details in (2, 1, 0):
        columns: list[list[str]] = []
        for index, name in enumerate(table.columns):
            values = [row[index] for row in table.rows]
            scores = [value if isinstance(value, Metric) else None for value in values]
            columns.append(
                [name, *(percent(each.value) if isinstance(each, Metric) else plain(each) for each in values)]
            )
            if details > 0 and any(score and score.low is not None for score in scores):
                columns.append(["95 % CI", *map(_interval, scores)])
            if details > 1 and any(score and score.chance is not None for score in scores):
                columns.append(["chance", *("" if not s or s.chance is None else percent(s.chance) for s in scores)])
        widths = [max(map(len, column)) for column in columns]
        if sum(widths) + 2 * len(widths) <= WIDTH:
            break
    form = "  ".join([f"{{:<{widths[0]}}}", *(f"{{:>{width}}}" for width in widths[1:])])
    lines = [form.format(*row).rstrip() for row in zip(*columns, strict=True)]
    return "\n".join([table.title, *lines, *textwrap.wrap(table.note, WIDTH)])


def _interval(metric: Metric | None) -> str:
    """`"41–48"`, in %; empty without one."""
    if metric is None or metric.low is None or metric.high is None:
        return ""
    return f"{100 * metric.low:.0f}–{100 * metric.high:.0f}"


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


def metric_name(name: str) -> str:
    """`"hit_rate@10"` → `"R@10"`, as the literature prints it."""
    name = name.replace("hit_rate@", "R@").replace("recall@", "R@").replace("mrr@", "MRR@")
    return _METRIC_NAMES.get(name, name)
