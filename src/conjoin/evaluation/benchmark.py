"""What a benchmark declares, how it is evaluated and reported, and the baselines beside it.

A baseline scores the same cells with a part of each item, or with the model's towers instead of the model.
"""

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from conjoin.constants import SOLAR_HEADS
from conjoin.evaluation.results import Example, Headline, Results, Score, Table
from conjoin.evaluation.tables import average, metric_name, random_order, score_table
from conjoin.evaluation.task import PARTS, Cell, CellScores, EvaluateOptions, View, evaluate_cells
from conjoin.evaluation.tasks import TASKS
from conjoin.retrieval import ItemEncoder
from conjoin.retrieval.encoder import EncoderOutput

VIEWS: dict[View, str] = {"text": "text alone", "image": "picture alone", "sum": "sum of views"}
TOWERS, HEADS = "towers alone", "with W"
MOST_ROWS = 10_000
"""Queries and candidates up to which baselines are scored unless they are asked for."""
MOST_PRINTED = 12
"""Rows of a table up to which it is printed, too."""
_EXAMPLES = 12
_BASELINES_NOTE = (
    "The same queries, candidates and judgements. Text alone, picture alone: only this part of each item is seen. Sum "
    "of views: the vectors of picture and text are added. Towers alone: without what was trained on top of them, the "
    "picture's global token and the mean of the text's tokens. With W: a picture or a text alone is projected by the "
    "heads of SOLAR's stage 1. Where a baseline is better, use the baseline."
)


@dataclass(frozen=True)
class Task:
    """A benchmark.

    Args:
        name: Of the benchmark.
        title: Of its report.
        summary: What is measured, one paragraph.
        options: A dataclass of the options of `cells`; the `Args` of its docstring are their help.
        cells: Reads the data that the options name.
        ks: Cut-offs of the hit rates.
        mrr: Ranks that the mean reciprocal rank counts; None leaves it out.
        headline: The main metrics.
        averages: Whether the average over the cells of a table is the main score, not each cell.
        by: A label of the cells: each of its values has an average of its own.
        notes: Below the tables, by title: of a section, or of a kind of groups.
        tables: Makes further tables.
    """

    name: str
    title: str
    summary: str
    options: type
    cells: Callable[[Any], Sequence[Cell]]
    ks: Sequence[int] = (1, 5, 10)
    mrr: int | None = 10
    headline: Sequence[str] = ("hit_rate@1",)
    averages: bool = False
    by: str | None = None
    notes: Mapping[str, str] = field(default_factory=dict)
    tables: Callable[[Sequence[CellScores]], list[Table]] = lambda scores: []


def find_task(name: str) -> Task:
    """The benchmark of a name.

    Raises:
        ValueError: There is none; the message names the nearest and all.
    """
    if name not in TASKS:
        near = difflib.get_close_matches(name, TASKS, n=1)
        raise ValueError(f"benchmark {name!r}; " + (f"did you mean {near[0]!r}?" if near else f"there are {[*TASKS]}"))
    task: Task = import_module(f"conjoin.evaluation.tasks.{name}").TASK
    return task


def evaluate(
    encoder: ItemEncoder,
    task: Task | str,
    out: str | Path,
    options: EvaluateOptions | None = None,
    **which: Any,  # noqa: ANN401 - of the task
) -> Results:
    """Evaluate an encoder on a benchmark; an interrupted evaluation resumes with the vectors that are on disk.

    Args:
        encoder: The model; its input type says how it takes items of several images.
        task: The benchmark, or the name of one.
        out: Folder to write to: vectors, and for some benchmarks run files and judgements.
        options: How to evaluate; the cut-offs are the benchmark's.
        which: The benchmark's own options, such as `data`, the folder or file of its data.

    Raises:
        FileNotFoundError: A file or an image is missing.
        ValueError: No such benchmark, data that cannot be read (the item is named), or a collection in `out` that was
            made with another model.
    """
    task = find_task(task) if isinstance(task, str) else task
    options = replace(options or EvaluateOptions(), ks=task.ks, mrr=task.mrr)
    chosen = task.options(**which)
    results = make_report(task, evaluate_cells(encoder, task.cells(chosen), out, options))
    results.model = {"name": encoder.name, "fingerprint": encoder.fingerprint}
    results.dataset = {name: value for name, value in vars(chosen).items() if isinstance(value, str | int | list)}
    results.config = {"hubness penalty": options.hubness_penalty, "resamples": options.resamples}
    return results


