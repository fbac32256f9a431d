"""M-BEIR: 16 cells of dataset and task, each against its own pool (local) and against the pool of all cells (global).

"Recall@k" in the published tables is a hit rate: any right candidate among the first k. Its k is 5, or 10 for
Fashion200K and FashionIQ. Some papers report the average at 50.
"""

import logging
import math
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from conjoin.data import MbeirCandidates, MbeirCell, find_cells, mbeir_queries
from conjoin.data.mbeir import MBEIR_GROUPS, pool_file, qrels_file, required
from conjoin.evaluation.benchmark import DTYPE, Benchmark, flag, run_tasks
from conjoin.evaluation.report.page import HIT_RATE_NOTE, score_table
from conjoin.evaluation.results import Headline, Metric, Results, Table, TableRow, read_qrels
from conjoin.evaluation.task import EvaluateOptions, RetrievalTask, Rows, TaskScores, evaluate_tasks
from conjoin.retrieval import ItemEncoder

logger = logging.getLogger(__name__)
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
        data: The root of M-BEIR, or of the miniature that `experiments/mini_mbeir.py` writes.
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
        raise ValueError(f"unknown settings {unknown}; expected some of {MBEIR_SETTINGS}")
    chosen, data = find_cells(cells), Path(data)
    if not data.is_dir():
        raise FileNotFoundError(f"M-BEIR: no such folder: {str(data)!r}")
    union = MbeirCandidates(data, required(pool_file(data, None, split))) if "global" in settings else None
    tasks: list[RetrievalTask] = []
    for cell in chosen:
        rows = mbeir_queries(data, cell, split, instructions)
        prompts = [row["instruction"] for row in rows] if instructions else None
        queries = Rows(f"queries-{cell.name}-{split}", [{"id": row["id"], **row["query"]} for row in rows], prompts)
        judged = read_qrels(required(qrels_file(data, cell, split)))
        pool = MbeirCandidates(data, required(pool_file(data, cell, split)))
        corpus = pool if union is None else union
        for setting in settings:
            searched = corpus if setting == "global" else pool
            qrels = {row["id"]: {did for did in judged.get(row["id"], ()) if did in searched} for row in rows}
            dropped = [(qid, did) for qid in qrels for did in judged.get(qid, ()) if did not in searched]
            if dropped:
                logger.warning(
                    "%s: %d of the judged candidates are not in the %s pool and count as not judged, such as %r of "
                    "query %r",
                    cell.name, len(dropped), setting, dropped[0][1], dropped[0][0],
                )  # fmt: skip
            lost = next((qid for qid, right in qrels.items() if not right), None)
            if lost is not None:
                right = sorted(judged.get(lost, ()))
                raise ValueError(
                    f"query {lost!r} of {cell.name}: none of its {len(right)} right candidates {right[:3]} is in the "
                    f"{setting} pool {str(searched.lines.path)!r}"
                )
            tasks.append(
                RetrievalTask(
                    f"{setting}/{cell.name}",
                    queries,
                    (Rows(corpus.lines.path.stem, corpus, lookup=corpus.__getitem__),),
                    qrels,
                    None if searched is corpus else searched.ids,
                    run_depth=run_depth,
                )
            )
        absent = next((did for did in pool.ids if did not in corpus), None)
        if absent is not None:
            raise ValueError(f"candidate {absent!r} of the local pool of {cell.name} is not in the global pool")
    return sorted(tasks, key=lambda task: list(settings).index(task.name.split("/")[0]))


def evaluate_mbeir(
    encoder: ItemEncoder,
    data: str | Path,
    out: str | Path,
    options: EvaluateOptions | None = None,
    **which: Any,  # noqa: ANN401 - of `mbeir_tasks`
) -> list[MbeirScore]:
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
    return _scores(evaluate_tasks(encoder, tasks, out, options))


def _scores(scores: Sequence[TaskScores]) -> list[MbeirScore]:
    found = []
    for each in scores:
        setting, name = each.task.name.split("/")
        found.append(MbeirScore(find_cells([name])[0], setting, len(each.ids), each.task.size, each.metrics()))
    return found


