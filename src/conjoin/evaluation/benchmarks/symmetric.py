"""The symmetric protocol as a benchmark: triplets from a file, and any number of distractors."""

import hashlib
import itertools
import json
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Mapping, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets

from conjoin.data import load_pairs, load_triplets
from conjoin.evaluation.benchmark import (
    BENCHMARKS,
    MOST_ROWS,
    NOTE,
    TOWERS,
    VIEWS,
    Benchmark,
    read_options,
    tower_encoder,
)
from conjoin.evaluation.results import Headline, Results, Symmetric, Table, TableRow
from conjoin.evaluation.symmetric import TripletVectors, evaluate_symmetric
from conjoin.evaluation.task import EvaluateOptions, Rows, TaskVectors, View
from conjoin.retrieval import Collection, ItemEncoder, check_model
from conjoin.retrieval.encoder import Role

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
    run = _Triplets(triplets.to_list(), distractors, instruction, name, options)
    vectors = TaskVectors(encoder, Path(out) / "collections", options)
    if isinstance(distractors, Collection):
        check_model(distractors, encoder)
    symmetric, count = run.evaluate(vectors)
    variants = sum(run.is_varied)
    return Results(
        title=name,
        summary=f"{len(triplets)} symmetric triplets, {variants} of them with a variant of the query. The pool is the "
        f"items of all triplets and {count} distractors. Ties count as failures.",
        seed=options.seed,
        model={"name": encoder.name, "fingerprint": encoder.fingerprint},
        dataset={"triplets": len(triplets), "variants": variants, "distractors": count},
        config={"resamples": options.resamples, "instruction": instruction},
        headline=[Headline(label, symmetric.metrics[key]) for key, label in _HEADLINE.items()],
        symmetric=[symmetric],
        tables=run.baselines(symmetric, vectors) if run.wants_baselines() else [],
    )


@dataclass
class _Triplets:
    """Triplets and distractors to evaluate an encoder on."""

    rows: list[dict[str, Any]]
    distractors: Iterable[Mapping[str, Any]] | Collection | None
    instruction: str | None
    name: str
    options: EvaluateOptions

    def __post_init__(self) -> None:
        self.keys = [_keys(row) for row in self.rows]
        self.is_varied = [bool(_item(row, "variant")) for row in self.rows]

    def evaluate(self, vectors: TaskVectors, view: View | None = None) -> tuple[Symmetric, int]:
        """The scores under a view, and how many distractors there are."""
        anchor, positive, negative = (
            vectors.of(rows, role).vectors(list(rows.parts)) for rows, role in self._roles(view)
        )
        variant = anchor.copy()
        if any(self.is_varied):
            ((rows, role),) = self._roles(view, ["variant"])
            variant[self.is_varied] = vectors.of(rows, role).vectors(list(rows.parts))
        others = self.distractors
        if others is not None and not isinstance(others, Collection):
            others = vectors.of(Rows("distractors", others, self.instruction, view=view))  # type: ignore[assignment]
        blocks = [] if others is None else ((block for _, block in others.batches()))  # type: ignore[union-attr]
        how: dict[str, Any] = {"resamples": self.options.resamples, "seed": self.options.seed, "name": self.name}
        kinds = [row["kind"] for row in self.rows]
        triplets = TripletVectors(anchor, positive, negative, variant, self.keys, kinds)
        symmetric = evaluate_symmetric(triplets, blocks, **how)
        return symmetric, 0 if others is None else len(others)  # type: ignore[arg-type]

    def wants_baselines(self) -> bool:
        """Whether baselines are asked for, or the data are small and nothing is said."""
        if isinstance(self.distractors, Collection):  # its items cannot be seen in part
            return False
        if self.options.baselines is not None:
            return self.options.baselines
        count = len(self.distractors) if isinstance(self.distractors, Sized) else MOST_ROWS * bool(self.distractors)
        return len(_ROLES) * len(self.rows) + count <= MOST_ROWS

    def baselines(self, symmetric: Symmetric, vectors: TaskVectors) -> list[Table]:
        """The table of the baselines."""
        runs = {"this model": symmetric}
        for view, label in VIEWS.items():
            if view == "sum" or all(view in parts for rows, _ in self._roles(None) for parts in rows.parts.values()):
                runs[label] = self.evaluate(vectors, view)[0]
        towers = tower_encoder(vectors.encoder)
        if towers is not None:
            folder = vectors.folder.parent / "towers" / "collections"
            runs[TOWERS] = self.evaluate(TaskVectors(towers, folder, self.options))[0]
        rows: list[TableRow] = [
            [self.name, label, run.triplets, *(run.metrics[key] for key in _HEADLINE)] for label, run in runs.items()
        ]
        return [Table("Baselines", ["", "", "n", *_HEADLINE.values()], rows, NOTE)]

    def _roles(self, view: View | None, roles: Iterable[str] = _ROLES) -> Iterable[tuple[Rows, Role]]:
        """The rows of some roles in the triplets; their vectors are not stored. A variant takes the query's place."""
        for role in roles:
            rows = [{"id": f"{row['id']}, {role}", **_item(row, role)} for row in self.rows]
            if role == "variant":
                rows = list(itertools.compress(rows, self.is_varied))
            shown = Rows(f"{self.name}, {role}", rows, [self.instruction] * len(rows), view=view)
            yield shown, "query" if role in ("query", "variant") else "document"


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
        read_options(args),
        instruction=args.instruction,
        name=Path(args.data).stem,
    )


BENCHMARKS.register(
    Benchmark(
        "symmetric",
        "symmetric triplets of your own, with or without distractors; --data is their file",
        _add_arguments,
        _run,
    )
)
