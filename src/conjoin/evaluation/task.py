"""Retrieval tasks, and the loop that evaluates all of them: encode, search, rank, score.

A benchmark is a list of `RetrievalTask` and a table of their scores. A wrong candidate that ties with the best right
one counts as better. Vectors are stored in collections, so an interrupted evaluation resumes.
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
from conjoin.evaluation.metrics import rank_of_relevant, tie_tolerance
from conjoin.evaluation.results import Example, Hit, Metric, Shown, score_ranks, write_qrels, write_run
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
from conjoin.storage import checksummed_path
from conjoin.storage.fingerprints import text_digest

Part = Literal["image", "text"]
PARTS: tuple[Part, ...] = ("image", "text")
View = Literal["text", "image", "sum"]
"""What is seen of each item: one of its parts; or both by themselves, whose vectors are added."""
_SHOWN_RESULTS = 5
_MOST_RANKED = 100_000
"""Candidates up to which the rank of an example is looked up beyond the results."""


@dataclass(frozen=True)
class Rows:
    """Rows that are encoded together: queries, or a part of a corpus.

    Args:
        name: Of the rows and of their collection. In one evaluation, equal names mean equal rows.
        rows: Rows for `encode_collection`, with an id each, that can be read several times.
        instruction: Of the task: for all rows; or one for each row, and then the vectors are not stored. None for the
            model's own prompt.
        lookup: Returns the row of an id; None finds it in `rows`.
        view: What is seen of each row; None for all of it. Rows without the part are skipped.
    """

    name: str
    rows: Iterable[Mapping[str, Any]] = field(repr=False)
    instruction: str | Sequence[str | None] | None = None
    lookup: Any = None
    view: View | None = None

    @property
    def folder(self) -> str:
        """Name of the collection."""
        digest = text_digest(self.instruction)[:8] if isinstance(self.instruction, str) else None
        return "-".join(part for part in (self.name, self.view, digest) if part)

    @cached_property
    def _by_id(self) -> dict[str, Any]:
        if isinstance(self.rows, datasets.Dataset):
            return {str(id_): index for index, id_ in enumerate(self.rows["id"][:])}
        return {row["id"]: row for row in self.rows}

    def row(self, id_: str) -> Mapping[str, Any]:
        """The row of an id, in full."""
        if self.lookup is not None:
            return self.lookup(id_)
        return self.rows[self._by_id[id_]] if isinstance(self.rows, datasets.Dataset) else self._by_id[id_]

    def item(self, id_: str) -> Any:  # noqa: ANN401 - an item
        """The row of an id as an item."""
        return _item(self.row(id_), id_)

    @cached_property
    def parts(self) -> dict[str, set[Part]]:
        """The parts that each row has, by id."""
        return {str(row["id"]): {part for part in PARTS if row.get(part) is not None} for row in self._undecoded()}

    def _undecoded(self) -> Iterable[Mapping[str, Any]]:
        is_dataset = isinstance(self.rows, datasets.Dataset | datasets.IterableDataset)
        return undecoded(self.rows) if is_dataset else self.rows

    def seen(self) -> Iterable[Mapping[str, Any]]:
        """The rows as `view` shows them, without those that lack the part."""
        if self.view is None:
            return self.rows
        return (_part(row, self.view) for row in self._undecoded() if row.get(self.view) is not None)

    def __len__(self) -> int:
        return len(self.rows)  # type: ignore[arg-type]


@dataclass(frozen=True)
class RetrievalTask:
    """Queries that search a corpus for the candidates that are right for them.

    Args:
        name: Of the task and of its run file.
        queries: The queries.
        corpus: What they search. Ids are unique over all parts.
        qrels: By id of a query the ids of the right candidates, at least one. Queries without an entry are not scored.
        candidates: Ids of the corpus: only these are searched. None: all.
        excluded: By id of a query the ids of candidates that are left out of its ranking.
        groups: Subsets of the queries: by kind (`"language"`) and name (`"th"`) the ids of queries.
        run_depth: Candidates of each query in the run file `runs/NAME.txt`; 0 writes none. Ids are one word then.
    """

    name: str
    queries: Rows
    corpus: tuple[Rows, ...]
    qrels: Mapping[str, Ids[str]] = field(repr=False)
    candidates: Ids[str] | None = field(default=None, repr=False)
    excluded: Mapping[str, Ids[str]] = field(default_factory=dict, repr=False)
    groups: Mapping[str, Mapping[str, Sequence[str]]] = field(default_factory=dict, repr=False)
    run_depth: int = 0

    @property
    def size(self) -> int:
        """Number of candidates of each query, `excluded` included."""
        return sum(map(len, self.corpus)) if self.candidates is None else len(self.candidates)

    def seen_as(self, view: View) -> "RetrievalTask":
        """The same task where only a part of each query and candidate is seen."""
        corpus = tuple(replace(rows, view=view) for rows in self.corpus)
        return replace(self, queries=replace(self.queries, view=view), corpus=corpus, run_depth=0)

    def candidate(self, id_: str) -> Any:  # noqa: ANN401 - an item
        """The candidate of an id as an item."""
        for rows in self.corpus[:-1]:
            try:
                return rows.item(id_)
            except KeyError:
                continue
        return self.corpus[-1].item(id_)


@dataclass(frozen=True)
class EvaluateOptions:
    """How tasks are evaluated.

    Args:
        ks: Cut-offs of the hit rates.
        mrr: Ranks that the mean reciprocal rank counts; None leaves it out.
        dtype: Of stored vectors, as for `encode_collection`.
        seed: Of the bootstrap.
        resamples: Of the bootstrap.
        show_progress: Show progress bars.
        hubness_penalty: Subtract this times a candidate's mean score over all queries of its task.
        reranker: Sorts the first candidates of each query again, in scores and run files.
        rerank_top: How many of them.
        baselines: Also score parts of the items, and the model's towers: see `baseline_table`. None: if the corpora
            are small.
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
    baselines: bool | None = False
    prompt: str | None = None
    prompt_name: str | None = None


