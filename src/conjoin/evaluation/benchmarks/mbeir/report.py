"""M-BEIR scores as `Results`."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from conjoin.data import MbeirCell
from conjoin.data.mbeir.layout import MBEIR_GROUPS
from conjoin.evaluation.report.table import HIT_RATE_NOTE
from conjoin.evaluation.results import Headline, Metric, Results, Table, TableRow

MBEIR_SETTINGS = ("local", "global")
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
        """The hit rate that the published tables print for this cell."""
        return self.metrics[f"hit_rate@{self.cell.cutoff}"]


def average_score(scores: Sequence[MbeirScore], setting: str, group: str | None = None) -> float | None:
    """Mean of the published metric over the cells of a setting (and of a group); None without cells."""
    values = [
        score.published.value
        for score in scores
        if score.setting == setting and (group is None or score.cell.group == group)
    ]
    return math.fsum(values) / len(values) if values else None


def mbeir_results(scores: Sequence[MbeirScore], seed: int = 0) -> Results:
    """The scores as `Results`: the averages, the published table, and all cut-offs for the report."""
    settings = list(dict.fromkeys(score.setting for score in scores))
    averages = {setting: average_score(scores, setting) for setting in settings}
    return Results(
        title="M-BEIR",
        summary="Hit rates on M-BEIR at the cut-offs of its tables: 10 for Fashion200K and FashionIQ, else 5. The "
        "queries of each cell search the cell's own pool (local) and the pool of all cells (global).",
        seed=seed,
        headline=[
            Headline(f"average, {setting} pools", Metric(average), f"{len(scores) // len(settings)} cells")
            for setting, average in averages.items()
            if average is not None
        ],
        tables=[_published_table(scores, settings), *(_full_table(scores, setting) for setting in settings)],
    )


def _published_table(scores: Sequence[MbeirScore], settings: Sequence[str]) -> Table:
    """The cells of each group followed by their average, both settings side by side."""
    by_place = {(score.cell, score.setting): score for score in scores}
    cells = list(dict.fromkeys(score.cell for score in scores))
    rows: list[TableRow] = []
    for group in MBEIR_GROUPS:
        members = [cell for cell in cells if cell.group == group]
        rows += [_cell_row([by_place[cell, setting] for setting in settings]) for cell in members]
        rows += [_average_row(scores, settings, group)] if members else []
    rows.append(_average_row(scores, settings, None))
    columns = ["cell", "task", "metric", "n", *(name for setting in settings for name in (setting, "pool"))]
    return Table("By cell and pool", columns, rows, HIT_RATE_NOTE)


def _cell_row(scores: Sequence[MbeirScore]) -> TableRow:
    cell = scores[0].cell
    task = f"{_SHORT[cell.query_modality]} → {_SHORT[cell.target_modality]}"
    values = [value for score in scores for value in (replace(score.published, chance=None), score.pool)]
    return [cell.name, task, f"R@{cell.cutoff}", scores[0].queries, *values]


def _average_row(scores: Sequence[MbeirScore], settings: Sequence[str], group: str | None) -> TableRow:
    averages = [average_score(scores, setting, group) for setting in settings]
    values = [value for average in averages for value in (None if average is None else Metric(average), "")]
    return ["average" if group is None else f"average, {group}", "", "", "", *values]


def _full_table(scores: Sequence[MbeirScore], setting: str) -> Table:
    """All cut-offs of one setting, with chance."""
    shown = [score for score in scores if score.setting == setting]
    names = list(dict.fromkeys(name for score in shown for name in score.metrics))
    rows: list[TableRow] = [
        [s.cell.name, s.cell.group, s.queries, s.pool, *(s.metrics.get(name) for name in names)] for s in shown
    ]
    columns = ["cell", "group", "n", "pool", *(name.replace("hit_rate@", "R@") for name in names)]
    return Table(f"All cut-offs, {setting} pools", columns, rows, report_only=True)
