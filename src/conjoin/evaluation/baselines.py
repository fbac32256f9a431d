"""Baselines of a model: the same tasks with a part of each item, and with the model's towers instead of the model."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from conjoin.evaluation.results import Metric, Table, TableRow
from conjoin.evaluation.task import EvaluateOptions, Part, RetrievalTask, TaskScores, View, evaluate_tasks
from conjoin.retrieval import ItemEncoder
from conjoin.retrieval.encoder import EncoderOutput

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
