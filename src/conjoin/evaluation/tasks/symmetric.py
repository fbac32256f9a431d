"""The symmetric protocol as a benchmark: triplets from a file, and any number of distractors."""

import hashlib
import json
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np

from conjoin.data import load_pairs, load_triplets
from conjoin.evaluation.benchmark import MOST_ROWS, NOTE, TOWERS, VIEWS, Benchmark, flag, read_options, tower_encoder
from conjoin.evaluation.results import Headline, Results, Symmetric, Table, TableRow
from conjoin.evaluation.symmetric import TripletVectors, evaluate_symmetric
from conjoin.evaluation.task import EvaluateOptions, Rows, TaskVectors, View
from conjoin.retrieval import Collection, ItemEncoder, check_model

_ROLES = ("query", "positive", "negative")
_HEADLINE = {"average": "Avg", "mean_recall": "mR", "precision": "Precision"}


def evaluate_triplets(
    encoder: ItemEncoder,
    triplets: datasets.Dataset,
    out: str | Path,
    distractors: Iterable[Mapping[str, Any]] | Collection | None = None,
    options: EvaluateOptions | None = None,
    *,
    instruction: str | None = None,
    name: str = "symmetric triplets",
) -> Results:
    """Evaluate an encoder by the symmetric protocol, see `evaluate_symmetric`.

    The distractors are encoded into `out/collections`, resumable. Their scores are counted block by block, so neither
    their vectors nor all scores need to fit in memory. An item that occurs in several triplets, with the same image
    (its bytes, or its path) and text, enters the pool once.

    Args:
        encoder: The model.
        triplets: Columns `TRIPLET_FEATURES`, as `load_triplets` and `symmetric_triplets` return them.
        out: Folder of the embeddings.
        distractors: Rows for `encode_collection`, such as `load_pairs` returns, streamed or not; or a collection of
            the same model; `None`: the pool is the triplets' own items.
        options: Type of the vectors, bootstrap, baselines.
        instruction: For every item, distractors included (the paper's is "Represent the given image with related text
            information:"). A collection of distractors must have been encoded with the same one.
        name: Of the benchmark in the results.

    Raises:
        ValueError: No triplets, two equal items in a triplet, an item that cannot be read (it is named), or a
            collection of another model.
    """
    if not len(triplets):
        raise ValueError("there are no triplets to evaluate")
    options = options or EvaluateOptions()
    triples = triplets.to_list()
    sides = _sides(triples, name, instruction)
    if isinstance(distractors, Collection):
        check_model(distractors, encoder)
    others = Rows("distractors", distractors, instruction) if isinstance(distractors, Iterable) else distractors
    vectors = TaskVectors(encoder, Path(out) / "collections", options)
    symmetric, count = _evaluate(vectors, triples, sides, others, name)
    results = Results(
        title=name,
        summary=f"{len(triples)} symmetric triplets, {len(sides['variant'])} of them with a variant of the query. The "
        f"pool is the items of all triplets and {count} distractors. Ties count as failures.",
        seed=options.seed,
        model={"name": encoder.name, "fingerprint": encoder.fingerprint},
        dataset={"triplets": len(triples), "variants": len(sides["variant"]), "distractors": count},
        config={"resamples": options.resamples, "instruction": instruction},
        headline=[Headline(label, symmetric.metrics[key]) for key, label in _HEADLINE.items()],
        symmetric=[symmetric],
    )
    size = len(distractors) if isinstance(distractors, Sized) else MOST_ROWS * (distractors is not None)
    is_small = size + len(_ROLES) * len(triples) <= MOST_ROWS
    if not isinstance(distractors, Collection) and (is_small if options.baselines is None else options.baselines):
        runs = {"this model": symmetric}  # the items of a collection cannot be seen in part
        for view, label in VIEWS.items():
            if view == "sum" or all(view in parts for role in _ROLES for parts in sides[role].parts.values()):
                runs[label], _ = _evaluate(vectors, triples, sides, others, name, view)
        towers = tower_encoder(encoder)
        if towers is not None:
            vectors = TaskVectors(towers, Path(out) / "towers" / "collections", options)
            runs[TOWERS], _ = _evaluate(vectors, triples, sides, others, name)
        scores: list[TableRow] = [
            [name, label, run.triplets, *(run.metrics[key] for key in _HEADLINE)] for label, run in runs.items()
        ]
        results.tables.append(Table("Baselines", ["", "", "n", *_HEADLINE.values()], scores, NOTE))
    return results


