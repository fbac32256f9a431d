"""Results as tables, as plain text for the terminal, and as one HTML page with charts and examples."""

import itertools
import math
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from conjoin.evaluation.results import Curve, Metric, Results, Score, Table, TableRow
from conjoin.templates import template

WIDTH = 100
"""Columns of a terminal. A wider table shows no chance, then no intervals either; the report has them."""
_METRIC_NAMES = {"precision": "Precision", "mean_recall": "mR", "average": "Avg"}
_PLOT = np.array([[52.0, 214.0], [508.0, 10.0]])
"""The lower left and the upper right corner of a chart, in pixels of the template's SVG."""


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


def render_report(results: Results) -> str:
    """The report of results as one HTML page.

    All text is escaped. A Content-Security-Policy without sources keeps the page from loading anything, whatever the
    results name as a picture.
    """
    model = "/".join(Path(str(results.model.get("name", ""))).parts[-2:])  # of a folder, the end of its path
    run = {"seed": results.seed, **({"date": results.created} if results.created else {}), **results.versions}
    facts = {"Model": results.model, "Data": results.dataset, "Versions": run, "Configuration": results.config}
    heading = f"{results.title} · {model}" if model else results.title
    charts = [place_curve(curve) for curve in results.curves if any(curve.series.values())]
    return fill_page("evaluation/report.html.j2", results=results, heading=heading, facts=facts, charts=charts)


def fill_page(name: str, **values: Any) -> str:  # noqa: ANN401
    """Fill a template with values; it may use `percent` and `plain`."""
    return template(name, percent=percent, plain=plain).render(**values)


def write_page(name: str, target: Path, **values: Any) -> Path:  # noqa: ANN401
    """Fill a template with values, write the page to `target`, and return `target`."""
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(fill_page(name, **values), encoding="utf-8")
    return target


def place_curve(curve: Curve) -> dict[str, Any]:
    """A chart as the template draws it: the points of its lines, and its ticks with their labels, in pixels."""
    series = {name: np.array(points) for name, points in curve.series.items() if points}
    every = np.concatenate(list(series.values()))
    low, high = every.min(axis=0), every.max(axis=0)
    low, high = np.where(high > low, (low, high), (low - 0.5, high + 0.5))
    x_ticks, y_ticks = (_ticks(*span) for span in zip(low.tolist(), high.tolist(), strict=True))
    low[1], high[1] = min(low[1], y_ticks[0]), max(high[1], y_ticks[-1])

    def pixels(points: Any) -> np.ndarray:  # noqa: ANN401 - `(N, 2)`, or one point
        return np.round(_PLOT[0] + (points - low) / (high - low) * (_PLOT[1] - _PLOT[0]), 1)

    return {
        "title": curve.title,
        "x_label": curve.x_label,
        "x_ticks": [(pixels((x, low[1]))[0], f"{x:g}") for x in x_ticks],
        "y_ticks": [(pixels((low[0], y))[1], f"{y:g}") for y in y_ticks],
        "lines": {name: pixels(points).tolist() for name, points in series.items()},
    }


def _ticks(low: float, high: float) -> list[float]:
    """About five round numbers between `low` and `high`."""
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [round(number * step, 12) for number in range(first, math.floor(high / step + 1e-9) + 1)]
