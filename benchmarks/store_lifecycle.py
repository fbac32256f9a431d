"""Time and memory per row of encoding, syncing, indexing and filtering a store, without a model.

The rows are synthetic texts with a category and a price; a stand-in gives each a vector from its checksum. So the
numbers are the cost of everything around the model. Each step is a process of its own; memory is its peak resident
size, less that of a process that has imported the same and encoded one shard.

    python benchmarks/store_lifecycle.py --rows 100000 1000000 --json lifecycle.json
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
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from conjoin.retrieval import (
    ItemEncoder,
    ModelIdentity,
    build_index,
    encode_corpus,
    load_index,
    select_rows,
    update_index,
    update_store,
)

CHANGED = 100
"""One row in so many is changed, one removed and one added by the sync."""


class StandIn:
    """Has what a store needs of an encoder; a vector follows from the text."""

    name = "stand-in"
    fingerprint = processing = "0"
    input_type = "seq"
    dtype = None
    batch_size = 256
    dimension = 16
    dims = None
    identity = ModelIdentity("stand-in", "0")

    def encode(self, items: Sequence[Any], names: Any = None, *, on_batch: Any = None, **options: Any) -> np.ndarray:  # noqa: ANN401
        """Vectors `(N, D)`."""
        seeds = np.array([zlib.crc32(item["text"].encode()) for item in items], dtype=np.float64)
        vectors = np.sin(seeds[:, None] * np.arange(1, self.dimension + 1)).astype(np.float32)
        if on_batch is not None:
            on_batch(len(items))
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def rows(count: int, day: int) -> Iterator[dict[str, Any]]:
    """The rows of a day: on the second, some are changed, some gone and some new."""
    for number in range(count + day * (count // CHANGED)):
        if day and number % CHANGED == 1 and number < count:
            continue
        text = f"product {number}" + (" new" if day and number % CHANGED == 2 else "")
        yield {"id": f"item/{number}", "text": text, "kept": {"category": f"c{number % 50}", "price": number % 997}}


def steps(count: int, folder: Path) -> dict[str, Callable[[], Any]]:
    """Each step by its name, in the order to run."""
    encoder = cast(ItemEncoder, StandIn())
    store, index = folder / "store", folder / "index"

    def update() -> None:
        loaded = load_index(index)
        update_index(loaded, store)
        loaded.save(index)

    return {
        "imports": lambda: encode_corpus(rows(4096, 0), encoder, folder / "small"),
        "encode": lambda: encode_corpus(rows(count, 0), encoder, store),
        "encode again": lambda: encode_corpus(rows(count, 0), encoder, store),
        "index": lambda: build_index(store).save(index),
        "sync": lambda: update_store(rows(count, 1), encoder, store, sync=True),
        "index --update": update,
        "filter": lambda: select_rows(load_index(index), "category = 'c7' and price < 50"),
    }


def measure(step: str, count: int, folder: str) -> dict[str, float]:
    """Run a step in a process of its own; returns its seconds and its peak resident size in bytes."""
    command = [sys.executable, __file__, "--step", step, "--folder", folder, "--rows", str(count)]
    found = subprocess.run(command, check=True, capture_output=True, text=True)
    return cast(dict[str, float], json.loads(found.stdout.splitlines()[-1]))


def main() -> None:
    """Print a table, and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--steps", nargs="+", metavar="STEP", help="some only; each needs those before it")
    parser.add_argument("--step", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.step:
        run, start = steps(args.rows[0], Path(args.folder))[args.step], time.perf_counter()
        run()
        seconds, peak = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(json.dumps({"seconds": seconds, "cpu_seconds": time.process_time(), "bytes": peak}))
        return
    table = []
    print(f"{'rows':>9}  {'step':16}{'s':>8}{'µs per row':>12}{'peak MiB':>10}{'bytes per row':>15}")
    for count in args.rows:
        with tempfile.TemporaryDirectory() as folder:
            floor = 0.0
            for step in steps(count, Path(folder)):
                if args.steps and step not in ("imports", *args.steps):
                    continue
                found = measure(step, count, folder)
                floor = floor or found["bytes"]
                row = {"rows": count, "step": step, **found, "bytes_per_row": (found["bytes"] - floor) / count}
                table.append(row)
                numbers = (
                    f"{found['seconds']:8.1f}{found['seconds'] / count * 1e6:12.1f}{found['bytes'] / 2**20:10.0f}"
                )
                print(f"{count:9}  {step:16}{numbers}{row['bytes_per_row']:15.1f}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(table, indent=2) + "\n")


if __name__ == "__main__":
    main()