def make_report(task: Task, scores: Sequence[CellScores]) -> Results:
    """The scores of the cells of a benchmark as tables, headlines, baselines and examples."""
    results = Results(task.title, task.summary, scores[0].vectors.options.seed, benchmark=task.name)
    sections: dict[str, list[Score]] = {}
    for each in scores:
        sections.setdefault(each.cell.section, []).append(each.score())
    for title, rows in sections.items():
        results.scores += rows
        averages = task.averages and len(rows) > 1
        results.tables.append(score_table(title, rows, task.by, averages, task.notes.get(title, "")))
        for score in [average(f"average, {title.partition(':')[0]}", rows)] if averages else rows:
            detail = f"{len(rows)} cells" if averages else f"{score.queries:,} queries"
            for name in [name for name in task.headline if name in score.metrics]:
                results.headline.append(Headline(f"{score.name}, {metric_name(name)}", score.metrics[name], detail))
    for kind in dict.fromkeys(kind for each in scores for kind in each.cell.groups):
        groups = []
        for each in scores:
            for name, ids in each.cell.groups.get(kind, {}).items():
                labels = {"kind": name.partition(":")[0]} if ":" in name else {}
                name = f"{each.cell.name}, {name}" if len(scores) > 1 else name
                groups.append(Score(name, len(ids), 0, each.metrics(ids), labels))
        results.tables.append(score_table(f"By {kind}", groups, "kind", note=task.notes.get(kind, "")))
    results.tables += task.tables(scores)
    if (table := baseline_table(scores)) is not None:
        results.tables.append(table)
    results.examples = task_examples(scores)
    results.examples_note = "Queries evenly spaced in the data, then queries whose first result is wrong."
    return results


