"""One miner over all anchors: searched block by block, one file of results per block."""

import itertools
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from conjoin.progress import progress
from conjoin.retrieval.exact import exact_search
from conjoin.retrieval.faiss_index import search_faiss, train_faiss
from conjoin.retrieval.mining.embedded import Embedded
from conjoin.retrieval.mining.miners import Miner
from conjoin.retrieval.mining.positives import Excluded, Positives, ViewItems
from conjoin.retrieval.reranker import Reranker
from conjoin.storage import FolderKind, FolderWriter, StoredFolder

RESULTS = FolderKind("miner results", 3, "run `conjoin mine`", prefix="part", is_cache=True)
_SPARE = 8
_DEEPEST = 1024
_RERANKED = 10
"""As `mine_hard_negatives` of sentence-transformers: candidates that are scored again for each negative."""
_UNLIMITED = math.inf


class Hits(NamedTuple):
    """What one miner found for one anchor: positions in the corpus with their scores, best first.

    Args:
        close: Those whose cosines reach `duplicate_above`: duplicates of the anchor in the view of this miner.
        others: The first below it: as many as are needed, none of them above the limit unless a reranker scores them.
        limit: The largest score of a negative.
    """

    close: list[tuple[int, float]]
    others: list[tuple[int, float]]
    limit: float = _UNLIMITED

    def negatives(self, duplicates: set[int], skip: int, count: int) -> list[tuple[int, float]]:
        """Return the `count` best after the first `skip`, without duplicates and those above the limit."""
        kept = [hit for hit in (*self.close, *self.others) if hit[0] not in duplicates and hit[1] <= self.limit]
        return sorted(kept, key=lambda hit: -hit[1])[skip : skip + count]


