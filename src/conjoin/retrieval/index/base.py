"""What an index is, and what every backend needs: checks of its arguments, saving and loading."""

import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self, TypeVar

import numpy as np

from conjoin.retrieval.encoder import ModelIdentity
from conjoin.retrieval.filters import Condition
from conjoin.retrieval.store import EmbeddingStore
from conjoin.retrieval.store_update import StoreChanges
from conjoin.storage import FolderKind, Manifest, StoredFolder, read_folder, read_manifest, replace_folder

INDEX = FolderKind("index", 2, "run `conjoin index`")
_NORM_TOLERANCE = 1e-2  # float16 and bfloat16 vectors are a little off 1

RECALL = "recall@10"
"""The detail of a saved index that has the share of the ten nearest that it finds, measured when it was built."""
INDEX_FILES = r"(ids|vectors|kept|rows)-[0-9a-f]{16}\.\w+"
"""Pattern of the names of an index's files, which a killed process leaves without a manifest."""
TABLES = "rows-*.lance"
"""The tables of LanceDB in the folder of an index."""

Loaded = TypeVar("Loaded")
Selection = np.ndarray | Condition
"""Some rows of an index: their positions `(M,)`, or a condition that a database evaluates."""


class SearchResult(NamedTuple):
    """The best matches of every query, best first.

    Attributes:
        ids: One list per query, at most k long.
        scores: `(Q, min(k, corpus))` float32 inner products; `-inf` where an approximate index found fewer.
    """

    ids: list[list[str]]
    scores: np.ndarray


class Described(Protocol):
    """What is recorded of an index.

    Attributes:
        kind: Name of the backend, as `build_index` takes it.
        dimension: Length of a vector; `None` while empty.
        model: Which model made the vectors, if known.
        recall: Share of the ten nearest vectors that it found when it was built; `None` if it was not measured.
    """

    kind: str
    dimension: int | None
    model: ModelIdentity | None
    recall: float | None

    def __len__(self) -> int:
        """How many vectors there are."""
        ...


class Index(Described, Protocol):
    """Ranks a corpus of L2-normalised vectors by inner product."""

    @property
    def ids(self) -> list[str]:
        """All ids in the order added."""
        ...

    def add(self, ids: Sequence[str], embeddings: np.ndarray, *, copy: bool = True) -> None:
        """Append vectors `(N, D)` under unique ids; without `copy` the array may be kept and must not change."""
        ...

    def remove(self, ids: Sequence[str]) -> None:
        """Remove the vectors under some ids, all of which are in the index."""
        ...

    def update(self, ids: Sequence[str], embeddings: np.ndarray) -> None:
        """Replace the vectors under the ids that are in the index, and append the others; all come last then."""
        ...

    def follow(self, store: EmbeddingStore) -> StoreChanges:
        """Make the index hold what a store holds now: its vectors, and what it keeps of the rows."""
        ...

    def select(self, where: str) -> Selection:
        """The rows that a condition holds for, as `search` takes them."""
        ...

    def rows(self, ids: Sequence[str]) -> list[dict[str, Any]]:
        """What is known of the rows under some ids: one mapping for each, with the columns it has."""
        ...

    def search(self, queries: np.ndarray, k: int, *, among: Selection | None = None) -> SearchResult:
        """The k nearest to each query `(Q, D)`, among some rows, or all."""
        ...

    def save(self, directory: str | Path) -> None:
        """Write the index; whatever happens, `directory` holds either the old index or the new one."""
        ...

    @classmethod
    def load(cls, directory: str | Path) -> Self:
        """Read a saved index."""
        ...


class SavedIndex(NamedTuple):
    """What a folder says of the index in it.

    Attributes:
        kind: Name of the backend.
        model: As of `Index`.
        recall: As of `Index`.
        options: To load it with.
        folder: Opens its files.
    """

    kind: str
    model: ModelIdentity | None
    recall: float | None
    options: dict[str, Any]
    folder: StoredFolder

    def files(self) -> dict[str, int]:
        """The numbers of the files, by the beginning of their names."""
        return {file.file.split("-")[0]: number for number, file in enumerate(self.folder.manifest.files)}


def save_index(
    index: Described,
    directory: str | Path,
    files: Mapping[str, Callable[[Path], object]],
    options: Mapping[str, Any] | None = None,
    *,
    is_locked: bool = False,
    replaces: Manifest | None = None,
) -> Manifest:
    """Save `index`; replaces an older index in one step.

    Args:
        index: What to save.
        directory: Where.
        files: By name, the function that writes the file to a path.
        options: To load it with.
        is_locked: Whether the caller holds the lock of `directory`.
        replaces: What `directory` must hold, if it holds anything.

    Returns:
        What it holds now.

    Raises:
        ValueError: The index is empty, `directory` holds something else, or another process writes into it.
    """
    if index.dimension is None:
        raise ValueError("the index is empty; add embeddings before saving it")
    key: dict[str, Any] = {
        "kind": index.kind,
        "model": None if index.model is None else index.model._asdict(),
        "dimension": index.dimension,
        "count": len(index),
        "options": dict(options or {}),
    }
    details = {} if index.recall is None else {RECALL: index.recall}
    tables = {table_of(directory), key["options"].get("table")}
    written = replace_folder(directory, INDEX, key, files, details, is_locked=is_locked, replaces=replaces)
    for path in Path(directory).glob(TABLES):
        if path.stem not in tables:  # the table of the index before stays, for its readers
            shutil.rmtree(path, ignore_errors=True)
    return written