def task_examples(scores: Sequence[CellScores]) -> list[Example]:
    """Some searches of each cell, then as many whose first result is wrong."""
    count = min(3, max(1, _EXAMPLES // max(len(scores), 1)))
    examples: list[Example] = []
    for each in scores:
        chosen = each.sample(count)
        examples += each.examples([*chosen, *(id_ for id_ in each.sample(count, missed=True) if id_ not in chosen)])
    return examples


def baseline_table(scores: Sequence[CellScores]) -> Table | None:
    """Score the baselines of each cell that has any; None if no cell has.

    Args:
        scores: Of the model. With `EvaluateOptions.baselines` false, or None and many rows, nothing is scored.
    """
    vectors = scores[0].vectors
    options, out = replace(vectors.options, reranker=None), vectors.folder.parent
    if not (len(vectors) <= MOST_ROWS if options.baselines is None else options.baselines):
        return None
    cells = [(each.cell, _parts(each.cell)) for each in scores if each.cell.qrels]
    runs: list[tuple[str, ItemEncoder, Path, list[Cell]]] = [
        (label, vectors.encoder, out, [cell.seen_as(view) for cell, pairs in cells if _has_view(pairs, view)])
        for view, label in VIEWS.items()
    ]
    for label, other in other_encoders(vectors.encoder).items():
        shared = [
            cell for cell, pairs in cells if label != TOWERS or all(any(q & r for r in right) for q, right in pairs)
        ]
        unwritten = [
            replace(cell, run_depth=0) for cell in shared
        ]  # towers only find what shares a part with the query
        runs.append((label, other, out / label.replace(" ", "-"), unwritten))
    rows: dict[str, list[Score]] = {}
    for label, encoder, folder, seen in runs:
        for each in evaluate_cells(encoder, seen, folder, options):
            rows.setdefault(each.cell.name, []).append(replace(each.score(), labels={"": label}))
    compared = []
    for own in (each.score() for each in scores if each.cell.name in rows):
        compared += [replace(own, labels={"": "this model"}), *rows[own.name], random_order(own, {"": "random order"})]
    table = score_table("Baselines", compared, note=_BASELINES_NOTE)
    return replace(table, report_only=len(compared) > MOST_PRINTED) if compared else None


def _parts(cell: Cell) -> list[tuple[set[str], list[set[str]]]]:
    """The parts of each scored query, as far as its negative has them too, and of each of its right candidates."""
    queries, candidates = cell.queries.parts, cell.corpus.parts
    return [
        (queries[id_] & candidates.get(cell.negatives.get(id_, ""), set(PARTS)), [candidates[name] for name in right])
        for id_, right in cell.qrels.items()
    ]


def _has_view(pairs: Sequence[tuple[set[str], list[set[str]]]], view: View) -> bool:
    """Whether all queries can be found as this view shows them, and it hides or separates anything."""
    both = any(len(parts) > 1 for query, right in pairs for parts in (query, *right))
    return both and (
        view == "sum" or all(view in query and any(view in parts for parts in right) for query, right in pairs)
    )


def other_encoders(encoder: ItemEncoder) -> dict[str, ItemEncoder]:
    """What the towers of a joint encoder give alone, and SOLAR's stage 1 with its projection heads; by label."""
    from conjoin.models.joint_encoder import JointEncoderModel

    if not isinstance(encoder.model, JointEncoderModel):
        return {}
    file = Path(encoder.model.name_or_path or "", SOLAR_HEADS)
    heads = load_file(str(file)) if file.is_file() else {}
    kept = [weight for name, weight in sorted(heads.items()) if name.startswith("heads.")]  # of images, of texts
    how = {name: getattr(encoder, name) for name in ("batch_size", "device", "dtype", "num_workers", "input_type")}
    return {
        label: ItemEncoder(_Parts(encoder.model, heads), encoder.processor, name=f"{encoder.name}, {label}", **how)
        for label, heads in ((TOWERS, []), *([(HEADS, kept)] if kept else []))
    }


class _Parts(nn.Module):
    """A joint encoder read in another way; `(N, D)`, normalised.

    With the heads W_V and W_L: the embedding, projected where an item is a picture alone or a text alone (Eq. 2).
    Without heads: the unit vectors of both towers side by side; a part that is missing is zero.
    """

    def __init__(self, model: Any, heads: Sequence[Tensor]) -> None:  # noqa: ANN401 - a `JointEncoderModel`
        super().__init__()
        self.model, self.config = model, model.config
        self.heads = nn.ParameterList([head.to(model.device) for head in heads])

    def forward(self, **inputs: Any) -> EncoderOutput:  # noqa: ANN401 - of the processor
        output = self.model(**inputs, views=None if self.heads else [], output_tokens=True)
        count = next(len(each) for each in (output.image_features, output.text_features) if each is not None)
        exists = []
        for mask, features in (("image_mask", output.image_features), ("text_mask", output.text_features)):
            own = torch.full((count, 1), features is not None, device=self.model.device)
            exists.append(own if inputs.get(mask) is None else inputs[mask].bool()[:, None])
        if self.heads:
            image, text = (output.embeddings @ head.float().T for head in self.heads)
            alone = torch.where(exists[0], image, text)
            vectors = torch.where(exists[0] & exists[1], output.embeddings, alone)
        else:
            parts = [
                torch.zeros(count, of.hidden_size, device=self.model.device)
                for of in (self.config.vision_config, self.config.text_config)
            ]
            if output.image_features is not None:
                parts[0] = output.image_features[:, 0].float()
            if output.text_features is not None:
                mask = inputs["attention_mask"][..., None].float()
                parts[1] = (output.text_features[:, 1:].float() * mask).sum(1) / mask.sum(1).clamp(min=1)
            vectors = torch.cat(
                [F.normalize(part, dim=1) * has for part, has in zip(parts, exists, strict=True)], dim=1
            )
        return EncoderOutput(F.normalize(vectors, dim=1))
