"""Image-text pairs as a benchmark: text → image and image → text, as on Flickr30k and COCO (PUMA Tables 4 and 10)."""

import unicodedata
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import numpy as np

from conjoin.data import load_pairs
from conjoin.data.pairs import undecoded
from conjoin.evaluation.benchmark import BENCHMARKS, Benchmark, complete, group_row, read_options, wants_baselines
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
    known = _Pairs(rows["id"][:], {"image": images, "text": rows["text"][:]}, len(pairs))
    items = {part: Rows(part, rows.select(known.distinct(part)).select_columns(["id", part])) for part in known.keys}
    whole = Rows("item", rows.select(known.distinct("image", "text")))
    tasks, further = [], []
    for source, target in DIRECTIONS:
        queries = replace(items[source], instruction=(instructions or {}).get(source))
        tasks.append(RetrievalTask(f"{source} → {target}", queries, (items[target],), known.right(source, target)))
        qrels, excluded = known.right_pairs(source, target)
        further.append(RetrievalTask(f"{source} → {ITEM}", queries, (whole,), qrels, excluded=excluded))
    return tasks + [task for task in further if task.qrels]


class _Pairs(NamedTuple):
    """The images and texts of pairs, of which the first ones are queries."""

    ids: list[str]
    keys: dict[str, list[Hashable]]
    """By part what is equal for equal images or texts."""
    queries: int

    def distinct(self, *parts: str) -> list[int]:
        """The first row of each image, text or pair."""
        first: dict[Hashable, int] = {}
        for row, key in enumerate(zip(*(self.keys[part] for part in parts), strict=True)):
            first.setdefault(key, row)
        return list(first.values())

    def names(self, part: str) -> dict[Hashable, str]:
        """The id of each image or text: that of its first pair."""
        return {self.keys[part][row]: self.ids[row] for row in self.distinct(part)}

    def partners(self, source: str, target: str) -> dict[Hashable, set[Hashable]]:
        """The partners of each query."""
        partners: dict[Hashable, set[Hashable]] = {key: set() for key in self.keys[source][: self.queries]}
        for key, partner in zip(self.keys[source], self.keys[target], strict=True):
            if key in partners:
                partners[key].add(partner)
        return partners

    def right(self, source: str, target: str) -> dict[str, list[str]]:
        """By query the ids of its partners."""
        query, answer = self.names(source), self.names(target)
        return {
            query[key]: sorted(answer[each] for each in right) for key, right in self.partners(source, target).items()
        }

    def right_pairs(self, source: str, target: str) -> tuple[dict[str, list[str]], dict[str, set[str]]]:
        """By query the ids of other pairs that hold a partner of it, and of the pairs that hold the query itself."""
        same: dict[Hashable, set[str]] = {}
        paired: dict[Hashable, set[str]] = {}
        for row in self.distinct("image", "text"):
            same.setdefault(_normal(self.keys[source][row]), set()).add(self.ids[row])
            paired.setdefault(self.keys[target][row], set()).add(self.ids[row])
        qrels, excluded, names = {}, {}, self.names(source)
        for key, partners in self.partners(source, target).items():
            right = set[str]().union(*(paired[each] for each in partners)) - same[_normal(key)]
            if right:
                qrels[names[key]], excluded[names[key]] = sorted(right), same[_normal(key)]
        return qrels, excluded


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
    if train is not None:
        shared = find_duplicates(pairs, train)
        tasks = [replace(task, groups=_by_training(task, pairs, shared)) for task in tasks]
    options = replace(options, baselines=wants_baselines(tasks, options))
    scores = evaluate_tasks(encoder, tasks if options.baselines else tasks[: len(DIRECTIONS)], out, options)
    results = _results(scores, pairs, gallery, name)
    results.model = {"name": encoder.name, "fingerprint": encoder.fingerprint}
    results.config = {f"{part} instruction": (instructions or {}).get(part) for part in ("text", "image")}
    if train is not None:
        results.tables += _training_tables(scores, pairs, train, shared)
        results.dataset["pairs also in training"] = len(set().union(*shared.values()))
    results.tables.append(_score_table(scores[: len(DIRECTIONS)]))
    return complete(results, scores)


