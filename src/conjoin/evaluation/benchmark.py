"""How a benchmark is evaluated: encode, search, rank and score its cells, and report them beside baselines.

A wrong candidate that ties with the best right one counts as better. The vectors of a corpus are stored in a
collection, so an interrupted evaluation resumes. A baseline scores the same cells with a part of each item, or with
another readout of the model.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import datasets
import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import gather_object

from conjoin.constants import Role
from conjoin.data.cells import row_kind
from conjoin.data.columns import undecoded
from conjoin.data.row_images import plain_text, row_item
from conjoin.evaluation.metrics import ranks_of_ids, tie_tolerance, triplet_wins
from conjoin.evaluation.readouts import HEADS, TOWERS, other_encoders
from conjoin.evaluation.report import average, metric_name, random_order, score_table
from conjoin.evaluation.results import (
    Example,
    Headline,
    Metric,
    Results,
    Score,
    Shown,
    ShownHit,
    Table,
    TableRow,
    score_ranks,
)
from conjoin.evaluation.sizes import has_one_gallery, size_tables
from conjoin.evaluation.tasks import Cell, Rows, Task, find_task
from conjoin.progress import progress
from conjoin.retrieval import Collection, ItemEncoder, Reranker, encode_collection, rerank, search_exactly
from conjoin.retrieval.results import Ranking
from conjoin.retrieval.vectors import subtract_centers

PARTS = ("image", "text")
CENTERED = "centered by kind"
"""Label of the baseline in which each vector lacks the mean of its kind, for galleries of several kinds."""
VIEWS = {"text alone": "text", "picture alone": "image", "sum of views": "sum"}
"""What a baseline sees of the items, by its label."""
MOST_ROWS = 10_000
"""Queries and candidates up to which baselines are scored unless they are asked for."""
MOST_PRINTED = 12
"""Rows of a table up to which it is printed, too."""
RUN_DEPTH = 100
"""Candidates of each query in a run file."""
SHOWN_RESULTS = 5
"""Results of an example in the report."""
_FIRST = 10
_EXAMPLES = 12
_ROWS_AT_ONCE = 1000
_BASELINES_NOTE = (
    "The same queries, candidates and judgements. Text alone, picture alone: only this part of each item is seen. Sum "
    "of views: the vectors of picture and text are added. Towers alone: without what was trained on top of them, the "
    "picture's global token and the mean of the text's tokens. With W: a picture or a text alone is projected by the "
    "heads of SOLAR's stage 1. Centered by kind: as `conjoin copy --center kind` does, vectors lack the mean of the "
    "gallery's rows of their kind. Where a baseline is better, use the baseline."
)


@dataclass(frozen=True)
class EvaluateOptions:
    """How cells are evaluated.

    Args:
        ks: Cut-offs of the hit rates.
        mrr: Ranks that the mean reciprocal rank counts; None leaves it out.
        seed: Of the bootstrap.
        show_progress: Show progress bars.
        hubness_penalty: Subtract this times a candidate's mean score over all queries of its cell, as the code of PUMA
            does with 0.2. It needs all test queries at once (transductive).
        reranker: Sorts the first candidates of each query again, in scores and run files.
        rerank_top: How many of them.
        baselines: Also score parts of the items, and the model's towers. None: if there are few rows.
        sizes: Also score shorter vectors and fewer bits, see `size_tables`.
        prompt: Of queries without an instruction, in place of the model's own prompt.
        prompt_name: The name of one of the model's prompts, likewise.
        processes: Of a launch, see `launched_processes`: they share the rows to encode, each returns all scores, and
            the first one writes the files.
    """

    ks: Sequence[int] = (1, 5, 10)
    mrr: int | None = 10
    seed: int = 0
    show_progress: bool = False
    hubness_penalty: float = 0.0
    reranker: Reranker | None = None
    rerank_top: int = 100
    baselines: bool | None = None
    sizes: bool = False
    prompt: str | None = None
    prompt_name: str | None = None
    processes: PartialState | None = None


class _Vectors:
    """Vectors `(N, D)` in memory, read as those of a `Collection`."""

    def __init__(self, ids: Sequence[str], matrix: np.ndarray) -> None:
        self.ids, self.matrix, self._index = ids, matrix, {id_: index for index, id_ in enumerate(ids)}

    def __len__(self) -> int:
        return len(self.ids)

    def batches(self) -> Iterator[np.ndarray]:
        yield self.matrix

    def vectors(self, ids: Sequence[str] | None = None) -> np.ndarray:
        return self.matrix if ids is None else self.matrix[[self._index[id_] for id_ in ids]]


def as_prompt(encoder: ItemEncoder, instruction: str | None) -> str | None:
    """The prompt that gives an encoder an instruction, with a space behind it, as UniIR joins it to a query."""
    return f"{instruction} " if instruction and not encoder.takes_messages else instruction


def plain_rows(rows: Rows) -> Iterable[Mapping[str, Any]]:
    """The rows, with images as files or bytes."""
    is_dataset = isinstance(rows.rows, datasets.Dataset | datasets.IterableDataset)
    return undecoded(rows.rows) if is_dataset else rows.rows


@dataclass(frozen=True)
class CellVectors:
    """The vectors of rows, each encoded once.

    Args:
        encoder: The model.
        folder: Of the collections.
        options: Prompts and progress bars.
        view: What the model sees of the rows: None for all; `"image"` or `"text"` for this part, of the rows that have
            it; `"sum"` adds the vectors of both parts; `"center"` is for `score_cell`. Those of views are not stored.
        encoded: The vectors by name of the rows; those of several views share it.
    """

    encoder: ItemEncoder
    folder: Path
    options: EvaluateOptions
    view: str | None = None
    encoded: dict[str, Collection | _Vectors] = field(default_factory=dict, repr=False)

    def of(self, rows: Rows, role: Role = "document") -> Collection | _Vectors:
        """Encode rows in their role, or return what was encoded before."""
        if self.view == "center":
            return replace(self, view=None).of(rows, role)
        instruction, prompt, name = rows.instruction, None, None
        if isinstance(instruction, str):
            prompt = as_prompt(self.encoder, instruction)
        elif role == "query":
            prompt, name = self.options.prompt, self.options.prompt_name
        if role == "query" and self.encoder.is_symmetric and instruction is prompt is name is None:
            role = "document"  # its vectors are the same
        folder = rows.folder if role == "document" else f"{rows.folder}-queries"
        key = f"{folder}, {self.view}"
        if key in self.encoded:
            return self.encoded[key]
        how: dict[str, Any] = {"role": role, "prompt_name": name}
        shows, processes = self.options.show_progress, self.options.processes
        found: Collection | _Vectors
        if self.view == "sum":
            total: dict[str, np.ndarray] = {}
            for part in PARTS:
                alone = replace(self, view=part).of(rows, role)
                for id_, vector in zip(alone.ids, alone.vectors(), strict=True):
                    total[id_] = total.get(id_, 0) + vector
            matrix = np.stack(list(total.values()))
            found = _Vectors(list(total), matrix / np.linalg.norm(matrix, axis=1, keepdims=True))
        elif self.view is None and (instruction is None or isinstance(instruction, str)):
            how |= {"prompt": prompt, "show_progress": shows, "processes": processes}
            found = encode_collection(rows.rows, self.encoder, self.folder / folder, sync=True, **how)
        else:
            seen, ids, matrices = self._seen(rows), list[str](), list[np.ndarray]()
            rank, count = (0, 1) if processes is None else (processes.process_index, processes.num_processes)
            share = slice(rank * _ROWS_AT_ONCE, (rank + 1) * _ROWS_AT_ONCE)
            while chunk := list(itertools.islice(seen, count * _ROWS_AT_ONCE)):
                ids += [id_ for id_, _, _ in chunk]
                own: list[np.ndarray] = []
                if chunk[share]:
                    names, items, instructions = map(list, zip(*chunk[share], strict=True))
                    prompts = [prompt if each is None else as_prompt(self.encoder, each) for each in instructions]
                    how |= {"prompt": prompts, "ids": names, "show_progress_bar": shows}
                    own = [self.encoder.encode(items, **how)]
                matrices += own if processes is None else gather_object(own)
            found = _Vectors(ids, np.concatenate(matrices) if matrices else np.empty((0, 1), np.float32))
        self.encoded[key] = found
        return found

    def _seen(self, rows: Rows) -> Iterator[tuple[str, Any, str | None]]:
        """The id of each row, what the view shows of it as an item, and its own instruction."""
        instruction = rows.instruction
        for number, row in enumerate(plain_rows(rows)):
            image, text = row.get("image"), row.get("text")
            if self.view == "image":
                text = None
            elif self.view == "text":
                image, text = None, None if text is None else plain_text(image, text)
            if self.view is not None and image is None and text is None:
                continue
            own = None if instruction is None or isinstance(instruction, str) else instruction[number]
            yield str(row["id"]), row_item({"image": image, "text": text}, f"item {row['id']!r}"), own


@dataclass(frozen=True)
class CellScores:
    """The ranks of the N scored queries of a cell.

    Args:
        cell: The cell.
        ids: Of the queries.
        sizes: `(N,)` how many candidates each query has.
        ranks: `(N,)` rank of the best right candidate, from 1; a number beyond all cut-offs if it was not found.
        results: The first candidates of each query.
        vectors: Of queries and corpus.
        wins: `(N,)` whether the right candidate is nearer than the negative, for a cell with `negatives`.
    """

    cell: Cell
    ids: list[str] = field(repr=False)
    sizes: np.ndarray = field(repr=False)
    ranks: np.ndarray
    results: Ranking = field(repr=False)
    vectors: CellVectors = field(repr=False)
    wins: np.ndarray | None = None

    def metrics(self, ids: Iterable[str] | None = None) -> dict[str, Metric]:
        """Hit rates and so on of all queries or of some, with intervals and chance; empty without queries."""
        position = {id_: position for position, id_ in enumerate(self.ids)}
        index = [position[id_] for id_ in (self.ids if ids is None else ids)]
        if not index:
            return {}
        options, ranks, sizes = self.vectors.options, self.ranks[index], self.sizes[index]
        wins = None if self.wins is None else self.wins[index]
        counts = [len(self.cell.qrels[self.ids[number]]) for number in index]
        metrics = score_ranks(ranks, counts, sizes, options.ks, options.mrr, options.seed, wins)
        return metrics if self.cell.published is None else {"published": metrics[self.cell.published]} | metrics

    def score(self) -> Score:
        """The scores of all queries."""
        return Score(self.cell.name, len(self.ids), int(self.sizes.max()), self.metrics(), dict(self.cell.labels))

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
            position = self.ids.index(id_)
            ranked = zip(self.results.ids[position], self.results.scores[position].tolist(), strict=False)
            found = [(name, score, name in cell.qrels[id_]) for name, score in ranked if np.isfinite(score)]
            # as in the ranks, a wrong candidate that ties with a right one comes first
            found.sort(key=lambda hit: hit[1] if hit[2] else hit[1] + tie_tolerance(torch.float32), reverse=True)
            hits = [ShownHit(show(name), score, is_right) for name, score, is_right in found[:SHOWN_RESULTS]]
            query = Shown.from_item(cell.queries.item(id_), f"query {id_}")
            rank = int(self.ranks[position]) if any(is_right for _, _, is_right in found) else None
            examples.append(Example(query, hits, rank, int(self.sizes[position]), title or f"{cell.name} · {id_}"))
        return examples


def evaluate(
    encoder: ItemEncoder,
    task: Task | str,
    out: str | Path,
    options: EvaluateOptions | None = None,
    **which: Any,  # noqa: ANN401 - of the task
) -> Results:
    """Evaluate an encoder on a benchmark; an interrupted evaluation resumes with the vectors that are on disk.

    Args:
        encoder: The model; its input type says how it takes items of several images.
        task: The benchmark, or the name of one.
        out: Folder to write to: vectors, and for some benchmarks run files and judgements.
        options: How to evaluate; the cut-offs are the benchmark's.
        which: The benchmark's own options, such as `data`, the folder or file of its data.

    Raises:
        FileNotFoundError: A file or an image is missing.
        ValueError: No such benchmark, data that cannot be read (the item is named), or a collection in `out` that was
            made with another model.
    """
    task = find_task(task) if isinstance(task, str) else task
    options = replace(options or EvaluateOptions(), ks=task.ks, mrr=task.mrr)
    chosen = task.options(**which)
    results = make_report(task, evaluate_cells(encoder, task.cells(chosen), out, options))
    results.model = {"name": encoder.name, "fingerprint": encoder.fingerprint}
    results.dataset = {name: value for name, value in vars(chosen).items() if isinstance(value, str | int | list)}
    results.config = {"hubness penalty": options.hubness_penalty}
    return results


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
        ValueError: There are no cells, or none for `sizes`; a cell has no queries, a query has no right candidate, an
            item cannot be read (it is named), or a collection in `out` was made with another model.
        FileNotFoundError: An image is missing.
    """
    options = options or EvaluateOptions()
    if not cells:
        raise ValueError("there are no cells to evaluate")
    if options.sizes and not any(map(has_one_gallery, cells)):
        raise ValueError("in no cell of this benchmark do all queries search the same candidates: leave out sizes")
    for cell in cells:
        if not cell.qrels:
            raise ValueError(f"{cell.name}: there are no queries")
        for id_, right in cell.qrels.items():
            if not right:
                raise ValueError(f"query {id_!r} of {cell.name}: none of the candidates is right")
    vectors = CellVectors(encoder, Path(out) / "collections", options)
    for cell in cells:  # a model that does not take the queries says so before a large corpus is encoded
        vectors.of(cell.queries, "query")
    scores = []
    for cell in progress(cells, "cells", show=options.show_progress):
        scores.append(score_cell(cell, vectors))
        if options.processes is None or options.processes.is_main_process:
            _write_run(cell, scores[-1].results, Path(out))
    return scores


