"""Image-text pairs as a benchmark: text → image and image → text, as on Flickr30k and COCO (PUMA Tables 4 and 10)."""

import unicodedata
from argparse import Namespace
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np

from conjoin.data import load_pairs
from conjoin.data.pairs import undecoded
from conjoin.evaluation.benchmark import (
    BENCHMARKS,
    DTYPE,
    Benchmark,
    complete,
    flag,
    group_table,
    read_options,
    wants_baselines,
)
from conjoin.evaluation.report.page import EXAMPLES_NOTE, task_examples
from conjoin.evaluation.results import Cell, Headline, Metric, Results, Table, TableRow
from conjoin.evaluation.task import EvaluateOptions, RetrievalTask, Rows, TaskScores, evaluate_tasks
from conjoin.retrieval import ItemEncoder
from conjoin.storage.fingerprints import item_digest, row_digest

DIRECTIONS = (("text", "image"), ("image", "text"))
ITEM = "image + text"
_PARTS = ("id", "image", "text")
_PROTOCOL = (
    "Each text searches all images, and each image searches all texts; any of its partners is right. Wrong candidates "
    "that tie with the best right one count as better."
)
_DUPLICATES_NOTE = (
    "Rows of the data that are in the training table, too. Texts are compared without case and spacing, pictures by "
    "their files' bytes. A model may have learnt these by heart: report the rows of queries that are not in it."
)
_SCORES_NOTE = (
    "The score that 95 % of the best wrong answers lie below, for `conjoin search --min-score`: 95 of 100 queries "
    "without a right answer then show nothing. The last column is the share of queries whose right answer still shows."
)
_WRONG_SHARE = 0.95
_SHOWN_DUPLICATES = 20


def pairs_tasks(
    pairs: datasets.Dataset,
    gallery: datasets.Dataset | None = None,
    instructions: Mapping[str, str | None] | None = None,
) -> list[RetrievalTask]:
    """Return the tasks of image-text pairs: `"text → image"` and `"image → text"`, and further ones for baselines.

    An image (its file, or its bytes) or a text that occurs in several pairs is one item, and each of its partners is
    right. So an image may have several captions. Further tasks search whole pairs (`"text → image + text"`): for texts
    whose image also has another text, and for images whose text also has another image. The pairs that hold the query
    itself are left out of its ranking.

    Args:
        pairs: Columns `id`, `image` and `text`, as `load_pairs` returns them: the queries.
        gallery: Further candidates, likewise: a whole catalogue, with or without `pairs`.
        instructions: By part, the instruction of queries of that part.

    Raises:
        ValueError: There are no pairs.
    """
    if not len(pairs):
        raise ValueError("there are no pairs to evaluate")
    rows = pairs.select_columns(list(_PARTS))
    if gallery is not None:
        ids = [f"gallery/{id_}" for id_ in gallery["id"][:]]
        named = gallery.select_columns(["image", "text"]).add_column("id", ids)
        rows = datasets.concatenate_datasets([rows, named.select_columns(list(_PARTS)).cast(rows.features)])
    images: list[Hashable] = [row_digest({"image": image}) for image in _values(rows, "image")]
    keys: dict[str, list[Hashable]] = {"image": images, "text": rows["text"][:]}
    ids, first = rows["id"][:], {part: _first_rows(values) for part, values in keys.items()}
    names = {part: {key: ids[row] for key, row in of_part.items()} for part, of_part in first.items()}
    items = {
        part: Rows(part, rows.select(list(of_part.values())).select_columns(["id", part]))
        for part, of_part in first.items()
    }
    distinct = list(_first_rows(zip(images, keys["text"], strict=True)).values())
    whole = Rows("item", rows.select(distinct))
    tasks, further = [], []
    for source, target in DIRECTIONS:
        queries = replace(items[source], instruction=(instructions or {}).get(source))
        partners: dict[Hashable, set[Hashable]] = {key: set() for key in keys[source][: len(pairs)]}
        for key, partner in zip(keys[source], keys[target], strict=True):
            if key in partners:
                partners[key].add(partner)
        qrels = {names[source][key]: sorted(names[target][each] for each in its) for key, its in partners.items()}
        tasks.append(RetrievalTask(f"{source} → {target}", queries, (items[target],), qrels))
        same: dict[Hashable, set[str]] = {}  # ids of the pairs that hold a query, and those that hold a partner
        paired: dict[Hashable, set[str]] = {}
        for row in distinct:
            same.setdefault(_normal(keys[source][row]), set()).add(ids[row])
            paired.setdefault(keys[target][row], set()).add(ids[row])
        right, excluded = {}, {}
        for key, its in partners.items():
            own = same[_normal(key)]
            others = set[str]().union(*(paired[each] for each in its)) - own
            if others:
                right[names[source][key]], excluded[names[source][key]] = sorted(others), own
        if right:
            further.append(RetrievalTask(f"{source} → {ITEM}", queries, (whole,), right, excluded=excluded))
    return tasks + further


