"""Results as a page with charts and examples, and as plain text for the terminal."""

import math
import os
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from conjoin.evaluation.results import Cell, Curve, Example, Metric, Results, Symmetric, Table, TableRow
from conjoin.evaluation.task import TaskScores

_PICTURE = re.compile(r"data:image/(png|jpeg|gif|webp);base64,[A-Za-z0-9+/]+={0,2}\Z")
HIT_RATE_NOTE = "R@k: % of queries with a right candidate among the first k; ties count as failures."
SETTING_TITLES = {
    "local": "Local: the gallery holds one modality",
    "global": "Global: the gallery holds all modalities, and only the named one is right",
}
_SHOWN_METRICS = ("hit_rate@1", "hit_rate@5", "hit_rate@10")
_METRIC_NAMES = {"precision": "Precision", "mean_recall": "mR", "average": "Avg"}
_WIDTH, _HEIGHT = 520, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 30, 36
_MOST_POINTS = 300
EXAMPLES_NOTE = "Queries evenly spaced in the data, then queries whose first result is wrong."
_EXAMPLES = 12


def render_report(results: Results | str | os.PathLike[str], out_html: str | os.PathLike[str]) -> Path:
    """Write the report of `results` as one HTML file.

    All text is escaped. A Content-Security-Policy without sources keeps the page from loading anything.

    Args:
        results: `Results`, or the path of their JSON file.
        out_html: The file to write; missing folders are created.

    Returns:
        The path of the file.

    Raises:
        ValueError: The results are malformed, or a picture is not an inline PNG, JPEG, GIF or WebP.
    """
    if not isinstance(results, Results):
        results = Results.load(results)
    run = {"seed": results.seed, **({"date": results.created} if results.created else {}), **results.versions}
    facts = {"Model": results.model, "Data": results.dataset, "Versions": run, "Configuration": results.config}
    return write_page(
        "conjoin.evaluation.report",
        "report.html.j2",
        Path(out_html),
        results.curves,
        results=results,
        heading=_heading(results),
        combinations=combination_tables(results.combinations),
        symmetric=symmetric_table(results.symmetric) if results.symmetric else None,
        facts=[(title, list(_flatten(each))) for title, each in facts.items() if each],
    )


