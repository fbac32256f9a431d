"""What a metric of hard-negative mining is: a model, and what of the anchor and of the candidate it looks at."""

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from conjoin.data.pair_sources import AnyDataset

VIEWS = {"image": ("image",), "text": ("text",), "fused": ("image", "text")}
"""What of an item a metric looks at, and the columns of it."""

DUPLICATE_ABOVE = 0.95


@dataclass(frozen=True)
class MiningMetric:
    """One way of finding hard negatives.

    Attributes:
        name: Unique; also the name of its folder.
        model: Folder or Hub name, as `load_encoder` takes it.
        query: What it looks at of the anchor: `"image"`, `"text"` or `"fused"`.
        candidate: What it looks at of the candidates.
        duplicate_above: A candidate of at least this cosine is a duplicate of the anchor, not a negative, whatever the
            other metrics say. Models differ in what 0.95 means; above 1 it finds none.
    """

    name: str
    model: str
    query: str
    candidate: str
    duplicate_above: float = DUPLICATE_ABOVE

    def __post_init__(self) -> None:
        if not re.fullmatch(r"\w[\w.-]*", self.name):
            raise ValueError(f"the name of a metric is letters, digits, '.', '_' and '-', got {self.name!r}")
        for role, view in (("query", self.query), ("candidate", self.candidate)):
            if view not in VIEWS:
                raise ValueError(f"metric {self.name!r}: unknown {role} {view!r}; expected one of {list(VIEWS)}")
        if not isinstance(self.duplicate_above, int | float) or math.isnan(self.duplicate_above):
            raise ValueError(f"metric {self.name!r}: duplicate_above must be a number, got {self.duplicate_above!r}")


def parse_metrics(described: Mapping[str, Mapping[str, Any]]) -> list[MiningMetric]:
    """Read metrics from `{name: {model, query, candidate[, duplicate_above]}}`, as they stand in YAML.

    Raises:
        ValueError: None at all, a key is missing or unknown, or a value is not one of those expected.
    """
    if not isinstance(described, Mapping) or not described:
        raise ValueError(f"expected metrics as name: {{model, query, candidate}}, got {described!r:.80}")
    known = {field.name for field in fields(MiningMetric)} - {"name"}
    for name, metric in described.items():
        keys = set(metric) if isinstance(metric, Mapping) else set()
        if not known - {"duplicate_above"} <= keys <= known:
            raise ValueError(
                f"metric {name!r}: expected the keys model, query, candidate and, if you like, duplicate_above; "
                f"got {metric!r:.120}"
            )
    return [MiningMetric(str(name), **metric) for name, metric in described.items()]


def check_metrics(metrics: Sequence[MiningMetric], k: int = 1) -> None:
    """Refuse metrics that cannot be mined together, and a `k` below 1."""
    names = [metric.name for metric in metrics]
    if not names or len(set(names)) != len(names):
        raise ValueError(f"expected at least one metric and no name twice, got {names}")
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")


def view_rows(rows: AnyDataset, view: str) -> AnyDataset:
    """The id of every row and what a view looks at."""
    return rows.select_columns(["id", *VIEWS[view]])


def needed_views(metrics: Sequence[MiningMetric], separate_anchors: bool) -> dict[str, list[tuple[str, str]]]:
    """For each model the `(source, view)` to encode, source `"corpus"` or `"anchors"`; each once."""
    needed: dict[str, list[tuple[str, str]]] = {}
    of_anchors = "anchors" if separate_anchors else "corpus"
    for metric in metrics:
        views = needed.setdefault(metric.model, [])
        for pair in (("corpus", metric.candidate), (of_anchors, metric.query)):
            if pair not in views:
                views.append(pair)
    return needed


def needed_parts(
    metrics: Sequence[MiningMetric], separate_anchors: bool
) -> dict[str, Literal["image", "text"] | None]:
    """The one part that the metrics look at of the rows of each source, None for both: `only` of `load_pairs`."""
    views: dict[str, set[str]] = {}
    for pairs in needed_views(metrics, separate_anchors).values():
        for source, view in pairs:
            views.setdefault(source, set()).add(view)
    return {
        source: "image" if seen == {"image"} else "text" if seen == {"text"} else None
        for source, seen in views.items()
    }


def store_folder(folder: Path, source: str, model: str, view: str) -> Path:
    """Where the embeddings of a view of `source`, `"corpus"` or `"anchors"`, are kept."""
    short = re.sub(r"\W+", "-", Path(model).name) + "-" + hashlib.blake2b(model.encode(), digest_size=4).hexdigest()
    return folder / "embeddings" / f"{source}-{view}-{short}"


def metric_folder(folder: Path, metric: MiningMetric) -> Path:
    """Where the results of a metric are kept."""
    return folder / "metrics" / metric.name