class _Vectors:
    """Vectors `(N, D)` in memory, read as those of a `Collection`."""

    def __init__(self, ids: Sequence[str], matrix: np.ndarray) -> None:
        self.matrix, self._index = matrix, {id_: index for index, id_ in enumerate(ids)}

    def __len__(self) -> int:
        return len(self.matrix)

    def batches(self) -> Iterator[tuple[pa.Array, np.ndarray]]:
        yield pa.array(list(self._index), pa.string()), self.matrix

    def vectors(self, ids: Sequence[str]) -> np.ndarray:
        return self.matrix[[self._index[id_] for id_ in ids]]


class _Corpus:
    """The vectors of several rows, searched as one collection."""

    def __init__(self, parts: Sequence[Collection | _Vectors], uri: str) -> None:
        self.parts, self.uri = parts, uri

    @cached_property
    def ids(self) -> list[str]:
        return [id_ for ids, _ in self.batches() for id_ in ids.to_pylist()]

    def batches(self) -> Iterator[tuple[pa.Array, np.ndarray]]:
        for part in self.parts:
            yield from part.batches()


def as_prompt(encoder: ItemEncoder, instruction: str | None) -> str | None:
    """The prompt that gives an encoder an instruction: models of other libraries read it before the text as it is."""
    return f"{instruction} " if instruction and isinstance(encoder.processor, DescribedProcessor) else instruction


