"""The cells of a benchmark, and the loop that evaluates all of them: encode, search, rank, score.

A wrong candidate that ties with the best right one counts as better. The vectors of a corpus are stored in a
collection, so an interrupted evaluation resumes.
"""

from collections.abc import Callable, Collection as Ids, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import datasets
import numpy as np
import pyarrow as pa
import torch

from conjoin.data.columns import undecoded
from conjoin.data.row_images import plain_text, row_item
from conjoin.evaluation.metrics import rank_of_relevant, tie_tolerance, triplet_wins
from conjoin.evaluation.results import Example, Hit, Metric, Score, Shown, score_ranks, score_symmetric
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
from conjoin.retrieval.encoder import DescribedProcessor, Role
from conjoin.retrieval.vectors import as_result
from conjoin.storage.fingerprints import text_digest

PARTS = ("image", "text")
View = Literal["text", "image", "sum"]
"""What is seen of each item: one of its parts; or both by themselves, whose vectors are added."""
SHOWN_RESULTS = 5
"""Results of an example in the report."""


@dataclass(frozen=True)
class Rows:
    """Rows that are encoded together: queries, or a part of a corpus.

    Args:
        name: Of the rows and of their collection. In one evaluation, equal names mean equal rows.
        rows: Rows for `encode_collection`, with an id each, that can be read several times.
        instruction: Of the task: for all rows; or one for each row, and then the vectors are not stored. None for the
            model's own prompt.
        lookup: Returns the row of an id; None finds it in `rows`, which then have numbers.
        view: What is seen of each row; None for all of it. Rows without the part are left out.
    """

    name: str
    rows: Iterable[Mapping[str, Any]] = field(repr=False)
    instruction: str | Sequence[str | None] | None = None
    lookup: Callable[[str], Mapping[str, Any]] | None = None
    view: View | None = None

    @property
    def folder(self) -> str:
        """Name of the collection."""
        digest = text_digest(self.instruction)[:8] if isinstance(self.instruction, str) else None
        return "-".join(part for part in (self.name, self.view, digest) if part)

    def row(self, id_: str) -> Mapping[str, Any]:
        """The row of an id, in full."""
        if self.lookup is not None:
            return self.lookup(id_)
        if isinstance(self.rows, datasets.IterableDataset):
            return next(row for row in self.rows if row["id"] == id_)
        return self.rows[self._numbers[id_]]  # type: ignore[index]

    def item(self, id_: str) -> Any:  # noqa: ANN401 - an item
        """The row of an id as an item."""
        return _item(self.row(id_), id_)

    @cached_property
    def _numbers(self) -> dict[str, int]:
        is_dataset = isinstance(self.rows, datasets.Dataset)
        ids = self.rows["id"][:] if is_dataset else (row["id"] for row in self.rows)  # type: ignore[index]
        return {str(id_): number for number, id_ in enumerate(ids)}

    @cached_property
    def parts(self) -> dict[str, set[str]]:
        """The parts that each row has, by id."""
        return {str(row["id"]): {part for part in PARTS if row.get(part) is not None} for row in self._undecoded()}

    def _undecoded(self) -> Iterable[Mapping[str, Any]]:
        is_dataset = isinstance(self.rows, datasets.Dataset | datasets.IterableDataset)
        return undecoded(self.rows) if is_dataset else self.rows

    def seen(self) -> Iterable[Mapping[str, Any]]:
        """The rows as `view` shows them."""
        return self.rows if self.view is None else filter(None, (_seen(row, self.view) for row in self._undecoded()))


