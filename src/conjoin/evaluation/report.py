"""One self-contained HTML page from one JSON of results: inline style, inline pictures, no scripts, no network."""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .charts import line_chart
from .combinations import SETTINGS
from .results import Cell, Curve, Results, Symmetric, Table
from .table import SETTING_TITLES, combination_name

_PICTURE = re.compile(r"data:image/(png|jpeg|gif|webp);base64,[A-Za-z0-9+/]+={0,2}\Z")
_METRIC_NAMES = {"precision": "Precision", "mean_recall": "mR", "average": "Avg"}


def render_report(
    results: Results | Mapping[str, Any] | str | os.PathLike[str], out_html: str | os.PathLike[str]
) -> Path:
    """Write the report of `results`.

    All text is escaped, and the page forbids itself to load anything (a Content-Security-Policy without sources).

    Args:
        results: `Results`, the same as plain dicts, or the path of its JSON file.
        out_html: Where to write; folders are created.

    Returns:
        The path written.

    Raises:
        ValueError: The results are malformed, or a picture is not an inline PNG, JPEG, GIF or WebP.
    """
    if isinstance(results, str | os.PathLike):
        results = Results.load(results)
    elif not isinstance(results, Results):
        results = Results.from_dict(results)
    return write_page(
        "report.html.j2",
        Path(out_html),
        results.curves,
        results=results,
        combinations=_combination_tables(results.combinations),
        symmetric=_symmetric_table(results.symmetric),
        facts=[(title, list(_flatten(facts))) for title, facts in _facts(results) if facts],
    )


def write_page(template: str, target: Path, curves: Sequence[Curve], **values: Any) -> Path:  # noqa: ANN401
    """Fill a template of this folder with charts and values, and write it to `target`, which is returned."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=PackageLoader("conjoin.evaluation", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"percent": _percent, "inline": _inline_picture, "plain": _plain}
    drawn = [curve for curve in curves if any(curve.series.values())]
    charts = [(curve.title, Markup(line_chart(curve.series, curve.x_label, curve.title))) for curve in drawn]
    page = environment.get_template(template).render(charts=charts, **values)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(page, encoding="utf-8")
    return target


def _combination_tables(cells: Sequence[Cell]) -> list[Table]:
    """One table per setting: a row per combination, a column per metric."""
    tables = []
    for setting in SETTINGS:
        shown = [cell for cell in cells if cell.setting == setting]
        names = list(dict.fromkeys(name for cell in shown for name in cell.metrics))
        rows: list[list[Any]] = [
            [combination_name(cell), cell.queries, cell.gallery, *(cell.metrics.get(name) for name in names)]
            for cell in shown
        ]
        if shown:
            columns = ["query → candidates", "queries", "gallery", *(_metric_name(name) for name in names)]
            tables.append(Table(SETTING_TITLES[setting], columns, rows))
    return tables


def _symmetric_table(runs: Sequence[Symmetric]) -> Table | None:
    if not runs:
        return None
    names = list(dict.fromkeys(name for run in runs for name in run.metrics))
    rows: list[list[Any]] = [
        [run.name, run.triplets, run.pool, *(run.metrics.get(name) for name in names)] for run in runs
    ]
    return Table("Symmetric triplets", ["", "triplets", "pool", *(_metric_name(name) for name in names)], rows)


def _metric_name(name: str) -> str:
    """`"hit_rate@10"` → `"R@10"`, as the literature prints it."""
    name = name.replace("hit_rate@", "R@").replace("recall@", "R@").replace("mrr@", "MRR@")
    return _METRIC_NAMES.get(name, name)


def _facts(results: Results) -> list[tuple[str, dict[str, Any]]]:
    run = {"seed": results.seed, **({"date": results.created} if results.created else {}), **results.versions}
    return [("Model", results.model), ("Data", results.dataset), ("Versions", run), ("Configuration", results.config)]


def _flatten(facts: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []
    for key, value in facts.items():
        nested = isinstance(value, Mapping) and value
        rows += _flatten(value, f"{prefix}{key}.") if nested else [(f"{prefix}{key}", value)]
    return rows


def _percent(value: float, digits: int = 1) -> str:
    return f"{100 * value:.{digits}f}"


def _plain(value: object) -> str:
    """A value of a table as a reader expects it."""
    if value is None:
        return "–"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def _inline_picture(uri: str) -> str:
    if not _PICTURE.match(uri):
        raise ValueError(f"a picture must be an inline data:image/(png|jpeg|gif|webp);base64 URI, got {uri[:60]!r}")
    return uri
