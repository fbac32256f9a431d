"""FAISS behind the index protocol: flat, HNSW and IVF-PQ."""

from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Self

import numpy as np

from conjoin.retrieval.encoder import ModelIdentity
from conjoin.retrieval.index.base import (
    INDEX,
    VECTORS,
    SavedIndex,
    SearchResult,
    check_positions,
    check_search,
    check_vectors,
    read_index,
    save_index,
)
from conjoin.retrieval.index.rows import IndexRows
from conjoin.storage import DamagedError

KINDS = ("flat", "hnsw", "ivfpq")
_PQ_CENTROIDS = 256
_MOST_REMOVED = 0.25  # of a graph, which keeps removed vectors; beyond it the graph is built again
_TRAINING_POINTS_PER_LIST = 39  # below it faiss warns that clusters are poorly trained


class FaissIndex(IndexRows):
    """Nearest neighbours by FAISS, inner product throughout.

    Args:
        kind: `"flat"` compares with every vector; `"hnsw"` walks a graph: fast and nearly exact, with some more
            memory; `"ivfpq"` keeps D/4 bytes per vector and looks into a few clusters only: small, fast, approximate.
        model: Which model made the vectors; recorded, and checked by `search_items`.
        links: Graph neighbours per vector (`"hnsw"`).
        breadth: Candidates kept while searching (`"hnsw"`): more is slower and more exact.
        lists: Clusters (`"ivfpq"`); `None` takes 4 √N of the training vectors.
        subvectors: Bytes per vector (`"ivfpq"`), a divisor of D; `None` takes the largest up to D/4.
        probes: Clusters looked into (`"ivfpq"`): more is slower and more exact.
    """

    def __init__(
        self,
        kind: str = "flat",
        model: ModelIdentity | None = None,
        *,
        links: int = 32,
        breadth: int = 128,
        lists: int | None = None,
        subvectors: int | None = None,
        probes: int = 16,
    ) -> None:
        if kind not in KINDS:
            raise ValueError(f"unknown kind {kind!r} of FAISS index; expected one of {list(KINDS)}")
        super().__init__()
        self._faiss = _import_faiss()
        self.kind = kind
        self.model = model
        self.options: dict[str, Any] = {
            "links": links,
            "breadth": breadth,
            "lists": lists,
            "subvectors": subvectors,
            "probes": probes,
        }
        self._index: Any = None
        self._labels = np.empty(0, dtype=np.int64)  # what FAISS calls each row, ascending

    def train(self, sample: np.ndarray) -> None:
        """Make an `"ivfpq"` index learn its clusters from vectors like the corpus; the other kinds learn nothing.

        Args:
            sample: `(N, D)`, L2-normalised.

        Raises:
            ValueError: Already trained, fewer than 256 vectors, or `subvectors` that does not divide D.
        """
        if self._index is not None:
            raise ValueError("the index is trained already; make a new one")
        vectors = check_vectors(sample, None)
        count, dimension = vectors.shape
        if self.kind == "flat":
            index = self._faiss.IndexFlatIP(dimension)
        elif self.kind == "hnsw":
            index = self._new_hnsw(dimension)
        else:
            index = self._new_ivfpq(count, dimension)
            index.train(vectors)
        self._index = index

    def _new_hnsw(self, dimension: int) -> Any:  # noqa: ANN401 - faiss has no types
        index = self._faiss.IndexHNSWFlat(dimension, self.options["links"], self._faiss.METRIC_INNER_PRODUCT)
        index.hnsw.efConstruction = 200
        return index

    def _new_ivfpq(self, count: int, dimension: int) -> Any:  # noqa: ANN401 - faiss has no types
        if count < _PQ_CENTROIDS:
            raise ValueError(f'"ivfpq" needs at least {_PQ_CENTROIDS} vectors to learn from, got {count}; use "flat"')
        most_lists = max(1, count // _TRAINING_POINTS_PER_LIST)
        lists: int = self.options["lists"] or min(round(4 * count**0.5), most_lists)
        subvectors: int = self.options["subvectors"] or max(
            size for size in range(1, max(1, dimension // 4) + 1) if dimension % size == 0
        )
        if dimension % subvectors:
            raise ValueError(f"subvectors must divide the dimension {dimension}, got {subvectors}")
        if lists > count:
            raise ValueError(f"lists must be at most the number of training vectors {count}, got {lists}")
        quantizer = self._faiss.IndexFlatIP(dimension)
        index = self._faiss.IndexIVFPQ(quantizer, dimension, lists, subvectors, 8, self._faiss.METRIC_INNER_PRODUCT)
        index.cp.min_points_per_centroid = 1  # checked above, no warning needed
        index.pq.cp.min_points_per_centroid = 1
        return index

    def add(self, ids: Sequence[str], embeddings: np.ndarray, *, copy: bool = True) -> None:
        """Append vectors; the first ones train an index that was not trained.

        Args:
            ids: N new ids.
            embeddings: `(N, D)`, L2-normalised.
            copy: Unused: FAISS has a copy of its own.

        Raises:
            ValueError: As `ExactIndex.add`, and as `train`.
        """
        dimension = None if self._index is None else self._index.d
        vectors = check_vectors(embeddings, dimension, ids)
        if self._index is None:
            self.train(vectors)
        self._add_ids(ids)
        if self.kind == "ivfpq":
            first = int(self._labels[-1]) + 1 if len(self._labels) else 0
            labels = np.arange(first, first + len(vectors))
            self._index.add_with_ids(vectors, labels)
        else:
            labels = np.arange(self._index.ntotal, self._index.ntotal + len(vectors))
            self._index.add(vectors)
        self._labels = np.concatenate([self._labels, labels])
        self.dimension = vectors.shape[1]

    def _remove(self, places: np.ndarray, left: np.ndarray) -> None:
        if self.kind != "hnsw":
            self._index.remove_ids(self._labels[places])
        self._labels = np.arange(len(left)) if self.kind == "flat" else self._labels[left]
        if self.kind == "hnsw" and len(left) < (1 - _MOST_REMOVED) * self._index.ntotal:
            graph = self._new_hnsw(self._index.d)
            if len(left):
                graph.add(self._index.reconstruct_batch(self._labels))
            self._index, self._labels = graph, np.arange(len(left))

    def search(self, queries: np.ndarray, k: int, *, among: np.ndarray | None = None) -> SearchResult:
        """Rank the corpus for each query.

        Among chosen rows, the search compares with all of them, in place of walking a graph or choosing clusters:
        exact, for `"ivfpq"` up to the compression.

        Args:
            queries: `(Q, D)`, L2-normalised.
            k: How many to return; the whole corpus if it is larger.
            among: Positions `(M,)` in `ids` to search among; all when None. See `select_rows`.

        Raises:
            ValueError: As `ExactIndex.search`.
        """
        vectors = check_search(self, queries, k)
        labels = self._labels if among is None else self._labels[check_positions(self, among)]
        k = min(k, len(labels))
        if k == 0:
            return SearchResult([[] for _ in vectors], np.empty((len(vectors), 0), dtype=np.float32))
        index, options = self._options(k, labels, among is not None)
        scores, found_labels = index.search(vectors, k, params=options)
        missing = found_labels < 0
        scores[missing] = -np.inf
        positions = np.where(missing, len(self.ids), np.searchsorted(self._labels, found_labels))
        order = np.lexsort((positions, -scores), axis=1)  # ties in the order of insertion, as far as faiss found them
        scores, positions = np.take_along_axis(scores, order, 1), np.take_along_axis(positions, order, 1)
        found = [[self.ids[position] for position in row if position < len(self.ids)] for row in positions.tolist()]
        return SearchResult(found, scores)

    def _options(self, k: int, labels: np.ndarray, is_filtered: bool) -> tuple[Any, Any]:
        """The FAISS index to search, and how, for `k` of the rows with some labels."""
        faiss, selector = self._faiss, {}
        if is_filtered or (self.kind == "hnsw" and len(labels) < self._index.ntotal):
            mask = np.zeros(int(labels[-1]) + 1, dtype=bool)
            mask[labels] = True
            selector["sel"] = faiss.IDSelectorBitmap(np.packbits(mask, bitorder="little"))
        if self.kind == "ivfpq":
            probes = self._index.nlist if is_filtered else self.options["probes"]
            return self._index, faiss.SearchParametersIVF(nprobe=probes, **selector)
        if self.kind == "hnsw" and not is_filtered:
            breadth = max(k, self.options["breadth"])
            return self._index, faiss.SearchParametersHNSW(efSearch=breadth, **selector)
        index = faiss.downcast_index(self._index.storage) if self.kind == "hnsw" else self._index
        return index, faiss.SearchParameters(**selector)

    def save(self, directory: str | Path) -> None:
        """Write the index; whatever happens, `directory` holds either the old index or the new one.

        Raises:
            ValueError: The index is empty.
        """
        are_positions = np.array_equal(self._labels, np.arange(len(self.ids)))
        rows = {} if are_positions else {"labels": self._labels}
        save_index(self, directory, "vectors.faiss", self._write, self.options, rows)

    def _write(self, path: Path) -> None:
        self._faiss.write_index(self._index, str(path))

    @classmethod
    def load(cls, directory: str | Path) -> Self:
        """Read a saved index.

        Raises:
            FileNotFoundError: There is none in `directory`.
            ValueError: It is damaged or of another kind.
        """
        return read_index(directory, KINDS, cls._read)

    @classmethod
    def _read(cls, saved: SavedIndex) -> Self:
        index = cls(saved.kind, saved.model, **saved.options)
        index._load_rows(saved)
        index._labels = saved.rows.get("labels", np.arange(len(saved.ids)))
        path = saved.folder.path(VECTORS)
        try:
            index._index = index._faiss.read_index(str(path))
        except RuntimeError as error:
            raise DamagedError(f"FAISS cannot read {str(path)!r} ({error}); {INDEX.remedy} again") from error
        index.dimension = index._index.d
        return index


def _import_faiss() -> ModuleType:
    try:
        import faiss
    except ImportError as error:
        raise ImportError('this index needs faiss: pip install "conjoin[faiss]"') from error
    return faiss