def find_duplicates(pairs: datasets.Dataset, train: datasets.Dataset) -> dict[str, dict[int, str]]:
    """Find the pairs that also occur in training.

    Args:
        pairs: Columns `id`, `image` and `text`.
        train: Likewise. Row numbers in place of ids are not compared.

    Returns:
        For `"same id"`, `"same text"` and `"same picture"`: by row of `pairs` the id of a row of `train`.
    """
    columns: dict[str, tuple[str, Callable[[Any], Hashable]]] = {
        "same id": ("id", str),
        "same text": ("text", _normal),
        "same picture": ("image", lambda image: item_digest({"image": image})),
    }
    duplicates: dict[str, dict[int, str]] = {}
    for label, (column, key) in columns.items():
        if column == "id" and (_are_numbers(pairs["id"][:]) or _are_numbers(train["id"][:])):
            continue
        known = {key(value): id_ for value, id_ in zip(_values(train, column), train["id"][:], strict=True)}
        keys = [key(value) for value in _values(pairs, column)]
        duplicates[label] = {row: known[each] for row, each in enumerate(keys) if each in known}
    return duplicates


def _results(
    scores: list[TaskScores], pairs: datasets.Dataset, gallery: datasets.Dataset | None, name: str
) -> Results:
    """The two directions as cells, with their searches."""
    cells = [
        Cell("local", source, target, len(each.ids), each.task.size, each.metrics())
        for (source, target), each in zip(DIRECTIONS, scores, strict=False)
    ]
    counts = {"pairs": len(pairs), "images": cells[0].gallery, "texts": cells[0].queries}
    text = f"{counts['pairs']} pairs of {counts['images']} images and {counts['texts']} texts. {_PROTOCOL}"
    if gallery is not None:
        counts |= {"texts": cells[1].gallery, "rows of the gallery": len(gallery)}
        text = (
            f"{len(pairs)} pairs, in a gallery of {counts['images']} images and {counts['texts']} texts. {_PROTOCOL}"
        )
    return Results(
        title=name,
        summary=text,
        seed=scores[0].vectors.options.seed,
        dataset=dict(counts),
        headline=[
            Headline(f"{cell.query} → {cell.candidates}, R@5", cell.metrics["hit_rate@5"], f"{cell.queries:,} queries")
            for cell in cells
        ],
        combinations=cells,
        examples=task_examples(scores[: len(DIRECTIONS)]),
        examples_note=EXAMPLES_NOTE,
    )


def _score_table(scores: Iterable[TaskScores]) -> Table:
    """Of each task the score that 95 % of the best wrong answers lie below, and the share of right ones above it."""
    rows: list[TableRow] = []
    for each in scores:
        is_right = [[name in each.task.qrels[id_] for name in names]
                    for id_, names in zip(each.ids, each.results.ids, strict=True)]  # fmt: skip
        right, wrong = (
            np.where(chosen, each.results.scores, -np.inf).max(axis=1)
            for chosen in (np.array(is_right), ~np.array(is_right))
        )
        wrong = wrong[np.isfinite(wrong)]
        if len(wrong):
            threshold = float(np.quantile(wrong, _WRONG_SHARE))
            rows.append([each.task.name, len(wrong), f"{threshold:.4f}", Metric(float(np.mean(right > threshold)))])
    return Table("Scores of wrong answers", ["", "n", "95 % are below", "right answers above, %"], rows, _SCORES_NOTE)


def _by_training(
    task: RetrievalTask, pairs: datasets.Dataset, shared: Mapping[str, Mapping[int, str]]
) -> dict[str, dict[str, list[str]]]:
    """The queries of a task, apart by whether a pair of theirs is in training."""
    rows = set().union(*shared.values())
    part = task.name.split(" ")[0]
    values = [_normal(value) if part == "text" else item_digest({"image": value}) for value in _values(pairs, part)]
    learnt = {values[row] for row in rows}
    of_id = dict(zip(pairs["id"][:], values, strict=True))
    groups: dict[str, list[str]] = {"not in training": [], "in training": []}
    for id_ in task.qrels:
        groups["in training" if of_id[id_] in learnt else "not in training"].append(id_)
    return {"training": groups}


