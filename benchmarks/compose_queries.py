"""Time and peak memory of `compose_queries` on a synthetic catalogue.

Products have attributes of 4 to 20 values, frequent and rare ones, families of three, and a small picture each. The
time of reading is that of `read_catalogue`; composing includes writing the products with their pictures. The CPU time
is of all threads of the process; on a busy machine the wall time is longer.

    python benchmarks/compose_queries.py --products 100000 --queries 10000 --width 512
"""

import argparse
import io
import json
import resource
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from conjoin.data import CompositionSettings, compose_queries, read_catalogue


def write_catalogue(path: Path, products: int, attributes: int, side: int) -> None:
    generator = np.random.default_rng(0)
    pictures = []
    for _ in range(64):
        buffer = io.BytesIO()
        Image.fromarray(generator.integers(0, 256, (side, side, 3), dtype=np.uint8)).save(buffer, "jpeg")
        pictures.append(buffer.getvalue())
    columns = {
        "id": [str(10**9 + number) for number in range(products)],
        "image": [{"bytes": pictures[number % 64], "path": None} for number in range(products)],
        "title": [f"the product with the number {number} of a shop" for number in range(products)],
        "family": [str(number // 3) for number in range(products)],
        "language": generator.choice(
            ["id", "en", "th", "ms", "vi"], products, p=[0.6, 0.16, 0.1, 0.07, 0.07]
        ).tolist(),
    }
    for place, share in enumerate(np.linspace(0.95, 0.1, attributes)):
        odds = 1 / np.arange(1, generator.integers(5, 22))
        values = generator.choice(len(odds), products, p=odds / odds.sum())
        has = generator.random(products) < share
        columns[f"attribute {place}"] = [
            f"value {value}" if known else None for value, known in zip(values.tolist(), has.tolist(), strict=True)
        ]
    pq.write_table(pa.table(columns), path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--products", type=int, default=100000)
    parser.add_argument("--attributes", type=int, default=20)
    parser.add_argument("--queries", type=int, default=10000, help="of the training split; a tenth for the test split")
    parser.add_argument("--max-positive-share", type=float, default=0.05)
    parser.add_argument("--width", type=int, default=0, help="of random vectors to rank by; 0: none")
    parser.add_argument("--side", type=int, default=64, help="of the pictures in pixels")
    parser.add_argument("--json", type=Path, help="write the figures there")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "catalogue.parquet"
        write_catalogue(path, args.products, args.attributes, args.side)
        started = time.perf_counter()
        catalogue = read_catalogue(path, columns={"group": "family"})
        read = time.perf_counter() - started
        vectors = None
        if args.width:
            vectors = np.random.default_rng(0).standard_normal((args.products, args.width), dtype=np.float32)
            vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        settings = CompositionSettings(
            queries=args.queries, test_queries=args.queries // 10, max_positive_share=args.max_positive_share
        )
        started, computed = time.perf_counter(), time.process_time()
        out = compose_queries(catalogue, Path(folder) / "out", settings, vectors=vectors)
        composed, cpu = time.perf_counter() - started, time.process_time() - computed
        files = {split: out / f"queries-{split}.json" for split in ("train", "test")}
        found = {
            "products": args.products,
            "queries": {split: len(file.read_bytes().splitlines()) for split, file in files.items()},
            "read_seconds": round(read, 1),
            "compose_seconds": round(composed, 2),
            "compose_cpu_seconds": round(cpu, 1),
            "peak_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
            "output_mib": round(sum(file.stat().st_size for file in out.rglob("*") if file.is_file()) / 2**20),
        }
    print(json.dumps(found))
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
