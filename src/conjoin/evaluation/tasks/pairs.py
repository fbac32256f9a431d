"""Image-text pairs as a benchmark: text → image and image → text, as on Flickr30k and COCO (PUMA Tables 4 and 10)."""

import unicodedata
from argparse import Namespace
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import datasets
import numpy as np

from conjoin.data import load_pairs
from conjoin.data.pairs import undecoded
from conjoin.evaluation.benchmark import DTYPE, Benchmark, flag, read_options
from conjoin.evaluation.report.page import EXAMPLES_NOTE, task_examples
from conjoin.evaluation.results import Cell, Headline, Metric, Results, Table, TableRow
from conjoin.evaluation.task import EvaluateOptions, RetrievalTask, Rows, TaskScores, evaluate_tasks
from conjoin.retrieval import ItemEncoder
from conjoin.storage.fingerprints import row_digest

DIRECTIONS = (("text", "image"), ("image", "text"))
_PROTOCOL = (
    "Each text searches all images, and each image searches all texts; any of its partners is right. Wrong candidates "
    "that tie with the best right one count as better."
)
_SCORES_NOTE = (
    "The score that 95 % of the best wrong answers lie below, for `conjoin search --min-score`: 95 of 100 queries "
    "without a right answer then show nothing. The last column is the share of queries whose right answer still shows."
)
_WRONG_SHARE = 0.95


def pairs_tasks(
    pairs: datasets.Dataset,
    gallery: datasets.Dataset | None = None,
    instructions: Mapping[str, str | None] | None = None,
) -> list[RetrievalTask]:
    """Return the tasks of image-text pairs: `"text → image"` and `"image → text"`.

    An image (its file, or its bytes) or a text (whatever its case, spacing and Unicode form) of several pairs is
    one item, and each of its partners is right. So an image may have several captions.

    Args:
        pairs: Columns `id`, `image` and `text`, as `load_pairs` returns them: the queries.
        gallery: Further candidates, likewise: a whole catalogue, with or without `pairs`.
        instructions: By part, the instruction of queries of that part.

    Raises:
        ValueError: There are no pairs.
    """
    if not len(pairs):
        raise ValueError("there are no pairs to evaluate")
    rows = pairs.select_columns(["id", "image", "text"])
    if gallery is not None:
        ids = [f"gallery/{id_}" for id_ in gallery["id"][:]]
        named = gallery.select_columns(["image", "text"]).add_column("id", ids).select_columns(rows.column_names)
        rows = datasets.concatenate_datasets([rows, named.cast(rows.features)])
    keys: dict[str, list[Hashable]] = {
        "image": [row_digest(row) for row in undecoded(rows.select_columns(["image"]))],
        "text": [" ".join(unicodedata.normalize("NFKC", text).casefold().split()) for text in rows["text"][:]],
    }
    ids, names, items = rows["id"][:], dict[str, dict[Hashable, str]](), dict[str, Rows]()
    for part, of_part in keys.items():
        first: dict[Hashable, int] = {}
        for row, key in enumerate(of_part):
            first.setdefault(key, row)
        names[part] = {key: ids[row] for key, row in first.items()}
        items[part] = Rows(part, rows.select(list(first.values())).select_columns(["id", part]))
    tasks = []
    for source, target in DIRECTIONS:
        qrels: dict[str, set[str]] = {names[source][key]: set() for key in keys[source][: len(pairs)]}
        for key, partner in zip(keys[source], keys[target], strict=True):
            if names[source][key] in qrels:
                qrels[names[source][key]].add(names[target][partner])
        queries = replace(items[source], instruction=(instructions or {}).get(source))
        right = {id_: sorted(partners) for id_, partners in qrels.items()}
        tasks.append(RetrievalTask(f"{source} → {target}", queries, (items[target],), right))
    return tasks


