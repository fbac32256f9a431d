"""FAISS behind the index protocol, by its index factory: flat, HNSW, IVF-PQ, RaBitQ and sign bits."""

from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Self

import numpy as np

from conjoin.retrieval.encoder import ModelIdentity
from conjoin.retrieval.index.base import (
    INDEX,
    SavedIndex,
    SearchResult,
    Selection,
    check_search,
    check_vectors,
    read_index,
)
from conjoin.retrieval.index.rows import VECTORS, IndexRows
from conjoin.storage import DamagedError

_RESCORED = ",Refine(SQfp16)"
_FACTORY = {
    "flat": "Flat",
    "hnsw": "HNSW{links}",
    "ivfpq": "IVF{lists},PQ{subvectors}np",
    "ivfpqr": "IVF{lists},PQ{subvectors}np" + _RESCORED,
    "rabitq": "IVF{lists},RaBitQ" + _RESCORED,
    "binary": "LSH" + _RESCORED,
}
KINDS = tuple(_FACTORY)
_IN_LISTS = ("ivfpq", "ivfpqr", "rabitq")
_KEEPING = ("hnsw", "ivfpqr", "rabitq")
"""The kinds that keep removed vectors, and are built again when there are many."""
_PQ_CENTROIDS = 256
_MOST_REMOVED = 0.25
_TRAINING_POINTS_PER_LIST = 39  # below it faiss warns that clusters are poorly trained
_TRAINING_VECTORS = 262_144


