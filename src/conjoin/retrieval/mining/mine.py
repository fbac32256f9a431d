"""Offline hard-negative mining: the union of what several encoders rank as similar.

Each miner names a model and a view (text, image or both) of the anchor and of the candidate. Mining has three steps,
each of which resumes after an interruption: every (model, view) is encoded once; every miner searches, one shard of
results per block of anchors; the results are united into one file.
"""

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from conjoin.data.pair_sources import AnyDataset
from conjoin.progress import progress
from conjoin.retrieval.collection import Collection
from conjoin.retrieval.encode import encode_collection
from conjoin.retrieval.encoder import ItemEncoder, Role
from conjoin.retrieval.load import load_encoder
from conjoin.retrieval.mining.miners import (
    Miner,
    check_miners,
    collection_folder,
    miner_folder,
    needed_views,
    view_rows,
)
from conjoin.retrieval.mining.negatives import NEGATIVES_FILE, MinedNegatives, load_mined, write_mined
from conjoin.retrieval.mining.positives import Embedded, Excluded, ViewItems
from conjoin.retrieval.mining.search import Hits, MinerResults, MinerSearch
from conjoin.retrieval.options import MiningOptions
from conjoin.retrieval.reranker import Reranker, load_reranker
from conjoin.storage import locked

logger = logging.getLogger(__name__)


def mine_hard_negatives(
    corpus: AnyDataset,
    miners: Sequence[Miner],
    folder: str | Path,
    *,
    anchors: AnyDataset | None = None,
    load_encoder: Callable[[str], ItemEncoder] = load_encoder,
    load_reranker: Callable[[str], Reranker] = load_reranker,
    show_progress: bool = False,
    **options: Any,  # noqa: ANN401 - fields of MiningOptions
) -> MinedNegatives:
    """Find the hard negatives of every anchor: the union of the top `k` of every miner.

    Never among them: the anchor itself (the same id), rows of its `group`, and near-duplicates: candidates that reach
    `duplicate_above` in every view that the miners compare. With miners of pictures and of texts, a candidate with
    the same picture and another text is a negative, the hardest there is. The search goes deeper for an anchor until
    `k` candidates below `duplicate_above` and the limits of the miner are found (to a depth of 1024). In memory are
    the embeddings that one miner compares.

    Args:
        corpus: Candidates, columns `id`, `image` and `text` as `load_pairs` gives them, and optionally `group`.
        miners: See `Miner`; of equal rank, the earlier one goes first.
        folder: For embeddings, results and `negatives.parquet`; the same call with the same folder resumes. More
            miners may be added later; those that are done stay.
        anchors: Whose negatives to find, ids and groups meaning the same as in the corpus; `None`: of all of the
            corpus.
        load_encoder: Makes the encoder of a model.
        load_reranker: Makes the reranker of a miner that has one.
        show_progress: Show progress bars.
        options: Fields of `MiningOptions`: `k`, `index`, `device`, `block`, `dtype`, `prompt`, `prompt_name`.

    Raises:
        ValueError: Two miners of one name, `k` < 1, a row without the view of a miner, or a folder that was begun with
            other settings (the message names them); and as `encode_collection`.
    """
    chosen = MiningOptions(**options)
    check_miners(miners, chosen.k)
    folder = Path(folder)
    sources = {"corpus": corpus} | ({} if anchors is None else {"anchors": anchors})
    collections = _encode_views(sources, miners, folder, load_encoder, chosen, show_progress)
    of_anchors = "corpus" if anchors is None else "anchors"
    excluded = Excluded(_groups(corpus), _groups(sources[of_anchors]))
    by_corpus = sorted(miners, key=_corpus_of)
    items = ViewItems(sources[of_anchors], corpus)
    results: dict[Miner, MinerResults] = {}
    with locked(folder):
        for (model, view), same_corpus in itertools.groupby(by_corpus, _corpus_of):
            candidates = Embedded.load(collections["corpus", model, view, "document"], corpus)
            search = MinerSearch(candidates, chosen, excluded, load_reranker)
            for miner in same_corpus:
                queries = Embedded.load(collections[of_anchors, model, miner.query, "query"], sources[of_anchors])
                results[miner] = search.run(miner, queries, items, miner_folder(folder, miner), show_progress)
            candidate_ids, anchor_ids = candidates.ids, queries.ids
            del search, candidates, queries  # one corpus at a time in memory
        of_miners = {miner: results[miner] for miner in miners}
        blocks = _united(anchor_ids, candidate_ids, of_miners, chosen.k, chosen.block, show_progress)
        write_mined(folder / NEGATIVES_FILE, blocks)
    return load_mined(folder)


