"""What a benchmark finds with smaller vectors: fewer numbers, and fewer bits for each."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from conjoin.evaluation.metrics import ranks_of_ids
from conjoin.evaluation.results import Curve, Metric, Table, TableRow
from conjoin.evaluation.tasks import Cell
from conjoin.retrieval.vectors import exact_search, truncate

if TYPE_CHECKING:
    from conjoin.evaluation.benchmark import CellScores

PRECISIONS = {"float32": 32, "int8": 8, "1 bit": 1, "1 bit, rescored": 1}
"""The bits of a number that a search reads of each candidate; the query stays in float32."""
RESCORED = 4
"""How many times k candidates found by bits are ranked again."""
HALVINGS = 3
_NOTE = (
    "Each vector cut to its first numbers and normalised again. int8: 256 levels between the least and the greatest "
    "value of each number in the gallery. 1 bit: its sign. Rescored: the first {count} by signs are ranked again in "
    "float32. Bytes: what a search reads of a candidate. {cells}. `--truncate-dim` keeps the first numbers; `conjoin "
    "index --kind ivf_sq` and `ivf_rq` search in bytes and in about a bit, `--refine` rescores."
)


def has_one_gallery(cell: Cell) -> bool:
    """Whether all queries of a cell search the same candidates."""
    return not (cell.excluded or isinstance(cell.candidates, Mapping))


def size_tables(scores: Sequence["CellScores"], k: int) -> tuple[Table, Curve]:
    """The hit rate at k by numbers and bits of a vector, and its chart over the bytes.

    Args:
        scores: Of the cells. Those without one gallery are left out.
        k: Cut-off.
    """
    cells = [each for each in scores if has_one_gallery(each.cell)]
    hits: dict[tuple[int, str], list[np.ndarray]] = {}
    for each in cells:
        corpus, among = each.vectors.of(each.cell.corpus), each.cell.candidates
        names = [id_ for id_ in corpus.ids if among is None or id_ in among]
        gallery, queries = corpus.vectors(names), each.vectors.of(each.cell.queries, "query").vectors(each.ids)
        depth = k + max(map(len, each.cell.qrels.values()))  # a longer tie has k wrong candidates
        for width in (queries.shape[1] >> halving for halving in range(HALVINGS + 1)):
            asked, whole = truncate(queries, width), truncate(gallery, width)
            for precision in PRECISIONS:
                positions, found_scores = _rank(asked, whole, precision, depth, RESCORED * k)
                ids = [[names[position] for position in row] for row in positions]
                ranks, _ = ranks_of_ids(ids, found_scores, each.cell.qrels.values())
                hits.setdefault((width, precision), []).append((ranks <= k).astype(float))
    rows, series = list[TableRow](), dict[str, list[list[float]]]()
    for (width, precision), own in hits.items():
        metric = Metric.from_values(own[0]) if len(own) == 1 else Metric(math.fsum(map(np.mean, own)) / len(own))
        size = width * PRECISIONS[precision] / 8
        rows.append([precision, width, size, metric])
        series.setdefault(precision, []).append([size, metric.value])
    told = f"Mean over {len(cells)} cells" if len(cells) > 1 else f"Queries of {cells[0].cell.name}"
    note = _NOTE.format(count=RESCORED * k, cells=told)
    table = Table("Smaller vectors", ["", "numbers", "bytes", f"R@{k}"], rows, note)
    return table, Curve(f"R@{k} by bytes of a vector", series, "bytes")


def _rank(
    queries: np.ndarray, gallery: np.ndarray, precision: str, depth: int, rescored: int
) -> tuple[np.ndarray, np.ndarray]:
    """The positions and scores of the first rows of a gallery `(N, D)` that is kept in a precision."""
    bits, kept = PRECISIONS[precision], gallery
    if bits == 8:
        least = gallery.min(axis=0)
        step = np.maximum(np.ptp(gallery, axis=0), np.finfo(np.float32).tiny) / 255
        kept = np.rint((gallery - least) / step) * step + least
    elif bits == 1:
        kept = np.where(gallery > 0, 1, -1).astype(np.float32) / np.float32(math.sqrt(gallery.shape[1]))
    if not precision.endswith("rescored"):
        return exact_search(queries, kept, depth)
    positions, _ = exact_search(queries, kept, rescored)
    scores = np.einsum("qd,qnd->qn", queries, gallery[positions])
    order = np.argsort(-scores, axis=1, kind="stable")
    return np.take_along_axis(positions, order, axis=1), np.take_along_axis(scores, order, axis=1)