def _sides(triples: Sequence[Mapping[str, Any]], name: str, instruction: str | None) -> dict[str, Rows]:
    """The rows of each role, and of the variants; their vectors are not stored."""
    sides = {}
    for role in (*_ROLES, "variant"):
        items = {f"{row['id']}, {role}": _item(row, role) for row in triples}
        rows = [{"id": id_, **item} for id_, item in items.items() if role in _ROLES or item]
        sides[role] = Rows(f"{name}, {role}", rows, [instruction] * len(rows))
    return sides


def _evaluate(
    vectors: TaskVectors,
    triples: Sequence[Mapping[str, Any]],
    sides: Mapping[str, Rows],
    others: Any,  # noqa: ANN401 - rows, a collection or None
    name: str,
    view: View | None = None,
) -> tuple[Symmetric, int]:
    """The scores under a view, and how many distractors there are."""
    of_role: dict[str, np.ndarray] = {}
    for role, rows in sides.items():
        if len(rows):
            encoded = vectors.of(replace(rows, view=view), "query" if role in ("query", "variant") else "document")
            of_role[role] = encoded.vectors(list(rows.parts))
    variant = of_role["query"].copy()
    if "variant" in of_role:
        variant[[bool(_item(row, "variant")) for row in triples]] = of_role["variant"]
    keys, kinds = [_keys(row) for row in triples], [row["kind"] for row in triples]
    anchor, positive, negative = (of_role[role] for role in _ROLES)
    embedded = TripletVectors(anchor, positive, negative, variant, keys, kinds)
    if isinstance(others, Rows):
        others = vectors.of(replace(others, view=view))
    blocks = () if others is None else (block for _, block in others.batches())
    how: dict[str, Any] = {"resamples": vectors.options.resamples, "seed": vectors.options.seed, "name": name}
    return evaluate_symmetric(embedded, blocks, **how), 0 if others is None else len(others)


def _item(row: Mapping[str, Any], role: str) -> dict[str, Any]:
    """The image and the text of a role, without null values."""
    parts = {part: row[f"{role}_{part}"] for part in ("image", "text")}
    return {part: value for part, value in parts.items() if value is not None}


def _keys(row: Mapping[str, Any]) -> tuple[str, str, str]:
    """Of the items of a triplet, which must differ, a text that is equal for items of equal content."""
    keys = []
    for role in _ROLES:
        item = _item(row, role)
        image = item.get("image")
        if image is not None and image.get("bytes") is not None:
            item["image"] = hashlib.sha256(image["bytes"]).hexdigest()
        keys.append(json.dumps(item, sort_keys=True))
    alike = [role for role, key in zip(_ROLES, keys, strict=True) if keys.count(key) > 1]
    if alike:
        raise ValueError(f"triplet {row['id']!r}: {' and '.join(alike)} are the same item")
    query, positive, negative = keys
    return query, positive, negative


def _run(encoder: ItemEncoder, args: Namespace, out: Path) -> Results:
    more = None if args.distractors is None else load_pairs(args.distractors, streaming=args.streaming)
    how = {"instruction": args.instruction, "name": Path(args.data).stem}
    return evaluate_triplets(encoder, load_triplets(args.data), out, more, read_options(args), **how)


BENCHMARK = Benchmark(
    "symmetric",
    "symmetric triplets of your own, with or without distractors; --data is their file",
    _run,
    (
        flag("--distractors", "further candidates, as for conjoin encode", metavar="SOURCE"),
        flag("--streaming", "read the distractors while encoding, without loading first", action="store_true"),
        flag("--instruction", "instruction for every item, for models that follow instructions", metavar="TEXT"),
    ),
)
