"""The results of an evaluation: dataclasses that are saved as one JSON file.

Scores are fractions (0.45, not 45 %). Pictures are `data:` URIs, so the file needs no other file.
"""

import base64
import dataclasses
import html
import itertools
import json
import math
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike
from PIL import Image
from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config
from torch import Tensor

from conjoin import __version__
from conjoin.evaluation.metrics import bootstrap_ci, chance_hit_rate, chance_mrr
from conjoin.processing.item_inputs import parse_item
from conjoin.retrieval.pictures import make_thumbnail
from conjoin.storage import check_checksums, write_checksums, write_text

_RECALL_AT = (1, 5, 10)
"""Cut-offs whose mean is mR."""


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


def query_values(metric: str, ranks: np.ndarray, wins: np.ndarray | None = None) -> np.ndarray:
    """What each query adds to the mean of a metric, `(N,)`; arguments as for `score_ranks`."""
    kind, _, k = metric.partition("@")
    if kind == "hit_rate":
        return (ranks <= int(k)).astype(float)
    if kind == "mrr":
        return np.where(ranks <= int(k), 1 / ranks, 0.0)
    nearer = np.zeros(len(ranks)) if wins is None else np.asarray(wins, dtype=float)
    recall = np.mean([ranks <= each for each in _RECALL_AT], axis=0)
    return {"precision": nearer, "mean_recall": recall, "average": (recall + nearer) / 2}[kind]


