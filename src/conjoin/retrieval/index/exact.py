"""Exact search, the oracle that the other backends are tested against."""

import json
import math
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Self

import numpy as np
import torch

from conjoin.ops import choose_device
from conjoin.retrieval.compact import DTYPES, pack, unpack
from conjoin.retrieval.encoder import ModelIdentity
from conjoin.retrieval.index.base import SavedIndex, SearchResult, Selection, check_search, check_vectors, read_index
from conjoin.retrieval.index.rows import VECTORS, IndexRows

_SCORES_AT_ONCE = 2**24
_NUMBERS_AT_ONCE = 2**17  # of the exact products: stays in the processor's cache
_CORPUS_BLOCK = 16384
_FEW_PER_QUERY = 4
_GROUPS_PER_RESULT = 8
_QUERIES_AT_ONCE = 256  # of the rough scores on a CPU, likewise
_DTYPE_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.int8: "I8", torch.uint8: "U8"}


class ExactIndex(IndexRows):
    """Exact nearest neighbours by blocked matrix products.

    Scores are accumulated in float64 and rounded to float32, so equal vectors score equal wherever they stand, and
    ties are ranked in the order of insertion. A product in float32 selects the few candidates for that: everything
    within its worst rounding error of the k-th best.

    On a CPU, the vectors of a saved index and of a store stay in their files and are read block by block. A GPU holds
    them as far as they fit into half of its free memory; the others are moved to it block by block.

    Args:
        model: Which model made the vectors; recorded, and checked by `search_items`.
        device: Where the vectors are multiplied; None takes a GPU when there is one.
        dtype: How they are held, one of `conjoin.retrieval.compact.DTYPES`; None keeps float16 and float32 as given.
            Queries stay float32; the search is exact among the vectors as they are held.
    """

    kind = "exact"

    def __init__(
        self, model: ModelIdentity | None = None, device: str | torch.device | None = None, dtype: str | None = None
    ) -> None:
        super().__init__(model)
        if dtype not in (None, *DTYPES):
            raise ValueError(f"unknown dtype {dtype!r}; expected one of {list(DTYPES)}")
        self.device = torch.device(choose_device(device))
        self.dtype = dtype
        self._parts: list[torch.Tensor] = []
        self._places: np.ndarray | None = None  # of the rows among the vectors of all parts, once some were removed

    def add(self, ids: Sequence[str], embeddings: np.ndarray, *, copy: bool = True) -> None:
        """Append vectors.

        Args:
            ids: N new ids.
            embeddings: `(N, D)`, L2-normalised.
            copy: False keeps the array itself, which must not change any more.

        Raises:
            ValueError: Another number of ids, an id met before, or vectors of another dimension, not finite or not
                normalised.
        """
        vectors = check_vectors(embeddings, self.dimension, ids)
        dimension = vectors.shape[1]
        if self.dtype is not None:
            vectors = pack(vectors, self.dtype)
        elif np.asarray(embeddings).dtype == np.float16:
            vectors = np.ascontiguousarray(embeddings)
        self._add_ids(ids)
        self._append(torch.tensor(vectors) if copy else torch.from_numpy(vectors), dimension)

    def _append(self, vectors: torch.Tensor, dimension: int) -> None:
        """Append checked vectors of some dimension, as they are held."""
        self.dimension = dimension
        if self._places is not None:
            start = sum(map(len, self._parts))
            self._places = np.concatenate([self._places, np.arange(start, start + len(vectors))])
        self._parts.append(vectors.to(self.device) if self._fits(vectors) else vectors)

    def _fits(self, vectors: torch.Tensor) -> bool:
        return self.device.type != "cuda" or vectors.nbytes < torch.cuda.mem_get_info(self.device)[0] / 2

    def _unpacked(self, block: torch.Tensor) -> torch.Tensor:
        """The vectors `(n, D)` of a block: float32, where they are multiplied."""
        if self.dtype in ("int8", "binary"):
            block = torch.from_numpy(unpack(block.cpu().numpy(), self.dtype, int(self.dimension or 0)))
        return block.to(self.device).float()

    def _remove(self, places: np.ndarray, left: np.ndarray) -> None:
        self._places = left if self._places is None else self._places[left]

    def search(self, queries: np.ndarray, k: int, *, among: Selection | None = None) -> SearchResult:
        """Rank the corpus for each query.

        Args:
            queries: `(Q, D)`, L2-normalised.
            k: How many to return; the whole corpus if it is larger.
            among: Positions `(M,)` in `ids`, or a condition; all when None. See `select_rows`.

        Raises:
            ValueError: An empty index, `k` below 1, or queries of another dimension, not finite or not normalised.
        """
        vectors = torch.tensor(check_search(self.dimension, queries, k), device=self.device)
        places = self._places
        chosen = None if among is None else self._positions(among)
        if chosen is not None:
            places = chosen if places is None else places[chosen]
        k = min(k, len(self.ids) if chosen is None else len(chosen))
        rows_at_once = max(1, _SCORES_AT_ONCE // _CORPUS_BLOCK)
        parts = vectors.split(rows_at_once) if k and len(vectors) else ()
        found = [self._search_rows(part, k, places) for part in parts]
        indices = np.concatenate([np.empty((0, k), dtype=np.int64), *(part[0] for part in found)])
        scores = np.concatenate([np.empty((0, k), dtype=np.float32), *(part[1] for part in found)])
        if k == 0:
            return SearchResult([[] for _ in vectors], np.empty((len(vectors), 0), dtype=np.float32))
        if chosen is not None:
            indices = chosen[indices]
        return SearchResult([[self.ids[index] for index in row] for row in indices.tolist()], scores)

    def _search_rows(self, queries: torch.Tensor, k: int, places: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """Positions in `places` and scores `(q, k)` for a few queries `(q, D)`."""
        margin = _rounding_margin(queries.shape[1])
        doubles = queries.cpu().numpy().astype(np.float64)
        floor = torch.full((len(queries), 1), -torch.inf, device=self.device)
        rows, columns = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
        scores = np.empty(0, dtype=np.float32)
        size = min(len(queries), _QUERIES_AT_ONCE) * _CORPUS_BLOCK
        memory = np.empty(size, dtype=np.float32), np.empty(size, dtype=bool)
        for offset, stored in self._blocks(places):
            block = self._unpacked(stored)
            new_rows, new_columns = _candidates(queries, block, k, floor, margin, memory)
            if len(new_rows) == 0:
                continue
            new_scores = _exact_scores(doubles, block, new_rows, new_columns)
            rows = np.concatenate([rows, new_rows])
            columns = np.concatenate([columns, new_columns + offset])
            scores = np.concatenate([scores, new_scores])
            rows, columns, scores = _best(rows, columns, scores, k)
            if offset + len(block) >= k:
                worst = torch.from_numpy(scores.reshape(len(queries), k)[:, -1:].copy()).to(self.device)
                floor = torch.maximum(floor, worst - margin)
        return columns.reshape(len(queries), k), scores.reshape(len(queries), k)

    def save(self, directory: str | Path) -> None:
        """Write the index; whatever happens, `directory` holds either the old index or the new one.

        Raises:
            ValueError: The index is empty, or the one in `directory` was changed since this one was loaded from there.
        """
        self._save(directory, "vectors.safetensors", self._write, {} if self.dtype is None else {"dtype": self.dtype})

    def _write(self, path: Path) -> None:
        """Write a safetensors file block by block, as the library's writers hold a copy of all vectors in memory."""
        found = {part.dtype for part in self._parts}
        dtype = next(iter(found)) if len(found) == 1 else torch.float32
        shape = (len(self.ids), self._parts[0].shape[1])
        size = math.prod(shape) * dtype.itemsize
        tensor = {"dtype": _DTYPE_NAMES[dtype], "shape": shape, "data_offsets": (0, size)}
        header = json.dumps({"embeddings": tensor}).encode()
        header += b" " * (-len(header) % 8)
        with path.open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            for _, block in self._blocks(self._places):
                file.write(np.ascontiguousarray(block.cpu().to(dtype).numpy()).data)

    def _blocks(self, places: np.ndarray | None) -> Iterator[tuple[int, torch.Tensor]]:
        """The vectors `(n, D)` at some places, ascending, block by block, each with the position of its first row."""
        offset = 0
        for part in self._parts:
            for block in part.split(_CORPUS_BLOCK):
                if places is None:
                    yield offset, block
                else:
                    first, end = np.searchsorted(places, [offset, offset + len(block)]).tolist()
                    chosen = torch.from_numpy(places[first:end] - offset).to(block.device)
                    if first < end:
                        yield first, block if len(chosen) == len(block) else block[chosen]
                offset += len(block)

    @classmethod
    def load(cls, directory: str | Path, device: str | torch.device | None = None) -> Self:
        """Read a saved index.

        Raises:
            FileNotFoundError: There is none in `directory`.
            ValueError: It is damaged or of another kind.
        """
        return read_index(directory, (cls.kind,), partial(cls._read, device=device))

    @classmethod
    def _read(cls, saved: SavedIndex, device: str | torch.device | None) -> Self:
        index = cls(saved.model, device, saved.options.get("dtype"))
        index._load_rows(saved)
        with saved.folder.shard(VECTORS) as file:
            index._append(file.get_tensor("embeddings"), saved.folder.manifest.key["dimension"])
        return index


def _rounding_margin(dimension: int) -> float:
    """Twice the worst error of a `dimension`-long float32 inner product of unit vectors, and a bit."""
    try:
        is_full = torch.get_float32_matmul_precision() == "highest"
    except RuntimeError:  # reduced by `torch.backends.fp32_precision`, as `tf32` of training arguments does
        is_full = False
    # Else factors may be rounded to bfloat16.
    return 3 * dimension * float(np.finfo(np.float32).eps) if is_full else 2.0**-5


def _candidates(
    queries: torch.Tensor,
    block: torch.Tensor,
    k: int,
    floor: torch.Tensor,
    margin: float,
    memory: tuple[np.ndarray, np.ndarray],
) -> tuple[np.ndarray, np.ndarray]:
    """Rows `(P,)` of queries and of a block that may be among the k best, where the scores so far reach `floor`.

    On a CPU numpy multiplies, a few queries at a time: its library is the faster one on some processors, above all for
    a single query. A floor of the block itself is only computed where too many rows reach the one so far.
    """
    if block.device.type != "cpu":
        rough = queries @ block.T
        if len(block) >= k:
            floor = torch.maximum(floor, rough.topk(k).values[:, -1:] - margin)
        found_rows, found_columns = (rough >= floor).nonzero(as_tuple=True)
        return found_rows.cpu().numpy(), found_columns.cpu().numpy()
    rows, columns, start = [], [], 0
    vectors = block.numpy().T
    for part, least in zip(queries.split(_QUERIES_AT_ONCE), floor.split(_QUERIES_AT_ONCE), strict=True):
        scores, reached = (kept[: len(part) * len(block)].reshape(len(part), -1) for kept in memory)
        np.matmul(part.numpy(), vectors, out=scores)
        np.greater_equal(scores, least.numpy(), out=reached)
        if len(block) >= k and np.count_nonzero(reached) > _FEW_PER_QUERY * k * len(part):
            np.greater_equal(scores, np.maximum(least.numpy(), _reached_by(scores, k) - margin), out=reached)
        row, column = np.divmod(np.flatnonzero(reached), len(block))
        rows.append(row + start)
        columns.append(column)
        start += len(part)
    return np.concatenate(rows), np.concatenate(columns)


def _reached_by(scores: np.ndarray, k: int) -> np.ndarray:
    """A bound `(q, 1)` that at least k of the scores `(q, n)` of each row reach: the k-th best maximum of groups."""
    groups = _GROUPS_PER_RESULT * k
    size = scores.shape[1] // groups
    if size > 1:
        parts = torch.from_numpy(scores)[:, : groups * size].unflatten(1, (groups, size))
        scores = parts.amax(2).numpy()  # numpy takes 20 times as long
    return np.partition(scores, -k, axis=1)[:, [-k]]


def _exact_scores(queries: np.ndarray, block: torch.Tensor, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Inner products of the given pairs `(P,)` of float64 queries and rows of `block`, as float32."""
    candidates, where = np.unique(columns, return_inverse=True)
    vectors = block[torch.from_numpy(candidates).to(block.device)].cpu().numpy().astype(np.float64)
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
