"""Symmetric retrieval of scenes whose picture and text share a part and differ in the rest."""

from argparse import ArgumentParser, Namespace
from dataclasses import replace
from pathlib import Path

import datasets

from conjoin.data import load_pairs, load_triplets
from conjoin.data.make.scenes import SAME_UNION, TEST_SETS
from conjoin.evaluation.benchmark import BENCHMARKS, Benchmark, read_options
from conjoin.evaluation.benchmarks.symmetric import evaluate_triplets
from conjoin.evaluation.report.page import EXAMPLES_NOTE, task_examples
from conjoin.evaluation.results import Example, Headline, Results, Table, TableRow
from conjoin.evaluation.task import EvaluateOptions, RetrievalTask, Rows, evaluate_task
from conjoin.retrieval import ItemEncoder

_TITLES = {"known": "known objects", "unseen": "unseen objects"}
_COLUMNS = ["", "candidates", "R@1", "R@5", "R@10"]
_SUMMARY = (
    "A query is a picture of objects and a text that names other objects in part. Its positive shares exactly what "
    "picture and text of the query share: another artist draws what the text named, and the text names what the "
    "picture showed. {triplets} triplets of known objects in new compositions and as many of objects that no training "
    "scene has, {distractors} distractors. Every negative lacks an object of its query; Precision on negatives with "
    "all objects of the query, of which picture and text share others, is a score of its own. Ties count as failures."
)


def evaluate_scenes(
    encoder: ItemEncoder,
    scenes: str | Path,
    out: str | Path,
    options: EvaluateOptions | None = None,
    *,
    split: str = "test",
    distractors: bool = True,
    instruction: str | None = None,
) -> Results:
    """Evaluate an encoder on both test sets of `make_scenes`, and its text → image search in them.

    Args:
        encoder: The model.
        scenes: Output folder of `make_scenes`.
        out: Folder of the embeddings.
        options: Bootstrap, baselines.
        split: `"test"` or `"validation"`.
        distractors: Whether to search among the distractors too.
        instruction: For every item, for models that follow instructions.

    Raises:
        FileNotFoundError: `scenes` is not the output of `make_scenes`.
    """
    by_set: dict[str, Results] = {}
    examples: list[Example] = []
    rows: list[TableRow] = []
    for name in TEST_SETS:
        triplets = load_triplets(Path(scenes) / f"{split}_{name}.jsonl")
        by_set[name] = evaluate_triplets(
            encoder,
            triplets,
            out,
            load_pairs(Path(scenes) / "distractors.parquet") if distractors else None,
            options,
            instruction=instruction,
            name=_TITLES[name],
        )
        if split == "test":
            by_set[name] = _with_same_union(by_set[name], encoder, scenes, name, out, options, instruction)
        scores = evaluate_task(encoder, _text_to_image(f"{split}-{name}", triplets, instruction), out, options)
        rows.append([_TITLES[name], scores.task.size, *(scores.metrics()[f"hit_rate@{k}"] for k in (1, 5, 10))])
        examples += task_examples([scores])
    first = by_set[TEST_SETS[0]]
    return replace(
        first,
        title="Scenes",
        summary=_SUMMARY.format(**first.dataset),
        headline=[
            Headline(f"{entry.label}, {_TITLES[name]}", entry.metric)
            for name, results in by_set.items()
            for entry in results.headline
        ],
        symmetric=[run for results in by_set.values() for run in results.symmetric],
        tables=[
            Table("Text → image: the text that names exactly what a picture shows", _COLUMNS, rows),
            *(table for results in by_set.values() for table in results.tables),
        ],
        examples=examples,
        examples_note=EXAMPLES_NOTE,
    )


def _with_same_union(
    results: Results,
    encoder: ItemEncoder,
    scenes: str | Path,
    name: str,
    out: str | Path,
    options: EvaluateOptions | None,
    instruction: str | None,
) -> Results:
    """Add the Precision on negatives of `SAME_UNION`."""
    triplets = load_triplets(Path(scenes) / f"test_{name}_same_union.jsonl")
    without = replace(options or EvaluateOptions(), baselines=False)
    (same_union,) = evaluate_triplets(encoder, triplets, out, None, without, instruction=instruction).symmetric
    label = f"precision, {SAME_UNION.replace('_', ' ')}"
    (run,) = results.symmetric
    return replace(results, symmetric=[replace(run, metrics=run.metrics | {label: same_union.metrics[label]})])


def _text_to_image(name: str, triplets: datasets.Dataset, instruction: str | None) -> RetrievalTask:
    """The texts of the positives, which search the pictures of the queries."""
    texts, images = (
        Rows(f"{name}-{part}s", triplets.select_columns(["id", column]).rename_column(column, part), instruction)
        for part, column in (("text", "positive_text"), ("image", "query_image"))
    )
    return RetrievalTask("text → image", texts, (images,), {id_: [id_] for id_ in triplets["id"][:]})


def _add_arguments(parser: ArgumentParser) -> None:
    options = parser.add_argument_group("options of scenes")
    options.add_argument(
        "--split", choices=("validation", "test"), default="test", help="part of the scenes (default: %(default)s)"
    )
    options.add_argument(
        "--instruction", metavar="TEXT", help="instruction for every item, for models that follow instructions"
    )
    options.add_argument("--no-distractors", action="store_true", help="search among the triplets' items alone")


def _run(encoder: ItemEncoder, args: Namespace, out: Path) -> Results:
    return evaluate_scenes(
        encoder,
        args.data,
        out,
        read_options(args),
        split=args.split,
        distractors=not args.no_distractors,
        instruction=args.instruction,
    )


SCENES = BENCHMARKS.register(
    Benchmark(
        "scenes",
        "scenes whose picture and text share a part only; --data is what `conjoin data make-scenes` wrote",
        _add_arguments,
        _run,
        maps=False,
    )
)