def average_score(
    scores: Sequence[MbeirScore], setting: str, group: str | None = None, k: int | None = None
) -> float | None:
    """Mean hit rate over the cells of a setting (and of a group), as published or at `k`; None without cells."""
    values = [
        (score.published if k is None else score.metrics[f"hit_rate@{k}"]).value
        for score in scores
        if score.setting == setting and (group is None or score.cell.group == group)
    ]
    return math.fsum(values) / len(values) if values else None


def mbeir_results(scores: Sequence[MbeirScore], seed: int = 0) -> Results:
    """The scores as `Results`: the averages, the published table, and all cut-offs for the report."""
    settings = list(dict.fromkeys(score.setting for score in scores))
    cells = list(dict.fromkeys(score.cell for score in scores))
    by_cell = {(score.cell, score.setting): score for score in scores}
    averages: list[tuple[str, str, int | None]] = [
        (f"average, {setting} pools", setting, None) for setting in settings
    ]
    averages += [
        (f"average R@50, {setting} pools", setting, 50) for setting in settings if "hit_rate@50" in scores[0].metrics
    ]

    def average_row(label: str, group: str | None) -> TableRow:
        values = [average_score(scores, setting, group) for setting in settings]
        return [label, "", "", "", *(part for value in values if value is not None for part in (Metric(value), ""))]

    published: list[TableRow] = []
    for group in MBEIR_GROUPS:
        members = [cell for cell in cells if cell.group == group]
        for cell in members:
            task = f"{_SHORT[cell.query_modality]} → {_SHORT[cell.target_modality]}"
            row = [by_cell[cell, setting] for setting in settings]
            values = [value for each in row for value in (replace(each.published, chance=None), each.pool)]
            published.append([cell.name, task, f"R@{cell.cutoff}", row[0].queries, *values])
        published += [average_row(f"average, {group}", group)] if members else []
    columns = ["cell", "task", "metric", "n", *(name for setting in settings for name in (setting, "pool"))]
    tables = [Table("By cell and pool", columns, [*published, average_row("average", None)], HIT_RATE_NOTE)]
    for setting in settings:
        title, of_setting = f"All cut-offs, {setting} pools", [each for each in scores if each.setting == setting]
        rows = [([each.cell.name, each.cell.group, each.queries, each.pool], each.metrics) for each in of_setting]
        tables.append(score_table(title, ["cell", "group", "n", "pool"], rows, report_only=True))
    return Results(
        title="M-BEIR",
        summary="Hit rates on M-BEIR at the cut-offs of its tables: 10 for Fashion200K and FashionIQ, else 5. The "
        "queries of each cell search the cell's own pool (local) and the pool of all cells (global).",
        seed=seed,
        headline=[
            Headline(label, Metric(average_score(scores, setting, k=k) or 0.0), f"{len(cells)} cells")
            for label, setting, k in averages
        ],
        tables=tables,
    )


def _tasks(args: Namespace) -> list[RetrievalTask]:
    which = {"cells": args.cells, "settings": args.pools, "split": args.split}
    return mbeir_tasks(args.data, instructions=not args.no_instructions, **which)


def _report(scores: list[TaskScores], args: Namespace) -> Results:
    results = mbeir_results(_scores(scores), args.seed)
    results.dataset = {"name": "M-BEIR", "folder": str(args.data), "split": args.split}
    results.config = {"instructions": not args.no_instructions, "hubness penalty": args.hubness_penalty}
    return results


BENCHMARK = Benchmark(
    "mbeir",
    "M-BEIR: 16 cells, local and global pools; also writes run files; --data is its root folder",
    run_tasks(_tasks, _report, ks=_CUT_OFFS, mrr=None),
    (
        flag("--split", "queries to evaluate on (default: test)", choices=("test", "val"), default="test"),
        flag("--cells", "only these, e.g. visualnews_task0 cirr_task7 (default: all 16)", nargs="+", metavar="NAME"),
        flag("--pools", "candidates (default: both)", nargs="+", choices=MBEIR_SETTINGS, default=MBEIR_SETTINGS),
        flag("--no-instructions", "queries without their instructions", action="store_true"),
        flag(
            "--hubness-penalty",
            "subtract W times a candidate's mean score over all queries (transductive; default: 0)",
            type=float,
            default=0.0,
            metavar="W",
        ),
        DTYPE,
    ),
    reranks=True,
)
