"""Results as a page with charts and examples."""

import math
import os
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from conjoin.evaluation.results import Curve, Results
from conjoin.evaluation.tables import percent, plain

_WIDTH, _HEIGHT = 520, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 30, 36


def render_report(results: Results, out_html: str | os.PathLike[str]) -> Path:
    """Write the report of `results` as one HTML file.

    All text is escaped. A Content-Security-Policy without sources keeps the page from loading anything, whatever the
    results name as a picture.

    Args:
        results: The results; `Results.load` reads them from their JSON file.
        out_html: The file to write; missing folders are created.

    Returns:
        The path of the file.
    """
    model = "/".join(Path(str(results.model.get("name", ""))).parts[-2:])  # of a folder, the end of its path
    run = {"seed": results.seed, **({"date": results.created} if results.created else {}), **results.versions}
    facts = {"Model": results.model, "Data": results.dataset, "Versions": run, "Configuration": results.config}
    heading = f"{results.title} · {model}" if model else results.title
    template = Path(__file__).with_name("report.html.j2")
    return write_page(template, Path(out_html), results.curves, results=results, heading=heading, facts=facts)


def write_page(template: Path, target: Path, curves: Sequence[Curve] = (), **values: Any) -> Path:  # noqa: ANN401
    """Fill a template with charts and values, write the page to `target`, and return `target`."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"percent": percent, "plain": plain}
    drawn = [curve for curve in curves if any(curve.series.values())]
    charts = [(curve.title, Markup(line_chart(curve.series, curve.x_label, curve.title))) for curve in drawn]
    page = environment.from_string(template.read_text(encoding="utf-8")).render(charts=charts, **values)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(page, encoding="utf-8")
    return target


def line_chart(series: Mapping[str, Sequence[Sequence[float]]], x_label: str, title: str) -> str:
    """Draw named series of `[x, y]` points as an SVG element.

    Lines differ in colour and in dash. A series may be empty, not all of them.
    """
    data = {name: np.array(points) for name, points in series.items() if len(points)}
    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title)}">']

    def text(x: float, y: float, words: str, anchor: str = "start") -> None:
        parts.append(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>')

    points = np.concatenate(list(data.values()))
    low, high = points.min(axis=0), points.max(axis=0)
    low, high = np.where(high > low, (low, high), (low - 0.5, high + 0.5))
    x_ticks, y_ticks = (_ticks(*span) for span in zip(low.tolist(), high.tolist(), strict=True))
    low[1], high[1] = min(low[1], y_ticks[0]), max(high[1], y_ticks[-1])
    corner, size = np.array([_LEFT, _HEIGHT - _BOTTOM]), np.array([_WIDTH - _LEFT - _RIGHT, _TOP + _BOTTOM - _HEIGHT])

    def pixels(x: float, y: float) -> list[float]:
        return list(corner + (np.array([x, y]) - low) / (high - low) * size)

    for tick in y_ticks:
        y = pixels(low[0], tick)[1]
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        text(_LEFT - 7, y + 4, f"{tick:g}", "end")
    for tick in x_ticks:
        text(pixels(tick, low[1])[0], _HEIGHT - _BOTTOM + 16, f"{tick:g}", "middle")
    text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 4, x_label, "middle")
    left = float(_LEFT)
    for number, (name, values) in enumerate(data.items()):
        parts.append(f'<line class="line s{number % 4}" x1="{left:.0f}" x2="{left + 24:.0f}" y1="14" y2="14"/>')
        text(left + 30, 18, name)
        left += 48 + 6.6 * len(name)
        corners = [pixels(x, y) for x, y in values]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in corners)
        parts.append(f'<polyline class="line s{number % 4}" points="{line}"/>')
        for x, y in corners if len(corners) <= 30 else []:
            parts.append(f'<circle class="dot s{number % 4}" cx="{x:.1f}" cy="{y:.1f}" r="2.6"/>')
    return "".join([*parts, "</svg>"])


def _ticks(low: float, high: float) -> list[float]:
    """About five round numbers between `low` and `high`."""
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [round(number * step, 12) for number in range(first, math.floor(high / step + 1e-9) + 1)]