@dataclass(frozen=True)
class Cell:
    """Queries that search a corpus for the candidates that are right for them: one row of a benchmark's table.

    Args:
        name: Of the cell and of its run file.
        queries: The queries.
        corpus: What they search.
        qrels: By id of a query the ids of the right candidates, at least one. Queries without an entry are not scored.
        candidates: Ids of the corpus: only these are searched; or by id of a query its own ids. None: all.
        excluded: By id of a query the ids of candidates that are left out of its ranking.
        groups: Subsets of the queries: by kind (`"language"`) and name (`"th"`) the ids of queries.
        negatives: By id of a query a candidate that looks like the right one. The cell is then scored by the symmetric
            protocol: precision beside the ranks.
        variants: Other forms of some queries, under their ids: they are compared with `negatives`.
        section: Title of the table that the cell is in.
        labels: Further columns of that table, by name.
        published: The metric that published tables print, such as `"hit_rate@10"`.
        run_depth: Candidates of each query in the run file `runs/NAME.txt`; 0 writes none. Ids are one word then.
    """

    name: str
    queries: Rows
    corpus: Rows
    qrels: Mapping[str, Ids[str]] = field(repr=False)
    candidates: Ids[str] | Mapping[str, Sequence[str]] | None = field(default=None, repr=False)
    excluded: Mapping[str, Ids[str]] = field(default_factory=dict, repr=False)
    groups: Mapping[str, Mapping[str, Sequence[str]]] = field(default_factory=dict, repr=False)
    negatives: Mapping[str, str] = field(default_factory=dict, repr=False)
    variants: Rows | None = None
    section: str = "Scores"
    labels: Mapping[str, str] = field(default_factory=dict)
    published: str | None = None
    run_depth: int = 0

    def seen_as(self, view: View) -> "Cell":
        """The same cell where only a part of each query and candidate is seen."""
        queries, corpus = replace(self.queries, view=view), replace(self.corpus, view=view)
        variants = self.variants and replace(self.variants, view=view)
        return replace(self, queries=queries, corpus=corpus, variants=variants, run_depth=0)


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

    def vectors(self, ids: Sequence[str]) -> np.ndarray:
        return self.matrix[[self._index[id_] for id_ in ids]]


def as_prompt(encoder: ItemEncoder, instruction: str | None) -> str | None:
    """The prompt that gives an encoder an instruction: models of other libraries read it before the text as it is."""
    return f"{instruction} " if instruction and isinstance(encoder.processor, DescribedProcessor) else instruction


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
        own, prompt, name = rows.instruction, None, None
        if role == "query" and not isinstance(own, str):
            prompt, name = self.options.prompt, self.options.prompt_name
        if isinstance(own, str):
            prompt = as_prompt(self.encoder, own)
        if role == "query" and self.encoder.is_symmetric and own is prompt is name is None:
            role = "document"  # its vectors are the same
        folder = rows.folder if role == "document" else f"{rows.folder}-queries"
        if folder not in self._encoded:
            how: dict[str, Any] = {"role": role, "prompt": prompt, "prompt_name": name}
            if rows.view == "sum":
                self._encoded[folder] = self._sum(rows, role)
            elif own is None or isinstance(own, str):
                how |= {"dtype": self.options.dtype, "show_progress": self.options.show_progress, "sync": True}
                self._encoded[folder] = encode_collection(rows.seen(), self.encoder, self.folder / folder, **how)
            else:
                given = [prompt if each is None else as_prompt(self.encoder, each) for each in own]
                seen = [(_seen(row, rows.view), text) for row, text in zip(rows.rows, given, strict=True)]
                kept = [(row, text) for row, text in seen if row is not None]
                ids = [row["id"] for row, _ in kept]
                items = [_item(row, row["id"]) for row, _ in kept]
                how["prompt"] = [text for _, text in kept]
                matrix = self.encoder.encode(items, ids, self.options.show_progress, **how)
                self._encoded[folder] = _Vectors(ids, matrix)
        return self._encoded[folder]

    def _sum(self, rows: Rows, role: Role) -> _Vectors:
        """Add the vectors of the parts of each row, L2-normalised."""
        total: dict[str, np.ndarray] = {}
        for part in sorted(set[str]().union(*rows.parts.values())):
            for ids, vectors in self.of(replace(rows, view=part), role).batches():  # type: ignore[arg-type]
                for id_, vector in zip(ids.to_pylist(), vectors.astype(np.float32), strict=True):
                    total[id_] = total.get(id_, 0) + vector
        matrix = np.stack(list(total.values()))
        return _Vectors(list(total), matrix / np.linalg.norm(matrix, axis=1, keepdims=True))

    def queries(self, cell: Cell) -> np.ndarray:
        """The vectors `(N, D)` of the queries that are scored."""
        return np.asarray(self.of(cell.queries, "query").vectors(list(cell.qrels)), dtype=np.float32)

    def search(self, cells: Sequence[Cell], queries: Sequence[np.ndarray]) -> list[SearchResult]:
        """Rank what cells of one corpus, and of the same candidates, search; in one pass over the corpus."""
        corpus, among = self.of(cells[0].corpus), cells[0].candidates
        if isinstance(among, Mapping):
            ids, vectors = corpus.ids, np.concatenate([block for _, block in corpus.batches()]).astype(np.float32)
            matrix, results = dict(zip(ids, vectors, strict=True)), []
            for cell, asked in zip(cells, queries, strict=True):
                rankings = []
                for vector, names in zip(asked, map(among.__getitem__, cell.qrels), strict=True):
                    scores = np.stack([matrix[name] for name in names]) @ vector
                    order = np.argsort(-scores, kind="stable")
                    rankings.append(([names[index] for index in order], scores[order]))
                results.append(as_result(rankings))
            return results
        depth, device = max(_depth(cell, self.options) for cell in cells), self.encoder.device
        found = search_exactly(corpus, np.concatenate(queries), depth, ids=among, device=device)  # type: ignore[arg-type]
        ends = np.cumsum([len(each) for each in queries]).tolist()
        parts = [slice(end - len(each), end) for end, each in zip(ends, queries, strict=True)]
        return [SearchResult(found.ids[part], found.scores[part]) for part in parts]

    def wins(self, cell: Cell) -> np.ndarray:
        """Whether cos(f, f⁺) > cos(f′, f⁻) for each query, see `triplet_wins`; `(N,)` of 0 and 1."""
        ids, variant = list(cell.qrels), (query := self.queries(cell)).copy()
        if cell.variants is not None:
            view = cell.variants.view
            known = [id_ for id_, parts in cell.variants.parts.items() if view in (None, "sum") or view in parts]
            if known:
                variant[[ids.index(id_) for id_ in known]] = self.of(cell.variants, "query").vectors(known)
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
    """Evaluate an encoder on cells. Rows of one name are encoded once, and cells of one corpus search it together.

    Args:
        encoder: The model.
        cells: The cells.
        out: Folder: vectors go to `collections`, the first candidates of each query to `runs` and the judgements to
            `qrels` (TREC files).
        options: How.

    Raises:
        ValueError: An item cannot be read (it is named), or a collection in `out` was made with another model.
        FileNotFoundError: An image is missing.
    """
    options = options or EvaluateOptions()
    vectors = CellVectors(encoder, Path(out) / "collections", options)
    # the queries first: a model that does not take them says so before a large corpus is encoded
    shown = progress(cells, "cells", show=options.show_progress)
    queries = [penalise_hubs(vectors.queries(cell), options.hubness_penalty) for cell in shown]
    together: dict[tuple[Any, ...], list[int]] = {}
    for number, cell in enumerate(cells):
        if cell.qrels:
            together.setdefault((cell.corpus.folder, id(cell.candidates)), []).append(number)
    results = [SearchResult([], np.empty((0, 0), np.float32))] * len(cells)
    for numbers in together.values():
        found = vectors.search([cells[number] for number in numbers], [queries[number] for number in numbers])
        for number, result in zip(numbers, found, strict=True):
            results[number] = result
    return [_score(cell, result, vectors, Path(out)) for cell, result in zip(cells, results, strict=True)]


