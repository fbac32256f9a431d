"""M-BEIR: 16 cells of dataset and task, each against its own pool (local) and against the pool of all cells (global).

"Recall@k" in the published tables is a hit rate: any right candidate among the first k. Its k is 5, or 10 for
Fashion200K and FashionIQ.
"""

import math
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from conjoin.data import MbeirCandidates, MbeirCell, find_cells, mbeir_queries
from conjoin.data.mbeir import MBEIR_GROUPS, pool_file, qrels_file, required
from conjoin.evaluation.benchmark import BENCHMARKS, Benchmark, run_tasks
from conjoin.evaluation.report.page import HIT_RATE_NOTE
from conjoin.evaluation.results import Headline, Metric, Results, Table, TableRow, read_qrels
from conjoin.evaluation.task import EvaluateOptions, RetrievalTask, Rows, TaskScores, evaluate_tasks
from conjoin.retrieval import ItemEncoder

MBEIR_SETTINGS = ("local", "global")
_SHORT = {"text": "t", "image": "i", "image,text": "it"}
_CUT_OFFS = (1, 5, 10, 50)


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

    @classmethod
    def of(cls, scores: TaskScores) -> "MbeirScore":
        """The scores of a task of `mbeir_tasks`."""
        setting, _, name = scores.task.name.partition("/")
        return cls(find_cells([name])[0], setting, len(scores.ids), scores.task.size, scores.metrics())

    @property
    def published(self) -> Metric:
        """The hit rate that the published tables print for this cell."""
        return self.metrics[f"hit_rate@{self.cell.cutoff}"]


def mbeir_tasks(
    data: str | Path,
    *,
    cells: Sequence[str] | None = None,
    settings: Sequence[str] = MBEIR_SETTINGS,
    split: str = "test",
    instructions: bool = True,
    run_depth: int = max(_CUT_OFFS) + 1,
) -> list[RetrievalTask]:
    """Return one task for each setting and cell, in the order of the published table.

    The global pool also serves the local settings; without the global setting, each local pool is a corpus of its own.
    Files, ids and judgements are checked here. An image is opened when it is encoded.

    Args:
        data: The root of M-BEIR, or of the miniature that `make_mini_mbeir` writes.
        cells: Names such as `"visualnews_task0"`; all 16 when None.
        settings: Of `MBEIR_SETTINGS`.
        split: `"test"` or `"val"`.
        instructions: Whether queries have an instruction. A query has the same one in every evaluation.
        run_depth: Candidates of each query in the run files.

    Raises:
        FileNotFoundError: A file is missing.
        ValueError: An unknown cell or setting or none, a malformed row (it is named), or a query without a right
            candidate in a pool.
    """
    unknown = [setting for setting in settings if setting not in MBEIR_SETTINGS]
    if unknown or not settings:
        raise ValueError(f"unknown settings {unknown}; expected some of {list(MBEIR_SETTINGS)}")
    chosen, data = find_cells(cells), Path(data)
    if not data.is_dir():
        raise FileNotFoundError(f"M-BEIR: no such folder: {str(data)!r}")
    union = MbeirCandidates(data, required(pool_file(data, None, split))) if "global" in settings else None
    tasks: dict[str, list[RetrievalTask]] = {setting: [] for setting in settings}
    for cell in chosen:
        rows = mbeir_queries(data, cell, split, instructions)
        prompts = [row["instruction"] for row in rows] if instructions else None
        queries = Rows(f"queries-{cell.name}-{split}", [{"id": row["id"], **row["query"]} for row in rows], prompts)
        judged = read_qrels(required(qrels_file(data, cell, split)))
        pool = MbeirCandidates(data, required(pool_file(data, cell, split)))
        absent = next((did for did in pool.ids if did not in union), None) if union is not None else None
        for setting in settings:
            searched = union if union is not None and setting == "global" else pool
            qrels = {
                id_: _right(id_, cell, judged.get(id_, {}), setting, searched) for id_ in (row["id"] for row in rows)
            }
            corpus = searched if union is None else union
            candidates = None if corpus is searched else searched.ids
            tasks[setting].append(
                RetrievalTask(
                    f"{setting}/{cell.name}", queries, (_corpus(corpus),), qrels, candidates, run_depth=run_depth
                )
            )
        if absent is not None:
            raise ValueError(f"candidate {absent!r} of the local pool of {cell.name} is not in the global pool")
    return [task for of_setting in tasks.values() for task in of_setting]


