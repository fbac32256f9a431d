"""The results of an evaluation: dataclasses that are saved as one JSON file, and run files in TREC's format.

Scores are fractions (0.45, not 45 %). Pictures are `data:` URIs, so the file needs no other file.
"""

import base64
import dataclasses
import io
import itertools
import json
import math
import os
import platform
from collections.abc import Mapping, Sequence
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
from conjoin.processing.item_images import to_rgb
from conjoin.processing.item_inputs import parse_item
from conjoin.storage import atomic_path, check_listed

SCHEMA_VERSION = 1
REMEDY = "evaluate again, or remove SHA256SUMS if you changed the file yourself"
"""What mends a damaged file of an evaluation."""


@dataclass(frozen=True)
class Metric:
    """A score: a fraction with its 95 % bootstrap interval and the expected score of a random order."""

    value: float
    low: float | None = None
    high: float | None = None
    chance: float | None = None

    def __post_init__(self) -> None:
        for name, number in dataclasses.asdict(self).items():
            required = name == "value"
            if not (isinstance(number, int | float) and math.isfinite(number)) and (required or number is not None):
                raise ValueError(f"metric {name} must be a finite number, got {number!r}")

    @classmethod
    def from_values(
        cls, values: ArrayLike | Tensor, chance: float | None = None, resamples: int = 10000, seed: int = 0
    ) -> Self:
        """The mean of per-query values `(N,)` and its bootstrap interval."""
        low, high = bootstrap_ci(values, resamples=resamples, seed=seed)
        numbers = values.tolist() if isinstance(values, Tensor) else list(values)  # type: ignore[arg-type]
        return cls(math.fsum(numbers) / len(numbers), low, high, chance)


