"""Line charts as inline SVG.

The page's style sheet colours them, so they follow its light and dark theme, which a matplotlib picture cannot; they
also need no dependency.
"""

import math
from collections.abc import Mapping, Sequence
from html import escape

import numpy as np

_WIDTH, _HEIGHT = 520, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 30, 36
_MOST_POINTS = 300


def line_chart(series: Mapping[str, Sequence[Sequence[float]]], x_label: str, title: str) -> str:
    """Draw named series of `[x, y]` points as an SVG element.

    Lines differ in colour and in dash. A series of more than 300 points is averaged in 300 bins. A chart without
    points shows the text "no values".
    """
    data = {name: _thin(np.asarray(points, dtype=float)) for name, points in series.items() if len(points)}
    head = f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title)}">'
    if not data:
        return f'{head}<text x="{_WIDTH / 2}" y="{_HEIGHT / 2}" text-anchor="middle">no values</text></svg>'
    points = np.concatenate(list(data.values()))
    (x_low, x_high), (y_low, y_high) = _span(points[:, 0]), _span(points[:, 1])
    x_ticks, y_ticks = _ticks(x_low, x_high), _ticks(y_low, y_high)
    y_low, y_high = min(y_low, y_ticks[0]), max(y_high, y_ticks[-1])

    def to_pixels(xy: np.ndarray) -> np.ndarray:
        x = _LEFT + (xy[:, 0] - x_low) / (x_high - x_low) * (_WIDTH - _LEFT - _RIGHT)
        y = _HEIGHT - _BOTTOM - (xy[:, 1] - y_low) / (y_high - y_low) * (_HEIGHT - _TOP - _BOTTOM)
        return np.stack((x, y), axis=1)

    parts = [head, *_legend(list(data))]
    for tick, (_, y) in zip(y_ticks, to_pixels(np.array([(x_low, tick) for tick in y_ticks])), strict=True):
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 7}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for tick, (x, _) in zip(x_ticks, to_pixels(np.array([(tick, y_low) for tick in x_ticks])), strict=True):
        parts.append(f'<text x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 16}" text-anchor="middle">{tick:g}</text>')
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{_HEIGHT - 4}" text-anchor="middle">{escape(x_label)}</text>')
    for number, values in enumerate(data.values()):
        corners = " ".join(f"{x:.1f},{y:.1f}" for x, y in to_pixels(values))
        parts.append(f'<polyline class="line s{number % 4}" points="{corners}"/>')
        if len(values) <= 30:
            parts += [
                f'<circle class="dot s{number % 4}" cx="{x:.1f}" cy="{y:.1f}" r="2.6"/>' for x, y in to_pixels(values)
            ]
    return "".join([*parts, "</svg>"])


def _legend(names: list[str]) -> list[str]:
    parts, x = [], float(_LEFT)
    for number, name in enumerate(names):
        parts.append(f'<line class="line s{number % 4}" x1="{x:.0f}" x2="{x + 24:.0f}" y1="14" y2="14"/>')
        parts.append(f'<text x="{x + 30:.0f}" y="18">{escape(name)}</text>')
        x += 48 + 6.6 * len(name)
    return parts


def _thin(points: np.ndarray) -> np.ndarray:
    bins = np.array_split(points, min(len(points), _MOST_POINTS))
    return np.stack([part.mean(axis=0) for part in bins])


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
