"""M-BEIR: 16 cells of dataset and task, each against its own pool (local) and against the pool of all cells (global).

"Recall@k" in the published tables is a hit rate: any right candidate among the first k. Its k is 5, or 10 for
Fashion200K and FashionIQ. A wrong candidate that ties with the best right one counts as better.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from conjoin.data import MbeirCandidates, MbeirCell, find_cells, mbeir_queries
from conjoin.data.mbeir.layout import pool_file, qrels_file, required
from conjoin.evaluation.metrics import chance_hit_rate
from conjoin.evaluation.ranking import rank_of_relevant, tie_tolerance
from conjoin.evaluation.results import Metric
from conjoin.evaluation.run_file import read_qrels, write_run
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

from .report import MBEIR_SETTINGS, MbeirScore


class _Questions(NamedTuple):
    """A cell that is read: its queries, their right candidates, its local pool."""

    cell: MbeirCell
    rows: list[dict[str, Any]]
    relevant: dict[str, set[str]]
    pool: MbeirCandidates

    @property
    def qids(self) -> list[str]:
        return [row["id"] for row in self.rows]


def evaluate_mbeir(
    encoder: ItemEncoder,
    data: str | Path,
    out: str | Path,
    *,
    cells: Sequence[str] | None = None,
    settings: Sequence[str] = MBEIR_SETTINGS,
    split: str = "test",
    instructions: bool = True,
    hubness_penalty: float = 0.0,
    ks: Sequence[int] = (1, 5, 10, 50),
    dtype: Literal["float32", "float16"] = "float32",
    seed: int = 0,
    show_progress: bool = True,
    reranker: Reranker | None = None,
    rerank_top: int = 100,
) -> list[MbeirScore]:
    """Evaluate an encoder on M-BEIR; an interrupted evaluation resumes with the vectors that are on disk.

    The global pool is encoded once and also serves the local settings. Without the global setting, each local pool is
    encoded on its own. Vectors go to `out/collections`, the first candidates of every query to `out/runs` (TREC run
    files).
    Files, ids and judgements are checked before anything is encoded. An image is opened when it is encoded.

    Args:
        encoder: The model.
        data: The root of M-BEIR, or of the miniature that `make_mini_mbeir` writes.
        out: Folder to write to.
        cells: Names such as `"visualnews_task0"`; all 16 when None.
        settings: Of `MBEIR_SETTINGS`.
        split: `"test"` or `"val"`.
        instructions: Whether queries have an instruction. A query has the same one in every evaluation.
        hubness_penalty: Subtract this times a candidate's mean score over all queries of the cell. PUMA's evaluation
            code uses 0.2. It needs all test queries at once (transductive), so the default is 0.
        ks: Cut-offs; 5 and 10 are added.
        dtype: Of the stored vectors, as in `encode_collection`.
        seed: Of the bootstrap.
        show_progress: Show progress bars.
        reranker: Sorts the first candidates of each query again, in scores and run files.
        rerank_top: How many of them.

    Returns:
        One score per cell and setting, in the order of the published table.

    Raises:
        FileNotFoundError: A file or an image is missing.
        ValueError: An unknown cell or setting or none, a cut-off below 1, a malformed row (it is named), or a query
            without a right candidate in a pool.
    """
    unknown = [setting for setting in settings if setting not in MBEIR_SETTINGS]
    if unknown or not settings:
        raise ValueError(f"unknown settings {unknown}; expected some of {list(MBEIR_SETTINGS)}")
    if min(ks, default=1) < 1:
        raise ValueError(f"ks={tuple(ks)}: cut-offs must be at least 1")
    chosen, data, out = find_cells(cells), Path(data), Path(out)
    if not data.is_dir():
        raise FileNotFoundError(f"M-BEIR: no such folder: {str(data)!r}")
    union = MbeirCandidates(data, required(pool_file(data, None, split))) if "global" in settings else None
    asked = [_load_cell(data, cell, split, instructions, settings, union) for cell in chosen]
    encode = partial(_encode_pool, encoder, out / "collections", dtype, show_progress)
    whole = None if union is None else encode(union)
    shown = progress(asked, desc="cells", unit="cell", show=show_progress)
    queries = [penalise_hubs(_encode_queries(encoder, q.rows, show_progress), hubness_penalty) for q in shown]
    listed = max(5, 10, *ks) + 1
    most_right = max(len(answers) for questions in asked for answers in questions.relevant.values())
    # a tie longer than this holds more wrong candidates than the last cut-off
    depth = listed - 1 + most_right if reranker is None else max(rerank_top, listed - 1 + most_right)
    search = partial(search_exactly, k=depth, device=encoder.device)
    scores = []
    for setting in settings:
        if whole is None:
            results = [search(encode(q.pool), own) for q, own in zip(asked, queries, strict=True)]
        elif setting == "global":
            results = _split(search(whole, np.concatenate(queries)), queries)
        else:
            results = [search(whole, own, ids=q.pool.ids) for q, own in zip(asked, queries, strict=True)]
        for questions, found in zip(asked, results, strict=True):
            pool = questions.pool if setting == "local" or union is None else union
            if reranker is not None:
                found = _reranked(found, questions, pool, reranker, rerank_top, show_progress)
            _write_run(out / "runs" / setting / f"{questions.cell.name}.txt", questions.qids, found, listed)
            metrics = _score(found, questions, pool, sorted({5, 10, *ks}), seed)
            scores.append(MbeirScore(questions.cell, setting, len(questions.rows), len(pool), metrics))
    return scores


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


def _load_cell(
    data: Path, cell: MbeirCell, split: str, instructions: bool, settings: Sequence[str], union: MbeirCandidates | None
) -> _Questions:
    """Read a cell and check that its pools hold a right candidate for each of its queries."""
    rows = mbeir_queries(data, cell, split, instructions)
    judged = read_qrels(required(qrels_file(data, cell, split)))
    pool = MbeirCandidates(data, required(pool_file(data, cell, split)))
    pools = {"local": pool, "global": union}
    relevant = {}
    for row in rows:
        answers = set(judged.get(row["id"], ()))
        for setting in settings:
            held = pools[setting]
            if held is not None and not any(did in held for did in answers):
                raise ValueError(
                    f"query {row['id']!r} of {cell.name}: none of its {len(answers)} right candidates "
                    f"{sorted(answers)[:3]} is in the {setting} pool {str(held.lines.path)!r}"
                )
        relevant[row["id"]] = answers
    if union is not None:
        absent = next((did for did in pool.ids if did not in union), None)
        if absent is not None:
            raise ValueError(f"candidate {absent!r} of the local pool of {cell.name} is not in the global pool")
    return _Questions(cell, rows, relevant, pool)


def _split(found: SearchResult, queries: Sequence[np.ndarray]) -> list[SearchResult]:
    """Split one search result by cell."""
    ends = np.cumsum([len(own) for own in queries]).tolist()
    return [SearchResult(found.ids[end - len(own) : end], found.scores[end - len(own) : end])
            for own, end in zip(queries, ends, strict=True)]  # fmt: skip


def _encode_pool(
    encoder: ItemEncoder,
    folder: Path,
    dtype: Literal["float32", "float16"],
    show_progress: bool,
    pool: MbeirCandidates,
) -> Collection:
    options: dict[str, Any] = {"sync": True, "dtype": dtype, "show_progress": show_progress}
    return encode_collection(pool, encoder, folder / pool.lines.path.stem, **options)


def _encode_queries(encoder: ItemEncoder, rows: Sequence[Mapping[str, Any]], show_progress: bool) -> np.ndarray:
    """Vectors of the queries `(Q, D)`, each with its instruction."""
    items, ids, instructions = ([row[key] for row in rows] for key in ("query", "id", "instruction"))
    return encoder.encode(items, ids, show_progress, instruction=instructions)


def _reranked(
    found: SearchResult, questions: _Questions, pool: MbeirCandidates, reranker: Reranker, top: int, show: bool
) -> SearchResult:
    """Sort the first candidates of each query of a cell again."""
    return rerank(
        found,
        [row["query"] for row in questions.rows],
        lambda did: {part: pool[did][part] for part in ("image", "text") if pool[did][part] is not None},
        reranker,
        top,
        [row["instruction"] for row in questions.rows],
        show,
    )


def _score(
    found: SearchResult, questions: _Questions, pool: MbeirCandidates, ks: Sequence[int], seed: int
) -> dict[str, Metric]:
    """Hit rates with intervals and chance."""
    right = torch.tensor(
        [[did in questions.relevant[qid] for did in ids] for qid, ids in zip(questions.qids, found.ids, strict=True)]
    )
    scores = torch.from_numpy(found.scores)
    ranks = torch.full((len(scores),), len(pool))
    hit = right.any(dim=1)
    if hit.any():
        ranks[hit] = rank_of_relevant(scores[hit], right[hit], tie_tolerance(torch.float32))
    counts = [sum(did in pool for did in questions.relevant[qid]) for qid in questions.qids]
    return {
        f"hit_rate@{k}": Metric.from_values((ranks <= k).double(), chance_hit_rate(counts, len(pool), k), seed=seed)
        for k in ks
    }


def _write_run(path: Path, qids: Sequence[str], found: SearchResult, count: int) -> None:
    """Write the first candidates of each query as a TREC run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rankings = {
        qid: list(zip(ids, scores, strict=True))[:count]
        for qid, ids, scores in zip(qids, found.ids, found.scores.tolist(), strict=True)
    }
    write_run(path, rankings, "conjoin")
