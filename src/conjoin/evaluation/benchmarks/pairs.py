"""Image-text pairs as a benchmark: text → image and image → text, as on Flickr30k and COCO (PUMA Tables 4 and 10)."""

import unicodedata
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets

from conjoin.data import load_pairs
from conjoin.data.pairs import undecoded
from conjoin.evaluation.baselines import wants_baselines
from conjoin.evaluation.benchmark import BENCHMARKS, Benchmark, complete, group_row, read_options
from conjoin.evaluation.report.examples import EXAMPLES_NOTE, task_examples
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
        more = gallery.select_columns(["image", "text"]).add_column("id", ids)
        rows = datasets.concatenate_datasets([rows, more.select_columns(list(_PARTS)).cast(rows.features)])
    keys: dict[str, list[Hashable]] = {
        "image": [row_digest({"image": image}) for image in _values(rows, "image")],
        "text": rows["text"][:],
    }
    first = {part: _first(keys[part]) for part in keys}
    items = {part: Rows(part, rows.select(list(first[part].values())).select_columns(["id", part])) for part in keys}
    whole = list(_first(list(zip(keys["image"], keys["text"], strict=True))).values())
    items[ITEM] = Rows("item", rows.select(whole))
    names = rows["id"][:]
    told = instructions or {}
    tasks = []
    for asked, target in DIRECTIONS:
        partners: dict[str, set[Hashable]] = {}
        for row, key in enumerate(keys[asked]):
            if first[asked][key] < len(pairs):
                partners.setdefault(names[first[asked][key]], set()).add(keys[target][row])
        queries = replace(items[asked], instruction=told.get(asked))
        qrels = {id_: sorted(names[first[target][key]] for key in right) for id_, right in partners.items()}
        tasks.append(RetrievalTask(f"{asked} → {target}", queries, (items[target],), qrels))
        alike = {names[place]: _normal(keys[asked][place]) for place in first[asked].values()}
        holding: dict[Hashable, set[str]] = {}
        having: dict[Hashable, set[str]] = {}
        for place in whole:
            holding.setdefault(_normal(keys[asked][place]), set()).add(names[place])
            having.setdefault(keys[target][place], set()).add(names[place])
        excluded = {id_: holding[alike[id_]] for id_ in partners}
        answers = {
            id_: {name for key in right for name in having[key]} - excluded[id_] for id_, right in partners.items()
        }
        qrels = {id_: sorted(right) for id_, right in answers.items() if right}
        excluded = {id_: excluded[id_] for id_ in qrels}
        tasks.append(RetrievalTask(f"{asked} → {ITEM}", queries, (items[ITEM],), qrels, excluded=excluded))
    return [task for task in tasks[::2] + tasks[1::2] if task.qrels]


def evaluate_pairs(
    encoder: ItemEncoder,
    pairs: datasets.Dataset,
    out: str | Path,
    options: EvaluateOptions | None = None,
    *,
    gallery: datasets.Dataset | None = None,
    train: datasets.Dataset | None = None,
    text_instruction: str | None = None,
    image_instruction: str | None = None,
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
        text_instruction: For texts that search for images.
        image_instruction: For images that search for texts.
        name: Of the data in the results.

    Raises:
        ValueError: There are no pairs, or an item cannot be read (it is named).
    """
    options = options or EvaluateOptions()
    instructions = {"text": text_instruction, "image": image_instruction}
    tasks = pairs_tasks(pairs, gallery, instructions)
    if train is not None:
        shared = find_duplicates(pairs, train)
        tasks = [replace(task, groups=_by_training(task, pairs, shared)) for task in tasks]
    options = replace(options, baselines=wants_baselines(tasks, options))
    scores = evaluate_tasks(encoder, tasks if options.baselines else tasks[: len(DIRECTIONS)], out, options)
    results = _results(scores, pairs, gallery, name)
    results.model = {"name": encoder.name, "fingerprint": encoder.fingerprint}
    results.config = {f"{part} instruction": told for part, told in instructions.items()}
    if train is not None:
        results.tables += _training_tables(scores, pairs, train, shared)
        results.dataset["pairs also in training"] = len(set().union(*shared.values()))
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
    found: dict[str, dict[int, str]] = {}
    for label, (column, key) in columns.items():
        if column == "id" and (_are_numbers(pairs["id"][:]) or _are_numbers(train["id"][:])):
            continue
        known = {key(value): id_ for value, id_ in zip(_values(train, column), train["id"][:], strict=True)}
        keys = [key(value) for value in _values(pairs, column)]
        found[label] = {row: known[each] for row, each in enumerate(keys) if each in known}
    return found


def _results(
    scores: list[TaskScores], pairs: datasets.Dataset, gallery: datasets.Dataset | None, name: str
) -> Results:
    """The two directions as cells, with their searches."""
    cells = [
        Cell("local", asked, target, len(each.ids), each.task.size, each.metrics())
        for (asked, target), each in zip(DIRECTIONS, scores, strict=False)
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
        [label, len(found), Metric(len(found) / len(pairs))]
        for label, found in {**shared, "any of these": dict.fromkeys(rows)}.items()
    ]
    ids = pairs["id"][:]
    named: list[TableRow] = [
        [
            ids[row],
            next(found[row] for found in shared.values() if row in found),
            ", ".join(label for label, found in shared.items() if row in found),
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


def _first(keys: Iterable[Hashable]) -> dict[Hashable, int]:
    """The first row of each key."""
    found: dict[Hashable, int] = {}
    for row, key in enumerate(keys):
        found.setdefault(key, row)
    return found


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
        text_instruction=args.text_instruction,
        image_instruction=args.image_instruction,
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