def _corpus(pool: MbeirCandidates) -> Rows:
    return Rows(pool.lines.path.stem, pool, lookup=pool.__getitem__)


def _right(qid: str, cell: MbeirCell, judged: Any, setting: str, pool: MbeirCandidates) -> set[str]:  # noqa: ANN401
    """The right candidates of a query that are in a pool, at least one."""
    right = {did for did in judged if did in pool}
    if not right:
        raise ValueError(
            f"query {qid!r} of {cell.name}: none of its {len(judged)} right candidates {sorted(judged)[:3]} is in the "
            f"{setting} pool {str(pool.lines.path)!r}"
        )
    return right


def evaluate_mbeir(
    encoder: ItemEncoder,
    data: str | Path,
    out: str | Path,
    options: EvaluateOptions | None = None,
    **which: Any,  # noqa: ANN401 - of `mbeir_tasks`
) -> "list[MbeirScore]":
    """Evaluate an encoder on M-BEIR; an interrupted evaluation resumes with the vectors that are on disk.

    Args:
        encoder: The model.
        data: As for `mbeir_tasks`.
        out: Folder to write to: vectors, run files and judgements.
        options: Cut-offs (5 and 10 are added), type of the vectors and so on. PUMA's evaluation code has
            `hubness_penalty=0.2`. It needs all test queries at once (transductive), so the default is 0.
        which: `cells`, `settings`, `split` and `instructions` of `mbeir_tasks`.

    Returns:
        One score per cell and setting.

    Raises:
        FileNotFoundError: As `mbeir_tasks`, or an image is missing.
        ValueError: As `mbeir_tasks`, or a cut-off below 1.
    """
    options = options or EvaluateOptions(ks=_CUT_OFFS)
    if min(options.ks, default=1) < 1:
        raise ValueError(f"ks={tuple(options.ks)}: cut-offs must be at least 1")
    options = replace(options, ks=sorted({5, 10, *options.ks}), mrr=None)
    tasks = mbeir_tasks(data, run_depth=max(options.ks) + 1, **which)
    return [MbeirScore.of(scores) for scores in evaluate_tasks(encoder, tasks, out, options)]


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
    by_cell = {(score.cell, score.setting): score for score in scores}
    cells = list(dict.fromkeys(score.cell for score in scores))
    rows: list[TableRow] = []
    for group in MBEIR_GROUPS:
        members = [cell for cell in cells if cell.group == group]
        rows += [_cell_row([by_cell[cell, setting] for setting in settings]) for cell in members]
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


def _add_arguments(parser: ArgumentParser) -> None:
    options = parser.add_argument_group("options of mbeir")
    options.add_argument(
        "--split", choices=("test", "val"), default="test", help="queries to evaluate on (default: %(default)s)"
    )
    options.add_argument(
        "--cells",
        nargs="+",
        metavar="NAME",
        help="only these cells, e.g. visualnews_task0 cirr_task7 (default: all 16)",
    )
    options.add_argument(
        "--pools",
        nargs="+",
        choices=MBEIR_SETTINGS,
        default=list(MBEIR_SETTINGS),
        help="candidate pools (default: both)",
    )
    options.add_argument("--no-instructions", action="store_true", help="queries without their instructions")
    options.add_argument(
        "--hubness-penalty",
        type=float,
        default=0.0,
        metavar="W",
        help="subtract W times a candidate's mean score over all queries (transductive; default: %(default)s)",
    )
    options.add_argument(
        "--dtype",
        choices=("float32", "float16"),
        default="float32",
        help="type of stored vectors (default: %(default)s)",
    )


def _tasks(args: Namespace) -> list[RetrievalTask]:
    which = {"cells": args.cells, "settings": args.pools, "split": args.split}
    return mbeir_tasks(args.data, instructions=not args.no_instructions, **which)


def _report(scores: list[TaskScores], args: Namespace) -> Results:
    results = mbeir_results([MbeirScore.of(each) for each in scores], args.seed)
    results.dataset = {"name": "M-BEIR", "folder": str(args.data), "split": args.split}
    results.config = {"instructions": not args.no_instructions, "hubness penalty": args.hubness_penalty}
    return results


BENCHMARKS.register(
    Benchmark(
        "mbeir",
        "M-BEIR: 16 cells, local and global pools; also writes run files; --data is its root folder",
        _add_arguments,
        run_tasks(_tasks, _report, ks=_CUT_OFFS, mrr=None),
        reranks=True,
    )
)