def write_page(package: str, template: str, target: Path, curves: Sequence[Curve], **values: Any) -> Path:  # noqa: ANN401
    """Fill a template of a package with charts and values, write the page to `target`, and return `target`."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=PackageLoader(package, "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"percent": percent, "inline": _inline_picture, "plain": plain}
    drawn = [curve for curve in curves if any(curve.series.values())]
    charts = [(curve.title, Markup(line_chart(curve.series, curve.x_label, curve.title))) for curve in drawn]
    page = environment.get_template(template).render(charts=charts, **values)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(page, encoding="utf-8")
    return target


def _heading(results: Results) -> str:
    """The title with the names of the benchmark and the model; of a folder, its last two parts."""
    name = str(results.model.get("name", ""))
    model = "/".join(Path(name).parts[-2:]) if Path(name).is_absolute() else name
    benchmark = "" if results.benchmark.lower() in results.title.lower() else results.benchmark
    return " · ".join(part for part in (benchmark, results.title, model) if part)


def _flatten(facts: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []
    for key, value in facts.items():
        nested = isinstance(value, Mapping) and value
        rows += _flatten(value, f"{prefix}{key}.") if nested else [(f"{prefix}{key}", value)]
    return rows


def _inline_picture(uri: str) -> str:
    if not _PICTURE.match(uri):
        raise ValueError(f"a picture must be an inline data:image/(png|jpeg|gif|webp);base64 URI, got {uri[:60]!r}")
    return uri


def format_results(results: Results) -> str:
    """Lay out the headline, the combinations, the symmetric runs, and the tables that are not for the report only."""
    parts = []
    if results.headline:
        labels = [f"{each.label} ({each.detail})" if each.detail else each.label for each in results.headline]
        rows: list[TableRow] = [[label, each.metric] for label, each in zip(labels, results.headline, strict=True)]
        parts.append(format_table(Table(results.title, ["", "score"], rows)))
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
        values = [row[index] for row in table.rows]
        scores = [value if isinstance(value, Metric) else None for value in values]
        columns.append([name, *(percent(each.value) if isinstance(each, Metric) else plain(each) for each in values)])
        if any(score and score.low is not None for score in scores):
            columns.append(["95 % CI", *map(_interval, scores)])
        if any(score and score.chance is not None for score in scores):
            columns.append(["chance", *("" if not s or s.chance is None else percent(s.chance) for s in scores)])
    widths = [max(map(len, column)) for column in columns]
    form = "  ".join([f"{{:<{widths[0]}}}", *(f"{{:>{width}}}" for width in widths[1:])])
    lines = [form.format(*row) for row in zip(*columns, strict=True)]
    return "\n".join([table.title, *lines, *textwrap.wrap(table.note, 100)])


def combination_tables(cells: Sequence[Cell], metrics: Sequence[str] | None = None) -> list[Table]:
    """One table per setting, with a row per combination and a column per metric (all metrics when None)."""
    tables = []
    for setting in dict.fromkeys(cell.setting for cell in cells):
        shown = [cell for cell in cells if cell.setting == setting]
        sizes = " / ".join(f"{size:,}" for size in dict.fromkeys(cell.gallery for cell in shown))
        title = f"{SETTING_TITLES[setting]} ({sizes} candidates)"
        rows = [
            ([f"{each.query} → {each.candidates}".replace(",", "+"), each.queries], each.metrics) for each in shown
        ]
        tables.append(score_table(title, ["query → candidates", "n"], rows, metrics))
    return tables


def score_table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[tuple[Sequence[Any], Mapping[str, Metric]]],
    metrics: Sequence[str] | None = None,
    chance: bool = True,
    **facts: Any,  # noqa: ANN401 - of `Table`
) -> Table:
    """A table with a column for each metric.

    Args:
        title: Of the table.
        columns: Names of the first columns.
        rows: The first values of each row, and its metrics.
        metrics: Names of the metrics; None for all.
        chance: Whether the metrics keep the score of a random order, which takes width.
        facts: Further fields of `Table`.
    """
    names = list(dict.fromkeys(name for _, of_row in rows for name in of_row)) if metrics is None else metrics
    filled: list[TableRow] = []
    for start, of_row in rows:
        shown = [of_row.get(name) for name in names]
        filled.append([*start, *(shown if chance else [each and replace(each, chance=None) for each in shown])])
    return Table(title, [*columns, *map(metric_name, names)], filled, **facts)


def symmetric_table(runs: Sequence[Symmetric]) -> Table:
    """One column per run."""
    names = list(dict.fromkeys(name for run in runs for name in run.metrics))
    rows: list[TableRow] = [
        ["triplets", *(run.triplets for run in runs)],
        ["candidates of each", *(run.pool for run in runs)],
    ]
    rows += [[metric_name(name), *(run.metrics.get(name) for run in runs)] for name in names]
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


def metric_name(name: str) -> str:
    """`"hit_rate@10"` → `"R@10"`, as the literature prints it."""
    name = name.replace("hit_rate@", "R@").replace("recall@", "R@").replace("mrr@", "MRR@")
    return _METRIC_NAMES.get(name, name)


def _interval(metric: Metric | None) -> str:
    """`"41–48"`, in %; empty without one."""
    if metric is None or metric.low is None or metric.high is None:
        return ""
    return f"{100 * metric.low:.0f}–{100 * metric.high:.0f}"


def line_chart(series: Mapping[str, Sequence[Sequence[float]]], x_label: str, title: str) -> str:
    """Draw named series of `[x, y]` points as an SVG element.

    Lines differ in colour and in dash. A series of more than 300 points is averaged in 300 bins. A chart without
    points shows the text "no values".
    """
    data = {
        name: np.array([part.mean(axis=0) for part in np.array_split(points, min(len(points), _MOST_POINTS))])
        for name, points in series.items()
        if len(points)
    }
    head = f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title)}">'
    if not data:
        return f'{head}<text x="{_WIDTH / 2}" y="{_HEIGHT / 2}" text-anchor="middle">no values</text></svg>'
    (x_low, x_high), (y_low, y_high) = map(_span, np.concatenate(list(data.values())).T)
    x_ticks, y_ticks = _ticks(x_low, x_high), _ticks(y_low, y_high)
    y_low, y_high = min(y_low, y_ticks[0]), max(y_high, y_ticks[-1])

    def pixels(x: Any, y: Any) -> tuple[Any, Any]:  # noqa: ANN401 - numbers or arrays
        across, up = (x - x_low) / (x_high - x_low), (y - y_low) / (y_high - y_low)
        return _LEFT + across * (_WIDTH - _LEFT - _RIGHT), _HEIGHT - _BOTTOM - up * (_HEIGHT - _TOP - _BOTTOM)

    parts = [head]
    for tick in y_ticks:
        y = pixels(x_low, tick)[1]
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 7}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for tick in x_ticks:
        x = pixels(tick, y_low)[0]
        parts.append(f'<text x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 16}" text-anchor="middle">{tick:g}</text>')
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{_HEIGHT - 4}" text-anchor="middle">{escape(x_label)}</text>')
    left = float(_LEFT)
    for number, (name, values) in enumerate(data.items()):
        style, points = f"s{number % 4}", list(zip(*pixels(*values.T), strict=True))
        parts.append(f'<line class="line {style}" x1="{left:.0f}" x2="{left + 24:.0f}" y1="14" y2="14"/>')
        parts.append(f'<text x="{left + 30:.0f}" y="18">{escape(name)}</text>')
        left += 48 + 6.6 * len(name)
        corners = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline class="line {style}" points="{corners}"/>')
        if len(points) <= 30:
            parts += [f'<circle class="dot {style}" cx="{x:.1f}" cy="{y:.1f}" r="2.6"/>' for x, y in points]
    return "".join([*parts, "</svg>"])


def _span(values: np.ndarray) -> tuple[float, float]:
    low, high = float(values.min()), float(values.max())
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _ticks(low: float, high: float) -> list[float]:
    """About five round numbers between `low` and `high`."""
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [round(number * step, 12) for number in range(first, math.floor(high / step + 1e-9) + 1)]


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
