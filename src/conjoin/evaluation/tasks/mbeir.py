"""M-BEIR: 16 cells of dataset and task, each against its own pool (local) and against the pool of all cells (global).

Hit rates: any right candidate among the first k ("Recall@k" in the published tables, with k = 10 for Fashion200K and
FashionIQ, else 5; GCL's average is at 50). Wrong candidates that tie with the best right one count as better.
"""

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from conjoin.evaluation.tasks import Cell, Rows, Task

logger = logging.getLogger(__name__)
SETTINGS = ("local", "global")
_SHORT = {"text": "t", "image": "i", "image,text": "it"}
_CUT_OFFS = (1, 5, 10, 50)


@dataclass(kw_only=True)
class MbeirOptions:
    """Which cells of M-BEIR.

    Args:
        data: Root folder of M-BEIR, or of the miniature that experiments/mini_mbeir.py writes.
        split: Queries to evaluate on.
        cells: Only these, e.g. visualnews_task0 cirr_task7 (default: all 16).
        pools: Candidates of a cell (local) or of all (global); without the global pool, each local one is encoded.
        instructions: Whether queries have their instruction, the same one in every evaluation.
    """

    data: str
    split: Literal["test", "val"] = "test"
    cells: list[str] | None = None
    pools: list[str] = field(default_factory=lambda: list(SETTINGS))
    instructions: bool = True


def mbeir_cells(options: MbeirOptions) -> list[Cell]:
    """The cells of each pool, in the order of the published table.

    Files and ids are checked here. An image is opened when it is encoded.

    Raises:
        FileNotFoundError: A file is missing.
        ValueError: An unknown cell or pool, a malformed row (it is named), or a candidate that the global pool lacks.
    """
    from conjoin.data import MbeirCandidates, find_cells, mbeir_queries
    from conjoin.data.mbeir import pool_file, qrels_file
    from conjoin.evaluation.results import read_qrels

    data, split, pools = Path(options.data), options.split, options.pools
    if not set(pools) <= set(SETTINGS):
        raise ValueError(f"unknown pools {pools}; expected some of {SETTINGS}")
    union = MbeirCandidates(data, pool_file(data, None, split)) if "global" in pools else None
    cells: list[Cell] = []
    for cell in find_cells(options.cells):
        rows = mbeir_queries(data, cell, split, options.instructions)
        prompts = [row["instruction"] for row in rows] if options.instructions else None
        queries = Rows(f"queries-{cell.name}-{split}", [{"id": row["id"], **row["query"]} for row in rows], prompts)
        judged = read_qrels(qrels_file(data, cell, split))
        local = MbeirCandidates(data, pool_file(data, cell, split))
        corpus = local if union is None else union
        absent = next((did for did in local.ids if did not in corpus), None)
        if absent is not None:
            raise ValueError(f"candidate {absent!r} of the local pool of {cell.name} is not in the global pool")
        candidates = Rows(corpus.lines.path.stem, corpus, lookup=corpus.__getitem__)
        short = f"{_SHORT[cell.query_modality]} → {_SHORT[cell.target_modality]}"
        for pool in pools:
            searched = corpus if pool == "global" else local
            qrels = {row["id"]: [did for did in judged.get(row["id"], ()) if did in searched] for row in rows}
            missing = [(qid, did) for qid, found in qrels.items() for did in judged.get(qid, ()) if did not in found]
            if missing:
                logger.warning(
                    "%s: %d of the judged candidates are not in the %s pool and count as not judged, such as %r of "
                    "query %r", cell.name, len(missing), pool, missing[0][1], missing[0][0],
                )  # fmt: skip
            among, labels = None if searched is corpus else searched.ids, {"task": short, "group": cell.group}
            how: dict[str, Any] = {"labels": labels, "published": f"hit_rate@{cell.cutoff}"}
            name, section = f"{pool}/{cell.name}", f"{pool} pools"
            cells.append(Cell(name, queries, candidates, qrels, among, section=section, **how))
    return sorted(cells, key=lambda each: pools.index(each.name.split("/")[0]))


TASK = Task(
    "mbeir",
    "M-BEIR",
    str(__doc__),
    MbeirOptions,
    mbeir_cells,
    ks=_CUT_OFFS,
    mrr=None,
    headline=("published", "hit_rate@50"),
    averages=True,
    by="group",
)
