"""The symmetric protocol as a benchmark: triplets from a file, and any number of distractors."""

import hashlib
import itertools
import json
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import datasets
import numpy as np

from conjoin.data import load_pairs, load_triplets
from conjoin.evaluation.benchmark import BENCHMARKS, Benchmark
from conjoin.evaluation.results import Headline, Results
from conjoin.evaluation.symmetric import evaluate_symmetric
from conjoin.retrieval import Collection, ItemEncoder, check_model, encode_collection

_ROLES = ("query", "positive", "negative")
_HEADLINE = {"average": "Avg", "mean_recall": "mR", "precision": "Precision"}


def evaluate_triplets(
    encoder: ItemEncoder,
    triplets: datasets.Dataset,
    folder: str | Path,
    distractors: Iterable[Mapping[str, Any]] | Collection | None = None,
    *,
    instruction: str | None = None,
    dtype: Literal["float32", "float16"] = "float32",
    resamples: int = 10000,
    seed: int = 0,
    name: str = "symmetric triplets",
    show_progress: bool = False,
) -> Results:
    """Evaluate an encoder by the symmetric protocol, see `evaluate_symmetric`.

    The distractors are encoded into `folder`, resumable. Their scores are counted block by block,
    so neither their vectors nor all scores need to fit in memory. An item that occurs in several triplets, with the
    same image (its bytes, or its path) and text, enters the pool once.

    Args:
        encoder: The model.
        triplets: Columns `TRIPLET_FEATURES`, as `load_triplets` and `symmetric_triplets` return them.
        folder: Folder of the distractors' embeddings.
        distractors: Rows for `encode_collection`, such as `load_pairs` returns, streamed or not; or a collection of
            the same model; `None`: the pool is the triplets' own items.
        instruction: For every item, distractors included (the paper's is "Represent the given image with related text
            information:"). A collection of distractors must have been encoded with the same one.
        dtype: As for `encode_collection`.
        resamples: Bootstrap samples per interval.
        seed: Of the bootstrap.
        name: Of the benchmark in the results.
        show_progress: Show progress bars.

    Raises:
        ValueError: No triplets, two equal items in a triplet, an item that cannot be read (it is named), or a
            collection of another model.
    """
    if not len(triplets):
        raise ValueError("there are no triplets to evaluate")
    rows = triplets.to_list()
    keys = [_keys(row) for row in rows]
    encode = partial(_encode, encoder, instruction, show_progress)
    anchor, positive, negative = (encode(rows, role) for role in _ROLES)
    varied = [bool(_item(row, "variant")) for row in rows]
    variant = anchor.copy()
    if any(varied):
        variant[varied] = encode(list(itertools.compress(rows, varied)), "variant")
    if isinstance(distractors, Collection):
        check_model(distractors, encoder)
    elif distractors is not None:
        asked = "" if instruction is None else "-" + hashlib.sha256(instruction.encode()).hexdigest()[:8]
        distractors = encode_collection(
            distractors,
            encoder,
            Path(folder) / f"distractors{asked}",
            sync=True,
            instruction=instruction,
            dtype=dtype,
            show_progress=show_progress,
        )
    blocks = () if distractors is None else (embeddings for _, embeddings in distractors.batches())
    symmetric = evaluate_symmetric(
        anchor,
        positive,
        negative,
        variant,
        blocks,
        keys,
        [row["kind"] for row in rows],
        resamples=resamples,
        seed=seed,
        name=name,
    )
    count = 0 if distractors is None else len(distractors)
    return Results(
        title=name,
        summary=f"{len(rows)} symmetric triplets, {sum(varied)} of them with a variant of the query. The pool is the "
        f"items of all triplets and {count} distractors. Ties count as failures.",
        seed=seed,
        model={"name": encoder.name, "fingerprint": encoder.fingerprint},
        dataset={"triplets": len(rows), "variants": sum(varied), "distractors": count},
        config={"resamples": resamples, "instruction": instruction},
        headline=[Headline(label, symmetric.metrics[key]) for key, label in _HEADLINE.items()],
        symmetric=[symmetric],
    )


def _encode(
    encoder: ItemEncoder, instruction: str | None, show_progress: bool, rows: list[dict[str, Any]], role: str
) -> np.ndarray:
    """Vectors `(N, D)` of one role of the triplets."""
    ids = [f"{row['id']}, {role}" for row in rows]
    return encoder.encode([_item(row, role) for row in rows], ids, show_progress, instruction=instruction)


def _item(row: Mapping[str, Any], role: str) -> dict[str, Any]:
    """The image and the text of a role, without null values."""
    parts = {part: row[f"{role}_{part}"] for part in ("image", "text")}
    return {part: value for part, value in parts.items() if value is not None}


def _keys(row: Mapping[str, Any]) -> tuple[str, str, str]:
    """The keys of the items of a triplet, which must differ."""
    query, positive, negative = keys = tuple(_key(row, role) for role in _ROLES)
    alike = [role for role, key in zip(_ROLES, keys, strict=True) if keys.count(key) > 1]
    if alike:
        raise ValueError(f"triplet {row['id']!r}: {' and '.join(alike)} are the same item")
    return query, positive, negative


def _key(row: Mapping[str, Any], role: str) -> str:
    """A text that is equal for items of equal content."""
    item = _item(row, role)
    image = item.get("image")
    if image is not None and image.get("bytes") is not None:
        item["image"] = hashlib.sha256(image["bytes"]).hexdigest()
    return json.dumps(item, sort_keys=True)


def _add_arguments(parser: ArgumentParser) -> None:
    options = parser.add_argument_group("options of symmetric")
    options.add_argument("--distractors", metavar="SOURCE", help="further candidates, as for conjoin encode")
    options.add_argument(
        "--streaming", action="store_true", help="read the distractors while encoding, without loading them first"
    )
    options.add_argument(
        "--instruction", metavar="TEXT", help="instruction for every item, for models that follow instructions"
    )


def _run(encoder: ItemEncoder, args: Namespace, out: Path) -> Results:
    return evaluate_triplets(
        encoder,
        load_triplets(args.data),
        out,
        None if args.distractors is None else load_pairs(args.distractors, streaming=args.streaming),
        instruction=args.instruction,
        seed=args.seed,
        name=Path(args.data).stem,
        show_progress=not args.quiet,
    )


SYMMETRIC = BENCHMARKS.register(
    Benchmark(
        "symmetric",
        "symmetric triplets of your own, with or without distractors; --data is their file",
        _add_arguments,
        _run,
    )
)
