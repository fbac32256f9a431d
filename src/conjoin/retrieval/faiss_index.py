"""A collection that FAISS searches in memory: any index of its factory, beside the table."""

import json
import logging
import re
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from conjoin.retrieval.collection import Collection, as_result, join, matrix
from conjoin.retrieval.collection_table import VECTOR, local_folder, open_table, published_version, writing
from conjoin.retrieval.vectors import SearchResult, check_vectors
from conjoin.storage import DamagedError, check_checksums, flush_tree, publish_folder, temporary_path, write_checksums

logger = logging.getLogger(__name__)

FOLDER = "faiss"
DEFAULT_FACTORY = "IVF{lists},SQfp16"
"""Clusters of float16 vectors: half of the memory, nearly exact, fast to build."""
PROBES = 32
"""Clusters that a search looks into."""
_INDEX, _ROWS, _SETTINGS = "index.faiss", "rows.npy", "settings.json"
_POINTS_PER_LIST = 39  # below it FAISS warns that clusters are poorly trained
_TRAINING_VECTORS = 262_144
_REMEDY = "run `conjoin index --faiss` again"
_PLACE = re.compile(r"^Error in .* at \S+:\d+: (Error: )?")


class FaissIndex(Collection):
    """A `Collection` whose vectors FAISS ranks in memory; the table answers conditions, words and rows.

    It is of one version of the collection: after an update it is not current until it is built again.

    Args:
        uri: The folder of the collection.
        verify: Whether to compare files with their checksums.

    Attributes:
        factory: What FAISS made.
        measured: The recall@10 when it was built.

    Raises:
        FileNotFoundError: The collection has no FAISS index.
        ImportError: FAISS is not installed.
        ValueError: It is damaged, or of another version of the collection.
    """

    def __init__(self, uri: str | Path, verify: bool = True) -> None:
        super().__init__(uri, verify)
        folder = _folder(uri)
        settings = _settings(folder)
        if verify:
            check_checksums(folder, _REMEDY)
        if settings["version"] != self.version:
            raise ValueError(
                f"the FAISS index of {str(uri)!r} is of version {settings['version']}, and the collection has version "
                f"{self.version}: {_REMEDY}"
            )
        try:
            self._index: Any = import_faiss().read_index(str(folder / _INDEX))
        except RuntimeError as error:
            raise DamagedError(f"FAISS cannot read {str(folder / _INDEX)!r} ({error}); {_REMEDY}") from error
        self._rows: np.ndarray = np.load(folder / _ROWS)
        self.factory, self.probes, self.measured = settings["factory"], settings["probes"], settings["recall@10"]

    @classmethod
    def build(
        cls, uri: str | Path, factory: str | None = None, *, probes: int = PROBES, recall_queries: int = 100
    ) -> "FaissIndex":
        """Build the index of the published vectors, all of them in memory, and lay it beside the table.

        Args:
            uri: The folder of the collection.
            factory: As `faiss.index_factory` takes it, such as `"IVF4096,PQ64"` or `"HNSW32"`; None for
                `DEFAULT_FACTORY` with 4 √N clusters.
            probes: Clusters that a search looks into, or the candidates of a graph: more is slower and more exact.
            recall_queries: Vectors that are searched for to measure the recall@10.

        Raises:
            ImportError: FAISS is not installed.
            ValueError: FAISS does not know the factory or cannot train it with so few vectors, the collection is in no
                folder of this machine, or another process writes into it.
        """
        faiss, folder = import_faiss(), _folder(uri)
        with writing(uri):
            collection = Collection(uri)
            if not len(collection):
                raise ValueError(f"the collection {str(uri)!r} has no rows to index")
            batches = list(collection.scan(["id", VECTOR], row_ids=True))
            vectors = join([matrix(batch[VECTOR], collection.dimension) for batch in batches], collection.dimension)
            rows = np.concatenate([batch["_rowid"].to_numpy() for batch in batches])
            factory = factory or DEFAULT_FACTORY.format(lists=_lists(len(rows)))
            index = train_faiss(factory, vectors)
            settings = {"version": collection.version, "factory": factory, "probes": probes, "recall@10": None}
            _write(faiss, folder, index, rows, settings)
            settings["recall@10"] = cls(uri).recall(recall_queries)
            _write(faiss, folder, index, rows, settings)
        return cls(uri)

    @staticmethod
    def is_current(uri: str | Path) -> bool:
        """Whether the collection at `uri` has a FAISS index of its published version; warns of an old one."""
        if local_folder(uri) is None or not (_folder(uri) / _SETTINGS).is_file():
            return False
        version, published = _settings(_folder(uri))["version"], published_version(open_table(uri))
        if version != published:
            logger.warning(
                "the FAISS index of %r is of version %s, the collection of version %s: searching its table; %s",
                str(uri), version, published, _REMEDY,
            )  # fmt: skip
        return bool(version == published)

    def _search_memory(self, queries: np.ndarray, k: int, where: str | None, exact: bool) -> SearchResult | None:
        if exact:
            return None
        selector, count, probes = None, len(self._rows), self.probes
        if where is not None:
            mask = np.isin(self._rows, self._row_ids(where))
            selector = import_faiss().IDSelectorBitmap(np.packbits(mask, bitorder="little"))
            count, probes = int(mask.sum()), None
        if count == 0:
            return as_result([([], np.empty(0, dtype=np.float32))] * len(queries))
        labels, scores = search_faiss(self._index, queries, min(k, count), probes, selector)
        if where is not None and (labels < 0).any():
            return None  # a graph finds fewer where few rows are left: the table finds them
        names = self._names(labels)
        rankings = []
        for row, values in zip(labels, scores, strict=True):
            hits = zip(row.tolist(), values.tolist(), strict=True)
            pairs = sorted((-value, names[label]) for label, value in hits if label >= 0)
            rankings.append(([name for _, name in pairs], np.array([-value for value, _ in pairs], dtype=np.float32)))
        return as_result(rankings)

    def _names(self, labels: np.ndarray) -> dict[int, str]:
        """Return the id of each of FAISS's labels."""
        wanted = np.unique(labels[labels >= 0])
        table = self._table.take_row_ids(self._rows[wanted].tolist()).with_row_id().select(["id"]).to_arrow()
        by_row = dict(zip(table["_rowid"].to_pylist(), table["id"].to_pylist(), strict=True))
        return {label: by_row[row] for label, row in zip(wanted.tolist(), self._rows[wanted].tolist(), strict=True)}