def _first_rows(keys: Iterable[Hashable]) -> dict[Hashable, int]:
    """The first row of each key."""
    rows: dict[Hashable, int] = {}
    for row, key in enumerate(keys):
        rows.setdefault(key, row)
    return rows


def evaluate_pairs(
    encoder: ItemEncoder,
    pairs: datasets.Dataset,
    out: str | Path,
    options: EvaluateOptions | None = None,
    *,
    gallery: datasets.Dataset | None = None,
    train: datasets.Dataset | None = None,
    instructions: Mapping[str, str | None] | None = None,
    name: str = "pairs",
) -> Results:
    """Search the images for each text and the texts for each image; R@1, R@5, R@10 and MRR@10.

    Args:
        encoder: The model.
        pairs: Columns `id`, `image` and `text`, as `load_pairs` returns them; see `pairs_tasks`.
        out: Folder to write to; an interrupted evaluation resumes with the embeddings there.
        options: Type of the vectors, baselines and so on.
        gallery: Further candidates, such as a whole catalogue.
        train: The pairs that the model was trained on; pairs that are in both are counted and scored by themselves.
        instructions: As for `pairs_tasks`: of `"text"`, for texts that search for images, and of `"image"`.
        name: Of the data in the results.

    Raises:
        ValueError: There are no pairs, or an item cannot be read (it is named).
    """
    options = options or EvaluateOptions()
    tasks = pairs_tasks(pairs, gallery, instructions)
    shared = {} if train is None else find_duplicates(pairs, train)
    learnt = set[int]().union(*shared.values())
    if train is not None:
        tasks = [replace(task, groups={"training": _by_training(task, pairs, learnt)}) for task in tasks]
    options = replace(options, baselines=wants_baselines(tasks, options))
    scores = evaluate_tasks(encoder, tasks if options.baselines else tasks[: len(DIRECTIONS)], out, options)
    shown = scores[: len(DIRECTIONS)]
    cells = [
        Cell("local", source, target, len(each.ids), each.task.size, each.metrics())
        for (source, target), each in zip(DIRECTIONS, shown, strict=True)
    ]
    counts = {"pairs": len(pairs), "images": cells[0].gallery, "texts": cells[1].gallery}
    of = "of" if gallery is None else "in a gallery of"
    results = Results(
        title=name,
        summary=f"{len(pairs)} pairs{'' if gallery is None else ','} {of} {counts['images']} images and "
        f"{counts['texts']} texts. {_PROTOCOL}",
        seed=options.seed,
        model={"name": encoder.name, "fingerprint": encoder.fingerprint},
        dataset=counts if gallery is None else counts | {"rows of the gallery": len(gallery)},
        config={f"{part} instruction": (instructions or {}).get(part) for part in ("text", "image")},
        headline=[
            Headline(f"{cell.query} → {cell.candidates}, R@5", cell.metrics["hit_rate@5"], f"{cell.queries:,} queries")
            for cell in cells
        ],
        combinations=cells,
        examples=task_examples(shown),
        examples_note=EXAMPLES_NOTE,
    )
    if train is not None:
        results.dataset["pairs also in training"] = len(learnt)
        results.tables += _training_tables(scores, pairs, len(train), shared)
    results.tables.append(_score_table(shown))
    return complete(results, scores)


def find_duplicates(pairs: datasets.Dataset, train: datasets.Dataset) -> dict[str, dict[int, str]]:
    """Find the pairs that also occur in training.

    Args:
        pairs: Columns `id`, `image` and `text`.
        train: Likewise. Row numbers in place of ids are not compared.

    Returns:
        For `"same id"`, `"same text"` and `"same picture"`: by row of `pairs` the id of a row of `train`.
    """
    labels = {"id": "same id", "text": "same text", "image": "same picture"}
    if any(rows["id"][:] == list(map(str, range(len(rows)))) for rows in (pairs, train)):  # row numbers
        del labels["id"]
    duplicates: dict[str, dict[int, str]] = {}
    for column, label in labels.items():
        key = _KEYS[column]
        known = {key(value): id_ for value, id_ in zip(_values(train, column), train["id"][:], strict=True)}
        keys = [key(value) for value in _values(pairs, column)]
        duplicates[label] = {row: known[each] for row, each in enumerate(keys) if each in known}
    return duplicates