class TaskVectors:
    """The vectors of rows, each encoded once.

    Args:
        encoder: The model.
        folder: Of the collections.
        options: Type of the stored vectors, and progress bars.
    """

    def __init__(self, encoder: ItemEncoder, folder: Path, options: EvaluateOptions) -> None:
        self.encoder, self.folder, self.options = encoder, folder, options
        self._encoded: dict[str, Collection | _Vectors] = {}

    def of(self, rows: Rows, role: Role = "document") -> Collection | _Vectors:
        """Encode rows in their role, or return what was encoded before."""
        how = self._how(rows, role)
        encodes_alike = self.encoder.is_symmetric and set(how) == {"role"}
        folder = rows.folder if role == "document" or encodes_alike else f"{rows.folder}-queries"
        if folder not in self._encoded:
            self._encoded[folder] = self._encode(
                rows, folder, how if folder != rows.folder else how | {"role": "document"}
            )
        return self._encoded[folder]

    def _how(self, rows: Rows, role: Role) -> dict[str, Any]:
        """How rows are encoded: their instruction as the prompt; else that of the options, for queries."""
        prompt, name = (self.options.prompt, self.options.prompt_name) if role == "query" else (None, None)
        if isinstance(rows.instruction, str):
            return {"role": role, "prompt": as_prompt(self.encoder, rows.instruction)}
        if rows.instruction is not None:
            given = [as_prompt(self.encoder, each) for each in rows.instruction]
            return {"role": role, "prompt": [prompt if each is None else each for each in given], "prompt_name": name}
        how = {"role": role, "prompt": prompt, "prompt_name": name}
        return {name: value for name, value in how.items() if value is not None}

    def _encode(self, rows: Rows, folder: str, how: dict[str, Any]) -> Collection | _Vectors:
        show = self.options.show_progress
        if rows.view == "sum":
            return self._sum(rows, how["role"])
        if rows.instruction is not None and not isinstance(rows.instruction, str):
            named = zip(rows.rows, how["prompt"], strict=True)
            shown = [pair for pair in named if rows.view is None or pair[0].get(rows.view) is not None]
            ids = [row["id"] for row, _ in shown]
            items = [_item(_part(row, rows.view) if rows.view else row, row["id"]) for row, _ in shown]
            prompts = [prompt for _, prompt in shown]
            return _Vectors(ids, self.encoder.encode(items, ids, show, **how | {"prompt": prompts}))
        options: dict[str, Any] = {**how, "dtype": self.options.dtype, "show_progress": show}
        return encode_collection(rows.seen(), self.encoder, self.folder / folder, sync=True, **options)

    def _sum(self, rows: Rows, role: Role) -> _Vectors:
        """Add the vectors of the parts of each row, L2-normalised."""
        total: dict[str, np.ndarray] = {}
        for part in sorted(set[Part]().union(*rows.parts.values())):
            for ids, vectors in self.of(replace(rows, view=part), role).batches():
                for id_, vector in zip(ids.to_pylist(), vectors.astype(np.float32), strict=True):
                    total[id_] = total.get(id_, 0) + vector
        matrix = np.stack(list(total.values()))
        return _Vectors(list(total), matrix / np.linalg.norm(matrix, axis=1, keepdims=True))

    def corpus(self, task: RetrievalTask) -> _Corpus:
        """What a task searches."""
        return _Corpus([self.of(rows) for rows in task.corpus], task.name)

    def queries(self, task: RetrievalTask) -> np.ndarray:
        """The vectors `(N, D)` of the queries that are scored."""
        vectors = np.asarray(self.of(task.queries, "query").vectors(list(task.qrels)), dtype=np.float32)
        return penalise_hubs(vectors, self.options.hubness_penalty)


