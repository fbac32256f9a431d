"""Results as one self-contained HTML page: inline style, inline pictures, no scripts, no network."""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from conjoin.evaluation.report.charts import line_chart
from conjoin.evaluation.report.table import combination_tables, percent, plain, symmetric_table
from conjoin.evaluation.results import Curve, Results

_PICTURE = re.compile(r"data:image/(png|jpeg|gif|webp);base64,[A-Za-z0-9+/]+={0,2}\Z")


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
    return write_page(
        "conjoin.evaluation.report",
        "report.html.j2",
        Path(out_html),
        results.curves,
        results=results,
        heading=_heading(results),
        combinations=combination_tables(results.combinations),
        symmetric=symmetric_table(results.symmetric) if results.symmetric else None,
        facts=[(title, list(_flatten(facts))) for title, facts in _facts(results) if facts],
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


def _facts(results: Results) -> list[tuple[str, dict[str, Any]]]:
    run = {"seed": results.seed, **({"date": results.created} if results.created else {}), **results.versions}
    return [("Model", results.model), ("Data", results.dataset), ("Versions", run), ("Configuration", results.config)]


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
