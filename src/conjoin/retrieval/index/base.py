"""What an index is, and what every backend needs: checks of its arguments, saving and loading."""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self, TypeVar

import numpy as np
from safetensors.numpy import load_file, save_file

from conjoin.retrieval.encoder import ModelIdentity
from conjoin.retrieval.kept_rows import KeptRows
from conjoin.storage import FolderKind, StoredFolder, read_folder, read_manifest, replace_folder

INDEX = FolderKind("index", 2, "run `conjoin index`")
IDS, VECTORS = 0, 1
"""The numbers of the first files of a saved index; `kept` and `rows` follow, if it has them."""
_NORM_TOLERANCE = 1e-2  # float16 and bfloat16 vectors are a little off 1

Loaded = TypeVar("Loaded")


class SearchResult(NamedTuple):
    """The best matches of every query, best first.

    Attributes:
        ids: One list per query, at most k long.
        scores: `(Q, min(k, corpus))` float32 inner products; `-inf` where an approximate index found fewer.
    """

    ids: list[list[str]]
    scores: np.ndarray


class Index(Protocol):
    """Ranks a corpus of L2-normalised vectors by inner product.

    Attributes:
        kind: Name of the backend, as `build_index` takes it.
        ids: Of the corpus, in the order added.
        dimension: Length of a vector; `None` while empty.
        model: Which model made the vectors, if known.
        kept: What the store keeps of the rows beside their vectors, in the order of `ids`, if known.
        digests: What each vector was made from `(N,)` int64, 0 where it is not known; equal digests, equal vectors.
    """

    kind: str
    ids: list[str]
    dimension: int | None
    model: ModelIdentity | None
    kept: KeptRows | None
    digests: np.ndarray

    def add(self, ids: Sequence[str], embeddings: np.ndarray, *, copy: bool = True) -> None:
        """Append vectors `(N, D)` under unique ids; without `copy` the array may be kept and must not change."""
        ...

    def remove(self, ids: Sequence[str]) -> None:
        """Remove the vectors under some ids, all of which are in the index."""
        ...

    def update(self, ids: Sequence[str], embeddings: np.ndarray) -> None:
        """Replace the vectors under the ids that are in the index, and append the others; all come last then."""
        ...

    def search(self, queries: np.ndarray, k: int, *, among: np.ndarray | None = None) -> SearchResult:
        """The k nearest to each query `(Q, D)`, among the rows at some positions of `ids`, or all."""
        ...

    def save(self, directory: str | Path) -> None:
        """Write the index; whatever happens, `directory` holds either the old index or the new one."""
        ...

    @classmethod
    def load(cls, directory: str | Path) -> Self:
        """Read a saved index."""
        ...


class SavedIndex(NamedTuple):
    """What a folder says of the index in it; `folder` opens its file `VECTORS`, `rows` are arrays with a row each."""

    kind: str
    model: ModelIdentity | None
    ids: list[str]
    kept: KeptRows | None
    rows: dict[str, np.ndarray]
    options: dict[str, Any]
    folder: StoredFolder


def save_index(
    index: Index,
    directory: str | Path,
    file: str,
    write: Callable[[Path], object],
    options: Mapping[str, Any] | None = None,
    rows: Mapping[str, np.ndarray] | None = None,
) -> None:
    """Save `index` with its vectors in `file`, which `write` makes; replaces an older index in one step.

    Args:
        index: What to save.
        directory: Where.
        file: Name of the file of its vectors.
        write: Writes that file.
        options: To load it with.
        rows: Further arrays with an entry for each row.

    Raises:
        ValueError: The index is empty, `directory` holds something else, or another process writes into it.
    """
    if index.dimension is None:
        raise ValueError("the index is empty; add embeddings before saving it")
    key = {
        "kind": index.kind,
        "model": None if index.model is None else index.model._asdict(),
        "dimension": index.dimension,
        "count": len(index.ids),
        "options": dict(options or {}),
    }
    files: dict[str, Callable[[Path], object]] = {
        "ids.json": lambda path: path.write_text(json.dumps(index.ids), encoding="ascii"),
        file: write,
    }
    if index.kept is not None:
        files["kept.parquet"] = index.kept.write
    arrays = {**({"digests": index.digests} if index.digests.any() else {}), **(rows or {})}
    if arrays:
        files["rows.safetensors"] = lambda path: save_file(arrays, path)
    replace_folder(directory, INDEX, key, files)


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
        ids = json.loads(folder.path(IDS).read_text(encoding="ascii"))
        further = {file.file.split("-")[0]: number for number, file in enumerate(folder.manifest.files)}
        kept = KeptRows.open(folder.path(further["kept"])) if "kept" in further else None
        rows = load_file(folder.path(further["rows"])) if "rows" in further else {}
        return read(SavedIndex(key["kind"], model, ids, kept, rows, key["options"], folder))

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


def check_search(index: Index, queries: np.ndarray, k: int) -> np.ndarray:
    """Return the queries as `check_vectors` does, if `index` can be searched for `k` neighbours of them."""
    if isinstance(k, bool) or not isinstance(k, int | np.integer) or k < 1:
        raise ValueError(f"k must be a positive integer, got {k!r}")
    if index.dimension is None:
        raise ValueError("the index is empty; add embeddings before searching it")
    return check_vectors(queries, index.dimension)


def check_positions(index: Index, among: np.ndarray) -> np.ndarray:
    """Return positions `(M,)` of rows of `index`, ascending.

    Raises:
        ValueError: One is not a position.
    """
    positions = np.unique(np.asarray(among, dtype=np.int64))
    if len(positions) and (positions[0] < 0 or positions[-1] >= len(index.ids)):
        raise ValueError(f"positions must be from 0 to {len(index.ids) - 1}, got {positions[[0, -1]].tolist()}")
    return positions
