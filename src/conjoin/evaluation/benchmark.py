"""What a benchmark declares, so that `conjoin evaluate` finds it, its tables, and the baselines of its tasks.

A baseline scores the same tasks with a part of each item, or with the model's towers instead of the model.
"""

from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

from conjoin.evaluation.report.page import EXAMPLES_NOTE, HIT_RATE_NOTE, metric_name, score_table, task_examples
from conjoin.evaluation.results import Headline, Metric, Results, Table
from conjoin.evaluation.task import EvaluateOptions, Part, RetrievalTask, TaskScores, View, evaluate_tasks
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
Flag = tuple[str, dict[str, Any]]


def flag(name: str, help: str, **how: Any) -> Flag:  # noqa: ANN401 - of argparse
    """Declare an option of a benchmark; `how` as for `ArgumentParser.add_argument`."""
    return name, {"help": help, **how}


DTYPE = flag("--dtype", "type of stored vectors (default: float32)", choices=("float32", "float16"), default="float32")


@dataclass(frozen=True)
class Benchmark:
    """A benchmark of `conjoin evaluate`.

    Args:
        name: What `--benchmark` takes.
        help: One line about what it measures and what `--data` is.
        run: Called as `run(encoder, args, out)` with the model, all options, and the folder to write to; `run_tasks`
            makes one of retrieval tasks. `args` holds the benchmark's own options and the shared ones: `data`, `seed`,
            `quiet` and so on.
        flags: The benchmark's own options.
        reads_data: Whether `--data` must, can or cannot be given. It is a path, or with `"source"`, any source of
            `conjoin.data.load_pairs`, and must be given.
        reranks: Whether it uses `args.reranker`, a `conjoin.retrieval.Reranker` or None, on the first
            `args.rerank_top` candidates of each query.
    """

    name: str
    help: str
    run: Run
    flags: Sequence[Flag] = ()
    reads_data: Literal["required", "optional", "none", "source"] = "required"
    reranks: bool = False


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


def read_options(args: Namespace, **defaults: Any) -> EvaluateOptions:  # noqa: ANN401 - of `EvaluateOptions`
    """The options of an evaluation among those of the command; `defaults` are the benchmark's."""
    given = {each.name: vars(args)[each.name] for each in fields(EvaluateOptions) if each.name in vars(args)}
    return EvaluateOptions(**defaults | given | {"show_progress": not args.quiet})


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
    rows: list[tuple[list[Any], dict[str, Metric]]] = [
        ([each.task.name, len(each.ids), each.task.size], each.metrics()) for each in scores
    ]
    tables = [score_table("Tasks", ["task", "n", "candidates"], rows, note=HIT_RATE_NOTE)]
    kinds = dict.fromkeys(kind for each in scores for kind in each.task.groups)
    tables += [group_table(scores, kind, f"By {kind}", kind) for kind in kinds]
    headline = [
        Headline(f"{name}, {metric_name(first)}", metrics[first], f"{count:,} queries")
        for (name, count, _), metrics in rows
        for first in list(metrics)[:1]
    ]
    seed = scores[0].vectors.options.seed if scores else 0
    return Results(title, summary, seed, headline=headline, tables=tables, **facts)


def group_table(scores: Sequence[TaskScores], kind: str, title: str, column: str, **facts: Any) -> Table:  # noqa: ANN401
    """A table with one row per task and group of a kind, named by the group, and by the task if there are several.

    Args:
        scores: Of the tasks.
        kind: Of the groups.
        title: Of the table.
        column: Name of the first column.
        facts: Further fields of `Table`.
    """
    rows: list[tuple[list[Any], dict[str, Metric]]] = [
        ([f"{each.task.name}, {name}" if len(scores) > 1 else name, len(ids)], each.metrics(ids))
        for each in scores
        for name, ids in each.task.groups.get(kind, {}).items()
    ]
    return score_table(title, [column, "n"], rows, chance=False, **facts)


def baseline_table(scores: Sequence[TaskScores]) -> Table | None:
    """Score the baselines of each task that has any; None if no task has.

    Args:
        scores: Of the model. With `EvaluateOptions.baselines` false, or None and many rows, nothing is scored.
    """
    if not scores or not wants_baselines([each.task for each in scores], scores[0].vectors.options):
        return None
    vectors = scores[0].vectors
    options, out = replace(vectors.options, reranker=None), vectors.folder.parent
    tasks = [(each.task, _parts(each.task)) for each in scores if each.task.qrels]
    runs: list[tuple[str, ItemEncoder, Path, list[RetrievalTask]]] = [
        (label, vectors.encoder, out, [task.seen_as(view) for task, pairs in tasks if _has_view(pairs, view)])
        for view, label in VIEWS.items()
    ]
    towers = tower_encoder(vectors.encoder)
    if towers is not None:  # they only find what shares a part with the query
        shared = [
            replace(task, run_depth=0)
            for task, pairs in tasks
            if all(any(query & parts for parts in right) for query, right in pairs)
        ]
        runs.append((TOWERS, towers, out / "towers", shared))
    by_task: dict[str, list[tuple[str, TaskScores]]] = {each.task.name: [("this model", each)] for each in scores}
    for label, encoder, folder, seen in runs:
        for each in evaluate_tasks(encoder, seen, folder, options):
            by_task[each.task.name].append((label, each))
    rows: list[tuple[list[Any], dict[str, Metric]]] = []
    for name, labelled in by_task.items():
        if len(labelled) > 1:
            rows += [([name, label, len(each.ids)], each.metrics()) for label, each in labelled]
            chance = {key: Metric(metric.chance or 0.0) for key, metric in labelled[0][1].metrics().items()}
            rows.append(([name, "random order", len(labelled[0][1].ids)], chance))
    facts: dict[str, Any] = {"note": NOTE, "report_only": len(rows) > MOST_PRINTED}
    return score_table("Baselines", ["task", "", "n"], rows, chance=False, **facts) if rows else None


def wants_baselines(tasks: Sequence[RetrievalTask], options: EvaluateOptions) -> bool:
    """Whether baselines are asked for, or the tasks are small and nothing is said."""
    if options.baselines is not None:
        return options.baselines
    sizes = {rows.folder: len(rows) for task in tasks for rows in (task.queries, *task.corpus)}
    return sum(sizes.values()) <= MOST_ROWS


def _parts(task: RetrievalTask) -> list[tuple[set[Part], list[set[Part]]]]:
    """The parts of each scored query, and of each of its right candidates."""
    candidates = {id_: parts for rows in task.corpus for id_, parts in rows.parts.items()}
    queries = task.queries.parts
    return [(queries[id_], [candidates[name] for name in right]) for id_, right in task.qrels.items()]


def _has_view(pairs: Sequence[tuple[set[Part], list[set[Part]]]], view: View) -> bool:
    """Whether all queries can be found as this view shows them, and it hides or separates anything."""
    both = any(len(parts) > 1 for query, right in pairs for parts in (query, *right))
    return both and (
        view == "sum" or all(view in query and any(view in parts for parts in right) for query, right in pairs)
    )


def tower_encoder(encoder: ItemEncoder) -> ItemEncoder | None:
    """An encoder of the towers of a joint encoder; None for other models."""
    from conjoin.models.joint_encoder import JointEncoderModel

    if not isinstance(encoder.model, JointEncoderModel):
        return None
    towers: Any = _Towers(encoder.model)
    how = {name: getattr(encoder, name) for name in ("batch_size", "device", "dtype", "num_workers", "input_type")}
    return ItemEncoder(towers, encoder.processor, name=f"{encoder.name}, towers", **how)


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
