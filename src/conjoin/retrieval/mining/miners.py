"""What a miner of hard negatives is: a model, and the views of the anchor and of the candidate that it compares."""

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from conjoin.data.pair_sources import AnyDataset
from conjoin.retrieval.encoder import Role

VIEWS = {"image": ("image",), "text": ("text",), "fused": ("image", "text")}
"""The views of an item, and the columns of each."""

DUPLICATE_ABOVE = 0.95


@dataclass(frozen=True)
class Miner:
    """One way of finding hard negatives.

    Attributes:
        name: Unique; also the name of its folder.
        model: Folder or Hub name, as `load_encoder` takes it.
        query: The view of the anchor: `"image"`, `"text"` or `"fused"`.
        candidate: The view of the candidates.
        duplicate_above: A candidate of at least this cosine is a duplicate of the anchor in `parts`. Models differ in
            what 0.95 means; above 1 there are no duplicates.
        absolute_margin: The score of a negative is at least this much below that of the positive. The positives of an
            anchor are the candidate with its id, unless that is the anchor itself, and those of its group; of several
            the least similar counts. As in `mine_hard_negatives` of sentence-transformers, like the next four.
        relative_margin: Likewise, as a share of the positive's score.
        max_score: A negative scores at most this.
        range_min: Of the candidates that are left, skip this many of the first.
        reranker: A `CrossEncoder` of sentence-transformers, whose scores replace the cosines for the first candidates
            and the positives; duplicates are still told by cosines.
    """

    name: str
    model: str
    query: str
    candidate: str
    duplicate_above: float = DUPLICATE_ABOVE
    absolute_margin: float | None = None
    relative_margin: float | None = None
    max_score: float | None = None
    range_min: int = 0
    reranker: str | None = None

    def __post_init__(self) -> None:
        if not re.fullmatch(r"\w[\w.-]*", self.name):
            raise ValueError(f"the name of a miner is letters, digits, '.', '_' and '-', got {self.name!r}")
        for role, view in (("query", self.query), ("candidate", self.candidate)):
            if view not in VIEWS:
                raise ValueError(f"miner {self.name!r}: unknown {role} {view!r}; expected one of {list(VIEWS)}")
        if not isinstance(self.duplicate_above, int | float) or math.isnan(self.duplicate_above):
            raise ValueError(f"miner {self.name!r}: duplicate_above must be a number, got {self.duplicate_above!r}")
        for name in ("absolute_margin", "relative_margin", "max_score"):
            value = vars(self)[name]
            if value is not None and (not isinstance(value, int | float) or not math.isfinite(value)):
                raise ValueError(f"miner {self.name!r}: {name} must be a number, got {value!r}")
        if not isinstance(self.range_min, int) or self.range_min < 0:
            raise ValueError(f"miner {self.name!r}: range_min must be a whole number from 0, got {self.range_min!r}")

    @property
    def has_margin(self) -> bool:
        """Whether negatives are compared with the positives."""
        return self.absolute_margin is not None or self.relative_margin is not None

    def limit(self, positive: float) -> float:
        """Return the largest score of a negative, given that of the positive."""
        limits = [math.inf if self.max_score is None else self.max_score]
        if self.absolute_margin is not None:
            limits.append(positive - self.absolute_margin)
        if self.relative_margin is not None:
            limits.append(positive - abs(positive) * self.relative_margin)
        return min(limits)

    @property
    def parts(self) -> set[str]:
        """The parts of items that it compares: `"image"`, `"text"` or both."""
        return {*VIEWS[self.query], *VIEWS[self.candidate]}


def parse_miners(described: Mapping[str, Mapping[str, Any]]) -> list[Miner]:
    """Read miners from `{name: {model, query, candidate, ...}}`, as in YAML; the keys are the attributes of `Miner`.

    Raises:
        ValueError: None at all, a key is missing or unknown, or a value is not one of those expected.
    """
    if not isinstance(described, Mapping) or not described:
        raise ValueError(f"expected miners as name: {{model, query, candidate}}, got {described!r:.80}")
    known = {field.name for field in fields(Miner)} - {"name"}
    needed = {"model", "query", "candidate"}
    for name, miner in described.items():
        keys = set(miner) if isinstance(miner, Mapping) else set()
        if not needed <= keys <= known:
            raise ValueError(
                f"miner {name!r}: expected the keys model, query, candidate and optionally "
                f"{', '.join(sorted(known - needed))}; "
                f"got {miner!r:.120}"
            )
    return [Miner(str(name), **miner) for name, miner in described.items()]


def check_miners(miners: Sequence[Miner], k: int = 1) -> None:
    """Refuse miners that cannot be used together, and a `k` below 1.

    Raises:
        ValueError: No miner, two of one name, or `k` < 1.
    """
    names = [miner.name for miner in miners]
    if not names or len(set(names)) != len(names):
        raise ValueError(f"expected at least one miner and no name twice, got {names}")
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")


def view_rows(rows: AnyDataset, view: str) -> AnyDataset:
    """The id of every row and the columns of a view."""
    return rows.select_columns(["id", *VIEWS[view]])


def needed_views(miners: Sequence[Miner], separate_anchors: bool) -> dict[str, list[tuple[str, str, Role]]]:
    """For each model the `(source, view, role)` to encode, source `"corpus"` or `"anchors"`; each once."""
    needed: dict[str, list[tuple[str, str, Role]]] = {}
    of_anchors = "anchors" if separate_anchors else "corpus"
    for miner in miners:
        views = needed.setdefault(miner.model, [])
        pair: tuple[tuple[str, str, Role], ...]
        pair = ("corpus", miner.candidate, "document"), (of_anchors, miner.query, "query")
        views += [each for each in pair if each not in views]
    return needed


def needed_parts(miners: Sequence[Miner], separate_anchors: bool) -> dict[str, Literal["image", "text"] | None]:
    """The one part that the miners compare of the rows of each source, None for both: `only` of `load_pairs`."""
    views: dict[str, set[str]] = {}
    for needed in needed_views(miners, separate_anchors).values():
        for source, view, _ in needed:
            views.setdefault(source, set()).add(view)
    return {
        source: "image" if seen == {"image"} else "text" if seen == {"text"} else None
        for source, seen in views.items()
    }


def collection_folder(folder: Path, source: str, model: str, view: str, role: Role) -> Path:
    """Where the embeddings of a view of `source`, `"corpus"` or `"anchors"`, in a role are kept."""
    short = re.sub(r"\W+", "-", Path(model).name) + "-" + hashlib.blake2b(model.encode(), digest_size=4).hexdigest()
    return folder / "embeddings" / f"{source}-{view}-{short}{'-queries' if role == 'query' else ''}"


def miner_folder(folder: Path, miner: Miner) -> Path:
    """Where the results of a miner are kept."""
    return folder / "miners" / miner.name
