"""One miner over all anchors: searched block by block, one shard of results per block."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from conjoin.retrieval.faiss_index import search_faiss, train_faiss
from conjoin.retrieval.mining.miners import Miner
from conjoin.retrieval.mining.positives import Embedded, Excluded, Positives, ViewItems
from conjoin.retrieval.options import MiningOptions
from conjoin.retrieval.reranker import Reranker
from conjoin.retrieval.vectors import exact_search
from conjoin.storage import RowCache

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


class MinerResults(RowCache):
    """What one miner found for every anchor."""

    kind = "miner results"
    remedy = "run `conjoin mine`"

    def hits(self, anchor: int) -> Hits:
        """What was found for the anchor at a position."""
        row = self[anchor]
        close, others = (
            list(zip(row[name].tolist(), row[f"{name}_scores"].tolist(), strict=True)) for name in ("close", "others")
        )
        return Hits(close, others, row["limit"].item())


class MinerSearch:
    """Searches one corpus of embeddings for any number of miners.

    Args:
        corpus: The embeddings of the candidates.
        options: How; an index of FAISS is built when first needed.
        excluded: Which candidates are no negatives.
        load_reranker: Makes the reranker of a miner.
    """

    def __init__(
        self, corpus: Embedded, options: MiningOptions, excluded: Excluded, load_reranker: Callable[[str], Reranker]
    ) -> None:
        self.corpus, self.index, self.device = corpus, options.index, options.device
        self.k, self.block = options.k, options.block
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

    def run(
        self, miner: Miner, queries: Embedded, items: ViewItems, folder: Path, show_progress: bool
    ) -> MinerResults:
        """Write the results of a miner into `folder`; the finished blocks of anchors are skipped.

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
        anchors = queries.ids

        def search(chosen: range) -> dict[str, Tensor | list[Tensor]]:
            ids, vectors = anchors[chosen.start : chosen.stop], queries.vectors[chosen.start : chosen.stop]
            limits = [miner.limit(0.0)] * len(ids)
            if positives is not None and reranker is None:
                limits = [miner.limit(score) for score in positives.scores(ids, vectors)]
            hits = self._nearest(ids, vectors, miner, limits)
            if reranker is not None:
                hits = [
                    self._scored_again(hit, id_, row, miner, reranker, items, positives)
                    for row, id_, hit in zip(chosen, ids, hits, strict=True)
                ]
            return _as_tensors(hits)

        key = self._key(miner, queries, reranker)
        description = miner.name if show_progress else None
        return MinerResults.make(folder, len(anchors), self.block, key, search, description=description)

    def _key(self, miner: Miner, queries: Embedded, reranker: Reranker | None) -> dict[str, Any]:
        """What the results depend on."""
        settings = ("absolute_margin", "relative_margin", "max_score", "range_min")
        thresholds = {name: vars(miner)[name] for name in settings if vars(miner)[name]}
        thresholds |= {name: 0 for name in settings[:3] if vars(miner)[name] == 0}
        return (
            thresholds
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
            for row, indices, scores in zip(pending.tolist(), positions.tolist(), values.tolist(), strict=True):
                most = _UNLIMITED if miner.reranker else limits[row]
                hits[row] = self._sort_out(ids[row], indices, scores, miner.duplicate_above, most, wanted)
                if len(hits[row].others) < wanted and depth < limit:
                    shallow.append(row)
            pending, depth = np.array(shallow, dtype=np.int64), min(4 * depth, limit)
        return hits

    def _sort_out(
        self, anchor: str, indices: list[int], scores: list[float], duplicate_above: float, limit: float, wanted: int
    ) -> Hits:
        """Tell the close from the others; scores fall, so once others are found, no close one comes after them."""
        hits = Hits([], [], limit)
        for index, score in zip(indices, scores, strict=True):
            if index < 0 or self.excluded.excludes(anchor, self.corpus.ids[index]):  # an approximate index finds fewer
                continue
            if score >= duplicate_above:
                hits.close.append((index, score))
            elif len(hits.others) < wanted and score <= limit:
                hits.others.append((index, score))
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
        right = [] if positives is None else positives.indices(anchor)
        indices = [position for position, _ in (*hits.close, *hits.others)]
        candidates = [items.candidate(miner.candidate, index) for index in (*right, *indices)]
        scores = reranker.score(items.anchor(miner.query, row), candidates, activate=True).tolist()
        limit = miner.limit(min(scores[: len(right)], default=0.0))
        scored = list(zip(indices, scores[len(right) :], strict=True))
        return Hits(scored[: len(hits.close)], scored[len(hits.close) :], limit)


def _as_tensors(hits: list[Hits]) -> dict[str, Tensor | list[Tensor]]:
    """The hits of N anchors, as `MinerResults.hits` reads them."""
    tensors: dict[str, Tensor | list[Tensor]] = {
        "limit": torch.tensor([each.limit for each in hits], dtype=torch.float64)
    }
    for name, lists in (("close", [each.close for each in hits]), ("others", [each.others for each in hits])):
        tensors[name] = [torch.tensor([position for position, _ in pairs], dtype=torch.int64) for pairs in lists]
        tensors[f"{name}_scores"] = [
            torch.tensor([score for _, score in pairs], dtype=torch.float32) for pairs in lists
        ]
    return tensors
