"""Time and memory per row of encoding, syncing, indexing, filtering and searching a collection, without a model.

The rows are synthetic texts with a category and a price; a stand-in gives each a vector from its checksum. Each step
is a process of its own. Its memory is its peak resident size above that of a process which has imported the same and
encoded 4,096 rows (`start`). `stand-in` makes the rows and their vectors and does nothing with them: the difference to
it is the cost of the collection, in memory too: chunks have 16,384 rows, of which the stand-in alone takes 28 MB above
`start` at 64 numbers in a vector and 155 MB at 384.

    python benchmarks/collection_lifecycle.py --rows 1000000 --json lifecycle.json
    python benchmarks/collection_lifecycle.py --rows 10000000 --dimension 16
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from stand_in import StandIn

from conjoin.retrieval import Collection, ItemEncoder, encode_collection

CHANGED = 100
"""One row in so many is changed, one removed and one added by the sync."""
QUERIES, K = 10, 10
WHERE = "category = 'c7' and price < 50"


def vectors(texts: Sequence[str], dimension: int) -> np.ndarray:
    """L2-normalised vectors `(N, D)` that follow from the checksums of texts."""
    seeds = np.fromiter((zlib.crc32(text.encode()) for text in texts), dtype=np.float64, count=len(texts))
    vectors = np.random.default_rng(0).standard_normal(dimension) + np.sin(seeds)[:, None]
    vectors = (vectors * 1e4 % 2 - 1).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def rows(count: int, day: int = 0) -> Iterator[dict[str, Any]]:
    """The rows of a day: on the second, some are changed, some gone and some new."""
    for number in range(count + day * (count // CHANGED)):
        if day and number % CHANGED == 1 and number < count:
            continue
        text = f"product {number}" + (" new" if day and number % CHANGED == 2 else "")
        yield {
            "id": f"item/{number}",
            "text": text,
            "metadata": {"category": f"c{number % 50}", "price": number % 997},
        }


def steps(count: int, dimension: int, folder: Path) -> dict[str, Callable[[], Any]]:
    """Each step by its name, in the order to run."""
    encoder = cast(ItemEncoder, StandIn(partial(vectors, dimension=dimension), dimension))
    uri = folder / "collection"

    def stand_in() -> None:
        chunk: list[dict[str, Any]] = []
        for row in rows(count):
            chunk.append(row)
            if len(chunk) == 64 * encoder.batch_size:
                encoder.encode(chunk)
                chunk = []

    def search(where: str | None = None) -> list[list[str]]:
        collection = Collection(uri)
        queries = encoder.encode([f"product {number} of a query" for number in range(QUERIES)])
        return [collection.rank(query[None], K, where=where).ids[0] for query in queries]

    return {
        "start": lambda: encode_collection(rows(4096), encoder, folder / "small"),
        "stand-in": stand_in,
        "encode": lambda: encode_collection(rows(count), encoder, uri),
        "encode again": lambda: encode_collection(rows(count), encoder, uri),
        "sync": lambda: encode_collection(rows(count, 1), encoder, uri, sync=True),
        f"search {QUERIES}": search,
        f"search {QUERIES} where": lambda: search(WHERE),
        "index columns": lambda: Collection(uri).index(None),
        "filter": lambda: Collection(uri).select(WHERE),
        "index ivf_pq": lambda: Collection(uri).index("ivf_pq", recall_queries=10),
        f"search {QUERIES} ivf_pq": search,
        "sync back": lambda: encode_collection(rows(count), encoder, uri, sync=True),
    }


def measure(step: str, count: int, dimension: int, folder: str) -> dict[str, float]:
    """Run a step in a process of its own; returns its seconds and its peak resident size in bytes."""
    command = [sys.executable, __file__, "--step", step, "--folder", folder, "--rows", str(count)]
    found = subprocess.run([*command, "--dimension", str(dimension)], check=True, stdout=subprocess.PIPE, text=True)
    return cast(dict[str, float], json.loads(found.stdout.splitlines()[-1]))


def run_step(step: str, count: int, dimension: int, folder: Path) -> None:
    """Run a step and print what it took."""
    run, start, cpu = steps(count, dimension, folder)[step], time.perf_counter(), time.process_time()
    run()
    found = {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - cpu}
    print(json.dumps(found | {"bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}))


def main() -> None:
    """Print a table, and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--dimension", type=int, default=64)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--steps", nargs="+", metavar="STEP", help="some only; each needs those before it")
    parser.add_argument("--step", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.step:
        run_step(args.step, args.rows[0], args.dimension, args.folder)
        return
    table = []
    heads = ("s", 8), ("CPU s", 8), ("CPU µs per row", 16), ("MB above start", 16), ("bytes per row", 15)
    print(f"{'rows':>9}  {'step':20}" + "".join(f"{head:>{width}}" for head, width in heads))
    for count in args.rows:
        with tempfile.TemporaryDirectory() as folder:
            floor = 0.0
            for step in steps(count, args.dimension, Path(folder)):
                if args.steps and step not in ("start", *args.steps):
                    continue
                found = measure(step, count, args.dimension, folder)
                floor = floor or found["bytes"]
                above = found["bytes"] - floor
                table.append({"rows": count, "step": step, **found, "bytes_per_row": above / count})
                print(
                    f"{count:9}  {step:20}{found['seconds']:8.1f}{found['cpu_seconds']:8.1f}"
                    f"{found['cpu_seconds'] / count * 1e6:16.1f}{above / 1e6:16.0f}{above / count:15.1f}",
                    flush=True,
                )
    if args.json:
        args.json.write_text(json.dumps(table, indent=2) + "\n")


if __name__ == "__main__":
    main()