class MinerSearch:
    """Searches one corpus of embeddings for any number of miners.

    Args:
        corpus: The embeddings of the candidates.
        index: `"exact"`, or a factory string of FAISS, whose index is built when first needed.
        device: Where `"exact"` ranks.
        k: Negatives per miner.
        block: Anchors that are searched at once.
        excluded: Which candidates are no negatives.
        load_reranker: Makes the reranker of a miner.
    """

    def __init__(
        self,
        corpus: Embedded,
        index: str,
        device: str | torch.device,
        k: int,
        block: int,
        excluded: Excluded,
        load_reranker: Callable[[str], Reranker],
    ) -> None:
        self.corpus, self.index, self.device = corpus, index, device
        self.k, self.block = k, block
        self.excluded = excluded
        self.load_reranker = load_reranker
        self._faiss: Any = None

    def _search(self, queries: np.ndarray, depth: int) -> tuple[np.ndarray, np.ndarray]:
        """Positions `(Q, depth)` in the corpus, negative where there is none, and scores, best first."""
        if self.index == "exact":
            return exact_search(queries, self.corpus.vectors, depth, device=self.device)
        if self._faiss is None:
            self._faiss = train_faiss(self.index, self.corpus.vectors)
        return search_faiss(self._faiss, queries, depth)

    def run(self, miner: Miner, queries: Embedded, items: ViewItems, folder: Path, show_progress: bool) -> None:
        """Write one file per shard of anchors into `folder`; the finished ones are skipped.

        Args:
            miner: How to search.
            queries: The embeddings of the anchors.
            items: Of the anchors and the candidates, for a reranker.
            folder: To write to.
            show_progress: Show a bar.

        Raises:
            ValueError: The folder holds results of other settings, another process writes into it, or an anchor has no
                positive to compare with.
        """
        reranker = None if miner.reranker is None else self.load_reranker(miner.reranker)
        same = queries.digest == self.corpus.digest and miner.query == miner.candidate
        positives = Positives(self.corpus, self.excluded, same, miner.name) if miner.has_margin else None
        bar = progress(total=len(queries.ids), unit="anchor", desc=miner.name, show=show_progress)
        with FolderWriter(folder, RESULTS, self._key(miner, queries, reranker)) as writer, bar:
            for number, start in enumerate(range(0, len(queries.ids), self.block)):
                ids = queries.ids[start : start + self.block]
                if not writer.has(number):
                    vectors = queries.vectors[start : start + self.block]
                    limits = [miner.limit(0.0)] * len(ids)
                    if positives is not None and reranker is None:
                        limits = [miner.limit(score) for score in positives.scores(ids, vectors)]
                    hits = self._nearest(ids, vectors, miner, limits)
                    if reranker is not None:
                        hits = [
                            self._scored_again(hit, id_, start + row, miner, reranker, items, positives)
                            for row, (id_, hit) in enumerate(zip(ids, hits, strict=True))
                        ]
                    writer.write(number, _as_tensors(hits), len(ids))
                bar.update(len(ids))
            writer.finish()

    def _key(self, miner: Miner, queries: Embedded, reranker: Reranker | None) -> dict[str, Any]:
        """What the results depend on."""
        settings = ("absolute_margin", "relative_margin", "max_score", "range_min")
        own = {name: vars(miner)[name] for name in settings if vars(miner)[name]}
        own |= {name: 0 for name in settings[:3] if vars(miner)[name] == 0}
        return (
            own
            | ({} if reranker is None else {"reranker": reranker.fingerprint})
            | {
                "query": miner.query,
                "candidate": miner.candidate,
                "duplicate_above": miner.duplicate_above,
                "k": self.k,
                "index": self.index,
                "anchors at once": self.block,
                "corpus": self.corpus.digest,
                "anchors": queries.digest,
                "groups": self.excluded.digest(),
            }
        )

    def _nearest(self, ids: list[str], vectors: np.ndarray, miner: Miner, limits: list[float]) -> list[Hits]:
        """The hits of each anchor; searched again more deeply where too few of the first results can be used."""
        corpus = len(self.corpus.ids)
        wanted = miner.range_min + self.k * (1 if miner.reranker is None else _RERANKED)
        limit = min(corpus, max(_DEEPEST, wanted + _SPARE))
        depth = min(limit, wanted + _SPARE)
        hits: list[Hits] = [Hits([], [])] * len(ids)
        pending = np.arange(len(ids))
        while len(pending):
            positions, values = self._search(np.asarray(vectors[pending], dtype=np.float32), depth)
            shallow = []
            for row, places, scores in zip(pending.tolist(), positions.tolist(), values.tolist(), strict=True):
                most = _UNLIMITED if miner.reranker else limits[row]
                hits[row] = self._sort_out(ids[row], places, scores, miner.duplicate_above, most, wanted)
                if len(hits[row].others) < wanted and depth < limit:
                    shallow.append(row)
            pending, depth = np.array(shallow, dtype=np.int64), min(4 * depth, limit)
        return hits

    def _sort_out(
        self, anchor: str, places: list[int], scores: list[float], duplicate_above: float, limit: float, wanted: int
    ) -> Hits:
        """Tell the close from the others; scores fall, so once others are found, no close one comes after them."""
        hits = Hits([], [], limit)
        for place, score in zip(places, scores, strict=True):
            if place < 0 or self.excluded.excludes(anchor, self.corpus.ids[place]):  # an approximate index finds fewer
                continue
            if score >= duplicate_above:
                hits.close.append((place, score))
            elif len(hits.others) < wanted and score <= limit:
                hits.others.append((place, score))
        return hits

    def _scored_again(
        self,
        hits: Hits,
        anchor: str,
        row: int,
        miner: Miner,
        reranker: Reranker,
        items: ViewItems,
        positives: Positives | None,
    ) -> Hits:
        """Return the hits of an anchor with the scores of the reranker, and the limit that follows from them."""
        own = [] if positives is None else positives.places(anchor)
        places = [position for position, _ in (*hits.close, *hits.others)]
        candidates = [items.candidate(miner.candidate, place) for place in (*own, *places)]
        scores = reranker.score(items.anchor(miner.query, row), candidates, activate=True).tolist()
        limit = miner.limit(min(scores[: len(own)], default=0.0))
        found = list(zip(places, scores[len(own) :], strict=True))
        return Hits(found[: len(hits.close)], found[len(hits.close) :], limit)


def read_hits(results: StoredFolder, number: int) -> list[Hits]:
    """The hits of a shard of anchors, one for each.

    Raises:
        ValueError: The file is damaged.
    """
    with results.shard(number) as file:
        found = {name: file.get_tensor(name).tolist() for name in file.keys()}
    return _from_lists(found)


def _as_tensors(hits: list[Hits]) -> dict[str, Tensor]:
    """The hits of N anchors, end to end, how many each has, and the limits if there are some."""
    tensors: dict[str, Tensor] = {}
    for name, lists in (("close", [one.close for one in hits]), ("others", [one.others for one in hits])):
        found = list(itertools.chain.from_iterable(lists))
        tensors[f"{name}_counts"] = torch.tensor([len(some) for some in lists], dtype=torch.int64)
        tensors[name] = torch.tensor([position for position, _ in found], dtype=torch.int64)
        tensors[f"{name}_scores"] = torch.tensor([score for _, score in found], dtype=torch.float32)
    if any(one.limit != _UNLIMITED for one in hits):
        tensors["limits"] = torch.tensor([one.limit for one in hits], dtype=torch.float64)
    return tensors


def _from_lists(found: Mapping[str, list[Any]]) -> list[Hits]:
    """The inverse of `_as_tensors`."""
    parts = []
    for name in ("close", "others"):
        pairs = iter(zip(found[name], found[f"{name}_scores"], strict=True))
        parts.append([list(itertools.islice(pairs, count)) for count in found[f"{name}_counts"]])
    limits = found.get("limits") or [_UNLIMITED] * len(parts[0])
    return [Hits(*each) for each in zip(*parts, limits, strict=True)]
