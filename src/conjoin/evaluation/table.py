"""The modality combinations as a plain-text table for the terminal."""

from collections.abc import Sequence

from .combinations import SETTINGS
from .results import Cell, Metric, Table

CUTOFFS = (1, 5, 10)
"""The k of the hit rates shown; those that a cell lacks stay empty."""

SETTING_TITLES = {
    "local": "Local: the gallery holds one modality",
    "global": "Global: one gallery of all modalities, the asked one is right",
    "any": "Any: one gallery of all modalities, each of them is right",
}


def combination_name(cell: Cell) -> str:
    """`"image+text → text"`."""
    return f"{cell.query} → {cell.candidates}".replace(",", "+")


def format_interval(metric: Metric) -> str:
    """`"41–48"`, in %; empty without one."""
    return "" if metric.low is None or metric.high is None else f"{100 * metric.low:.0f}–{100 * metric.high:.0f}"


def format_combinations(cells: Sequence[Cell]) -> str:
    """Lay out what `evaluate_combinations` returns: hit rates in %, their 95 % interval, and chance."""
    columns = "".join(f"{f'R@{k}':>7}{'95 % CI':>9}{'chance':>7}" for k in CUTOFFS)
    lines = []
    for setting in SETTINGS:
        shown = [cell for cell in cells if cell.setting == setting]
        if shown:
            gallery = " / ".join(f"{size:,}" for size in dict.fromkeys(cell.gallery for cell in shown))
            lines += [f"{SETTING_TITLES[setting]} ({gallery} candidates)"]
            lines += [f"{'query → candidates':<24}{'n':>6}{columns}"]
            lines += [*(_line(cell) for cell in shown), ""]
    return "\n".join([*lines, "R@k: % of queries with a right candidate among the first k; ties count as failures."])


def format_table(table: Table) -> str:
    """Lay out any table; metrics in %."""
    shown = [[f"{100 * v.value:.1f}" if isinstance(v, Metric) else str(v) for v in row] for row in table.rows]
    shown.insert(0, table.columns)
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    aligned = [[cell.rjust(width) for cell, width in zip(row, widths, strict=True)] for row in shown]
    return "\n".join([table.title, *("  ".join([row[0].strip().ljust(widths[0]), *row[1:]]) for row in aligned)])


def _line(cell: Cell) -> str:
    values = "".join(_columns(cell.metrics.get(f"hit_rate@{k}")) for k in CUTOFFS)
    return f"{combination_name(cell):<24}{cell.queries:>6}{values}"


def _columns(metric: Metric | None) -> str:
    if metric is None:
        return f"{'–':>7}{'':>16}"
    chance = "" if metric.chance is None else f"{100 * metric.chance:.1f}"
    return f"{100 * metric.value:>7.1f}{format_interval(metric):>9}{chance:>7}"
