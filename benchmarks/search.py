"""Exact search of a collection against the numpy oracle, and its time against FAISS and one matrix product.

The vectors are random and of length 1. Equality: the ids and scores of `Collection.search` are compared with a product
in float64 and a sort, for all rows, for those of a filter, after an update that changes, adds and removes rows, and
with an index of a flat kind of which every partition is searched.

Time: the ways take turns; the order is reversed in every second turn. `table` searches the Lance table, `memory` the
collection with its vectors in memory, `faiss` is `IndexFlatIP`, `matmul` is `(queries @ vectors.T).topk(10)` of torch
in float32 (not where its scores need more than 1 GiB). A ratio is the median over the turns of (time of the other /
time of `memory`). A single query is searched for 20 times, one after the other.

    python benchmarks/search.py --json search.json
    python benchmarks/search.py --rows 300 --queries 2 --dimension 16 --turns 1   # a quick test
"""

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import faiss
import numpy as np
import torch
from stand_in import StandIn
from threadpoolctl import threadpool_limits
from turns import median, setup, speed_up, table, take_turns, write_json

from conjoin.retrieval import Collection, ItemEncoder, encode_collection

K = 10
MOST_SCORES = 2**28
CALLS = 20
WAYS = ("memory", "table", "faiss", "matmul")
EVERY = 7
"""The filter keeps one row in so many, and the update changes one and removes one in so many."""


def unit_vectors(rows: int, dimension: int, seed: int) -> np.ndarray:
    """Random `(rows, dimension)`, float32, of length 1."""
    vectors = np.random.default_rng(seed).standard_normal((rows, dimension), dtype=np.float32)
    for part in np.array_split(vectors, max(1, rows // 2**16)):
        part /= np.linalg.norm(part, axis=1, keepdims=True)
    return vectors


def make(uri: Path, vectors: np.ndarray, numbers: Sequence[int]) -> Collection:
    """Make a collection, or bring it up to date: row i has the id i and the vector `numbers[i]`; -1 is no row."""
    rows: Iterator[dict[str, Any]] = (
        {"id": str(row), "text": str(number), "metadata": {"part": row % EVERY}}
        for row, number in enumerate(numbers)
        if number >= 0
    )
    encoder = StandIn(lambda texts: vectors[[int(text) for text in texts]], vectors.shape[1])
    return encode_collection(rows, cast(ItemEncoder, encoder), uri, sync=True)


def compare(
    collection: Collection, queries: np.ndarray, vectors: np.ndarray, rows: np.ndarray, where: str | None
) -> float:
    """The largest difference of scores to the oracle, which ranks the vectors of some rows.

    Raises:
        ValueError: The ids differ.
    """
    scores = queries.astype(np.float64) @ vectors.astype(np.float64).T
    found = collection.rank(queries, K, where=where)
    worst = 0.0
    for own, ids, values in zip(scores, found.ids, found.scores, strict=True):
        order = np.argsort(-own, kind="stable")[:K]
        if ids != [str(row) for row in rows[order]]:
            raise ValueError(f"{collection.uri}, where {where}: found {ids}, the oracle {rows[order].tolist()}")
        worst = max(worst, float(np.abs(values - own[order]).max()))
    return worst


def check(uri: Path, vectors: np.ndarray, queries: np.ndarray) -> dict[str, float]:
    """The largest difference of scores to the oracle in each state of a collection, whose ids all agree."""
    count = len(vectors) * (EVERY - 1) // EVERY  # the others come by the update
    numbers = np.arange(count)
    found = {}

    def compare_all(name: str, collection: Collection) -> None:
        rows = np.flatnonzero(numbers >= 0)
        some = rows[rows % EVERY == 3]
        found[name] = compare(collection, queries, vectors[numbers[rows]], rows, None)
        found[f"{name}, filtered"] = compare(collection, queries, vectors[numbers[some]], some, "part = 3")

    compare_all("first", make(uri, vectors, numbers))
    compare_all("in memory", Collection(uri, memory=2**40))
    changed = np.arange(0, count, EVERY)
    numbers[changed] = numbers[changed][::-1].copy()
    numbers = np.concatenate([numbers, np.arange(count, len(vectors))])
    numbers[5::EVERY] = -1
    collection = make(uri, vectors, numbers)
    compare_all("updated", collection)
    collection.index("ivf_flat", probes=len(vectors), recall_queries=1)
    compare_all("indexed", collection)
    return found


def ways(uri: Path, vectors: np.ndarray, queries: np.ndarray) -> dict[str, Callable[[], object]]:
    """Each way to search for the queries."""
    found: dict[str, Callable[[np.ndarray], object]] = {
        "memory": partial(Collection(uri, memory=2**40).search, k=K),
        "table": partial(Collection(uri).search, k=K),
    }
    flat = faiss.IndexFlatIP(vectors.shape[1])
    flat.add(vectors)
    found["faiss"] = lambda some: flat.search(some, K)
    if len(vectors) * len(queries) <= MOST_SCORES:
        corpus = torch.from_numpy(vectors)
        found["matmul"] = lambda some: (torch.from_numpy(some) @ corpus.T).topk(K)
    return {name: partial(each_call, search, queries) for name, search in found.items()}


def each_call(search: Callable[[np.ndarray], object], queries: np.ndarray) -> None:
    """Search for all queries at once; a single one `CALLS` times, one after the other."""
    for _ in range(CALLS if len(queries) == 1 else 1):
        search(queries)


def measure(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """The rows of the table of times."""
    found = []
    for rows in args.rows:
        vectors, uri = unit_vectors(rows, args.dimension, 0), folder / f"{rows}-rows"
        make(uri, vectors, range(rows))
        for count in args.queries:
            times = take_turns(ways(uri, vectors, unit_vectors(count, args.dimension, 1)), args.turns)
            row: dict[str, Any] = {"rows": rows, "queries": count}
            for name in WAYS:
                calls = count if count > 1 else CALLS
                row[f"{name}_ms"] = 1e3 * median(times[name]).wall / calls if name in times else "-"
            for name in WAYS[1:]:
                ratio = speed_up(times[name], times["memory"]) if name in times else {}
                row |= {name: ratio.get("wall", "-"), f"{name}_cpu": ratio.get("cpu", "-")}
            found.append(row)
            print(f"{rows} rows, {count} queries: {row}", flush=True)
    return found


def main() -> None:
    """Print what was found, and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[100_000])
    parser.add_argument("--queries", type=int, nargs="+", default=[1, 100, 1000])
    parser.add_argument("--dimension", type=int, default=384)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="of torch, FAISS and Lance (with LANCE_CPU_THREADS)")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    args = parser.parse_args()
    threadpool_limits(args.threads)  # of numpy's and FAISS's products, too
    torch.set_num_threads(args.threads)
    found: dict[str, Any] = {"setup": setup(args)}
    print(json.dumps(found["setup"]))
    with tempfile.TemporaryDirectory() as folder:
        vectors = unit_vectors(args.rows[0], args.dimension, 0)
        found["difference"] = check(Path(folder) / "checked", vectors, unit_vectors(20, args.dimension, 1))
        print(f"the ids equal the oracle's; the scores differ by at most {found['difference']}", flush=True)
        found["search"] = measure(args, Path(folder))
    print(f"\n{table(found['search'])}\n")
    write_json(args.json, found)


if __name__ == "__main__":
    main()
