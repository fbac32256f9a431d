"""What a benchmark registers, so that `conjoin evaluate` finds it."""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from conjoin.evaluation.baselines import baseline_table
from conjoin.evaluation.report.examples import EXAMPLES_NOTE, task_examples
from conjoin.evaluation.report.table import HIT_RATE_NOTE
from conjoin.evaluation.results import Headline, Results, Table, TableRow
from conjoin.evaluation.task import EvaluateOptions, RetrievalTask, TaskScores, evaluate_tasks
from conjoin.registry import Registry
from conjoin.retrieval import ItemEncoder

Run = Callable[[ItemEncoder, Namespace, Path], Results]


@dataclass(frozen=True)
class Benchmark:
    """A benchmark of `conjoin evaluate`.

    Args:
        name: What `--benchmark` takes.
        help: One line about what it measures and what `--data` is.
        add_arguments: Adds the benchmark's own options to the parser of the command.
        run: Called as `run(encoder, args, out)` with the model, all options, and the folder to write to; `run_tasks`
            makes one of retrieval tasks. `args` holds the benchmark's own options and the shared ones: `data`, `seed`,
            `quiet` and so on.
        reads_data: Whether `--data` must, can or cannot be given. It is a path, or with `"source"`, any source of
            `conjoin.data.load_pairs`, and must be given.
        reranks: Whether it uses `args.reranker`, a `conjoin.retrieval.Reranker` or None, on the first
            `args.rerank_top` candidates of each query.
    """

    name: str
    help: str
    add_arguments: Callable[[ArgumentParser], None]
    run: Run
    reads_data: Literal["required", "optional", "none", "source"] = "required"
    reranks: bool = False


BENCHMARKS: Registry[Benchmark] = Registry("benchmark", "conjoin.evaluation.benchmarks", "conjoin.benchmarks")
"""Every benchmark by name."""


def run_tasks(
    tasks: Callable[[Namespace], Sequence[RetrievalTask]],
    report: Callable[[list[TaskScores], Namespace], Results],
    **defaults: Any,  # noqa: ANN401 - of `EvaluateOptions`
) -> Run:
    """Make the `run` of a benchmark that is data: its tasks, and the table of their scores.

    Args:
        tasks: Reads the data that the options name.
        report: Lays out the scores, see `task_results`. Baselines are added, and examples if there are none.
        defaults: Fields of `EvaluateOptions`; options of the command override them.
    """

    def run(encoder: ItemEncoder, args: Namespace, out: Path) -> Results:
        scores = evaluate_tasks(encoder, tasks(args), out, read_options(args, **defaults))
        return complete(report(scores, args), scores)

    return run


def complete(results: Results, scores: Sequence[TaskScores]) -> Results:
    """Add the table of baselines to a report, and examples if it has none."""
    table = baseline_table(scores)
    results.tables += [] if table is None else [table]
    if not results.examples:
        results.examples, results.examples_note = task_examples(scores), EXAMPLES_NOTE
    return results


def task_results(title: str, summary: str, scores: Sequence[TaskScores], **facts: Any) -> Results:  # noqa: ANN401
    """Results with one row per task, and one table per kind of group.

    Args:
        title: Of the report.
        summary: What is measured.
        scores: Of the tasks.
        facts: Further fields of `Results`.
    """
    metrics = [each.metrics() for each in scores]
    columns = [name.replace("hit_rate@", "R@").replace("mrr@", "MRR@") for name in (metrics[0] if metrics else ())]
    rows: list[TableRow] = [
        [each.task.name, len(each.ids), each.task.size, *found.values()]
        for each, found in zip(scores, metrics, strict=True)
    ]
    tables = [Table("Tasks", ["task", "n", "candidates", *columns], rows, HIT_RATE_NOTE)]
    for kind in dict.fromkeys(kind for each in scores for kind in each.task.groups):
        grouped = [
            group_row(each, f"{each.task.name}, {name}" if len(scores) > 1 else name, ids)
            for each in scores
            for name, ids in each.task.groups.get(kind, {}).items()
        ]
        tables.append(Table(f"By {kind}", [kind, "n", *columns], grouped))
    headline = [
        Headline(f"{each.task.name}, {name}", metric, f"{len(each.ids):,} queries")
        for each, found in zip(scores, metrics, strict=True)
        for name, metric in list(zip(columns, found.values(), strict=True))[:1]
    ]
    seed = scores[0].vectors.options.seed if scores else 0
    return Results(title, summary, seed, headline=headline, tables=tables, **facts)


def group_row(scores: TaskScores, label: str, ids: Sequence[str]) -> TableRow:
    """A row of a table about some queries: their number and metrics, whose chance is left out for width."""
    options = scores.vectors.options
    empty = [None] * (len(options.ks) + (options.mrr is not None))
    return [label, len(ids), *([replace(metric, chance=None) for metric in scores.metrics(ids).values()] or empty)]


def read_options(args: Namespace, **defaults: Any) -> EvaluateOptions:  # noqa: ANN401 - of `EvaluateOptions`
    """The options of an evaluation among those of the command.

    Args:
        args: What was parsed.
        defaults: Of the benchmark.
    """
    given = vars(args)
    names = {each.name for each in fields(EvaluateOptions)} & given.keys()
    return EvaluateOptions(**defaults | {name: given[name] for name in names} | {"show_progress": not args.quiet})