def _corpus_of(miner: Miner) -> tuple[str, str]:
    return miner.model, miner.candidate


def _encode_views(
    sources: Mapping[str, AnyDataset],
    miners: Sequence[Miner],
    folder: Path,
    load_encoder: Callable[[str], ItemEncoder],
    chosen: MiningOptions,
    show_progress: bool,
) -> dict[tuple[str, str, str, Role], Collection]:
    """The collection of every (source, model, view, role); one model at a time in memory."""
    collections: dict[tuple[str, str, str, Role], Collection] = {}
    prompt = {"prompt": chosen.prompt, "prompt_name": chosen.prompt_name}
    for model, views in needed_views(miners, "anchors" in sources).items():
        encoder = load_encoder(model)
        encodes_alike = encoder.is_symmetric and not any(prompt.values())
        for source, view, role in views:
            stored: Role = "document" if encodes_alike else role
            rows, target = view_rows(sources[source], view), collection_folder(folder, source, model, view, stored)
            options: dict[str, Any] = {"sync": True, "dtype": chosen.dtype, "show_progress": show_progress}
            options |= {"role": stored} | (prompt if stored == "query" else {})
            known = collections.get((source, model, view, "document")) if encodes_alike else None
            collections[source, model, view, role] = known or encode_collection(rows, encoder, target, **options)
        del encoder
    return collections


def _groups(rows: AnyDataset) -> dict[str, str]:
    """The group of every row that has one."""
    columns: Iterable[str] = rows.column_names or next(
        iter(rows), {}
    )  # a stream may not know its columns before it is read
    if "group" not in columns:
        return {}
    named = rows.select_columns(["id", "group"])
    return {str(row["id"]): str(row["group"]) for row in named if row["group"] is not None}


def _united(
    anchor_ids: Sequence[str],
    candidate_ids: Sequence[str],
    results: Mapping[Miner, MinerResults],
    k: int,
    block_size: int,
    show_progress: bool,
) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows of the final file, one list per block of anchors."""
    without, count = 0, len(anchor_ids)
    for start in progress(range(0, count, block_size), desc="uniting", unit="block", show=show_progress):
        rows = [
            _row(anchor_ids[index], {miner: result.hits(index) for miner, result in results.items()}, k, candidate_ids)
            for index in range(start, min(start + block_size, count))
        ]
        without += sum(not row["negatives"] for row in rows)
        yield rows
    if without:
        logger.warning("%d of %d anchors have no hard negative", without, count)


def _row(anchor: str, by_miner: Mapping[Miner, Hits], k: int, candidate_ids: Sequence[str]) -> dict[str, Any]:
    """Unite what the miners found for one anchor: best rank first, then in the order of the miners."""
    duplicates = _duplicates(by_miner)
    provenance: dict[int, list[dict[str, Any]]] = {}
    for miner, hits in by_miner.items():
        for rank, (position, score) in enumerate(hits.negatives(duplicates, miner.range_min, k), start=1):
            provenance.setdefault(position, []).append({"miner": miner.name, "rank": rank, "score": score})
    order = sorted(provenance, key=lambda position: min(entry["rank"] for entry in provenance[position]))
    return {
        "id": anchor,
        "negatives": [candidate_ids[position] for position in order],
        "found_by": [provenance[position] for position in order],
    }


def _duplicates(by_miner: Mapping[Miner, Hits]) -> set[int]:
    """The candidates that are close to the anchor in every part, image or text, that the miners compare."""
    compared = {part for miner in by_miner for part in miner.parts}
    close: dict[int, set[str]] = {}
    for miner, hits in by_miner.items():
        for position, _ in hits.close:
            close.setdefault(position, set()).update(miner.parts)
    return {position for position, parts in close.items() if parts == compared}
