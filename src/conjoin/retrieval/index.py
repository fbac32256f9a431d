"""What an index is, and exact search, the oracle that the other backends are tested against."""

import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
import torch

from conjoin.retrieval.atomic_files import atomic_path, write_json
from conjoin.retrieval.encoder import ModelIdentity

INDEX_FILE = "index.json"
FORMAT = "conjoin-index-1"
_NORM_TOLERANCE = 1e-2  # float16 and bfloat16 vectors are a little off 1
_SCORES_AT_ONCE = 2**24
_NUMBERS_AT_ONCE = 2**17  # of the exact products: stays in the processor's cache
_CORPUS_BLOCK = 16384


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
    """

    kind: str
    ids: list[str]
    dimension: int | None
    model: ModelIdentity | None

    def add(self, ids: Sequence[str], embeddings: np.ndarray) -> None:
        """Append vectors `(N, D)` under unique ids."""
        ...

    def search(self, queries: np.ndarray, k: int) -> SearchResult:
        """The k nearest of the corpus to each query `(Q, D)`."""
        ...

    def save(self, directory: str | Path) -> None:
        """Write the index; whatever happens, `directory` holds either the old index or the new one."""
        ...

    @classmethod
    def load(cls, directory: str | Path) -> Self:
        """Read a saved index."""
        ...


class ExactIndex:
    """Exact nearest neighbours by blocked matrix products.

    Scores are accumulated in float64 and rounded to float32, so equal vectors score equal wherever they stand, and
    ties are ranked in the order of insertion. A product in float32 selects the few candidates for that: everything
    within its worst rounding error of the k-th best.

    Args:
        model: Which model made the vectors; recorded, and checked by `search_items`.
        device: Where the vectors are kept and multiplied.
    """

    kind = "exact"

    def __init__(self, model: ModelIdentity | None = None, device: str | torch.device = "cpu") -> None:
        self.model = model
        self.device = torch.device(device)
        self.ids: list[str] = []
        self.dimension: int | None = None
        self._known: set[str] = set()
        self._parts: list[torch.Tensor] = []

    def add(self, ids: Sequence[str], embeddings: np.ndarray) -> None:
        """Append vectors.

        Args:
            ids: N new ids.
            embeddings: `(N, D)`, L2-normalised.

        Raises:
            ValueError: Another number of ids, an id met before, or vectors of another dimension, not finite or not
                normalised.
        """
        vectors = check_vectors(embeddings, self.dimension, ids)
        add_ids(self.ids, self._known, ids)
        self.dimension = vectors.shape[1]
        self._parts.append(torch.tensor(vectors, device=self.device))

    def search(self, queries: np.ndarray, k: int) -> SearchResult:
        """Rank the corpus for each query.

        Args:
            queries: `(Q, D)`, L2-normalised.
            k: How many to return; the whole corpus if it is larger.

        Raises:
            ValueError: An empty index, `k` below 1, or queries of another dimension, not finite or not normalised.
        """
        vectors = torch.tensor(check_search(self, queries, k), device=self.device)
        k = min(k, len(self.ids))
        rows_at_once = max(1, _SCORES_AT_ONCE // _CORPUS_BLOCK)
        found = [self._search_rows(part, k) for part in vectors.split(rows_at_once)]
        indices = np.concatenate([part[0] for part in found]) if found else np.empty((0, k), dtype=np.int64)
        scores = np.concatenate([part[1] for part in found]) if found else np.empty((0, k), dtype=np.float32)
        return SearchResult([[self.ids[index] for index in row] for row in indices.tolist()], scores)

    def _search_rows(self, queries: torch.Tensor, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Positions and scores `(q, k)` for a few queries `(q, D)`."""
        margin = _rounding_margin(queries.shape[1])
        doubles = queries.cpu().numpy().astype(np.float64)
        floor = torch.full((len(queries), 1), -torch.inf, device=self.device)
        rows, columns = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
        scores = np.empty(0, dtype=np.float32)
        offset = 0
        for part in self._parts:
            for block in part.split(_CORPUS_BLOCK):
                rough = queries @ block.T
                if len(block) >= k:
                    floor = torch.maximum(floor, rough.topk(k).values[:, -1:] - margin)
                found_rows, new_columns = (rough >= floor).nonzero(as_tuple=True)
                new_rows = found_rows.cpu().numpy()
                new_scores = _exact_scores(doubles, block, new_rows, new_columns)
                rows = np.concatenate([rows, new_rows])
                columns = np.concatenate([columns, new_columns.cpu().numpy() + offset])
                scores = np.concatenate([scores, new_scores])
                rows, columns, scores = _best(rows, columns, scores, k)
                if offset + len(block) >= k:
                    worst = torch.from_numpy(scores.reshape(len(queries), k)[:, -1:].copy()).to(self.device)
                    floor = torch.maximum(floor, worst - margin)
                offset += len(block)
        return columns.reshape(len(queries), k), scores.reshape(len(queries), k)

    def save(self, directory: str | Path) -> None:
        """Write the index; whatever happens, `directory` holds either the old index or the new one.

        Raises:
            ValueError: The index is empty.
        """
        save_index(self, Path(directory), self._write)

    def _write(self, path: Path) -> None:
        with path.open("wb") as file:
            np.save(file, torch.cat([part.cpu() for part in self._parts]).numpy(), allow_pickle=False)

    @classmethod
    def load(cls, directory: str | Path, device: str | torch.device = "cpu") -> Self:
        """Read a saved index.

        Raises:
            FileNotFoundError: There is none in `directory`.
            ValueError: It is damaged or of another kind.
        """
        saved = read_index(Path(directory), (cls.kind,))
        try:
            embeddings = np.load(saved.vectors, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise ValueError(
                f"the index file {str(saved.vectors)!r} is missing, truncated or damaged ({error})"
            ) from error
        index = cls(saved.model, device)
        index.add(saved.ids, embeddings)
        return index


class SavedIndex(NamedTuple):
    """What a folder says about the index in it."""

    kind: str
    model: ModelIdentity | None
    ids: list[str]
    vectors: Path
    options: dict[str, Any]


def save_index(
    index: Index, directory: Path, write: Callable[[Path], None], options: dict[str, Any] | None = None
) -> None:
    """Save `index`, its vectors written by `write`.

    New files get new names; replacing `index.json`, which names them, is the one step that makes them the index.
    """
    if index.dimension is None:
        raise ValueError("the index is empty; add embeddings before saving it")
    directory.mkdir(parents=True, exist_ok=True)
    old = _read_json(directory) if (directory / INDEX_FILE).exists() else None
    content = {
        "format": FORMAT,
        "kind": index.kind,
        "model": None if index.model is None else index.model._asdict(),
        "dimension": index.dimension,
        "count": len(index.ids),
        "revision": 1 if old is None else old["revision"] + 1,
        "options": options or {},
    }
    ids_path, vectors_path = _data_files(directory, content)
    with atomic_path(vectors_path) as temporary:
        write(temporary)
    with atomic_path(ids_path) as temporary:
        temporary.write_text(json.dumps(index.ids), encoding="ascii")
    write_json(directory / INDEX_FILE, content)
    for stale in _data_files(directory, old) if old is not None else ():
        with suppress(PermissionError):  # Windows: another process has it open
            stale.unlink(missing_ok=True)


def read_index(directory: Path, kinds: Iterable[str]) -> SavedIndex:
    """Read everything of a saved index but its vectors.

    Raises:
        FileNotFoundError: `directory` holds no index.
        ValueError: It is damaged or of none of the `kinds`.
    """
    content = _read_json(directory)
    if content["kind"] not in kinds:
        raise ValueError(f"the index in {str(directory)!r} is of kind {content['kind']!r}, expected {sorted(kinds)}")
    ids_path, vectors_path = _data_files(directory, content)
    try:
        ids = json.loads(ids_path.read_text(encoding="ascii"))
    except (OSError, ValueError) as error:
        raise ValueError(f"the index file {str(ids_path)!r} is missing, truncated or damaged ({error})") from error
    if len(ids) != content["count"]:
        raise ValueError(f"the index file {str(ids_path)!r} has {len(ids)} ids, expected {content['count']}")
    model = None if content["model"] is None else ModelIdentity(**content["model"])
    return SavedIndex(content["kind"], model, ids, vectors_path, content["options"])


def read_kind(directory: Path) -> str:
    """The kind of the index saved in `directory`."""
    return str(_read_json(directory)["kind"])


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


def add_ids(ids: list[str], known: set[str], new: Sequence[str]) -> None:
    """Append `new` to `ids` if all of them are new; otherwise change nothing and raise ValueError."""
    added: set[str] = set()
    for id_ in new:
        if not isinstance(id_, str):
            raise ValueError(f"ids must be strings, got {id_!r} ({type(id_).__name__})")
        if id_ in known or id_ in added:
            raise ValueError(f"the id {id_!r} occurs twice; ids must be unique")
        added.add(id_)
    known |= added
    ids.extend(new)


def _rounding_margin(dimension: int) -> float:
    """Twice the worst error of a `dimension`-long float32 inner product of unit vectors, and a bit."""
    try:
        is_full = torch.get_float32_matmul_precision() == "highest"
    except RuntimeError:  # reduced by `torch.backends.fp32_precision`, as `tf32` of training arguments does
        is_full = False
    # Else factors may be rounded to bfloat16.
    return 3 * dimension * float(np.finfo(np.float32).eps) if is_full else 2.0**-5


def _exact_scores(queries: np.ndarray, block: torch.Tensor, rows: np.ndarray, columns: torch.Tensor) -> np.ndarray:
    """Inner products of the given pairs `(P,)` of float64 queries and rows of `block`, as float32."""
    candidates, places = columns.unique(return_inverse=True)
    vectors, where = block[candidates].cpu().numpy().astype(np.float64), places.cpu().numpy()
    scores = np.empty(len(rows), dtype=np.float32)
    pairs_at_once = max(1, _NUMBERS_AT_ONCE // queries.shape[1])
    for start in range(0, len(rows), pairs_at_once):
        some = slice(start, start + pairs_at_once)
        scores[some] = np.einsum("pd,pd->p", queries[rows[some]], vectors[where[some]])
    return scores


def _best(
    rows: np.ndarray, columns: np.ndarray, scores: np.ndarray, k: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The k best of every row in order: by row, then falling score, then column."""
    order = np.lexsort((columns, -scores, rows))
    rows = rows[order]
    rank = np.arange(len(rows)) - np.searchsorted(rows, rows)
    kept = order[rank < k]
    return rows[rank < k], columns[kept], scores[kept]


def _data_files(directory: Path, content: dict[str, Any]) -> tuple[Path, Path]:
    """Where the ids and the vectors of an index are."""
    revision, suffix = int(content["revision"]), "npy" if content["kind"] == ExactIndex.kind else "faiss"
    return directory / f"ids-{revision}.json", directory / f"vectors-{revision}.{suffix}"


def _read_json(directory: Path) -> dict[str, Any]:
    path = directory / INDEX_FILE
    if not path.is_file():
        raise FileNotFoundError(f"{str(directory)!r} is not an index: it has no {INDEX_FILE}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        found = content["format"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{str(path)!r} is not the description of an index ({error!r})") from error
    if found != FORMAT:
        raise ValueError(f"{str(path)!r} has format {found!r}, expected {FORMAT!r}")
    return dict(content)