def penalise_hubs(queries: np.ndarray, weight: float) -> np.ndarray:
    """Return queries `(Q, D)`, normalised, whose scores rank as q·c − weight · mean over all queries q' of q'·c.

    Raises:
        ValueError: A query equals the penalty, so its difference has no direction.
    """
    if weight == 0:
        return queries
    moved = queries - weight * queries.mean(axis=0)
    norms = np.linalg.norm(moved, axis=1, keepdims=True)
    if not norms.all():
        raise ValueError(f"hubness_penalty={weight} leaves nothing of query {int(norms.argmin())}")
    return (moved / norms).astype(queries.dtype)


def _depth(cell: Cell, options: EvaluateOptions) -> int:
    """How many candidates to find: a tie that is longer holds more wrong ones than the last cut-off."""
    last = max(*options.ks, options.mrr or 1) + max(map(len, cell.qrels.values()))
    reranked = options.rerank_top if options.reranker is not None else 0
    return max(last, reranked, cell.run_depth, SHOWN_RESULTS) + max(map(len, cell.excluded.values()), default=0)


def _score(cell: Cell, results: SearchResult, vectors: CellVectors, out: Path) -> CellScores:
    """Rank the right candidates of each query among those found; write the run file."""
    options, ids = vectors.options, list(cell.qrels)
    if cell.excluded:
        named = zip(ids, results.ids, strict=True)
        is_excluded = [[name in cell.excluded.get(id_, ()) for name in names] for id_, names in named]
        results = results._replace(scores=np.where(is_excluded, -np.inf, results.scores))
    if options.reranker is not None and ids:
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


def _item(row: Mapping[str, Any], id_: str) -> Any:  # noqa: ANN401 - an item
    return row_item({part: row[part] for part in PARTS if row.get(part) is not None}, f"item {id_!r}")


def _seen(row: Mapping[str, Any], view: str | None) -> Mapping[str, Any] | None:
    """A row as a view shows it, its text without the marks of images; None if it lacks the part."""
    if view is None or row.get(view) is None:
        return row if view is None else None
    return {"id": row["id"], view: plain_text(row.get("image"), row["text"]) if view == "text" else row[view]}