def score_ranks(
    ranks: ArrayLike,
    relevant_counts: ArrayLike,
    gallery_size: int,
    ks: Sequence[int] = (1, 5, 10),
    mrr: int | None = 10,
    resamples: int = 10000,
    seed: int = 0,
) -> dict[str, Metric]:
    """Hit rates and the mean reciprocal rank, with intervals over queries and the expectation of a random order.

    Args:
        ranks: Rank of the best relevant candidate of each query `(N,)`, from 1.
        relevant_counts: Number of relevant candidates of each query `(N,)`.
        gallery_size: Number of candidates of each query.
        ks: Cut-offs of the hit rates.
        mrr: Ranks that the mean reciprocal rank counts; None leaves it out.
        resamples: Of the bootstrap.
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
    return {name: Metric.from_values(each, chance, resamples, seed) for name, (each, chance) in values.items()}


@dataclass(frozen=True)
class Cell:
    """One of the modality combinations: queries of one modality against candidates of one modality."""

    setting: str
    """`"local"` (a gallery of that modality only) or `"global"` (one gallery of all modalities)."""
    query: str
    candidates: str
    queries: int
    gallery: int
    metrics: dict[str, Metric]
    """`"hit_rate@1"`, ..., `"mrr@10"`; empty without queries."""


@dataclass(frozen=True)
class Symmetric:
    """One run of the symmetric triplet protocol."""

    name: str
    triplets: int
    pool: int
    """Candidates ranked for each query, distractors included."""
    metrics: dict[str, Metric]
    """`"precision"`, `"recall@1"`, ..., `"mean_recall"`, `"average"`."""


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
class Hit:
    """One search result."""

    item: Shown
    score: float
    correct: bool


@dataclass(frozen=True)
class Example:
    """One search: the query, its first results, and the rank of the first correct one."""

    query: Shown
    results: list[Hit]
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

    def __post_init__(self) -> None:
        for name, points in self.series.items():
            bad = [point for point in points if len(point) != 2 or not all(math.isfinite(number) for number in point)]
            if bad:
                raise ValueError(f"curve {self.title!r}, series {name!r}: expected finite [x, y] points, got {bad[0]}")


TableRow = list[str | int | float | Metric | None]


@dataclass(frozen=True)
class Table:
    """A further table, for example baselines or scores per group."""

    title: str
    columns: list[str]
    rows: list[TableRow]
    note: str = ""
    report_only: bool = False
    """Whether the terminal leaves the table out."""

    def __post_init__(self) -> None:
        uneven = [row for row in self.rows if len(row) != len(self.columns)]
        if uneven:
            raise ValueError(f"table {self.title!r} has {len(self.columns)} columns, but a row of {len(uneven[0])}")


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
    combinations: list[Cell] = field(default_factory=list)
    symmetric: list[Symmetric] = field(default_factory=list)
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
    schema_version: int = SCHEMA_VERSION

    def cell(self, query: str, candidates: str, setting: str = "local") -> Cell:
        """The cell of one modality combination.

        Raises:
            ValueError: There is no such cell; the message lists all.
        """
        cells = {(cell.setting, cell.query, cell.candidates): cell for cell in self.combinations}
        if (setting, query, candidates) not in cells:
            raise ValueError(f"no cell {(setting, query, candidates)}; there are {sorted(cells)}")
        return cells[setting, query, candidates]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write as JSON; a failed write leaves an older file at `path` unchanged.

        Raises:
            ValueError: JSON cannot hold a value, or a number is NaN or infinite.
        """
        try:
            text = json.dumps(dataclasses.asdict(self), indent=1, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(f"cannot write the results as JSON: {error}") from error
        with atomic_path(Path(path)) as temporary:
            temporary.write_text(text + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Results":
        """Read what `save` wrote.

        Raises:
            ValueError: Not JSON, another schema version, unknown or missing keys, or damaged since it was evaluated.
        """
        check_listed(Path(path), REMEDY)
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}: not a JSON file of results ({error})") from error
        try:
            return cls.from_dict(data)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Results":
        """Build from plain dicts and lists; errors as in `load`."""
        schema = data.get("schema_version", SCHEMA_VERSION) if isinstance(data, Mapping) else None
        if isinstance(data, Mapping) and schema != SCHEMA_VERSION:
            raise ValueError(f"results have schema version {schema!r}, this version of conjoin reads {SCHEMA_VERSION}")
        try:
            return TypeAdapter(cls).validate_python(data)
        except ValidationError as error:
            wrong = (f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
            raise ValueError(f"results: {'; '.join(wrong)}") from error


def picture(image: Image.Image, size: int = 96) -> str:
    """A thumbnail of at most `size` x `size` pixels as a PNG or JPEG (whichever is smaller) `data:` URI."""
    thumbnail = to_rgb(image).copy()
    thumbnail.thumbnail((size, size), Image.Resampling.LANCZOS)
    encoded = []
    for kind, options in (("png", {"optimize": True}), ("jpeg", {"quality": 85})):
        buffer = io.BytesIO()
        thumbnail.save(buffer, kind, **options)
        encoded.append((len(buffer.getvalue()), kind, buffer.getvalue()))
    _, kind, data = min(encoded)
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def write_run(path: str | os.PathLike[str], rankings: Mapping[str, Sequence[tuple[str, float]]], tag: str) -> None:
    """Write rankings, best first, with ranks from 1.

    Args:
        path: The file to write.
        rankings: For each query id the (document id, score) pairs; scores do not rise.
        tag: Name of the run, one word.

    Raises:
        ValueError: An id or the tag is empty or holds white space, a score is not finite, or scores rise.
    """
    lines = []
    for query, ranking in rankings.items():
        scores = [float(score) for _, score in ranking]
        if not np.isfinite(scores).all() or sorted(scores, reverse=True) != scores:
            raise ValueError(f"query {query!r}: scores must be finite and not rise, got {scores[:5]}")
        lines += [
            f"{_word(query, 'query id')} Q0 {_word(name, 'document id')} {rank} {score!r} {_word(tag, 'tag')}\n"
            for rank, ((name, _), score) in enumerate(zip(ranking, scores, strict=True), start=1)
        ]
    Path(path).write_text("".join(lines), encoding="utf-8")


def write_qrels(path: str | os.PathLike[str], qrels: Mapping[str, Mapping[str, int]]) -> None:
    """Write judgements, the grade of each document by query id, in four columns.

    Raises:
        ValueError: An id is empty or holds white space.
    """
    lines = [
        f"{_word(query, 'query id')} 0 {_word(document, 'document id')} {grade}\n"
        for query, judged in qrels.items()
        for document, grade in judged.items()
    ]
    Path(path).write_text("".join(lines), encoding="utf-8")


def read_qrels(path: str | os.PathLike[str]) -> dict[str, dict[str, int]]:
    """Read the judgements of positive grade from a file of four or five columns: grades by query id and document.

    Raises:
        ValueError: Not UTF-8, a row with another number of columns, a grade that is not an integer, or a document that
            is judged twice for one query. The message names the file and the line. Or the file differs from its
            checksum.
    """
    check_listed(Path(path), REMEDY)
    qrels: dict[str, dict[str, int]] = {}
    for number, content in enumerate(Path(path).read_bytes().splitlines(), start=1):
        where = f"{path}, line {number}"
        try:
            columns = content.decode().split()
        except UnicodeDecodeError as error:
            raise ValueError(f"{where}: not valid UTF-8 ({error})") from error
        if columns and len(columns) not in (4, 5):
            raise ValueError(
                f"{where}: expected 'qid 0 docid rel [task]', got {len(columns)} columns: {content.decode()[:80]!r}"
            )
        if columns:
            query, _, document, grade = columns[:4]
            if document in qrels.setdefault(query, {}):
                raise ValueError(f"{where}: document {document!r} is judged twice for query {query!r}")
            try:
                qrels[query][document] = int(grade)
            except ValueError as error:
                raise ValueError(f"{where}: relevance must be an integer, got {grade!r}") from error
    kept = {query: {name: grade for name, grade in judged.items() if grade > 0} for query, judged in qrels.items()}
    return {query: judged for query, judged in kept.items() if judged}


def _word(text: str, name: str) -> str:
    if not isinstance(text, str) or [text] != text.split():
        raise ValueError(f"{name} must be one word without white space, got {text!r}")
    return text
