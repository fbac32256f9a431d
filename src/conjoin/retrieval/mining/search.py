"""One miner over all anchors: searched block by block, one file of results per block."""

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from conjoin.progress import progress
from conjoin.retrieval.index.base import Index
from conjoin.retrieval.index.build import build_index
from conjoin.retrieval.mining.miners import Miner
from conjoin.retrieval.store import EmbeddingStore
from conjoin.storage import FolderKind, FolderWriter, StoredFolder, text_digest

RESULTS = FolderKind("miner results", 3, "run `conjoin mine`", prefix="part", is_cache=True)
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
        return text_digest(json.dumps([sorted(groups.items()) for groups in self]))


class Hits(NamedTuple):
    """What one miner found for one anchor: positions in the corpus with their cosines, best first.

    Args:
        close: Those that reach `duplicate_above`: duplicates of the anchor in the view of this miner.
        others: The first `k` below it.
    """

    close: list[tuple[int, float]]
    others: list[tuple[int, float]]


class MinerSearch:
    """Searches one corpus of embeddings for any number of miners; the index is built when first needed."""

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

    def run(self, miner: Miner, queries: EmbeddingStore, folder: Path, show_progress: bool) -> None:
        """Write one file per shard of anchors into `folder`; the finished ones are skipped.

        Raises:
            ValueError: The folder holds results of other settings, or another process writes into it.
        """
        bar = progress(total=len(queries), unit="anchor", desc=miner.name, show=show_progress)
        with FolderWriter(folder, RESULTS, self._key(miner, queries)) as writer, bar:
            for number, file in enumerate(queries.manifest.files):
                if not writer.has(number):
                    ids, vectors = queries.read(number)
                    writer.write(number, _as_tensors(self._nearest(ids, vectors, miner.duplicate_above)), len(ids))
                bar.update(file.rows)
            writer.finish()

    def _key(self, miner: Miner, queries: EmbeddingStore) -> dict[str, Any]:
        """What the results depend on."""
        return {
            "query": miner.query,
            "candidate": miner.candidate,
            "duplicate_above": miner.duplicate_above,
            "k": self.k,
            "index": self.kind,
            "index options": {name: value for name, value in self.options.items() if name != "device"},
            "corpus": self.corpus.checksum,
            "anchors": queries.checksum,
            "groups": self.excluded.digest(),
        }

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
                if len(hits[row].others) < self.k and depth < limit:
                    shallow.append(row)
            pending, depth = np.array(shallow, dtype=np.int64), min(4 * depth, limit)
        return hits

    def _sort_out(self, anchor: str, names: list[str], scores: list[float], duplicate_above: float) -> Hits:
        """Tell the close from the others; scores fall, so once k others are found, no close one comes after them."""
        hits = Hits([], [])
        for name, score in zip(names, scores, strict=False):  # an approximate index may find fewer
            if self.excluded.excludes(anchor, name):
                continue
            if score >= duplicate_above:
                hits.close.append((self._positions[name], score))
            elif len(hits.others) < self.k:
                hits.others.append((self._positions[name], score))
        return hits


def read_hits(results: StoredFolder, number: int) -> list[Hits]:
    """The hits of a shard of anchors, one for each.

    Raises:
        ValueError: The file is damaged.
    """
    with results.shard(number) as file:
        found = {name: file.get_tensor(name).tolist() for name in file.keys()}
    return _from_lists(found)


def _as_tensors(hits: list[Hits]) -> dict[str, Tensor]:
    """The hits of N anchors, end to end, and how many each has."""
    tensors: dict[str, Tensor] = {}
    for name in Hits._fields:
        lists = [one._asdict()[name] for one in hits]
        found = list(itertools.chain.from_iterable(lists))
        tensors[f"{name}_counts"] = torch.tensor([len(some) for some in lists], dtype=torch.int64)
        tensors[name] = torch.tensor([position for position, _ in found], dtype=torch.int64)
        tensors[f"{name}_scores"] = torch.tensor([score for _, score in found], dtype=torch.float32)
    return tensors


def _from_lists(found: Mapping[str, list[Any]]) -> list[Hits]:
    """The inverse of `_as_tensors`."""
    parts = []
    for name in Hits._fields:
        pairs = iter(zip(found[name], found[f"{name}_scores"], strict=True))
        parts.append([list(itertools.islice(pairs, count)) for count in found[f"{name}_counts"]])
    return [Hits(close, others) for close, others in zip(*parts, strict=True)]