def _score_table(scores: Iterable[TaskScores]) -> Table:
    """Of each task the score that 95 % of the best wrong answers lie below, and the share of right ones above it."""
    rows: list[TableRow] = []
    for each in scores:
        qrels, found = each.task.qrels, zip(each.ids, each.results.ids, strict=True)
        is_right = np.array([[name in qrels[id_] for name in names] for id_, names in found])
        right, wrong = (np.where(chosen, each.results.scores, -np.inf).max(axis=1) for chosen in (is_right, ~is_right))
        wrong = wrong[np.isfinite(wrong)]
        if len(wrong):
            threshold = float(np.quantile(wrong, _WRONG_SHARE))
            rows.append([each.task.name, len(wrong), f"{threshold:.4f}", Metric(float(np.mean(right > threshold)))])
    return Table("Scores of wrong answers", ["", "n", "95 % are below", "right answers above, %"], rows, _SCORES_NOTE)


def _by_training(task: RetrievalTask, pairs: datasets.Dataset, learnt: set[int]) -> dict[str, list[str]]:
    """The queries of a task, apart by whether a pair of theirs is in training."""
    part = task.name.split(" ")[0]
    values = list(map(_KEYS[part], _values(pairs, part)))
    of_id, known = dict(zip(pairs["id"][:], values, strict=True)), {values[row] for row in learnt}
    groups: dict[str, list[str]] = {"not in training": [], "in training": []}
    for id_ in task.qrels:
        groups["in training" if of_id[id_] in known else "not in training"].append(id_)
    return groups


def _training_tables(
    scores: Sequence[TaskScores], pairs: datasets.Dataset, trained: int, shared: Mapping[str, Mapping[int, str]]
) -> list[Table]:
    learnt = sorted(set[int]().union(*shared.values()))
    counts: list[TableRow] = [
        [label, len(rows), Metric(len(rows) / len(pairs))]
        for label, rows in {**shared, "any of these": learnt}.items()
    ]
    tables = [
        Table(f"Also among the {trained:,} rows of the training table", ["", "pairs", "%"], counts, _DUPLICATES_NOTE),
        group_table(scores, "training", "Queries by training", ""),
    ]
    ids, named = pairs["id"][:], list[TableRow]()
    for row in learnt[:_SHOWN_DUPLICATES]:
        why = [label for label, rows in shared.items() if row in rows]
        named.append([ids[row], shared[why[0]][row], ", ".join(why)])
    if named:
        columns = ["pair", "training row", "why"]
        tables.append(Table("Pairs that are also in training", columns, named, report_only=True))
    return tables


def _values(rows: datasets.Dataset, column: str) -> Iterator[Any]:
    return (row[column] for row in undecoded(rows.select_columns([column])))


def _normal(value: Hashable) -> Hashable:
    """A text without differences of case, spacing and Unicode form; what is no text stays."""
    return " ".join(unicodedata.normalize("NFKC", value).casefold().split()) if isinstance(value, str) else value


_KEYS: dict[str, Callable[[Any], Hashable]] = {
    "id": str,
    "text": _normal,
    "image": lambda image: item_digest({"image": image}),
}
"""By column what is equal for values that are equal in training."""


def _run(encoder: ItemEncoder, args: Namespace, out: Path) -> Results:
    columns = {f"{part}_column": vars(args)[f"{part}_column"] for part in ("image", "text", "id")}
    more = {name: vars(args)[name] for name in ("gallery", "train") if vars(args)[name] is not None}
    results = evaluate_pairs(
        encoder,
        load_pairs(args.data, split=args.split, **columns),
        out,
        read_options(args),
        instructions={"text": args.text_instruction, "image": args.image_instruction},
        name=Path(args.data).stem,
        **{name: load_pairs(source, **columns) for name, source in more.items()},
    )
    results.dataset |= {"source": args.data, "split": args.split} | more
    return results


BENCHMARKS.register(
    Benchmark(
        "pairs",
        "text → image and image → text on pairs of your own, or Flickr30k and COCO; --data is any source of pairs",
        _run,
        (
            *(
                flag(f"--{part}-column", f"column of the {part}s, when it cannot be guessed", metavar="NAME")
                for part in ("image", "text", "id")
            ),
            flag("--split", "split of the data (default: train)", default="train", metavar="NAME"),
            flag(
                "--gallery",
                "further candidates: the whole catalogue of which --data is the held-out part",
                metavar="TABLE",
            ),
            flag(
                "--train", "what the model was trained on: pairs that are also in --data are flagged", metavar="TABLE"
            ),
            *(
                flag(f"--{part}-instruction", f"instruction for {part}s that search for {target}s", metavar="TEXT")
                for part, target in DIRECTIONS
            ),
            DTYPE,
        ),
        reads_data="source",
    )
)
