"""An index of FAISS beside the table of a collection: any index of its factory, and the ids of its rows."""

import json
import logging
import shutil
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from conjoin.retrieval.results import Ranking, by_score
from conjoin.retrieval.vectors import check_vectors
from conjoin.storage import (
    DamagedError,
    check_checksums,
    publish_folder,
    read_json,
    reading,
    temporary_path,
    write_checksums,
)

logger = logging.getLogger(__name__)

DEFAULT_FACTORY = "IVF{lists},SQfp16"
"""Clusters of float16 vectors: half of the memory, nearly exact, fast to build."""
PROBES = 32
"""Clusters that a search looks into."""
_INDEX, _ROWS, SETTINGS = "index.faiss", "rows.parquet", "settings.json"
_POINTS_PER_LIST = 39  # below it FAISS warns that clusters are poorly trained
_TRAINING_VECTORS = 262_144
_REMEDY = "run `conjoin index --faiss` again"


class FaissIndex(NamedTuple):
    """An index of one version of a collection.

    Attributes:
        index: Of FAISS.
        ids: Of its rows.
        settings: `version` of the collection, `factory` and `probes`.
    """

    index: Any
    ids: pa.Array
    settings: dict[str, Any]

    @classmethod
    def open(cls, folder: Path, version: int) -> "FaissIndex | None":
        """Read the index in a folder; None, with a warning, if it is of another version of the collection.

        Raises:
            ImportError: FAISS is not installed.
            DamagedError: A file is damaged.
        """
        check_checksums(folder, _REMEDY)
        settings = read_json(folder / SETTINGS, _REMEDY)
        if settings["version"] != version:
            old = "the FAISS index of %r is of version %s, the collection of version %s: searching its table; %s"
            logger.warning(old, str(folder.parent), settings["version"], version, _REMEDY)
            return None
        with reading(folder / _INDEX, _REMEDY):
            index = import_faiss().read_index(str(folder / _INDEX))
        with reading(folder / _ROWS, _REMEDY):
            ids = pq.read_table(folder / _ROWS)["id"].combine_chunks()
        if index.ntotal != len(ids):
            raise DamagedError(
                f"{str(folder / _INDEX)!r} holds {index.ntotal} vectors, {_ROWS} {len(ids)} ids; {_REMEDY}"
            )
        return cls(index, ids, settings)

    def write(self, folder: Path) -> None:
        """Write the files aside and move them to their folder; in between, searches use the table.

        Raises:
            DiskFullError: The disk is full.
        """
        with temporary_path(folder) as aside:
            aside.mkdir()
            import_faiss().write_index(self.index, str(aside / _INDEX))
            pq.write_table(pa.table({"id": self.ids}), aside / _ROWS)
            (aside / SETTINGS).write_text(json.dumps(self.settings, indent=2), encoding="utf-8")
            write_checksums(aside, [_INDEX, _ROWS, SETTINGS])
            shutil.rmtree(folder, ignore_errors=True)
            publish_folder(aside, folder)

    def rank(self, queries: np.ndarray, k: int) -> Ranking:
        """The nearest rows."""
        labels, scores = search_faiss(self.index, queries, k, self.settings["probes"])
        found = [(row[row >= 0], values[row >= 0]) for row, values in zip(labels, scores, strict=True)]
        return Ranking.join(by_score(self.ids.take(pa.array(row)).to_pylist(), values) for row, values in found)


def import_faiss() -> Any:  # noqa: ANN401 - faiss has no types
    """FAISS.

    Raises:
        ImportError: It is not installed.
    """
    try:
        return import_module("faiss")
    except ImportError as error:
        raise ImportError('this index needs faiss: pip install "conjoin[faiss]"') from error


def train_faiss(factory: str, vectors: np.ndarray) -> Any:  # noqa: ANN401
    """An index of vectors `(N, D)`, L2-normalised, by FAISS's factory.

    Raises:
        ImportError: FAISS is not installed.
        ValueError: FAISS does not know the factory, or cannot train it with so few vectors.
    """
    faiss, vectors = import_faiss(), check_vectors(vectors, None)
    try:
        index = faiss.index_factory(vectors.shape[1], factory, faiss.METRIC_INNER_PRODUCT)
        index.train(vectors[:: max(1, len(vectors) // _TRAINING_VECTORS)])
        index.add(vectors)
    except RuntimeError as error:
        reason = str(error).splitlines()[0].partition(": ")[2].removeprefix("Error: ")  # without the place in FAISS
        raise ValueError(f"FAISS cannot make {factory!r} of {len(vectors)} vectors: {reason}") from error
    return index


def default_factory(count: int) -> str:
    """The factory string for so many vectors."""
    return DEFAULT_FACTORY.format(lists=max(1, min(round(4 * count**0.5), count // _POINTS_PER_LIST)))


def search_faiss(
    index: Any,  # noqa: ANN401
    queries: np.ndarray,
    k: int,
    probes: int = PROBES,
) -> tuple[np.ndarray, np.ndarray]:
    """Labels and scores `(Q, K)` of the nearest, best first; a label is negative where there is none.

    Args:
        index: Of FAISS.
        queries: `(Q, D)`, L2-normalised.
        k: How many; all if there are fewer.
        probes: Clusters to look into, or candidates of a graph (at least 128 and k).
    """
    space, k = import_faiss().ParameterSpace(), min(k, index.ntotal)
    for name, value in (("nprobe", probes), ("efSearch", max(k, probes, 128)), ("k_factor_rf", 20)):
        with suppress(RuntimeError):  # another kind of index
            space.set_index_parameter(index, name, value)
    scores, labels = index.search(queries, k)
    return labels, scores
