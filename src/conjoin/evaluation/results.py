"""The results of an evaluation: dataclasses that are saved as one JSON file.

Scores are fractions (0.45, not 45 %). Pictures are `data:` URIs, so the file needs no other file.
"""

import base64
import dataclasses
import itertools
import json
import math
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike
from PIL import Image
from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config
from torch import Tensor

from conjoin import __version__
from conjoin.evaluation.metrics import bootstrap_ci, chance_hit_rate, chance_mrr
from conjoin.processing.item_inputs import parse_item
from conjoin.retrieval.pictures import make_thumbnail
from conjoin.storage import check_checksums, write_checksums, write_text


@dataclass(frozen=True)
class Metric:
    """A score: a fraction with its 95 % bootstrap interval and the expected score of a random order."""

    value: float
    low: float | None = None
    high: float | None = None
    chance: float | None = None

    @classmethod
    def from_values(cls, values: ArrayLike | Tensor, chance: float | None = None, seed: int = 0) -> Self:
        """The mean of per-query values `(N,)` and its bootstrap interval."""
        low, high = bootstrap_ci(values, seed=seed)
        return cls(math.fsum(values) / len(values), low, high, chance)  # type: ignore[arg-type]


def score_ranks(
    ranks: ArrayLike,
    relevant_counts: ArrayLike,
    gallery_size: ArrayLike,
    ks: Sequence[int] = (1, 5, 10),
    mrr: int | None = 10,
    seed: int = 0,
) -> dict[str, Metric]:
    """Hit rates and the mean reciprocal rank, with intervals over queries and the expectation of a random order.

    Args:
        ranks: Rank of the best relevant candidate of each query `(N,)`, from 1.
        relevant_counts: Number of relevant candidates of each query `(N,)`.
        gallery_size: Number of candidates of each query `(N,)`, or one number for all.
        ks: Cut-offs of the hit rates.
        mrr: Ranks that the mean reciprocal rank counts; None leaves it out.
        seed: Of the bootstrap.

    Returns:
        `"hit_rate@1"`, ..., `"mrr@10"`.
    """
    ranks = np.asarray(ranks)
    values = {
        f"hit_rate@{k}": ((ranks <= k).astype(float), chance_hit_rate(relevant_counts, gallery_size, k)) for k in ks
    }
    if mrr is not None:
        values[f"mrr@{mrr}"] = np.where(ranks <= mrr, 1 / ranks, 0.0), chance_mrr(relevant_counts, gallery_size, mrr)
    return {name: Metric.from_values(each, chance, seed) for name, (each, chance) in values.items()}


def score_symmetric(
    ranks: ArrayLike, wins: ArrayLike, pool: ArrayLike, ks: Sequence[int] = (1, 5, 10), seed: int = 0
) -> dict[str, Metric]:
    """Precision, hit rates, the mean of those up to 10 (mR), and Avg = (mR + Precision) / 2 (SOLAR section 4).

    Args:
        ranks: Rank of the positive of each query `(N,)`, from 1.
        wins: Whether each positive is nearer than the negative `(N,)`, see `triplet_wins`.
        pool: Number of candidates of each query `(N,)`, or one number for all.
        ks: Cut-offs of the hit rates.
        seed: Of the bootstrap.
    """
    ranks, wins = np.asarray(ranks), np.asarray(wins, dtype=float)
    rates = score_ranks(ranks, np.ones_like(ranks), pool, ks, None, seed)
    few = [k for k in ks if k <= 10]
    recall = np.mean([ranks <= k for k in few], axis=0)
    chance = math.fsum(rates[f"hit_rate@{k}"].chance or 0.0 for k in few) / len(few)
    return {
        "average": Metric.from_values((recall + wins) / 2, (chance + 0.5) / 2, seed),
        "mean_recall": Metric.from_values(recall, chance, seed),
        "precision": Metric.from_values(wins, 0.5, seed),
    } | rates


@dataclass(frozen=True)
class Score:
    """One row of a table: the scores of some queries.

    Args:
        name: Of the cell of a benchmark, or of some of its queries.
        queries: How many queries.
        candidates: How many each of them searches; the most, if they differ.
        metrics: `"hit_rate@1"`, ..., `"mrr@10"`; empty without queries.
        labels: Further columns, by name.
    """

    name: str
    queries: int
    candidates: int
    metrics: dict[str, Metric]
    labels: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Headline:
    """One of the main scores, at the top of the report."""

    label: str
    metric: Metric
    detail: str = ""