def score_cell(cell: Cell, vectors: CellVectors) -> CellScores:
    """Search a cell, and rank the best right candidate of each query among those found."""
    options, ids, among = vectors.options, list(cell.qrels), cell.candidates
    corpus, queries = vectors.of(cell.corpus), vectors.of(cell.queries, "query").vectors(ids)
    if vectors.view == "center":
        corpus, queries = _center(cell, corpus, queries)
    asked = penalise_hubs(queries, options.hubness_penalty)
    if isinstance(among, Mapping):
        sizes = np.array([len(among[id_]) for id_ in ids])
        number = {id_: index for index, id_ in enumerate(corpus.ids)}
        matrix, rankings = corpus.vectors(), []
        for query, names in zip(asked, map(among.__getitem__, ids), strict=True):
            similarity = matrix[[number[name] for name in names]] @ query
            order = np.argsort(-similarity, kind="stable")
            rankings.append(([names[index] for index in order], similarity[order]))
        results = Ranking.join(rankings)
    else:
        sizes = np.full(len(ids), len(corpus) if among is None else len(among))
        # a tie that is longer holds more wrong candidates than the last cut-off
        last = max(*options.ks, options.mrr or 1) + max(map(len, cell.qrels.values()))
        reranked = options.rerank_top if options.reranker is not None else 0
        excluded = max(map(len, cell.excluded.values()), default=0)
        depth = max(last, reranked, RUN_DEPTH, SHOWN_RESULTS) + excluded
        results = search_exactly(corpus, asked, depth, ids=among, device=vectors.encoder.device)  # type: ignore[arg-type]
    if cell.excluded:
        sizes = sizes - [len(cell.excluded.get(id_, ())) for id_ in ids]
        named = zip(ids, results.ids, strict=True)
        is_excluded = [[name in cell.excluded.get(id_, ()) for name in names] for id_, names in named]
        results = results._replace(scores=np.where(is_excluded, -np.inf, results.scores))
    if options.reranker is not None:
        own = cell.queries.instruction
        by_query = None if own is None or isinstance(own, str) else own
        items, how = [cell.queries.item(id_) for id_ in ids], (options.rerank_top, by_query, options.show_progress)
        results = rerank(results, items, cell.corpus.item, options.reranker, *how)

    ranks, _ = ranks_of_ids(*results, cell.qrels.values())
    wins = None
    if cell.negatives:
        variants = queries.copy()
        if cell.variants is not None:
            changed = vectors.of(cell.variants, "query")
            variants[[ids.index(id_) for id_ in changed.ids]] = changed.vectors()
        positives = corpus.vectors([next(iter(cell.qrels[id_])) for id_ in ids])
        negatives = corpus.vectors([cell.negatives[id_] for id_ in ids])
        wins = triplet_wins(queries, positives, negatives, variants).double().numpy()
    return CellScores(cell, ids, sizes, ranks, results, vectors, wins)


