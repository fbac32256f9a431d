"""Charts with two logarithmic axes, as SVG."""

import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 460, 300, 58, 14, 40, 44
COLOURS = ("#0b6bb5", "#d1600a", "#3a8f3a", "#8a4fb0", "#777777")
DASHES = ("", "6 3", "2 3", "8 3 2 3", "1 2")


def draw(series: Mapping[str, Sequence[tuple[float, float]]], path: Path, title: str, x: str, y: str) -> None:
    """Draw named lines through points `(x, y)`, all positive."""
    points = [point for line in series.values() for point in line]
    (left, right), (low, high) = (_decades([point[axis] for point in points]) for axis in (0, 1))

    def place(a: float, b: float) -> tuple[float, float]:
        across = (math.log10(a) - left) / (right - left)
        up = (math.log10(b) - low) / (high - low)
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)

    parts = [f'<text x="8" y="16" font-size="13">{escape(title)}</text>']
    for power in range(math.ceil(left), math.floor(right) + 1):
        across, _ = place(10.0**power, 10.0**low)
        parts.append(f'<path d="M{across:.1f} {TOP}V{HEIGHT - BOTTOM}" stroke="#ddd"/>')
        parts.append(f'<text x="{across:.1f}" y="{HEIGHT - BOTTOM + 15}" text-anchor="middle">{_power(power)}</text>')
    for power in range(math.ceil(low), math.floor(high) + 1):
        _, up = place(10.0**left, 10.0**power)
        parts.append(f'<path d="M{LEFT} {up:.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{up + 4:.1f}" text-anchor="end">{_power(power)}</text>')
    parts.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 10}" text-anchor="middle">{escape(x)}</text>')
    parts.append(f'<text x="8" y="{TOP - 8}">{escape(y)}</text>')
    for number, (name, line) in enumerate(series.items()):
        colour, dash = COLOURS[number % len(COLOURS)], DASHES[number % len(DASHES)]
        corners = [place(a, b) for a, b in line]
        path_ = "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in corners)
        parts.append(
            f'<path d="{path_}" fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}"/>'
            + "".join(f'<circle cx="{a:.1f}" cy="{b:.1f}" r="2.5" fill="{colour}"/>' for a, b in corners)
        )
        shown = f'<text x="{LEFT + 10}" y="{TOP + 14 + 14 * number}" fill="{colour}">{escape(name)}</text>'
        parts.append(shown)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" '
        f'font-size="11"><rect width="100%" height="100%" fill="white"/>{"".join(parts)}</svg>\n',
        encoding="utf-8",
    )


def _decades(values: Sequence[float]) -> tuple[float, float]:
    """The logarithms of the ends of an axis: half a decade at least, rounded outwards to a tenth of one."""
    low, high = (math.log10(end) for end in (min(values), max(values)))
    return math.floor(10 * low - 0.5) / 10, max(math.ceil(10 * high + 1.5) / 10, low + 0.5)


def _power(power: int) -> str:
    digits = str(power).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"10{digits}" if not 0 <= power <= 3 else str(10**power)