def score_ranks(
    ranks: ArrayLike,
    relevant_counts: ArrayLike,
    gallery_size: ArrayLike,
    ks: Sequence[int] = (1, 5, 10),
    mrr: int | None = 10,
    seed: int = 0,
    wins: ArrayLike | None = None,
) -> dict[str, Metric]:
    """Hit rates and the mean reciprocal rank, with intervals over queries and the expectation of a random order.

    Args:
        ranks: Rank of the best relevant candidate of each query `(N,)`, from 1.
        relevant_counts: Number of relevant candidates of each query `(N,)`, or one number for all.
        gallery_size: Number of candidates of each query `(N,)`, or one number for all.
        ks: Cut-offs of the hit rates.
        mrr: Ranks that the mean reciprocal rank counts; None leaves it out.
        seed: Of the bootstrap.
        wins: Whether the positive of each triplet `(N,)` is nearer than the negative, see `triplet_wins`: adds
            Precision, mR (the mean of R@1, R@5 and R@10) and Avg = (mR + Precision) / 2 (SOLAR section 4).

    Returns:
        `"hit_rate@1"`, ..., `"mrr@10"`; before them `"average"`, `"mean_recall"` and `"precision"` of triplets.
    """
    ranks = np.asarray(ranks)
    chance = {f"hit_rate@{k}": chance_hit_rate(relevant_counts, gallery_size, k) for k in ks}
    if mrr is not None:
        chance[f"mrr@{mrr}"] = chance_mrr(relevant_counts, gallery_size, mrr)
    if wins is not None:
        wins = np.asarray(wins)
        recall = math.fsum(chance_hit_rate(relevant_counts, gallery_size, k) for k in _RECALL_AT) / len(_RECALL_AT)
        chance = {"average": (recall + 0.5) / 2, "mean_recall": recall, "precision": 0.5} | chance
    return {name: Metric.from_values(query_values(name, ranks, wins), each, seed) for name, each in chance.items()}


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
@dataclass(repr=False)
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
    queries: dict[str, dict[str, list[Any]]] = field(default_factory=dict)
    """By the name of a score: `query`, the ids; `rank`, of the best right candidate of each, None where none was
    found; and of triplets `win`, whether the right candidate is nearer than the negative."""
    created: str | None = None
    versions: dict[str, str] = field(default_factory=package_versions)

    def metrics(self, name: str) -> dict[str, Metric]:
        """The metrics of the score of a name.

        Raises:
            KeyError: There is no such score.
        """
        return {score.name: score.metrics for score in self.scores}[name]

    def add_ranks(
        self, name: str, ids: Sequence[str], ranks: np.ndarray, found: int, wins: np.ndarray | None = None
    ) -> None:
        """Keep the ranks of the queries of a score; those beyond the first `found` candidates are not known."""
        columns: dict[str, list[Any]] = {"query": list(ids)}
        columns["rank"] = [rank if rank <= found else None for rank in ranks.tolist()]
        if wins is not None:
            columns["win"] = np.asarray(wins, dtype=bool).tolist()
        self.queries[name] = columns

    def to_pandas(self) -> pd.DataFrame:
        """A row for each query of each score: `score`, `query` and `rank`; of triplets also `win`."""
        frames = [pd.DataFrame({"score": name, **columns}) for name, columns in self.queries.items()]
        found = pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=["score", "query", "rank"])
        return found.astype({"rank": "Int64"})

    def __repr__(self) -> str:
        from conjoin.evaluation.report import format_results

        return format_results(self)

    def _repr_html_(self) -> str:
        from conjoin.evaluation.report import render_report

        return f'<iframe srcdoc="{html.escape(render_report(self))}" style="width: 100%; height: 40em"></iframe>'

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write `results.json` and `report.html` into a folder, and return the path of the report.

        `SHA256SUMS` has the checksum of the first. A failed write leaves an older file as it is.

        Raises:
            ValueError: A number is NaN or infinite.
        """
        from conjoin.evaluation.report import render_report

        self.created = self.created or datetime.now(UTC).isoformat(timespec="seconds")
        text = json.dumps(dataclasses.asdict(self), indent=1, ensure_ascii=False, allow_nan=False) + "\n"
        Path(folder).mkdir(parents=True, exist_ok=True)
        for name, content in (("results.json", text), ("report.html", render_report(self))):
            write_text(path := Path(folder) / name, content)
        write_checksums(Path(folder), ["results.json"])
        return path

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Results":
        """Read what `save` wrote.

        Raises:
            ValueError: Damaged, not JSON, missing or unknown keys, or other types; the message names the file.
        """
        check_checksums(Path(path).parent, "evaluate again", [Path(path).name])
        try:
            return TypeAdapter(cls).validate_json(Path(path).read_bytes())
        except ValidationError as error:
            raise ValueError(f"{path}: not the results of an evaluation: {error}") from error


def compare(a: Results | str | os.PathLike[str], b: Results | str | os.PathLike[str], seed: int = 0) -> pd.DataFrame:
    """Compare two evaluations of the same queries.

    Args:
        a: Results, or the path of a `results.json`.
        b: Likewise, what `a` is compared with.
        seed: Of the bootstrap.

    Returns:
        A row for each score and metric of both: `score`, `metric`, `n` queries, the means `a` and `b`, `difference`
        (a − b), and its 95 % interval `low` to `high`, paired: each resample draws the same queries of both.

    Raises:
        ValueError: They share no score, or a score is of other queries or another number of candidates.
    """
    both = [each if isinstance(each, Results) else Results.load(each) for each in (a, b)]
    first, second = ({score.name: score for score in each.scores if score.name in each.queries} for each in both)
    rows: list[dict[str, Any]] = []
    for name in [name for name in first if name in second]:
        own, other = (pd.DataFrame(each.queries[name]).set_index("query") for each in both)
        if set(own.index) != set(other.index) or first[name].candidates != second[name].candidates:
            raise ValueError(f"{name!r} has other queries or candidates in the two results: they cannot be compared")
        for metric in [each for each in first[name].metrics if each in second[name].metrics and each != "published"]:
            values = []
            for frame in (own, other.loc[own.index]):
                ranks = frame["rank"].astype(float).fillna(math.inf).to_numpy()
                values.append(query_values(metric, ranks, frame.get("win")))
            low, high = bootstrap_ci(values[0] - values[1], seed=seed)
            means = [float(each.mean()) for each in values]
            rows.append({"score": name, "metric": metric, "n": len(own), "a": means[0], "b": means[1]})
            rows[-1] |= {"difference": means[0] - means[1], "low": low, "high": high}
    if not rows:
        raise ValueError(f"the results share no score whose ranks they hold: {[*first]} and {[*second]}")
    return pd.DataFrame(rows)


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
