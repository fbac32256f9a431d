"""What a benchmark registers, so that `conjoin evaluate` finds it, and the baselines of its tasks.

A baseline scores the same tasks with a part of each item, or with the model's towers instead of the model.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

from conjoin.evaluation.report.page import EXAMPLES_NOTE, HIT_RATE_NOTE, task_examples
from conjoin.evaluation.results import Headline, Metric, Results, Table, TableRow
from conjoin.evaluation.task import EvaluateOptions, Part, RetrievalTask, TaskScores, View, evaluate_tasks
from conjoin.registry import Registry
from conjoin.retrieval import ItemEncoder
from conjoin.retrieval.encoder import EncoderOutput

Run = Callable[[ItemEncoder, Namespace, Path], Results]
VIEWS: dict[View, str] = {"text": "text alone", "image": "picture alone", "sum": "sum of views"}
TOWERS = "towers alone"
MOST_ROWS = 10_000
"""Queries and candidates up to which baselines are scored unless they are asked for."""
MOST_PRINTED = 12
"""Rows of the table up to which it is printed, too."""
NOTE = (
    "The same queries, candidates and judgements. Text alone, picture alone: only this part of each item is seen. Sum "
    "of views: the vectors of picture and text are added. Towers alone: without what was trained on top of them, the "
    "picture's global token and the mean of the text's tokens. Where a baseline is better, use the baseline."
)


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
        [each.task.name, len(each.ids), each.task.size, *task_metrics.values()]
        for each, task_metrics in zip(scores, metrics, strict=True)
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
        for each, task_metrics in zip(scores, metrics, strict=True)
        for name, metric in list(zip(columns, task_metrics.values(), strict=True))[:1]
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


def baseline_table(scores: Sequence[TaskScores]) -> Table | None:
    """Score the baselines of each task that has any; None if no task has.

    Args:
        scores: Of the model. With `EvaluateOptions.baselines` false, or None and many rows, nothing is scored.
    """
    if not scores or not wants_baselines([each.task for each in scores], scores[0].vectors.options):
        return None
    vectors = scores[0].vectors
    options, out = replace(vectors.options, reranker=None), vectors.folder.parent
    tasks = [each.task for each in scores if each.task.qrels]
    by_task: dict[str, list[tuple[str, TaskScores]]] = {each.task.name: [("this model", each)] for each in scores}
    for view, label in VIEWS.items():
        viewed = [task.seen_as(view) for task in tasks if _has_view(task, view)]
        for each in evaluate_tasks(vectors.encoder, viewed, out, options):
            by_task[each.task.name].append((label, each))
    towers = tower_encoder(vectors.encoder)
    if towers is not None:
        shared = [replace(task, run_depth=0) for task in tasks if _shares_part(task)]
        for each in evaluate_tasks(towers, shared, out / "towers", options):
            by_task[each.task.name].append((TOWERS, each))
    rows = [row for runs in by_task.values() if len(runs) > 1 for row in _rows(runs, options)]
    names = [f"R@{k}" for k in options.ks] + ([] if options.mrr is None else [f"MRR@{options.mrr}"])
    return Table("Baselines", ["task", "", "n", *names], rows, NOTE, len(rows) > MOST_PRINTED) if rows else None


def wants_baselines(tasks: Sequence[RetrievalTask], options: EvaluateOptions) -> bool:
    """Whether baselines are asked for, or the tasks are small and nothing is said."""
    if options.baselines is not None:
        return options.baselines
    sizes = {rows.folder: len(rows) for task in tasks for rows in (task.queries, *task.corpus)}
    return sum(sizes.values()) <= MOST_ROWS


def tower_encoder(encoder: ItemEncoder) -> ItemEncoder | None:
    """An encoder of the towers of a joint encoder; None for other models."""
    from conjoin.models.joint_encoder import JointEncoderModel

    if not isinstance(encoder.model, JointEncoderModel):
        return None
    towers: Any = _Towers(encoder.model)
    name, device = f"{encoder.name}, towers", encoder.device
    options: dict[str, Any] = {"dtype": encoder.dtype, "num_workers": encoder.num_workers, "name": name}
    options["input_type"] = encoder.input_type
    return ItemEncoder(towers, encoder.processor, encoder.batch_size, device, **options)


class _Towers(nn.Module):
    """The unit vectors of both towers side by side, normalised; a part that is missing is zero."""

    def __init__(self, model: Any) -> None:  # noqa: ANN401 - a `JointEncoderModel`
        super().__init__()
        self.model, self.config = model, model.config

    def forward(self, **inputs: Any) -> EncoderOutput:  # noqa: ANN401 - of the processor
        tokens = self.model(**inputs, views=[], output_tokens=True)
        widths = [self.config.vision_config.hidden_size, self.config.text_config.hidden_size]
        count = next(len(each) for each in (tokens.image_features, tokens.text_features) if each is not None)
        parts = [torch.zeros(count, width, device=self.model.device) for width in widths]
        if tokens.image_features is not None:
            parts[0] = tokens.image_features[:, 0].float()
        if tokens.text_features is not None:
            mask = inputs["attention_mask"][..., None].float()
            parts[1] = (tokens.text_features[:, 1:].float() * mask).sum(1) / mask.sum(1).clamp(min=1)
        for index, name in enumerate(("image_mask", "text_mask")):
            if inputs.get(name) is not None:
                parts[index] = parts[index] * inputs[name][:, None]
        return EncoderOutput(F.normalize(torch.cat([F.normalize(part, dim=1) for part in parts], dim=1), dim=1))


def _parts(task: RetrievalTask) -> list[tuple[set[Part], list[set[Part]]]]:
    """The parts of each scored query, and of each of its right candidates."""
    candidates = {id_: parts for rows in task.corpus for id_, parts in rows.parts.items()}
    queries = task.queries.parts
    return [(queries[id_], [candidates[name] for name in right]) for id_, right in task.qrels.items()]


def _has_view(task: RetrievalTask, view: View) -> bool:
    """Whether all queries can be found as this view shows them, and it hides or separates anything."""
    pairs = _parts(task)
    both = any(len(parts) > 1 for query, right in pairs for parts in (query, *right))
    return both and (
        view == "sum" or all(view in query and any(view in parts for parts in right) for query, right in pairs)
    )


def _shares_part(task: RetrievalTask) -> bool:
    """Whether each query has a part that a right candidate has, too."""
    return all(any(query & parts for parts in right) for query, right in _parts(task))


def _rows(runs: Sequence[tuple[str, TaskScores]], options: EvaluateOptions) -> list[TableRow]:
    """A row for the model, for each baseline and for a random order."""
    rows: list[TableRow] = []
    for label, scores in runs:
        metrics = [replace(metric, chance=None) for metric in scores.metrics().values()]
        rows.append([scores.task.name, label, len(scores.ids), *metrics])
    chances = [Metric(metric.chance or 0.0) for metric in runs[0][1].metrics().values()]
    return [*rows, [runs[0][1].task.name, "random order", len(runs[0][1].ids), *chances]]
