"""How long mining will take and how much memory it needs, from a probe of each model and of the search."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import datasets
import numpy as np

from conjoin.retrieval.collection_table import open_table
from conjoin.retrieval.encoder import ItemEncoder
from conjoin.retrieval.load import load_encoder
from conjoin.retrieval.mining.miners import (
    Miner,
    check_miners,
    collection_folder,
    miner_folder,
    needed_views,
    view_rows,
)
from conjoin.retrieval.mining.search import MinerResults
from conjoin.retrieval.vectors import exact_search

_PROBE_BATCHES = 2
_PROBE_CORPUS = 32_768
_PROBE_QUERIES = 256


class Step(NamedTuple):
    """One step of the work: its name, the rows that are still to do, and the seconds that they will take."""

    name: str
    rows: int
    seconds: float


class MiningPlan(NamedTuple):
    """The work that is left.

    Attributes:
        steps: In order.
        index_bytes: Memory of the largest embeddings.
    """

    steps: list[Step]
    index_bytes: int

    @property
    def seconds(self) -> float:
        """Of all steps."""
        return sum(step.seconds for step in self.steps)

    def __str__(self) -> str:
        lines = [f"{step.name}: {step.rows} rows, about {_duration(step.seconds)}" for step in self.steps]
        memory = f"{self.index_bytes / 2**30:.2f} GiB for the largest embeddings"
        return "\n".join([*lines, f"in all about {_duration(self.seconds)}; {memory}"])


def plan_mining(
    corpus: datasets.Dataset,
    miners: Sequence[Miner],
    folder: str | Path,
    *,
    anchors: datasets.Dataset | None = None,
    load_encoder: Callable[[str], ItemEncoder] = load_encoder,
    device: str = "cpu",
) -> MiningPlan:
    """Estimate `mine_hard_negatives` with the same arguments, without what `folder` holds already.

    Each model encodes three batches of each view, and one search over random vectors is scaled to the corpus. The
    search is timed as if it were exact: the approximate kinds take less.

    Raises:
        ValueError: As `mine_hard_negatives`.
    """
    check_miners(miners)
    folder = Path(folder)
    sources = {"corpus": corpus} | ({} if anchors is None else {"anchors": anchors})
    queries = len(sources["corpus" if anchors is None else "anchors"])
    steps: list[Step] = []
    dimensions: dict[str, int] = {}
    for model, views in needed_views(miners, anchors is not None).items():
        encoder = load_encoder(model)
        dimensions[model] = encoder.dimension
        for source, view in views:
            rows = view_rows(sources[source], view)
            left = max(0, len(rows) - _encoded_rows(collection_folder(folder, source, model, view)))
            seconds = left * _seconds_per_item(encoder, rows) if left else 0.0
            steps.append(Step(f"encode {source} {view} with {model}", left, seconds))
        del encoder
    per_score = {size: _seconds_per_score(size, device) for size in set(dimensions.values())}
    for miner in miners:
        left = queries - MinerResults.finished_rows(miner_folder(folder, miner))
        steps.append(Step(f"search {miner.name}", left, left * len(corpus) * per_score[dimensions[miner.model]]))
    return MiningPlan(steps, 4 * len(corpus) * max(dimensions.values()))


def _seconds_per_item(encoder: ItemEncoder, rows: datasets.Dataset) -> float:
    """Measured on a few batches after one to warm up."""
    size = encoder.batch_size
    sample = rows.select(range(min(len(rows), (1 + _PROBE_BATCHES) * size)))
    items = [{key: value for key, value in row.items() if key != "id"} for row in sample]
    ids = [str(id_) for id_ in sample["id"]]
    encoder.encode(items[:size], ids[:size])
    timed = slice(size if len(items) > size else 0, None)
    start = time.perf_counter()
    encoder.encode(items[timed], ids[timed])
    return (time.perf_counter() - start) / len(items[timed])


def _seconds_per_score(dimension: int, device: str) -> float:
    """Seconds of exact search per query and candidate, over random vectors."""
    generator = np.random.default_rng(0)
    vectors = generator.standard_normal((_PROBE_CORPUS, dimension), dtype=np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    start = time.perf_counter()
    exact_search(vectors[:_PROBE_QUERIES], vectors, 20, device=device)
    return (time.perf_counter() - start) / (_PROBE_CORPUS * _PROBE_QUERIES)


def _encoded_rows(folder: Path) -> int:
    """Rows that a collection has, finished or not."""
    try:
        return int(open_table(folder).count_rows())
    except FileNotFoundError:
        return 0


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    return (
        f"{seconds:.0f} s"
        if seconds < 120
        else f"{minutes // 60} h {minutes % 60} min"
        if minutes >= 60
        else f"{minutes} min"
    )