def import_faiss() -> ModuleType:
    """FAISS.

    Raises:
        ImportError: It is not installed.
    """
    try:
        import faiss
    except ImportError as error:
        raise ImportError('this index needs faiss: pip install "conjoin[faiss]"') from error
    return faiss


def train_faiss(factory: str, vectors: np.ndarray) -> Any:  # noqa: ANN401 - faiss has no types
    """An index of vectors `(N, D)`, L2-normalised, by FAISS's factory.

    Raises:
        ImportError: FAISS is not installed.
        ValueError: FAISS does not know the factory, or cannot train it with so few vectors.
    """
    faiss, vectors = import_faiss(), check_vectors(vectors, None)
    try:
        index = faiss.index_factory(vectors.shape[1], factory, faiss.METRIC_INNER_PRODUCT)
        step = max(1, len(vectors) // _TRAINING_VECTORS)
        index.train(vectors[::step])
        index.add(vectors)
        search_faiss(index, vectors[:1], 1, selector=faiss.IDSelectorAll())  # some kinds take no conditions
    except RuntimeError as error:
        reason = _PLACE.sub("", str(error).splitlines()[0])
        raise ValueError(f"FAISS cannot make {factory!r} of {len(vectors)} vectors: {reason}") from error
    return index


def search_faiss(
    index: Any,  # noqa: ANN401
    queries: np.ndarray,
    k: int,
    probes: int | None = PROBES,
    selector: Any = None,  # noqa: ANN401
) -> tuple[np.ndarray, np.ndarray]:
    """Labels and scores `(Q, K)` of the nearest, best first; a label is negative where there is none.

    Args:
        index: Of FAISS.
        queries: `(Q, D)`, L2-normalised.
        k: How many; all if there are fewer.
        probes: Clusters to look into, or candidates of a graph; None for all clusters.
        selector: Which rows to search.
    """
    k = min(k, index.ntotal)
    scores, labels = index.search(queries, k, params=_parameters(import_faiss(), index, selector, probes, k))
    return labels, scores


def _parameters(faiss: ModuleType, index: Any, selector: Any, probes: int | None, k: int) -> Any:  # noqa: ANN401
    """How to search an index, or the index within it; without `probes` all of its clusters."""
    index, options = faiss.downcast_index(index), {} if selector is None else {"sel": selector}
    if isinstance(index, faiss.IndexPreTransform):
        inner = _parameters(faiss, index.index, selector, probes, k)
        return faiss.SearchParametersPreTransform(index_params=inner)
    if isinstance(index, faiss.IndexRefine):
        inner = _parameters(faiss, index.base_index, selector, probes, k)
        return faiss.IndexRefineSearchParameters(k_factor=max(1, min(20, index.ntotal // k)), base_index_params=inner)
    if isinstance(index, faiss.IndexIVF):
        return faiss.SearchParametersIVF(nprobe=probes or index.nlist, **options)
    if isinstance(index, faiss.IndexHNSW):
        return faiss.SearchParametersHNSW(efSearch=max(k, probes or 0, 128), **options)
    return faiss.SearchParameters(**options)


def _lists(rows: int) -> int:
    """Clusters for some rows: 4 √N, as far as the rows suffice to train them."""
    return max(1, min(round(4 * rows**0.5), rows // _POINTS_PER_LIST))


def _folder(uri: str | Path) -> Path:
    folder = local_folder(uri)
    if folder is None:
        raise ValueError(f"{str(uri)!r} is no folder of this machine: FAISS searches only those")
    return folder / FOLDER


def _settings(folder: Path) -> dict[str, Any]:
    path = folder / _SETTINGS
    try:
        settings = dict(json.loads(path.read_text(encoding="utf-8")))
        return {name: settings[name] for name in ("version", "factory", "probes", "recall@10")}
    except FileNotFoundError as error:
        raise FileNotFoundError(f"there is no FAISS index in {str(folder)!r}: run `conjoin index --faiss`") from error
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedError(f"the file {str(path)!r} is damaged; {_REMEDY}") from error


def _write(faiss: ModuleType, folder: Path, index: Any, rows: np.ndarray, settings: dict[str, Any]) -> None:  # noqa: ANN401
    """Write the files aside and move them to their place; in between, searches use the table.

    Raises:
        OSError: The disk is full or fails.
    """
    with temporary_path(folder) as aside:
        aside.mkdir()
        try:
            faiss.write_index(index, str(aside / _INDEX))
        except RuntimeError as error:
            raise OSError(f"FAISS cannot write its index into {str(folder.parent)!r} ({error})") from error
        np.save(aside / _ROWS, rows)
        (aside / _SETTINGS).write_text(json.dumps(settings, indent=2), encoding="utf-8")
        write_checksums(aside, [_INDEX, _ROWS, _SETTINGS])
        flush_tree(aside)
        shutil.rmtree(folder, ignore_errors=True)
        publish_folder(aside, folder)