def _center(cell: Cell, corpus: Collection | _Vectors, queries: np.ndarray) -> tuple[_Vectors, np.ndarray]:
    """The vectors of a corpus and of the scored queries, each less the mean of the corpus's rows of its kind."""
    own, asked = (
        {str(row["id"]): str(row_kind(row)) for row in plain_rows(rows)} for rows in (cell.corpus, cell.queries)
    )
    kinds, matrix = [own[id_] for id_ in corpus.ids], corpus.vectors()
    centers = _means(kinds, matrix)
    moved = subtract_centers(matrix, kinds, centers)
    return _Vectors(corpus.ids, moved), subtract_centers(queries, [asked[id_] for id_ in cell.qrels], centers)


def penalise_hubs(queries: np.ndarray, weight: float) -> np.ndarray:
    """Return queries `(Q, D)`, normalised, whose scores rank as q·c − weight · mean over all queries q' of q'·c."""
    if weight == 0:
        return queries
    moved = queries - weight * queries.mean(axis=0)
    return (moved / np.linalg.norm(moved, axis=1, keepdims=True)).astype(queries.dtype)


def _write_run(cell: Cell, results: Ranking, out: Path) -> None:
    """Write the first candidates of each query, and the right ones, as TREC's tools read them: `%20` is a space."""

    def word(id_: str) -> str:
        return "".join(quote(each) if each.isspace() else each for each in id_)

    run, qrels = [], []
    for id_, names, scores in zip(cell.qrels, results.ids, results.scores.tolist(), strict=True):
        ranked = [pair for pair in zip(names, scores, strict=False) if np.isfinite(pair[1])][:RUN_DEPTH]
        query, numbered = word(id_), enumerate(ranked, start=1)
        run += [f"{query} Q0 {word(name)} {rank} {score!r} conjoin\n" for rank, (name, score) in numbered]
        qrels += [f"{query} 0 {word(name)} 1\n" for name in sorted(cell.qrels[id_])]
    for folder, lines in (("runs", run), ("qrels", qrels)):
        path = out / folder / f"{cell.name}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(lines), encoding="utf-8")


