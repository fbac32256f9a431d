"""Exact search against one matrix product and FAISS, and the building of indexes against plain calls of FAISS.

The vectors are random and of length 1. The ways take turns; the order is reversed in every second turn. A ratio is the
median over the turns of (time of the other / time of ours). `exact` is `ExactIndex`, whose scores are accumulated in
float64, so that ties have an order; `matmul` is `(queries @ vectors.T).topk(10)` of torch in float32; `faiss` is
`IndexFlatIP`. Where the scores of one product need more than 1 GiB, there is no matmul. A single query is searched for
20 times, one after the other.

Building: `build_index` of a store without the measurement of recall, against reading the files of the store and FAISS
with the same factory string, training vectors and parameters.

    python benchmarks/search.py --json search.json
    python benchmarks/search.py --rows 300 --queries 2 --dimension 16 --build-rows 300 --turns 1   # a quick test

On a GPU (not measured), against the product there:

    python benchmarks/search.py --device cuda --rows 1000000 10000000 --queries 1 100 1000 --build-rows 0
"""

import argparse
import json
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import faiss
import numpy as np
import torch
from conjoin.retrieval.index.exact import ExactIndex
from conjoin.retrieval.index.faiss import training_vectors
from safetensors.numpy import load_file
from turns import median, setup, speed_up, table, take_turns, write_json

from conjoin.retrieval import ItemEncoder, ModelIdentity, build_index, encode_corpus

K = 10
MOST_SCORES = 2**28
CALLS = 20
KINDS = ("exact", "flat", "hnsw", "ivfpq")


def unit_vectors(rows: int, dimension: int, seed: int) -> np.ndarray:
    """Random `(rows, dimension)`, float32, of length 1."""
    vectors = np.random.default_rng(seed).standard_normal((rows, dimension), dtype=np.float32)
    for part in np.array_split(vectors, max(1, rows // 2**16)):
        part /= np.linalg.norm(part, axis=1, keepdims=True)
    return vectors


def ways(vectors: np.ndarray, queries: np.ndarray, device: str) -> dict[str, Callable[[], object]]:
    """Each way to search for the queries, ours first."""
    index = ExactIndex(device=device)
    index.add([str(row) for row in range(len(vectors))], vectors, copy=False)
    found: dict[str, Callable[[np.ndarray], object]] = {"exact": lambda some: index.search(some, K)}
    if len(vectors) * len(queries) <= MOST_SCORES:
        corpus = torch.from_numpy(vectors).to(device)

        def product(some: np.ndarray) -> list[Any]:
            values, places = (torch.from_numpy(some).to(device) @ corpus.T).topk(K)
            return [values.cpu().numpy(), places.tolist()]

        found["matmul"] = product
    if device == "cpu":
        flat = faiss.IndexFlatIP(vectors.shape[1])
        flat.add(vectors)
        found["faiss"] = lambda some: flat.search(some, K)
    return {name: partial(each_call, search, queries) for name, search in found.items()}


def each_call(search: Callable[[np.ndarray], object], queries: np.ndarray) -> None:
    """Search for all queries at once; a single one `CALLS` times, one after the other."""
    for _ in range(CALLS if len(queries) == 1 else 1):
        search(queries)


def measure_search(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of the first table."""
    found = []
    for rows in args.rows:
        vectors = unit_vectors(rows, args.dimension, 0)
        for count in args.queries:
            times = take_turns(
                ways(vectors, unit_vectors(count, args.dimension, 1), args.device), args.turns, args.device
            )
            row: dict[str, Any] = {
                "rows": rows,
                "queries": count,
                "ms_per_query": 1e3 * median(times["exact"]).wall / (count if count > 1 else CALLS),
            }
            for name in ("matmul", "faiss"):
                ratio = speed_up(times[name], times["exact"]) if name in times else {}
                row |= {f"{name}": ratio.get("wall", "-"), f"{name}_cpu": ratio.get("cpu", "-")}
            found.append(row)
            print(f"{rows} rows, {count} queries: {row}", flush=True)
    return found


class Vectors:
    """Has what a store needs of an encoder; the vector of a text is that at its number."""

    name = "vectors"
    fingerprint = processing = "0"
    input_type = "seq"
    dtype = dims = None
    batch_size = 4096
    identity = ModelIdentity("vectors", "0")

    def __init__(self, vectors: np.ndarray) -> None:
        self.vectors, self.dimension = vectors, vectors.shape[1]

    def encode(self, items: Sequence[Any], names: Any = None, **options: Any) -> np.ndarray:  # noqa: ANN401
        """Vectors `(N, D)`."""
        return self.vectors[[int(item["text"]) for item in items]]


def plain_build(kind: str, folder: Path) -> object:
    """Read the files of a store and build an index with the libraries alone."""
    parts = [load_file(path)["embeddings"] for path in sorted(folder.glob("*.safetensors"))]
    rows = sum(map(len, parts))
    if kind == "exact":
        return [torch.from_numpy(part) for part in parts]
    vectors = np.concatenate(parts)
    if kind == "flat":
        index = faiss.IndexFlatIP(vectors.shape[1])
    elif kind == "hnsw":
        index = faiss.index_factory(vectors.shape[1], "HNSW32", faiss.METRIC_INNER_PRODUCT)
        index.hnsw.efConstruction = 200
    else:
        sample = vectors[np.sort(np.random.default_rng(0).choice(rows, training_vectors(rows), replace=False))]
        lists = min(round(4 * rows**0.5), max(1, len(sample) // 39))
        factory = f"IVF{lists},PQ{vectors.shape[1] // 4}np"
        index = faiss.index_factory(vectors.shape[1], factory, faiss.METRIC_INNER_PRODUCT)
        index.train(sample)
    index.add(vectors)
    return index


def measure_build(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of the second table."""
    found = []
    with tempfile.TemporaryDirectory() as name:
        store = Path(name) / "store"
        vectors = unit_vectors(args.build_rows, args.dimension, 0)
        rows = ({"id": str(row), "text": str(row)} for row in range(len(vectors)))
        encode_corpus(rows, cast(ItemEncoder, Vectors(vectors)), store)
        for kind in KINDS:
            runs: dict[str, Callable[[], object]] = {
                "ours": lambda kind=kind: build_index(store, kind, recall_queries=0),
                "plain": lambda kind=kind: plain_build(kind, store),
            }
            times = take_turns(runs, args.turns)
            ratio = speed_up(times["plain"], times["ours"])
            row = {"index": kind, "rows": len(vectors), "seconds": median(times["ours"]).wall, "wall": ratio["wall"]}
            found.append(row | {"cpu": ratio["cpu"]})
            print(f"{kind}: {found[-1]}", flush=True)
    return found


def main() -> None:
    """Print the tables, and write them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--queries", type=int, nargs="+", default=[1, 100, 1000])
    parser.add_argument("--dimension", type=int, default=256)
    parser.add_argument("--build-rows", type=int, default=20_000, help="vectors of the built indexes; 0 builds none")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="of torch and of FAISS")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    faiss.omp_set_num_threads(args.threads)
    found: dict[str, Any] = {"setup": setup(args)}
    print(json.dumps(found["setup"]))
    found["search"] = measure_search(args)
    print(f"\n{table(found['search'])}\n")
    write_json(args.json, found)
    if args.build_rows:
        found["build"] = measure_build(args)
        print(f"\n{table(found['build'])}")
        write_json(args.json, found)


if __name__ == "__main__":
    main()
