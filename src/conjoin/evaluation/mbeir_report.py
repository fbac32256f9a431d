"""Scores on M-BEIR as the published table and as a report."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from conjoin.data import MbeirCell
from conjoin.data.mbeir_layout import MBEIR_GROUPS, MBEIR_TITLES
from conjoin.evaluation.results import Headline, Metric, Results, Table
from conjoin.evaluation.table import format_interval

MBEIR_SETTINGS = ("local", "global")
_GROUP_TITLES = {"single": "Single-modal", "mixed": "Mixed-modal", "multi": "Multi-modal"}
_SHORT = {"text": "t", "image": "i", "image,text": "it"}


@dataclass(frozen=True)
class MbeirScore:
    """One cell against one pool."""

    cell: MbeirCell
    setting: str
    """`"local"` or `"global"`."""
    queries: int
    pool: int
    metrics: dict[str, Metric]
    """`"hit_rate@5"` and so on."""

    @property
    def published(self) -> Metric:
        """The hit rate that tables print for this cell."""
        return self.metrics[f"hit_rate@{self.cell.cutoff}"]


def average_score(scores: Sequence[MbeirScore], setting: str, group: str | None = None) -> float | None:
    """Mean of the published metric over the cells of a setting (and group); None without any."""
    values = [
        score.published.value
        for score in scores
        if score.setting == setting and (group is None or score.cell.group == group)
    ]
    return math.fsum(values) / len(values) if values else None


def format_mbeir(scores: Sequence[MbeirScore]) -> str:
    """Lay the scores out as the published table, in %: three groups, the cells, their averages."""
    settings = list(dict.fromkeys(score.setting for score in scores))
    by_place = {(score.cell, score.setting): score for score in scores}
    cells = list(dict.fromkeys(score.cell for score in scores))
    columns = "".join(f"{name:>9}{'95 % CI':>10}{'pool':>11}" for name in settings)
    lines = [f"{'task':<10}{'dataset':<13}{'metric':<7}{'n':>8}{columns}"]
    for group in MBEIR_GROUPS:
        members = [cell for cell in cells if cell.group == group]
        if members:
            lines += [_GROUP_TITLES[group]]
            lines += [_cell_line([by_place[cell, setting] for setting in settings]) for cell in members]
            lines += [_average_line(scores, settings, f"{_GROUP_TITLES[group]} average", group)]
    lines += [_average_line(scores, settings, f"Average of {len(cells)}", None), ""]
    return "\n".join([*lines, "R@k: % of queries with a right candidate among the first k; ties count as failures."])


def mbeir_results(scores: Sequence[MbeirScore], seed: int = 0) -> Results:
    """The scores as `Results`, for `Results.save` and `render_report`."""
    settings = list(dict.fromkeys(score.setting for score in scores))
    names = list(dict.fromkeys(name for score in scores for name in score.metrics))
    tables = []
    for setting in settings:
        rows: list[list[str | int | float | Metric | None]] = [
            [
                score.cell.name,
                task_name(score.cell),
                score.cell.group,
                score.queries,
                score.pool,
                f"R@{score.cell.cutoff}",
                score.published,
                *(score.metrics.get(name) for name in names),
            ]
            for score in scores
            if score.setting == setting
        ]
        for group in (*MBEIR_GROUPS, None):
            average = average_score(scores, setting, group)
            if average is not None:
                label = "average" if group is None else f"average, {group}"
                rows.append([label, "", group or "all", None, None, "", Metric(average), *[None] * len(names)])
        shown = ("cell", "task", "group", "n", "pool", "metric", "score", *names)
        columns = [name.replace("hit_rate@", "R@") for name in shown]
        tables.append(Table(f"M-BEIR, {setting} pools", columns, rows))
    headline = [
        Headline(f"average, {setting} pools", Metric(average), f"{len(scores) // len(settings)} cells")
        for setting in settings
        if (average := average_score(scores, setting)) is not None
    ]
    return Results(
        title="M-BEIR",
        summary="Hit rates on M-BEIR as its tables print them: at 5, at 10 for Fashion200K and FashionIQ; against the "
        "pool of each cell (local) and the pool of all (global).",
        seed=seed,
        headline=headline,
        tables=tables,
    )


def task_name(cell: MbeirCell) -> str:
    """`"t → i"`, `"it → t"`, as tables name the tasks."""
    return f"{_SHORT[cell.query_modality]} → {_SHORT[cell.target_modality]}"


def _cell_line(scores: Sequence[MbeirScore]) -> str:
    cell = scores[0].cell
    values = "".join(f"{100 * s.published.value:>9.1f}{format_interval(s.published):>10}{s.pool:>11,}" for s in scores)
    name = MBEIR_TITLES[cell.dataset]
    return f"{task_name(cell):<10}{name:<13}{f'R@{cell.cutoff}':<7}{scores[0].queries:>8,}{values}"


def _average_line(scores: Sequence[MbeirScore], settings: Sequence[str], label: str, group: str | None) -> str:
    averages = [average_score(scores, setting, group) for setting in settings]
    values = "".join(f"{100 * value:>9.1f}{'':>21}" for value in averages if value is not None)
    return f"{label:<38}{values}".rstrip()