@dataclass(frozen=True)
class TaskScores:
    """The ranks of the N scored queries of a task.

    Args:
        task: The task.
        ranks: `(N,)` rank of the best right candidate, from 1; the number of candidates if it was not found.
        results: The first candidates of each query.
        vectors: Of queries and corpus.
    """

    task: RetrievalTask
    ranks: np.ndarray
    results: SearchResult = field(repr=False)
    vectors: TaskVectors = field(repr=False)

    @cached_property
    def ids(self) -> list[str]:
        """The ids of the queries."""
        return list(self.task.qrels)

    def metrics(self, ids: Iterable[str] | None = None) -> dict[str, Metric]:
        """Hit rates and MRR of all queries or of some, with intervals and chance; empty without queries."""
        index = [self._position[id_] for id_ in (self.ids if ids is None else ids)]
        if not index:
            return {}
        counts = np.array([len(self.task.qrels[self.ids[position]]) for position in index])
        options = self.vectors.options
        how: dict[str, Any] = {"resamples": options.resamples, "seed": options.seed}
        return score_ranks(self.ranks[index], counts, self.task.size, options.ks, options.mrr, **how)

    @cached_property
    def _position(self) -> dict[str, int]:
        return {id_: position for position, id_ in enumerate(self.ids)}

    def spread(self, count: int, missed: bool = False) -> list[str]:
        """The ids of some queries, evenly spaced; of those whose first candidate is wrong if `missed`."""
        ids = [id_ for id_, rank in zip(self.ids, self.ranks, strict=True) if not missed or rank > 1]
        count = min(count, len(ids))
        return [ids[number * len(ids) // count] for number in range(count)]

    def examples(
        self, ids: Sequence[str], title: str | None = None, show: Callable[[str], Shown] | None = None
    ) -> list[Example]:
        """The searches of some queries, with their first results and the rank among all candidates.

        Args:
            ids: Of the queries.
            title: Of each; None for the names of the task and the query.
            show: How a candidate is shown; None for what is encoded.
        """
        task, examples = self.task, []
        show = show or (lambda name: Shown.from_item(task.candidate(name), f"candidate {name}"))
        for id_ in ids:
            position = self._position[id_]
            ranked = zip(self.results.ids[position], self.results.scores[position].tolist(), strict=False)
            found = [(name, score, name in task.qrels[id_]) for name, score in ranked if np.isfinite(score)]
            # as in the ranks, a wrong candidate that ties with a right one comes first
            found.sort(key=lambda hit: hit[1] if hit[2] else hit[1] + tie_tolerance(torch.float32), reverse=True)
            hits = [Hit(show(name), score, is_right) for name, score, is_right in found[:_SHOWN_RESULTS]]
            query = Shown.from_item(task.queries.item(id_), f"query {id_}")
            is_found = not set(task.qrels[id_]).isdisjoint(self.results.ids[position])
            rank = int(self.ranks[position]) if is_found else self._rank_among_all(position)
            examples.append(Example(query, hits, rank, task.size, title or f"{task.name} · {id_}"))
        return examples

    def _rank_among_all(self, position: int) -> int | None:
        """The rank of the best right candidate of one query; None if there are many candidates."""
        task, id_ = self.task, self.ids[position]
        if sum(map(len, task.corpus)) > _MOST_RANKED:
            return None
        corpus, query = self.vectors.corpus(task), self._queries[position : position + 1]
        found = search_exactly(corpus, query, task.size, ids=task.candidates, device=self.vectors.encoder.device)  # type: ignore[arg-type]
        excluded = set(task.excluded.get(id_, ()))
        ranked = zip(found.ids[0], found.scores[0].tolist(), strict=True)
        kept = [(score, name in task.qrels[id_]) for name, score in ranked if name not in excluded]
        if not any(is_right for _, is_right in kept):
            return task.size
        scores, relevant = (torch.tensor([column]) for column in zip(*kept, strict=True))
        return int(rank_of_relevant(scores, relevant, tie_tolerance(torch.float32)))

    @cached_property
    def _queries(self) -> np.ndarray:
        return self.vectors.queries(self.task)


def evaluate_task(
    encoder: ItemEncoder, task: RetrievalTask, out: str | Path, options: EvaluateOptions | None = None
) -> TaskScores:
    """Evaluate an encoder on one task; as `evaluate_tasks`."""
    return evaluate_tasks(encoder, [task], out, options)[0]


def evaluate_tasks(
    encoder: ItemEncoder, tasks: Sequence[RetrievalTask], out: str | Path, options: EvaluateOptions | None = None
) -> list[TaskScores]:
    """Evaluate an encoder on tasks. Rows of one name are encoded once, and tasks on one corpus search it together.

    Args:
        encoder: The model.
        tasks: The tasks.
        out: Folder: vectors go to `collections`, the first candidates of each query to `runs` and the judgements to
            `qrels` (TREC files).
        options: How.

    Raises:
        ValueError: An item cannot be read (it is named), or a collection in `out` was made with another model.
        FileNotFoundError: An image is missing.
    """
    options = options or EvaluateOptions()
    vectors = TaskVectors(encoder, Path(out) / "collections", options)
    # the queries first: a model that does not take them says so before a large corpus is encoded
    queries = [vectors.queries(task) for task in progress(tasks, "tasks", show=options.show_progress)]
    groups: dict[tuple[Any, ...], list[int]] = {}
    for number, task in enumerate(tasks):
        if task.qrels:
            groups.setdefault((*(rows.folder for rows in task.corpus), id(task.candidates)), []).append(number)
    results: dict[int, SearchResult] = {}
    for numbers in groups.values():
        members = [tasks[number] for number in numbers]
        corpus, together = vectors.corpus(members[0]), np.concatenate([queries[number] for number in numbers])
        depth, device = max(_depth(task, options) for task in members), encoder.device
        result = search_exactly(corpus, together, depth, ids=members[0].candidates, device=device)  # type: ignore[arg-type]
        ends = np.cumsum([len(queries[number]) for number in numbers]).tolist()
        for number, end in zip(numbers, ends, strict=True):
            rows = slice(end - len(queries[number]), end)
            results[number] = SearchResult(result.ids[rows], result.scores[rows])
    nothing = SearchResult([], np.empty((0, 0), np.float32))
    return [_score(task, results.get(number, nothing), vectors, Path(out)) for number, task in enumerate(tasks)]


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


def _depth(task: RetrievalTask, options: EvaluateOptions) -> int:
    """How many candidates to find: a tie that is longer holds more wrong ones than the last cut-off."""
    last = max(*options.ks, options.mrr or 1) + max(map(len, task.qrels.values()))
    reranked = options.rerank_top if options.reranker is not None else 0
    return max(last, reranked, task.run_depth, _SHOWN_RESULTS) + max(map(len, task.excluded.values()), default=0)


def _score(task: RetrievalTask, results: SearchResult, vectors: TaskVectors, out: Path) -> TaskScores:
    """Rank the right candidates of each query among those found; write the run file."""
    options, ids = vectors.options, list(task.qrels)
    if task.excluded:
        is_excluded = [
            [name in task.excluded.get(id_, ()) for name in names] for id_, names in zip(ids, results.ids, strict=True)
        ]
        results = results._replace(scores=np.where(is_excluded, -np.inf, results.scores))
    if options.reranker is not None and ids:
        instructions = task.queries.instruction
        by_query = None if instructions is None or isinstance(instructions, str) else instructions
        items = [task.queries.item(id_) for id_ in ids]
        top, show = options.rerank_top, options.show_progress
        results = rerank(results, items, task.candidate, options.reranker, top, by_query, show)
    ranks = torch.full((len(ids),), task.size)
    if ids:
        relevant = torch.tensor(
            [[name in task.qrels[id_] for name in names] for id_, names in zip(ids, results.ids, strict=True)]
        )
        hit, scores = relevant.any(dim=1), torch.from_numpy(results.scores)
        if hit.any():
            ranks[hit] = rank_of_relevant(scores[hit], relevant[hit], tie_tolerance(torch.float32))
    if task.run_depth:
        _write_run(task, results, out)
    return TaskScores(task, ranks.numpy(), results, vectors)


def _write_run(task: RetrievalTask, results: SearchResult, out: Path) -> None:
    """Write the first candidates of each query, and the right ones."""
    run, qrels = (out / folder / f"{task.name}.txt" for folder in ("runs", "qrels"))
    for path in (run, qrels):
        path.parent.mkdir(parents=True, exist_ok=True)
    rankings = {
        id_: [pair for pair in zip(names, scores, strict=True) if np.isfinite(pair[1])][: task.run_depth]
        for id_, names, scores in zip(task.qrels, results.ids, results.scores.tolist(), strict=True)
    }
    with checksummed_path(run) as temporary:
        write_run(temporary, rankings, "conjoin")
    with checksummed_path(qrels) as temporary:
        write_qrels(temporary, {id_: dict.fromkeys(sorted(right), 1) for id_, right in task.qrels.items()})


def _item(row: Mapping[str, Any], id_: str) -> Any:  # noqa: ANN401 - an item
    return row_item({part: row[part] for part in PARTS if row.get(part) is not None}, f"item {id_!r}")


def _part(row: Mapping[str, Any], part: str) -> dict[str, Any]:
    """One part of a row; a text without the marks of images."""
    value = plain_text(row.get("image"), row["text"]) if part == "text" else row[part]
    return {"id": row["id"], part: value}