def make_report(task: Task, scores: Sequence[CellScores]) -> Results:
    """The scores of the cells of a benchmark as tables, headlines, baselines and examples."""
    results = Results(task.title, task.summary, scores[0].vectors.options.seed, benchmark=task.name)
    sections: dict[str, list[Score]] = {}
    for each in scores:
        results.add_ranks(each.cell.name, each.ids, each.ranks, each.results.scores.shape[1], each.wins)
        sections.setdefault(each.cell.section, []).append(each.score())
    for title, rows in sections.items():
        results.scores += rows
        averages = task.averages and len(rows) > 1
        results.tables.append(score_table(title, rows, task.by, averages))
        for score in [average(f"average, {title.partition(':')[0]}", rows)] if averages else rows:
            detail = f"{len(rows)} cells" if averages else f"{score.queries:,} queries"
            for name in [name for name in task.headline if name in score.metrics]:
                results.headline.append(Headline(f"{score.name}, {metric_name(name)}", score.metrics[name], detail))
    for kind in dict.fromkeys(kind for each in scores for kind in each.cell.groups):
        groups = []
        for each in scores:
            for name, ids in each.cell.groups.get(kind, {}).items():
                labels = {"kind": name.partition(":")[0]} if ":" in name else {}
                name = f"{each.cell.name}, {name}" if len(scores) > 1 else name
                groups.append(Score(name, len(ids), 0, each.metrics(ids), labels))
        results.tables.append(score_table(f"By {kind}", groups, "kind"))
    results.tables += [*kinds_tables(scores), *task.tables(scores)]
    if (table := baseline_table(scores)) is not None:
        results.tables.append(table)
    if (options := scores[0].vectors.options).sizes:
        table, curve = size_tables(scores, _FIRST if _FIRST in options.ks else max(options.ks))
        results.tables.append(table)
        results.curves.append(curve)
    count = min(3, max(1, _EXAMPLES // len(scores)))
    for each in scores:
        shown = dict.fromkeys([*each.sample(count), *each.sample(count, missed=True)])
        results.examples += each.examples(list(shown))
    results.examples_note = "Queries evenly spaced in the data, then queries whose first result is wrong."
    return results


def kinds_tables(scores: Sequence[CellScores]) -> list[Table]:
    """In galleries of several kinds (image, text or both): those that queries find first, and how far they lie apart.

    Returns:
        A table of the kinds of the first results of each cell, and one of the means of kinds; nothing without such
        galleries.
    """
    found: list[tuple[CellScores, list[list[str]]]] = []
    gaps: dict[str, list[TableRow]] = {}
    for each in scores:
        corpus = each.cell.corpus
        if corpus.lookup is None and not isinstance(corpus.rows, Sized):
            continue  # a stream, which is not read for each result

        def kinds(ids: Iterable[str], corpus: Rows = corpus) -> list[str]:
            return [str(row_kind(corpus.row(id_))) for id_ in ids]

        ranked = [kinds(ids[:_FIRST]) for ids in each.results.ids if ids]
        right = kinds(id_ for ids in each.cell.qrels.values() for id_ in ids)
        shown = [[names[0] for names in ranked], [*itertools.chain(*ranked)], right]
        if len({*shown[0], *right}) < 2:
            continue
        found.append((each, shown))
        if corpus.name not in gaps:
            vectors = each.vectors.of(corpus)
            ids = vectors.ids[:: -(-len(vectors) // MOST_ROWS)]
            gaps[corpus.name] = _gap_rows(corpus.name, kinds(ids), vectors.vectors(ids))
    if not found:
        return []
    names = [name for name in (*PARTS, "both") if any(name in seen for _, shown in found for seen in shown)]
    rows: list[TableRow] = [
        [each.cell.name, *(Metric(seen.count(name) / len(seen)) for name in names for seen in shown)]
        for each, shown in found
    ]
    columns = ["", *(column for name in names for column in (name, f"of {_FIRST}", "(right)"))]
    note = f"The share of each kind among the first results, the first {_FIRST}, and the right answers, in %."
    apart = (
        "The distance between the means of two kinds of rows, and their cosine: 0 and 1 if there is no modality gap. "
        f"Where the baseline {CENTERED!r} is better, `conjoin copy --center kind` makes a collection without it."
    )
    return [
        Table("Kinds found", columns, rows, note, len(rows) > MOST_PRINTED),
        Table("Gap between kinds", ["", "kinds", "distance", "cosine"], [*itertools.chain(*gaps.values())], apart),
    ]


def _means(kinds: Sequence[str], vectors: np.ndarray) -> dict[str, np.ndarray]:
    """The mean `(D,)` of the vectors of each kind that rows have."""
    of = np.array(kinds)
    return {kind: vectors[of == kind].mean(axis=0, dtype=np.float64) for kind in (*PARTS, "both") if kind in kinds}


def _gap_rows(name: str, kinds: Sequence[str], vectors: np.ndarray) -> list[TableRow]:
    """For each two kinds of rows, how far the means of their vectors lie apart."""
    rows: list[TableRow] = []
    for (one, first), (other, second) in itertools.combinations(_means(kinds, vectors).items(), 2):
        cosine = first @ second / (np.linalg.norm(first) * np.linalg.norm(second))
        distance = np.linalg.norm(first - second)
        rows.append([name, f"{one} – {other}", round(float(distance), 3), round(float(cosine), 3)])
    return rows


def baseline_table(scores: Sequence[CellScores]) -> Table | None:
    """Score the baselines of each cell that has any; None if no cell has.

    Args:
        scores: Of the model. With `EvaluateOptions.baselines` false, or None and many rows, nothing is scored.
    """
    vectors = scores[0].vectors
    options = replace(vectors.options, reranker=None)
    if not (sum(map(len, vectors.encoded.values())) <= MOST_ROWS if options.baselines is None else options.baselines):
        return None
    views = VIEWS | {CENTERED: "center"}
    runs = {label: replace(vectors, options=options, view=view) for label, view in views.items()}
    for label, encoder in other_encoders(vectors.encoder).items():
        folder = vectors.folder.parent / label.replace(" ", "-") / "collections"
        runs[label] = CellVectors(encoder, folder, options)
    compared: list[Score] = []
    for each in scores:
        own, labels = each.score(), _baselines_of(each.cell)
        found = [(label, score_cell(each.cell, run).score()) for label, run in runs.items() if label in labels]
        if found:
            compared.append(replace(own, labels={"": "this model"}))
            compared += [replace(score, labels={"": label}) for label, score in found]
            compared.append(random_order(own, {"": "random order"}))
    table = score_table("Baselines", compared, note=_BASELINES_NOTE)
    return replace(table, report_only=len(compared) > MOST_PRINTED) if compared else None


def _baselines_of(cell: Cell) -> set[str]:
    """The labels of the baselines that can find the answers of all queries of a cell."""
    queries, corpus = (
        {str(row["id"]): {part for part in PARTS if row.get(part) is not None} for row in plain_rows(rows)}
        for rows in (cell.queries, cell.corpus)
    )
    is_mixed, labels = False, {*VIEWS, TOWERS, HEADS}
    for id_, right in cell.qrels.items():
        own = queries[id_] & corpus.get(cell.negatives.get(id_, ""), queries[id_])
        shared = {part for part in own if any(part in corpus[name] for name in right)}
        labels -= {label for label, part in VIEWS.items() if part in PARTS and part not in shared}
        labels -= set() if shared else {TOWERS}
        is_mixed |= any(len(parts) > 1 for parts in (own, *(corpus[name] for name in right)))
    labels = labels if is_mixed else labels - VIEWS.keys()  # else there is nothing to hide
    pool = corpus if cell.candidates is None else cell.candidates
    kinds = Counter(frozenset(corpus[name]) for name in pool)
    can_center = (
        not (isinstance(cell.candidates, Mapping) or cell.negatives) and len(kinds) > 1 and min(kinds.values()) > 1
    )
    return labels | (
        {CENTERED} if can_center and all(frozenset(queries[id_]) in kinds for id_ in cell.qrels) else set()
    )