@dataclass(frozen=True)
class Shown:
    """An item as the report shows it."""

    text: str | None = None
    image: str | None = None
    """A `data:image/...;base64,` URI, see `picture`."""
    images: list[str] = field(default_factory=list)
    """The images of an item with several, likewise, in place of `image`."""

    @classmethod
    def from_item(cls, item: Any, name: str = "item") -> Self:  # noqa: ANN401
        """Show an item; in the text, `[1]` stands for the first of several images.

        Raises:
            ValueError: As `parse_item`.
            FileNotFoundError: As `parse_item`.
        """
        parts = parse_item(item, name).parts
        images = [picture(part) for part in parts if not isinstance(part, str)]
        if len(images) < 2:
            return cls(" ".join(part for part in parts if isinstance(part, str)) or None, next(iter(images), None))
        numbers = itertools.count(1)
        words = [part if isinstance(part, str) else f"[{next(numbers)}]" for part in parts]
        return cls(" ".join(words) if len(images) < len(parts) else None, images=images)


@dataclass(frozen=True)
class ShownHit:
    """One search result."""

    item: Shown
    score: float
    correct: bool


@dataclass(frozen=True)
class Example:
    """One search: the query, its first results, and the rank of the first correct one."""

    query: Shown
    results: list[ShownHit]
    rank: int | None
    """Rank of the first correct candidate in the gallery, from 1; None if it is not known, beyond the results."""
    gallery: int
    title: str = ""


@dataclass(frozen=True)
class Curve:
    """One chart: named series of `[x, y]` points."""

    title: str
    series: dict[str, list[list[float]]]
    x_label: str = "step"


TableRow = list[str | int | float | Metric | None]


@dataclass(frozen=True)
class Table:
    """A table of the report; the terminal leaves it out if `report_only`."""

    title: str
    columns: list[str]
    rows: list[TableRow]
    note: str = ""
    report_only: bool = False


def package_versions() -> dict[str, str]:
    """Versions of the packages that the scores depend on."""
    packages = {name: version(name) for name in ("torch", "transformers", "datasets", "numpy")}
    return {"conjoin": __version__, **packages, "python": platform.python_version()}


@with_config(ConfigDict(extra="forbid"))
@dataclass
class Results:
    """Everything that one evaluation reports."""

    title: str
    summary: str
    """One paragraph: the model, the data, and the meaning of the scores."""
    seed: int
    model: dict[str, Any] = field(default_factory=dict)
    dataset: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    headline: list[Headline] = field(default_factory=list)
    scores: list[Score] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    curves: list[Curve] = field(default_factory=list)
    examples: list[Example] = field(default_factory=list)
    examples_note: str = ""
    """How the examples were chosen."""
    usage: str = ""
    """Code that loads and uses the model."""
    benchmark: str = ""
    """Name of the benchmark."""
    created: str | None = None
    versions: dict[str, str] = field(default_factory=package_versions)

    def metrics(self, name: str) -> dict[str, Metric]:
        """The metrics of the score of a name.

        Raises:
            KeyError: There is no such score.
        """
        return {score.name: score.metrics for score in self.scores}[name]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write as JSON, with its checksum in `SHA256SUMS`; a failed write leaves an older file at `path` unchanged.

        Raises:
            ValueError: A number is NaN or infinite.
        """
        text = json.dumps(dataclasses.asdict(self), indent=1, ensure_ascii=False, allow_nan=False)
        write_text(Path(path), text + "\n")
        write_checksums(Path(path).parent, [Path(path).name])

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Results":
        """Read what `save` wrote.

        Raises:
            ValueError: Damaged, not JSON, missing or unknown keys, or other types; the message names the file.
        """
        check_checksums(Path(path).parent, "evaluate again", Path(path).name)
        try:
            return TypeAdapter(cls).validate_json(Path(path).read_bytes())
        except ValidationError as error:
            raise ValueError(f"{path}: not the results of an evaluation: {error}") from error


def picture(image: Image.Image, size: int = 96) -> str:
    """A thumbnail of at most `size` x `size` pixels as a JPEG `data:` URI."""
    return f"data:image/jpeg;base64,{base64.b64encode(make_thumbnail(image, size, 'picture')).decode()}"


def read_qrels(path: str | os.PathLike[str]) -> dict[str, dict[str, int]]:
    """Read the judgements of positive grade from a file of four or five columns: grades by query id and document.

    Raises:
        ValueError: A line of other columns; the message names the file and the line.
    """
    qrels: dict[str, dict[str, int]] = {}
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), start=1):
        try:
            query, _, document, grade = line.split()[:4] or ("", "", "", 0)
            if int(grade) > 0:
                qrels.setdefault(query, {})[document] = int(grade)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: expected 'qid 0 docid rel [task]', got {line[:80]!r}") from error
    return qrels