def evaluate_pairs(
    encoder: ItemEncoder,
    pairs: datasets.Dataset,
    out: str | Path,
    options: EvaluateOptions | None = None,
    *,
    gallery: datasets.Dataset | None = None,
    instructions: Mapping[str, str | None] | None = None,
    name: str = "pairs",
) -> Results:
    """Search the images for each text and the texts for each image; R@1, R@5, R@10 and MRR@10.

    Args:
        encoder: The model.
        pairs: Columns `id`, `image` and `text`, as `load_pairs` returns them; see `pairs_tasks`.
        out: Folder to write to; an interrupted evaluation resumes with the embeddings there.
        options: Type of the vectors and so on.
        gallery: Further candidates, such as a whole catalogue.
        instructions: As for `pairs_tasks`: of `"text"`, for texts that search for images, and of `"image"`.
        name: Of the data in the results.

    Raises:
        ValueError: There are no pairs, or an item cannot be read (it is named).
    """
    options = options or EvaluateOptions()
    scores = evaluate_tasks(encoder, pairs_tasks(pairs, gallery, instructions), out, options)
    cells = [
        Cell("local", source, target, len(each.ids), each.task.size, each.metrics())
        for (source, target), each in zip(DIRECTIONS, scores, strict=True)
    ]
    counts = {"pairs": len(pairs), "images": cells[0].gallery, "texts": cells[1].gallery}
    of = " of" if gallery is None else ", in a gallery of"
    return Results(
        title=name,
        summary=f"{len(pairs)} pairs{of} {counts['images']} images and {counts['texts']} texts. {_PROTOCOL}",
        seed=options.seed,
        model={"name": encoder.name, "fingerprint": encoder.fingerprint},
        dataset=counts if gallery is None else counts | {"rows of the gallery": len(gallery)},
        config={f"{part} instruction": (instructions or {}).get(part) for part in ("text", "image")},
        headline=[
            Headline(f"{cell.query} → {cell.candidates}, R@5", cell.metrics["hit_rate@5"], f"{cell.queries:,} queries")
            for cell in cells
        ],
        combinations=cells,
        tables=[_score_table(scores)],
        examples=task_examples(scores),
        examples_note=EXAMPLES_NOTE,
    )


def _score_table(scores: Sequence[TaskScores]) -> Table:
    """Of each task the score that 95 % of the best wrong answers lie below, and the share of right ones above it."""
    rows: list[TableRow] = []
    for each in scores:
        found = zip(each.task.qrels.values(), each.results.ids, strict=True)
        is_right = np.array([[name in right for name in names] for right, names in found])
        right, wrong = (np.where(chosen, each.results.scores, -np.inf).max(axis=1) for chosen in (is_right, ~is_right))
        wrong = wrong[np.isfinite(wrong)]
        if len(wrong):
            threshold = float(np.quantile(wrong, _WRONG_SHARE))
            rows.append([each.task.name, len(wrong), f"{threshold:.4f}", Metric(float(np.mean(right > threshold)))])
    return Table("Scores of wrong answers", ["", "n", "95 % are below", "right answers above, %"], rows, _SCORES_NOTE)


def _run(encoder: ItemEncoder, args: Namespace, out: Path) -> Results:
    columns = {f"{part}_column": vars(args)[f"{part}_column"] for part in ("image", "text", "id")}
    pairs = load_pairs(args.data, split=args.split, **columns)
    gallery = None if args.gallery is None else load_pairs(args.gallery, **columns)
    told = {"text": args.text_instruction, "image": args.image_instruction}
    name, options = Path(args.data).stem, read_options(args)
    results = evaluate_pairs(encoder, pairs, out, options, gallery=gallery, instructions=told, name=name)
    results.dataset |= {"source": args.data, "split": args.split}
    results.dataset |= {} if args.gallery is None else {"gallery": args.gallery}
    return results


_COLUMN, _INSTRUCTION = "column of the {}s, when it cannot be guessed", "instruction for {}s that search for {}s"
BENCHMARK = Benchmark(
    "pairs",
    "text → image and image → text on pairs of your own, or Flickr30k and COCO; --data is any source of pairs",
    _run,
    (
        *(flag(f"--{part}-column", _COLUMN.format(part), metavar="NAME") for part in ("image", "text", "id")),
        flag("--split", "split of the data (default: train)", default="train", metavar="NAME"),
        flag("--gallery", "further candidates: the catalogue of which --data is the held-out part", metavar="TABLE"),
        *(flag(f"--{part}-instruction", _INSTRUCTION.format(part, to), metavar="TEXT") for part, to in DIRECTIONS),
        DTYPE,
    ),
    reads_data="source",
)
