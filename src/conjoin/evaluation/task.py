"""The loop that evaluates all cells of a benchmark: encode, search, rank, score.

A wrong candidate that ties with the best right one counts as better. The vectors of a corpus are stored in a
collection, so an interrupted evaluation resumes.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import torch

from conjoin.data.row_images import row_item
from conjoin.evaluation.metrics import rank_of_relevant, tie_tolerance, triplet_wins
from conjoin.evaluation.results import Example, Hit, Metric, Score, Shown, score_ranks, score_symmetric
from conjoin.evaluation.tasks import Cell, Rows
from conjoin.progress import progress
from conjoin.retrieval import (
    Collection,
    ItemEncoder,
    Reranker,
    SearchResult,
    encode_collection,
    rerank,
    search_exactly,
)
from conjoin.retrieval.encoder import Role
from conjoin.retrieval.vectors import as_result

SHOWN_RESULTS = 5
"""Results of an example in the report."""


@dataclass(frozen=True)
class EvaluateOptions:
    """How cells are evaluated.

    Args:
        ks: Cut-offs of the hit rates.
        mrr: Ranks that the mean reciprocal rank counts; None leaves it out.
        dtype: Of stored vectors, as for `encode_collection`.
        seed: Of the bootstrap.
        resamples: Of the bootstrap.
        show_progress: Show progress bars.
        hubness_penalty: Subtract this times a candidate's mean score over all queries of its cell, as the code of PUMA
            does with 0.2. It needs all test queries at once (transductive).
        reranker: Sorts the first candidates of each query again, in scores and run files.
        rerank_top: How many of them.
        baselines: Also score parts of the items, and the model's towers. None: if there are few rows.
        prompt: Of queries without an instruction, in place of the model's own prompt.
        prompt_name: The name of one of the model's prompts, likewise.
    """

    ks: Sequence[int] = (1, 5, 10)
    mrr: int | None = 10
    dtype: Literal["float32", "float16"] = "float32"
    seed: int = 0
    resamples: int = 10000
    show_progress: bool = False
    hubness_penalty: float = 0.0
    reranker: Reranker | None = None
    rerank_top: int = 100
    baselines: bool | None = None
    prompt: str | None = None
    prompt_name: str | None = None


class _Vectors:
    """Vectors `(N, D)` in memory, read as those of a `Collection`."""

    def __init__(self, ids: Sequence[str], matrix: np.ndarray) -> None:
        self.ids, self.matrix, self._index = ids, matrix, {id_: index for index, id_ in enumerate(ids)}

    def __len__(self) -> int:
        return len(self.ids)

    def batches(self) -> Iterator[tuple[pa.Array, np.ndarray]]:
        yield pa.array(self.ids, pa.string()), self.matrix

    def vectors(self, ids: Sequence[str] | None = None) -> np.ndarray:
        return self.matrix if ids is None else self.matrix[[self._index[id_] for id_ in ids]]


def as_prompt(encoder: ItemEncoder, instruction: str | None) -> str | None:
    """The prompt that gives an encoder an instruction: models of other libraries read it before the text as it is."""
    return f"{instruction} " if instruction and hasattr(encoder.processor, "digest") else instruction


class CellVectors:
    """The vectors of rows, each encoded once.

    Args:
        encoder: The model.
        folder: Of the collections.
        options: Type of the stored vectors, prompts and progress bars.
    """

    def __init__(self, encoder: ItemEncoder, folder: Path, options: EvaluateOptions) -> None:
        self.encoder, self.folder, self.options = encoder, folder, options
        self._encoded: dict[str, Collection | _Vectors] = {}

    def __len__(self) -> int:
        """How many rows were encoded."""
        return sum(map(len, self._encoded.values()))

    def of(self, rows: Rows, role: Role = "document") -> Collection | _Vectors:
        """Encode rows in their role, or return what was encoded before."""
        instruction, prompt, name = rows.instruction, None, None
        if isinstance(instruction, str):
            prompt = as_prompt(self.encoder, instruction)
        elif role == "query":
            prompt, name = self.options.prompt, self.options.prompt_name
        if role == "query" and self.encoder.is_symmetric and instruction is prompt is name is None:
            role = "document"  # its vectors are the same
        folder = rows.folder if role == "document" else f"{rows.folder}-queries"
        if folder in self._encoded:
            return self._encoded[folder]
        how: dict[str, Any] = {"role": role, "prompt_name": name, "show_progress": self.options.show_progress}
        if rows.summed:
            total: dict[str, np.ndarray] = {}
            for part in rows.summed:
                for ids, vectors in self.of(part, role).batches():
                    for id_, vector in zip(ids.to_pylist(), vectors.astype(np.float32), strict=True):
                        total[id_] = total.get(id_, 0) + vector
            matrix = np.stack(list(total.values()))
            self._encoded[folder] = _Vectors(list(total), matrix / np.linalg.norm(matrix, axis=1, keepdims=True))
        elif instruction is None or isinstance(instruction, str):
            how |= {"prompt": prompt, "dtype": self.options.dtype, "sync": True}
            self._encoded[folder] = encode_collection(rows.rows, self.encoder, self.folder / folder, **how)
        else:
            ids = [row["id"] for row in rows.rows]
            items = [row_item({part: row.get(part) for part in ("image", "text")}, row["id"]) for row in rows.rows]
            prompts = [prompt if each is None else as_prompt(self.encoder, each) for each in instruction]
            self._encoded[folder] = _Vectors(ids, self.encoder.encode(items, ids, prompt=prompts, **how))
        return self._encoded[folder]

    def queries(self, cell: Cell) -> np.ndarray:
        """The vectors `(N, D)` of the queries that are scored."""
        return np.asarray(self.of(cell.queries, "query").vectors(list(cell.qrels)), dtype=np.float32)

    def search(self, cell: Cell) -> SearchResult:
        """Rank what the queries of a cell search."""
        options, corpus, among = self.options, self.of(cell.corpus), cell.candidates
        queries = penalise_hubs(self.queries(cell), options.hubness_penalty)
        if not isinstance(among, Mapping):
            # a tie that is longer holds more wrong candidates than the last cut-off
            last = max(*options.ks, options.mrr or 1) + max(map(len, cell.qrels.values()))
            reranked = options.rerank_top if options.reranker is not None else 0
            excluded = max(map(len, cell.excluded.values()), default=0)
            depth = max(last, reranked, cell.run_depth, SHOWN_RESULTS) + excluded
            return search_exactly(corpus, queries, depth, ids=among, device=self.encoder.device)  # type: ignore[arg-type]
        number = {id_: index for index, id_ in enumerate(corpus.ids)}
        vectors, rankings = corpus.vectors().astype(np.float32), []
        for query, names in zip(queries, map(among.__getitem__, cell.qrels), strict=True):
            scores = vectors[[number[name] for name in names]] @ query
            order = np.argsort(-scores, kind="stable")
            rankings.append(([names[index] for index in order], scores[order]))
        return as_result(rankings)

    def wins(self, cell: Cell) -> np.ndarray:
        """Whether cos(f, f⁺) > cos(f′, f⁻) for each query, see `triplet_wins`; `(N,)` of 0 and 1."""
        ids, variant = list(cell.qrels), (query := self.queries(cell)).copy()
        if cell.variants is not None:
            variants = self.of(cell.variants, "query")
            variant[[ids.index(id_) for id_ in variants.ids]] = variants.vectors()
        items = self.of(cell.corpus)
        positive = items.vectors([next(iter(cell.qrels[id_])) for id_ in ids])
        negative = items.vectors([cell.negatives[id_] for id_ in ids])
        return triplet_wins(query, positive, negative, variant).double().numpy()


@dataclass(frozen=True)
class CellScores:
    """The ranks of the N scored queries of a cell.

    Args:
        cell: The cell.
        ranks: `(N,)` rank of the best right candidate, from 1; a number beyond all cut-offs if it was not found.
        results: The first candidates of each query.
        vectors: Of queries and corpus.
        wins: `(N,)` whether the right candidate is nearer than the negative, for a cell with `negatives`.
    """

    cell: Cell
    ranks: np.ndarray
    results: SearchResult = field(repr=False)
    vectors: CellVectors = field(repr=False)
    wins: np.ndarray | None = None

    @cached_property
    def ids(self) -> list[str]:
        """The ids of the queries."""
        return list(self.cell.qrels)

    @cached_property
    def sizes(self) -> np.ndarray:
        """`(N,)` how many candidates each query has."""
        cell, among = self.cell, self.cell.candidates
        whole = len(self.vectors.of(cell.corpus)) if among is None else len(among)
        sizes = [len(among[id_]) if isinstance(among, Mapping) else whole for id_ in self.ids]
        return np.array(sizes) - [len(cell.excluded.get(id_, ())) for id_ in self.ids]

    @cached_property
    def _position(self) -> dict[str, int]:
        return {id_: position for position, id_ in enumerate(self.ids)}

    def metrics(self, ids: Iterable[str] | None = None) -> dict[str, Metric]:
        """Hit rates and so on of all queries or of some, with intervals and chance; empty without queries."""
        index = [self._position[id_] for id_ in (self.ids if ids is None else ids)]
        if not index:
            return {}
        options, ranks, sizes = self.vectors.options, self.ranks[index], self.sizes[index]
        how = {"resamples": options.resamples, "seed": options.seed}
        if self.wins is not None:
            return score_symmetric(ranks, self.wins[index], sizes, options.ks, **how)
        counts = [len(self.cell.qrels[self.ids[position]]) for position in index]
        metrics = score_ranks(ranks, counts, sizes, options.ks, options.mrr, **how)
        return metrics if self.cell.published is None else {"published": metrics[self.cell.published]} | metrics

    def score(self) -> Score:
        """The scores of all queries."""
        largest = int(self.sizes.max(initial=0))
        return Score(self.cell.name, len(self.ids), largest, self.metrics(), dict(self.cell.labels))

    def sample(self, count: int, missed: bool = False) -> list[str]:
        """The ids of some queries, evenly spaced; of those whose first candidate is wrong if `missed`."""
        ids = [id_ for id_, rank in zip(self.ids, self.ranks, strict=True) if not missed or rank > 1]
        count = min(count, len(ids))
        return [ids[number * len(ids) // count] for number in range(count)]

    def examples(
        self, ids: Sequence[str], title: str | None = None, show: Callable[[str], Shown] | None = None
    ) -> list[Example]:
        """The searches of some queries, with their first results.

        Args:
            ids: Of the queries.
            title: Of each; None for the names of the cell and the query.
            show: How a candidate is shown; None for what is encoded.
        """
        cell, examples = self.cell, []
        show = show or (lambda name: Shown.from_item(cell.corpus.item(name), f"candidate {name}"))
        for id_ in ids:
            position = self._position[id_]
            ranked = zip(self.results.ids[position], self.results.scores[position].tolist(), strict=False)
            found = [(name, score, name in cell.qrels[id_]) for name, score in ranked if np.isfinite(score)]
            # as in the ranks, a wrong candidate that ties with a right one comes first
            found.sort(key=lambda hit: hit[1] if hit[2] else hit[1] + tie_tolerance(torch.float32), reverse=True)
            hits = [Hit(show(name), score, is_right) for name, score, is_right in found[:SHOWN_RESULTS]]
            query = Shown.from_item(cell.queries.item(id_), f"query {id_}")
            rank = int(self.ranks[position]) if any(is_right for _, _, is_right in found) else None
            examples.append(Example(query, hits, rank, int(self.sizes[position]), title or f"{cell.name} · {id_}"))
        return examples


def evaluate_cells(
    encoder: ItemEncoder, cells: Sequence[Cell], out: str | Path, options: EvaluateOptions | None = None
) -> list[CellScores]:
    """Evaluate an encoder on cells. Rows of one name are encoded once.

    Args:
        encoder: The model.
        cells: The cells.
        out: Folder: vectors go to `collections`, the first candidates of each query to `runs` and the judgements to
            `qrels` (TREC files).
        options: How.

    Raises:
        ValueError: A query has no right candidate, an item cannot be read (it is named), or a collection in `out` was
            made with another model.
        FileNotFoundError: An image is missing.
    """
    options = options or EvaluateOptions()
    for cell in cells:
        for id_, right in cell.qrels.items():
            if not right:
                raise ValueError(f"query {id_!r} of {cell.name}: none of the candidates is right")
    vectors = CellVectors(encoder, Path(out) / "collections", options)
    for cell in cells:  # a model that does not take the queries says so before a large corpus is encoded
        vectors.of(cell.queries, "query")
    shown = progress(cells, "cells", show=options.show_progress)
    return [_score(cell, vectors, Path(out)) for cell in shown]


def penalise_hubs(queries: np.ndarray, weight: float) -> np.ndarray:
    """Return queries `(Q, D)`, normalised, whose scores rank as q·c − weight · mean over all queries q' of q'·c."""
    if weight == 0:
        return queries
    moved = queries - weight * queries.mean(axis=0)
    return (moved / np.linalg.norm(moved, axis=1, keepdims=True)).astype(queries.dtype)


def _score(cell: Cell, vectors: CellVectors, out: Path) -> CellScores:
    """Rank the right candidates of each query among those found; write the run file."""
    options, ids = vectors.options, list(cell.qrels)
    if not ids:
        return CellScores(cell, np.empty(0, int), SearchResult([], np.empty((0, 0), np.float32)), vectors)
    results = vectors.search(cell)
    if cell.excluded:
        named = zip(ids, results.ids, strict=True)
        is_excluded = [[name in cell.excluded.get(id_, ()) for name in names] for id_, names in named]
        results = results._replace(scores=np.where(is_excluded, -np.inf, results.scores))
    if options.reranker is not None:
        own = cell.queries.instruction
        by_query = None if own is None or isinstance(own, str) else own
        items, how = [cell.queries.item(id_) for id_ in ids], (options.rerank_top, by_query, options.show_progress)
        results = rerank(results, items, cell.corpus.item, options.reranker, *how)
    is_right = np.zeros(results.scores.shape, dtype=bool)
    for row, id_, names in zip(is_right, ids, results.ids, strict=True):
        row[: len(names)] = [name in cell.qrels[id_] for name in names]
    ranks, hit = np.full(len(ids), 1 + results.scores.shape[1]), is_right.any(axis=1)
    if hit.any():
        ranks[hit] = rank_of_relevant(results.scores[hit], is_right[hit], tie_tolerance(torch.float32)).numpy()
    if cell.run_depth:
        _write_run(cell, results, out)
    return CellScores(cell, ranks, results, vectors, vectors.wins(cell) if cell.negatives else None)


def _write_run(cell: Cell, results: SearchResult, out: Path) -> None:
    """Write the first candidates of each query, and the right ones, as TREC's tools read them.

    Raises:
        ValueError: An id holds white space.
    """
    run, qrels = [], []
    for id_, names, scores in zip(cell.qrels, results.ids, results.scores.tolist(), strict=True):
        ranked = [pair for pair in zip(names, scores, strict=False) if np.isfinite(pair[1])][: cell.run_depth]
        run += [f"{id_} Q0 {name} {rank} {score!r} conjoin\n" for rank, (name, score) in enumerate(ranked, start=1)]
        qrels += [f"{id_} 0 {name} 1\n" for name in sorted(cell.qrels[id_])]
    for folder, lines, columns in (("runs", run, 6), ("qrels", qrels, 4)):
        for line in lines:
            if len(line.split()) != columns:
                raise ValueError(f"{cell.name}: an id must be one word in a run file, got the line {line!r}")
        path = out / folder / f"{cell.name}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(lines), encoding="utf-8")