def _training_tables(
    scores: Iterable[TaskScores],
    pairs: datasets.Dataset,
    train: datasets.Dataset,
    shared: Mapping[str, Mapping[int, str]],
) -> list[Table]:
    rows = set().union(*shared.values())
    counts: list[TableRow] = [
        [label, len(matches), Metric(len(matches) / len(pairs))]
        for label, matches in {**shared, "any of these": dict.fromkeys(rows)}.items()
    ]
    ids = pairs["id"][:]
    named: list[TableRow] = [
        [
            ids[row],
            next(matches[row] for matches in shared.values() if row in matches),
            ", ".join(label for label, matches in shared.items() if row in matches),
        ]
        for row in sorted(rows)[:_SHOWN_DUPLICATES]
    ]
    by_group = [
        group_row(each, f"{each.task.name}, {name}", queries)
        for each in scores
        for name, queries in each.task.groups["training"].items()
    ]
    tables = [
        Table(
            f"Also among the {len(train):,} rows of the training table", ["", "pairs", "%"], counts, _DUPLICATES_NOTE
        ),
        Table("Queries by training", ["", "n", "R@1", "R@5", "R@10", "MRR@10"], by_group),
    ]
    if named:
        tables.append(
            Table("Pairs that are also in training", ["pair", "training row", "why"], named, report_only=True)
        )
    return tables


def _values(rows: datasets.Dataset, column: str) -> Iterator[Any]:
    return (row[column] for row in undecoded(rows.select_columns([column])))


def _normal(value: Any) -> Any:  # noqa: ANN401 - a text, or the digest of an image
    """A text without differences of case, spacing and Unicode form."""
    return " ".join(unicodedata.normalize("NFKC", value).casefold().split()) if isinstance(value, str) else value


def _are_numbers(ids: Iterable[str]) -> bool:
    return all(id_ == str(row) for row, id_ in enumerate(ids))


def _add_arguments(parser: ArgumentParser) -> None:
    options = parser.add_argument_group("options of pairs")
    for part in ("image", "text", "id"):
        options.add_argument(
            f"--{part}-column", metavar="NAME", help=f"column of the {part}s, when it cannot be guessed"
        )
    options.add_argument("--split", default="train", metavar="NAME", help="split of the data (default: %(default)s)")
    options.add_argument(
        "--gallery",
        metavar="TABLE",
        help="further candidates: the whole catalogue of which --data is the held-out part",
    )
    options.add_argument(
        "--train", metavar="TABLE", help="what the model was trained on: pairs that are also in --data are flagged"
    )
    for part, target in DIRECTIONS:
        options.add_argument(
            f"--{part}-instruction", metavar="TEXT", help=f"instruction for {part}s that search for {target}s"
        )
    options.add_argument(
        "--dtype",
        choices=("float32", "float16"),
        default="float32",
        help="type of stored vectors (default: %(default)s)",
    )


def _run(encoder: ItemEncoder, args: Namespace, out: Path) -> Results:
    columns = {f"{part}_column": vars(args)[f"{part}_column"] for part in ("image", "text", "id")}
    pairs = load_pairs(args.data, split=args.split, **columns)
    more = {name: vars(args)[name] for name in ("gallery", "train") if vars(args)[name] is not None}
    results = evaluate_pairs(
        encoder,
        pairs,
        out,
        read_options(args),
        instructions={"text": args.text_instruction, "image": args.image_instruction},
        name=Path(args.data).stem,
        **{name: load_pairs(source, **columns) for name, source in more.items()},
    )
    results.dataset |= {"source": args.data, "split": args.split} | more
    return results


PAIRS = BENCHMARKS.register(
    Benchmark(
        "pairs",
        "text → image and image → text on pairs of your own, or Flickr30k and COCO; --data is any source of pairs",
        _add_arguments,
        _run,
        reads_data="source",
    )
)
