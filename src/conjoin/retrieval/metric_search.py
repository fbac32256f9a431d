"""One metric of hard-negative mining over all anchors: searched block by block, one file of results per block."""

import hashlib
import itertools
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm.auto import tqdm

from conjoin.retrieval.atomic_files import atomic_path, write_json
from conjoin.retrieval.build import build_index
from conjoin.retrieval.embedding_store import EmbeddingStore
from conjoin.retrieval.index import Index
from conjoin.retrieval.mining_metrics import MiningMetric

_SPARE = 8
_DEEPEST = 1024


class Excluded(NamedTuple):
    """Which candidates are no negatives of which anchors, by name."""

    of_candidates: dict[str, str]
    of_anchors: dict[str, str]

    def excludes(self, anchor: str, candidate: str) -> bool:
        """Whether the candidate is the anchor itself or of its group."""
        group = self.of_anchors.get(anchor)
        return candidate == anchor or (group is not None and group == self.of_candidates.get(candidate))

    def digest(self) -> str:
        """A checksum of the groups."""
        content = json.dumps([sorted(groups.items()) for groups in self]).encode()
        return hashlib.sha256(content).hexdigest()


class Hits(NamedTuple):
    """What one metric found for one anchor: positions in the corpus with their cosines, best first; duplicates."""

    kept: list[tuple[int, float]]
    duplicates: list[int]


class MetricSearch:
    """Searches one corpus of embeddings for any number of metrics; the index is built when first needed."""

    def __init__(self, corpus: EmbeddingStore, kind: str, options: dict[str, Any], k: int, excluded: Excluded) -> None:
        self.corpus = corpus
        self.kind = kind
        self.options = options
        self.k = k
        self.excluded = excluded
        self._index: Index | None = None
        self._positions: dict[str, int] = {}

    @property
    def index(self) -> Index:
        """The index of the corpus."""
        if self._index is None:
            self._index = build_index(self.corpus, self.kind, **self.options)
            self._positions = {id_: position for position, id_ in enumerate(self._index.ids)}
        return self._index

    def run(self, metric: MiningMetric, queries: EmbeddingStore, folder: Path, show_progress: bool) -> None:
        """Write one file per shard of anchors into `folder`, leaving out those that are there."""
        self._check_settings(metric, queries, folder)
        with tqdm(total=len(queries), unit="anchor", desc=metric.name, disable=not show_progress) as bar:
            for number, (ids, vectors) in enumerate(queries):
                path = part_path(folder, number)
                if not path.exists():
                    _write_hits(path, self._nearest(ids, vectors, metric.duplicate_above))
                bar.update(len(ids))

    def _check_settings(self, metric: MiningMetric, queries: EmbeddingStore, folder: Path) -> None:
        settings = {
            "query": metric.query,
            "candidate": metric.candidate,
            "duplicate_above": metric.duplicate_above,
            "k": self.k,
            "index": f"{self.kind} {sorted(self.options.items() - {('device', self.options.get('device'))})}",
            "corpus": _checksum(self.corpus),
            "anchors": _checksum(queries),
            "groups": self.excluded.digest(),
        }
        path = folder / "settings.json"
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            write_json(path, settings)
            return
        begun = json.loads(path.read_text(encoding="ascii"))
        for name, value in settings.items():
            if begun.get(name) != value:
                raise ValueError(
                    f"cannot resume metric {metric.name!r} in {str(folder)!r}: it was begun with {name} "
                    f"{begun.get(name)!r}, not {value!r}; use the same, another name for the metric or another folder"
                )

    def _nearest(self, ids: list[str], vectors: np.ndarray, duplicate_above: float) -> list[Hits]:
        """The hits of each anchor; searched again more deeply where duplicates fill the first results."""
        corpus = len(self.index.ids)
        limit = min(corpus, max(_DEEPEST, self.k + _SPARE))
        depth = min(limit, self.k + _SPARE)
        hits: list[Hits] = [Hits([], [])] * len(ids)
        pending = np.arange(len(ids))
        while len(pending):
            found = self.index.search(np.asarray(vectors[pending], dtype=np.float32), depth)
            shallow = []
            for row, names, scores in zip(pending.tolist(), found.ids, found.scores.tolist(), strict=True):
                hits[row] = self._sort_out(ids[row], names, scores, duplicate_above)
                if len(hits[row].kept) < self.k and depth < limit:
                    shallow.append(row)
            pending, depth = np.array(shallow, dtype=np.int64), min(4 * depth, limit)
        return hits

    def _sort_out(self, anchor: str, names: list[str], scores: list[float], duplicate_above: float) -> Hits:
        """Tell negatives from duplicates; scores fall, so k negatives mean that no duplicate comes after them."""
        hits = Hits([], [])
        for name, score in zip(names, scores, strict=False):  # an approximate index may find fewer
            if self.excluded.excludes(anchor, name):
                continue
            if score >= duplicate_above:
                hits.duplicates.append(self._positions[name])
            elif len(hits.kept) < self.k:
                hits.kept.append((self._positions[name], score))
        return hits


def part_path(folder: Path, number: int) -> Path:
    """Where the hits of a shard of anchors are kept."""
    return folder / f"part-{number:05d}.npz"


def _checksum(store: EmbeddingStore) -> str:
    """Of the vectors and ids of a store."""
    return hashlib.sha256("".join(shard.sha256 for shard in store.manifest.shards).encode()).hexdigest()


def _write_hits(path: Path, hits: list[Hits]) -> None:
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        np.savez(
            file,
            kept_counts=np.array([len(one.kept) for one in hits], dtype=np.int64),
            kept=np.array([position for one in hits for position, _ in one.kept], dtype=np.int64),
            scores=np.array([score for one in hits for _, score in one.kept], dtype=np.float32),
            duplicate_counts=np.array([len(one.duplicates) for one in hits], dtype=np.int64),
            duplicates=np.array([position for one in hits for position in one.duplicates], dtype=np.int64),
        )


def read_hits(path: Path) -> list[Hits]:
    """The hits of a shard of anchors, one for each."""
    with np.load(path, allow_pickle=False) as file:
        kept, scores, duplicates = (iter(file[name].tolist()) for name in ("kept", "scores", "duplicates"))
        return [
            Hits(
                list(zip(itertools.islice(kept, some), itertools.islice(scores, some), strict=True)),
                list(itertools.islice(duplicates, barred)),
            )
            for some, barred in zip(file["kept_counts"].tolist(), file["duplicate_counts"].tolist(), strict=True)
        ]
