"""M-BEIR: 16 cells of dataset and task, each against its own pool (local) and against the pool of all (global).

"Recall@k" of the published tables is a hit rate: any right candidate among the first k. It is reported at 5, at 10 for
Fashion200K and FashionIQ. Ties count as failures.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tqdm.auto import tqdm

from conjoin.data import MbeirCandidates, MbeirCell, find_cells, mbeir_queries, prefixed, takes_instruction
from conjoin.data.mbeir_layout import pool_file, qrels_file, required
from conjoin.evaluation.mbeir_report import MBEIR_SETTINGS, MbeirScore
from conjoin.evaluation.metrics import chance_hit_rate
from conjoin.evaluation.ranking import rank_of_relevant, tie_tolerance
from conjoin.evaluation.results import Metric
from conjoin.evaluation.run_file import read_qrels, write_run
from conjoin.retrieval import EmbeddingStore, ItemEncoder, SearchResult, encode_corpus, search_store


class _Questions(NamedTuple):
    """A cell made ready: its queries, their right answers, its local pool."""

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
    dtype: str = "float32",
    seed: int = 0,
    show_progress: bool = True,
) -> list[MbeirScore]:
    """Evaluate an encoder on M-BEIR; what was encoded before an interruption is kept.

    The global pool is encoded once, searched part by part for the queries of all cells, and local pools are taken out
    of it; without the global setting each local pool is encoded by itself. Vectors go to `out/stores`, the first
    candidates of every query to `out/runs` (TREC run files). Files, ids and judgements are checked before anything is
    encoded; images are opened when they are.

    Args:
        encoder: The model. A processor that takes an argument `instruction` gets it; otherwise it stands in front of
            the query's text.
        data: The root of M-BEIR, or of the miniature that `make_mini_mbeir` writes.
        out: Where to write.
        cells: Names such as `"visualnews_task0"`; all 16 when None.
        settings: Of `MBEIR_SETTINGS`.
        split: `"test"` or `"val"`.
        instructions: Whether queries carry one; each query has the same one every time.
        hubness_penalty: Subtract this times a candidate's mean score over all queries of the cell. PUMA's evaluation
            code takes 0.2; it looks at all test queries at once (transductive), so it is off by default.
        ks: Cut-offs; 5 and 10 are added.
        dtype: Of the stored vectors, as in `encode_corpus`.
        seed: Of the bootstrap.
        show_progress: Show progress bars.

    Returns:
        One score per cell and setting, in the order of the published table.

    Raises:
        FileNotFoundError: A file or an image is missing.
        ValueError: An unknown cell or setting or none, a cut-off below 1, a malformed row (it is named), or a query
            without an answer in a pool.
    """
    unknown = [setting for setting in settings if setting not in MBEIR_SETTINGS]
    if unknown or not settings:
        raise ValueError(f"unknown settings {unknown}; expected some of {list(MBEIR_SETTINGS)}")
    if min(ks, default=1) < 1:
        raise ValueError(f"ks={tuple(ks)}: cut-offs must be at least 1")
    chosen = find_cells(cells)
    data, out = Path(data), Path(out)
    if not data.is_dir():
        raise FileNotFoundError(f"M-BEIR: no such folder: {str(data)!r}")
    everything = None
    if "global" in settings:
        everything = MbeirCandidates(data, required(pool_file(data, None, split)))
    asked = [_load_cell(data, cell, split, instructions, settings, everything) for cell in chosen]
    depth = max(5, 10, *ks) + 1  # one more than is looked at shows whether a tie goes on
    search = partial(search_store, k=depth, device=encoder.device)

    def encode(pool: MbeirCandidates) -> EmbeddingStore:
        folder = out / "stores" / pool.lines.path.stem
        return encode_corpus(pool, encoder, folder, dtype=dtype, show_progress=show_progress)

    union = None if everything is None else encode(everything)
    progress = tqdm(asked, desc="cells", unit="cell", disable=not show_progress)
    queries = [penalise_hubs(_encode_queries(encoder, q.rows, show_progress), hubness_penalty) for q in progress]
    scores = []
    for setting in settings:
        if union is None:
            results = [search(encode(questions.pool), own) for questions, own in zip(asked, queries, strict=True)]
        elif setting == "global":
            results = _split(search(union, np.concatenate(queries)), queries)
        else:
            results = [search(union, own, ids=q.pool.ids) for q, own in zip(asked, queries, strict=True)]
        for questions, found in zip(asked, results, strict=True):
            _write_run(out / "runs" / setting / f"{questions.cell.name}.txt", questions.qids, found)
            pool = questions.pool if setting == "local" or everything is None else everything
            metrics = _score(found, questions, pool, sorted({5, 10, *ks}), seed)
            scores.append(MbeirScore(questions.cell, setting, len(questions.rows), len(pool), metrics))
    return scores


def penalise_hubs(queries: np.ndarray, weight: float) -> np.ndarray:
    """Queries `(Q, D)` whose scores rank like q·c − weight · mean over all queries q' of q'·c, normalised again.

    Raises:
        ValueError: A query equals the penalty exactly and has no direction left.
    """
    if weight == 0:
        return queries
    moved = queries - weight * queries.mean(axis=0)
    norms = np.linalg.norm(moved, axis=1, keepdims=True)
    if not norms.all():
        raise ValueError(f"hubness_penalty={weight} leaves nothing of query {int(norms.argmin())}")
    return (moved / norms).astype(queries.dtype)


def _load_cell(
    data: Path,
    cell: MbeirCell,
    split: str,
    instructions: bool,
    settings: Sequence[str],
    everything: MbeirCandidates | None,
) -> _Questions:
    """Read a cell and make sure that its pools hold an answer to each of its queries."""
    rows = mbeir_queries(data, cell, split, instructions)
    judged = read_qrels(required(qrels_file(data, cell, split)))
    pool = MbeirCandidates(data, required(pool_file(data, cell, split)))
    pools = {"local": pool, "global": everything}
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
    if everything is not None:
        absent = next((did for did in pool.ids if did not in everything), None)
        if absent is not None:
            raise ValueError(f"candidate {absent!r} of the local pool of {cell.name} is not in the global pool")
    return _Questions(cell, rows, relevant, pool)


def _split(found: SearchResult, queries: Sequence[np.ndarray]) -> list[SearchResult]:
    """What was found for the queries of each cell."""
    ends = np.cumsum([len(own) for own in queries]).tolist()
    return [SearchResult(found.ids[end - len(own) : end], found.scores[end - len(own) : end])
            for own, end in zip(queries, ends, strict=True)]  # fmt: skip


def _encode_queries(encoder: ItemEncoder, rows: Sequence[Mapping[str, Any]], show_progress: bool) -> np.ndarray:
    """Vectors of the queries `(Q, D)`, each under its instruction."""
    processor: Any = encoder.processor
    if not takes_instruction(processor):
        items = [prefixed(row["query"], row["instruction"]) for row in rows]
        return encoder.encode(items, [row["id"] for row in rows], show_progress)
    by_instruction: dict[str | None, list[int]] = {}
    for place, row in enumerate(rows):
        by_instruction.setdefault(row["instruction"], []).append(place)
    order: list[int] = []
    parts = []
    for instruction, places in by_instruction.items():
        own = encoder.with_processor(partial(processor, instruction=instruction))
        items, ids = ([rows[place][key] for place in places] for key in ("query", "id"))
        parts.append(own.encode(items, ids, show_progress))
        order += places
    return np.concatenate(parts)[np.argsort(order)]


def _score(
    found: SearchResult, questions: _Questions, pool: MbeirCandidates, ks: Sequence[int], seed: int
) -> dict[str, Metric]:
    """Hit rates with intervals and chance. A tie that runs on past what was searched counts as a failure too."""
    right = torch.tensor(
        [[did in questions.relevant[qid] for did in ids] for qid, ids in zip(questions.qids, found.ids, strict=True)]
    )
    scores, tolerance = torch.from_numpy(found.scores), tie_tolerance(torch.float32)
    depth = scores.shape[1]
    ranks = torch.full((len(scores),), depth + 1)
    hit = right.any(dim=1)
    if hit.any():
        ranks[hit] = rank_of_relevant(scores[hit], right[hit], tolerance)
    if depth < len(pool):
        best = scores.masked_fill(~right, float("-inf")).amax(dim=1)
        ranks[scores[:, -1] >= best - tolerance] = depth + 1
    counts = [sum(did in pool for did in questions.relevant[qid]) for qid in questions.qids]
    return {
        f"hit_rate@{k}": Metric.from_values((ranks <= k).double(), chance_hit_rate(counts, len(pool), k), seed=seed)
        for k in ks
    }


def _write_run(path: Path, qids: Sequence[str], found: SearchResult) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    rankings = {
        qid: list(zip(ids, scores, strict=True))
        for qid, ids, scores in zip(qids, found.ids, found.scores.tolist(), strict=True)
    }
    write_run(path, rankings, "conjoin")
