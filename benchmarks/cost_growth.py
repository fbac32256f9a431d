"""How the cost grows: of exact search with the vectors, of encoding with the batch, the text's length and the layers.

All weights and vectors are random. Each number is the median over the turns of the processor time of one call: other
programs on the machine affect it less than wall time. Four charts are drawn as SVG.

    vectors  `exact_search`, FAISS flat and FAISS HNSW (up to --most-hnsw): milliseconds for a query
    batch    a BERT and a DINOv2: milliseconds for an item
    length   the BERT: milliseconds for a text
    layers   a Qwen2-VL of 28 layers cut to the first: milliseconds for a text

    python benchmarks/cost_growth.py --out runs/growth
    python benchmarks/cost_growth.py --out DIR --size tiny --vectors 100 1000 --layers 2 4     # a quick test
"""

import argparse
import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pruned_mllm
import torch
from plot import draw
from transformers import BertConfig, BertModel, Dinov2Config, Dinov2Model
from turns import setup, timed, write_json

from conjoin.hub.build import mllm_model, mllm_processor
from conjoin.retrieval import exact_search

Line = list[tuple[float, float]]
SIZES = {"tiny": (32, 2, 2, 56), "small": (384, 6, 12, 98)}
"""Width, layers and heads of both towers, and the pixels of an image's side."""


def milliseconds(function: Callable[[], object], turns: int) -> float:
    """Processor time of a call, after one to warm up."""
    function()
    found = sorted(timed(function).own for _ in range(turns))
    return 1e3 * max(found[turns // 2], 1e-6)


def unit_vectors(rows: int, dimension: int, seed: int) -> np.ndarray:
    """Random `(rows, dimension)`, float32, of length 1."""
    vectors = np.random.default_rng(seed).standard_normal((rows, dimension), dtype=np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def by_vectors(args: argparse.Namespace) -> dict[str, Line]:
    """Lines of milliseconds per query."""
    lines: dict[str, Line] = {"exact": [], "FAISS flat": [], "FAISS HNSW": []}
    queries = unit_vectors(16, args.dimension, 1)
    for count in args.vectors:
        vectors = unit_vectors(count, args.dimension, 0)
        indexes: dict[str, Any] = {"FAISS flat": faiss.IndexFlatIP(args.dimension)}
        if count <= args.most_hnsw:
            indexes["FAISS HNSW"] = faiss.IndexHNSWFlat(args.dimension, 32, faiss.METRIC_INNER_PRODUCT)
        runs: dict[str, Callable[[], object]] = {"exact": lambda vectors=vectors: exact_search(queries, vectors, 10)}
        for name, made in indexes.items():
            made.add(vectors)
            runs[name] = lambda made=made: made.search(queries, 10)
        for name, run in runs.items():
            lines[name].append((count, milliseconds(run, args.turns) / len(queries)))
    return {name: line for name, line in lines.items() if line}


def towers(args: argparse.Namespace) -> tuple[dict[str, Line], dict[str, Line]]:
    """Lines of milliseconds per item by batch, and per text by length."""
    width, layers, heads, side = SIZES[args.size]
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
    torch.manual_seed(0)
    text = BertModel(BertConfig(intermediate_size=4 * width, **sizes)).eval()
    image = Dinov2Model(Dinov2Config(patch_size=14, image_size=224, **sizes)).eval()

    def ids(count: int, length: int) -> torch.Tensor:
        return torch.randint(5, text.config.vocab_size, (count, length))

    batches: dict[str, Line] = {"text": [], "image": []}
    for count in args.batches:
        inputs = {"text": (text, ids(count, 16)), "image": (image, torch.randn(count, 3, side, side))}
        for name, (tower, values) in inputs.items():
            time = milliseconds(lambda tower=tower, values=values: tower(values), args.turns)
            batches[name].append((count, time / count))
    lengths: Line = []
    for length in args.lengths:
        values = ids(4, length)
        lengths.append((length, milliseconds(lambda values=values: text(values), args.turns) / 4))
    return batches, {"text": lengths}


def by_layers(args: argparse.Namespace) -> dict[str, Line]:
    """Lines of milliseconds per text."""
    line: Line = []
    with tempfile.TemporaryDirectory() as name:
        pruned_mllm.save_checkpoint(args.size, Path(name))
        processor = mllm_processor(name)
        batch = dict(processor(pruned_mllm.make_items("text", 4, args.size)))
        for keep in args.layers:
            model = mllm_model(name, keep)
            line.append((keep, milliseconds(lambda model=model: model(**batch), args.turns) / 4))
    return {"text": line}


def main() -> None:
    """Measure, draw, and write the numbers as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="for the charts and cost_growth.json")
    parser.add_argument("--size", choices=("tiny", "small"), default="small", help="of the models")
    parser.add_argument("--vectors", type=int, nargs="+", default=[10**power for power in range(3, 8)])
    parser.add_argument("--dimension", type=int, default=64, help="of the vectors")
    parser.add_argument("--most-hnsw", type=int, default=10_000, help="build no larger graph")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--lengths", type=int, nargs="+", default=[8, 16, 32, 64, 128, 256, 512])
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 8, 12, 20, 28])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    faiss.omp_set_num_threads(args.threads)
    charts: dict[str, tuple[Mapping[str, Line], str, str]] = {}
    with torch.inference_mode():
        charts["vectors"] = by_vectors(args), "vectors", "ms per query"
        batches, lengths = towers(args)
        charts["batch"] = batches, "items of a batch", "ms per item"
        charts["length"] = lengths, "tokens of a text", "ms per text"
        charts["layers"] = by_layers(args), "kept layers", "ms per text"
    for name, (lines, x, y) in charts.items():
        draw(lines, args.out / f"cost_{name}.svg", f"Processor time by {x}", x, y)
    found = {"setup": setup(args)} | {name: lines for name, (lines, _, _) in charts.items()}
    print(json.dumps(found))
    write_json(args.out / "cost_growth.json", found)


if __name__ == "__main__":
    main()