class FaissIndex(IndexRows):
    """Nearest neighbours by FAISS, inner product throughout.

    `"ivfpqr"`, `"rabitq"` and `"binary"` find candidates by compressed vectors and rescore them with float16 vectors,
    which a loaded index reads from its file.

    Args:
        kind: `"flat"` compares with every vector; `"hnsw"` walks a graph: fast and nearly exact, with some more
            memory; `"ivfpq"` keeps D/4 bytes per vector and looks into a few clusters only: small, fast, approximate;
            `"ivfpqr"` is the same with rescoring; `"rabitq"` keeps D/8 bytes and a few more, in clusters; `"binary"`
            keeps the signs, D/8 bytes, and compares with all of them.
        model: Which model made the vectors; recorded, and checked by `search_items`.
        links: Graph neighbours per vector (`"hnsw"`).
        breadth: Candidates kept while searching (`"hnsw"`): more is slower and more exact.
        lists: Clusters; `None` takes 4 √N, as far as the training vectors suffice.
        subvectors: Bytes per vector (`"ivfpq"`, `"ivfpqr"`), a divisor of D; `None` takes the largest up to D/4.
        probes: Clusters looked into: more is slower and more exact.
        refine: Candidates rescored for each result.
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
        refine: int = 20,
    ) -> None:
        if kind not in KINDS:
            raise ValueError(f"unknown kind {kind!r} of FAISS index; expected one of {list(KINDS)}")
        super().__init__(model)
        self._faiss = _import_faiss()
        self.kind = kind
        self.options: dict[str, Any] = {
            "links": links,
            "breadth": breadth,
            "lists": lists,
            "subvectors": subvectors,
            "probes": probes,
            "refine": refine,
        }
        self._index: Any = None
        self._mapped: Path | None = None  # the file in which the vectors of the index stay
        self._labels = np.empty(0, dtype=np.int64)  # what FAISS calls each row, ascending

    def train(self, sample: np.ndarray, corpus: int | None = None) -> None:
        """Make an index learn its clusters from vectors like the corpus; `"flat"` and `"hnsw"` learn nothing.

        Args:
            sample: `(N, D)`, L2-normalised.
            corpus: How many vectors will be added; N when None.

        Raises:
            ValueError: Already trained, too few vectors, or `subvectors` that does not divide D.
        """
        if self._index is not None:
            raise ValueError("the index is trained already; make a new one")
        vectors = check_vectors(sample, None)
        index = self._make(len(vectors), vectors.shape[1], corpus or len(vectors))
        if self.kind == "hnsw":
            index.hnsw.efConstruction = 200
        elif self.kind != "flat":
            index.train(vectors)
        self._index = index

    def _make(self, count: int, dimension: int, corpus: int) -> Any:  # noqa: ANN401 - faiss has no types
        """An empty index for `corpus` vectors that will be trained with `count` of them."""
        faiss, chosen = self._faiss, dict(self.options)
        if self.kind in ("ivfpq", "ivfpqr"):
            chosen["subvectors"] = self._subvectors(count, dimension)
        if self.kind in _IN_LISTS:
            most_lists = max(1, count // _TRAINING_POINTS_PER_LIST)
            chosen["lists"] = self.options["lists"] or min(round(4 * corpus**0.5), most_lists)
            if chosen["lists"] > count:
                raise ValueError(
                    f"lists must be at most the number of training vectors {count}, got {chosen['lists']}"
                )
        metric = faiss.METRIC_L2 if self.kind == "binary" else faiss.METRIC_INNER_PRODUCT  # of unit vectors the same
        index = faiss.index_factory(dimension, _FACTORY[self.kind].format(**chosen), metric)
        if self.kind in _IN_LISTS:
            lists = self._base(index)
            lists.cp.min_points_per_centroid = 1  # checked above, no warning needed
            if "subvectors" in chosen and self.kind != "rabitq":
                lists.pq.cp.min_points_per_centroid = 1
        return index

    def _subvectors(self, count: int, dimension: int) -> int:
        if count < _PQ_CENTROIDS:
            raise ValueError(
                f'"{self.kind}" needs at least {_PQ_CENTROIDS} vectors to learn from, got {count}; use "flat"'
            )
        subvectors: int = self.options["subvectors"] or max(
            size for size in range(1, max(1, dimension // 4) + 1) if dimension % size == 0
        )
        if dimension % subvectors:
            raise ValueError(f"subvectors must divide the dimension {dimension}, got {subvectors}")
        return subvectors

    @property
    def _is_rescored(self) -> bool:
        return _FACTORY[self.kind].endswith(_RESCORED)

    def _base(self, index: Any) -> Any:  # noqa: ANN401
        """The index that finds the candidates."""
        return self._faiss.downcast_index(index.base_index) if self._is_rescored else index

    def _storage(self) -> Any:  # noqa: ANN401
        """The index that has the vectors of all candidates, and can be searched among some of them."""
        if self._is_rescored:
            return self._faiss.downcast_index(self._index.refine_index)
        return self._faiss.downcast_index(self._index.storage) if self.kind == "hnsw" else self._index

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
        self._take_into_memory()
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
        self._take_into_memory()
        if self.kind in _KEEPING:
            self._labels = self._labels[left]
            if len(left) < (1 - _MOST_REMOVED) * self._index.ntotal:
                self._build_again()
            return
        parts = [self._base(self._index), self._storage()] if self._is_rescored else [self._index]
        for part in parts:
            part.remove_ids(self._labels[places])
        self._index.ntotal = parts[0].ntotal
        self._labels = self._labels[left] if self.kind == "ivfpq" else np.arange(len(left))

    def _build_again(self) -> None:
        """Build the index of the vectors that are left, with the clusters that it has."""
        vectors = self._storage().reconstruct_batch(self._labels) if len(self._labels) else None
        self._index.reset()
        if vectors is not None:
            self._index.add(vectors)
        self._labels = np.arange(len(self._labels))

    def _take_into_memory(self) -> None:
        """Read the vectors that are still in the file of a loaded index; they can be changed then."""
        if self._mapped is not None:
            self._index, self._mapped = self._faiss.read_index(str(self._mapped)), None

    def search(self, queries: np.ndarray, k: int, *, among: Selection | None = None) -> SearchResult:
        """Rank the corpus for each query.

        Among chosen rows, the search compares with all of them, in place of walking a graph or choosing clusters:
        exact, for `"ivfpq"` up to the compression.

        Args:
            queries: `(Q, D)`, L2-normalised.
            k: How many to return; the whole corpus if it is larger.
            among: Positions `(M,)` in `ids`, or a condition; all when None. See `select_rows`.

        Raises:
            ValueError: As `ExactIndex.search`.
        """
        vectors = check_search(self.dimension, queries, k)
        labels = self._labels if among is None else self._labels[self._positions(among)]
        k = min(k, len(labels))
        if k == 0:
            return SearchResult([[] for _ in vectors], np.empty((len(vectors), 0), dtype=np.float32))
        index, options = self._options(k, labels, among is not None)
        scores, found_labels = index.search(vectors, k, params=options)
        if self.kind == "binary":
            scores = 1 - scores / 2  # from the squared distance of unit vectors
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
        if is_filtered or (self.kind in _KEEPING and len(labels) < self._index.ntotal):
            mask = np.zeros(int(labels[-1]) + 1, dtype=bool)
            mask[labels] = True
            selector["sel"] = faiss.IDSelectorBitmap(np.packbits(mask, bitorder="little"))
        if self.kind == "ivfpq":
            probes = self._index.nlist if is_filtered else self.options["probes"]
            return self._index, faiss.SearchParametersIVF(nprobe=probes, **selector)
        if is_filtered or self.kind == "flat":
            return self._storage(), faiss.SearchParameters(**selector)
        if self.kind == "hnsw":
            breadth = max(k, self.options["breadth"])
            return self._index, faiss.SearchParametersHNSW(efSearch=breadth, **selector)
        inner = {}
        if self.kind in _IN_LISTS:
            inner["base_index_params"] = faiss.SearchParametersIVF(nprobe=self.options["probes"], **selector)
        factor = max(1, min(self.options["refine"], self._index.ntotal // k))
        return self._index, faiss.IndexRefineSearchParameters(k_factor=factor, **inner)

    def save(self, directory: str | Path) -> None:
        """Write the index; whatever happens, `directory` holds either the old index or the new one.

        Raises:
            ValueError: The index is empty, or the one in `directory` was changed since this one was loaded from there.
        """
        are_positions = np.array_equal(self._labels, np.arange(len(self.ids)))
        rows = {} if are_positions else {"labels": self._labels}
        self._save(directory, "vectors.faiss", self._write, self.options, rows)

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
        index._labels = index._load_rows(saved).get("labels", np.arange(len(index.ids)))
        path = saved.folder.path(VECTORS)
        try:
            flags = index._faiss.IO_FLAG_MMAP_IFC if index._is_rescored else 0
            index._index, index._mapped = index._faiss.read_index(str(path), flags), path if flags else None
        except RuntimeError as error:
            raise DamagedError(f"FAISS cannot read {str(path)!r} ({error}); {INDEX.remedy} again") from error
        index.dimension = index._index.d
        return index


def training_vectors(corpus: int) -> int:
    """How many of `corpus` vectors the clusters are learned from."""
    return min(corpus, max(_TRAINING_VECTORS, _TRAINING_POINTS_PER_LIST * round(4 * corpus**0.5)))


def _import_faiss() -> ModuleType:
    try:
        import faiss
    except ImportError as error:
        raise ImportError('this index needs faiss: pip install "conjoin[faiss]"') from error
    return faiss