def table_of(directory: str | Path) -> str | None:
    """The name of the table of the index that a folder holds, if it has one."""
    try:
        options: Any = read_manifest(Path(directory), INDEX).key["options"]
    except (FileNotFoundError, ValueError):
        return None
    return None if "table" not in options else str(options["table"])


def check_not_replaced(directory: Path, options: Mapping[str, Any]) -> None:
    """Make sure that the index in a folder is still the one that was loaded, with these options.

    Raises:
        ValueError: Another process changed it meanwhile.
    """
    found: Any = read_manifest(directory, INDEX).key["options"]
    if any(found.get(name) != value for name, value in options.items()):
        raise ValueError(f"the index in {str(directory)!r} was changed since it was loaded; load it again")


def read_index(directory: str | Path, kinds: Collection[str], read: Callable[[SavedIndex], Loaded]) -> Loaded:
    """Return what `read` makes of a saved index.

    Raises:
        FileNotFoundError: `directory` holds no index.
        ValueError: It is damaged or of none of the `kinds`.
    """

    def read_saved(folder: StoredFolder) -> Loaded:
        key = folder.manifest.key
        if key["kind"] not in kinds:
            raise ValueError(f"the index in {str(directory)!r} is of kind {key['kind']!r}, expected {sorted(kinds)}")
        model = None if key["model"] is None else ModelIdentity(**key["model"])
        recall = folder.manifest.details.get(RECALL)
        return read(SavedIndex(key["kind"], model, recall, key["options"], folder))

    return read_folder(directory, INDEX, read_saved)


def read_kind(directory: str | Path) -> str:
    """The kind of the index saved in `directory`.

    Raises:
        FileNotFoundError: `directory` holds no index.
        ValueError: Its manifest is damaged.
    """
    return str(read_manifest(Path(directory), INDEX).key["kind"])


def check_vectors(vectors: np.ndarray, dimension: int | None, ids: Sequence[str] | None = None) -> np.ndarray:
    """Return the vectors `(N, D)` as contiguous float32 if they can be indexed (`ids` given) or searched for.

    Raises:
        ValueError: Another shape, values that are not finite, or rows not of length 1; the message names the row.
    """
    kind = "queries" if ids is None else "embeddings"
    array = np.ascontiguousarray(vectors, dtype=np.float32)
    if array.ndim != 2 or array.shape[1] == 0:
        raise ValueError(f"{kind} must be a matrix (N, D), got the shape {array.shape}")
    if dimension is not None and array.shape[1] != dimension:
        raise ValueError(f"the {kind} have {array.shape[1]} dimensions, the index has {dimension}")
    if ids is not None and len(ids) != len(array):
        raise ValueError(f"got {len(ids)} ids for {len(array)} embeddings")
    norms = np.sqrt(np.einsum("nd,nd->n", array, array, dtype=np.float64))
    bad = ~(np.abs(norms - 1) <= _NORM_TOLERANCE)  # true for NaN as well
    if bad.any():
        row = int(bad.argmax())
        name = f"query {row}" if ids is None else f"the embedding of {ids[row]!r}"
        problem = f"has norm {norms[row]:.4g}, expected an L2-normalised vector"
        raise ValueError(f"{name} {problem if np.isfinite(norms[row]) else 'has values that are not finite'}")
    return array


def check_search(dimension: int | None, queries: np.ndarray, k: int) -> np.ndarray:
    """Return the queries as `check_vectors` does, if an index can be searched for `k` neighbours of them."""
    if isinstance(k, bool) or not isinstance(k, int | np.integer) or k < 1:
        raise ValueError(f"k must be a positive integer, got {k!r}")
    if dimension is None:
        raise ValueError("the index is empty; add embeddings before searching it")
    return check_vectors(queries, dimension)


def check_positions(count: int, among: np.ndarray) -> np.ndarray:
    """Return positions `(M,)` of the `count` rows of an index, ascending.

    Raises:
        ValueError: One is not a position.
    """
    positions = np.unique(np.asarray(among, dtype=np.int64))
    if len(positions) and (positions[0] < 0 or positions[-1] >= count):
        raise ValueError(f"positions must be from 0 to {count - 1}, got {positions[[0, -1]].tolist()}")
    return positions
