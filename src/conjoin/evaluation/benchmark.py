"""How a benchmark is evaluated and reported, and the baselines beside it.

A baseline scores the same cells with a part of each item, or with the model's towers instead of the model.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from conjoin.constants import SOLAR_HEADS
from conjoin.data.columns import undecoded
from conjoin.data.row_images import plain_text
from conjoin.evaluation.results import Headline, Results, Score, Table
from conjoin.evaluation.tables import average, metric_name, random_order, score_table
from conjoin.evaluation.task import CellScores, EvaluateOptions, evaluate_cells
from conjoin.evaluation.tasks import Cell, Rows, Task, find_task
from conjoin.retrieval import ItemEncoder
from conjoin.retrieval.encoder import EncoderOutput

PARTS = {"text": "text alone", "image": "picture alone"}
SUM, TOWERS, HEADS = "sum of views", "towers alone", "with W"
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
        results.tables.append(score_table(title, rows, task.by, averages))
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
        results.tables.append(score_table(f"By {kind}", groups, "kind"))
    results.tables += task.tables(scores)
    if (table := baseline_table(scores)) is not None:
        results.tables.append(table)
    count = min(3, max(1, _EXAMPLES // len(scores)))
    for each in scores:
        shown = dict.fromkeys([*each.sample(count), *each.sample(count, missed=True)])
        results.examples += each.examples(list(shown))
    results.examples_note = "Queries evenly spaced in the data, then queries whose first result is wrong."
    return results


def baseline_table(scores: Sequence[CellScores]) -> Table | None:
    """Score the baselines of each cell that has any; None if no cell has.

    Args:
        scores: Of the model. With `EvaluateOptions.baselines` false, or None and many rows, nothing is scored.
    """
    vectors = scores[0].vectors
    options, out = replace(vectors.options, reranker=None), vectors.folder.parent
    if not (len(vectors) <= MOST_ROWS if options.baselines is None else options.baselines):
        return None
    runs = {label: (vectors.encoder, out) for label in (*PARTS.values(), SUM)}
    for label, other in other_encoders(vectors.encoder).items():
        runs[label] = (other, out / label.replace(" ", "-"))
    views = [_views(replace(each.cell, run_depth=0)) for each in scores if each.cell.qrels]
    rows: dict[str, list[Score]] = {}
    for label, (encoder, folder) in runs.items():
        seen = [by_label[label] for by_label in views if label in by_label]
        for each in evaluate_cells(encoder, seen, folder, options):
            rows.setdefault(each.cell.name, []).append(replace(each.score(), labels={"": label}))
    compared = []
    for own in (each.score() for each in scores if each.cell.name in rows):
        compared += [replace(own, labels={"": "this model"}), *rows[own.name], random_order(own, {"": "random order"})]
    table = score_table("Baselines", compared, note=_BASELINES_NOTE)
    return replace(table, report_only=len(compared) > MOST_PRINTED) if compared else None


def _views(cell: Cell) -> dict[str, Cell]:
    """The cell as each baseline sees it, by label; without those that cannot find the answers of all queries."""
    queries, corpus = (
        {str(row["id"]): {part for part in PARTS if row.get(part) is not None} for row in _plain(rows)}
        for rows in (cell.queries, cell.corpus)
    )
    is_mixed, shared = False, []
    for id_, right in cell.qrels.items():
        own = queries[id_] & corpus.get(cell.negatives.get(id_, ""), queries[id_])
        shared.append({part for part in own if any(part in corpus[name] for name in right)})
        is_mixed |= any(len(parts) > 1 for parts in (own, *(corpus[name] for name in right)))
    views = {HEADS: cell}
    if all(shared):
        views[TOWERS] = cell
    if is_mixed:  # else there is nothing to hide
        views[SUM] = _change(cell, _separated)
        for part, label in PARTS.items():
            if all(part in parts for parts in shared):
                views[label] = _change(cell, partial(_alone, part=part))
    return views


def _change(cell: Cell, change: Callable[[Rows], Rows]) -> Cell:
    """The cell with other rows."""
    variants = cell.variants and change(cell.variants)
    kept = variants if variants and (variants.summed or any(variants.rows)) else None
    return replace(cell, queries=change(cell.queries), corpus=change(cell.corpus), variants=kept)


def _separated(rows: Rows) -> Rows:
    """Rows whose vectors are the sum of those of their parts."""
    parts = [_alone(rows, part) for part in ("image", "text")]
    return Rows(f"{rows.name}-sum", [], rows.instruction, summed=[part for part in parts if any(part.rows)])


def _alone(rows: Rows, part: str) -> Rows:
    """A part of each row that has it."""
    instruction = rows.instruction
    if not isinstance(instruction, str | None):
        has_part = [row.get(part) is not None for row in _plain(rows)]
        instruction = list(itertools.compress(instruction, has_part))
    return Rows(f"{rows.name}-{part}", _PartRows(rows, part), instruction)


class _PartRows:
    """A part of each row that has it, read at every iteration; texts without the marks of images."""

    def __init__(self, rows: Rows, part: str) -> None:
        self.rows, self.part = rows, part

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for row in _plain(self.rows):
            if row.get(self.part) is not None:
                shown = plain_text(row.get("image"), row["text"]) if self.part == "text" else row[self.part]
                yield {"id": row["id"], self.part: shown}


def _plain(rows: Rows) -> Iterable[Mapping[str, Any]]:
    """The rows, with images as files or bytes."""
    is_dataset = isinstance(rows.rows, datasets.Dataset | datasets.IterableDataset)
    return undecoded(rows.rows) if is_dataset else rows.rows


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
        label: ItemEncoder(_Readout(encoder.model, heads), encoder.processor, name=f"{encoder.name}, {label}", **how)
        for label, heads in ((TOWERS, []), *([(HEADS, kept)] if kept else []))
    }


class _Readout(nn.Module):
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
        image, text = output.image_features, output.text_features
        count = len(text if image is None else image)
        has_image, has_text = (
            inputs.get(mask, torch.full((count,), part is not None, device=self.model.device)).bool()[:, None]
            for mask, part in (("image_mask", image), ("text_mask", text))
        )
        if self.heads:
            image, text = (output.embeddings @ head.float().T for head in self.heads)
            vectors = torch.where(has_image & has_text, output.embeddings, torch.where(has_image, image, text))
        else:
            parts = [
                torch.zeros(count, of.hidden_size, device=self.model.device)
                for of in (self.config.vision_config, self.config.text_config)
            ]
            if image is not None:
                parts[0] = F.normalize(image[:, 0].float(), dim=1) * has_image
            if text is not None:
                mask = inputs["attention_mask"][..., None].float()
                mean = (text[:, 1:].float() * mask).sum(1) / mask.sum(1).clamp(min=1)
                parts[1] = F.normalize(mean, dim=1) * has_text
            vectors = torch.cat(parts, dim=1)
        return EncoderOutput(F.normalize(vectors, dim=1))
