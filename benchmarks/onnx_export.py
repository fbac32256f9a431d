"""Items per second of ONNX exports relative to PyTorch on a CPU, and what an export in 8 bits loses.

MODEL runs in PyTorch, each EXPORT (`conjoin export MODEL --format onnx`) in onnxruntime and, with `--openvino`, in
OpenVINO. Items are the test split of the embedded sample; they are prepared once, and only the model is timed. All
take turns with the same batches and the same number of threads. A row shows the median of the ratios to PyTorch in
single turns, which other programs on the machine affect less than wall time, and how far the vectors are from those
of PyTorch. `--loss` instead measures hit rates on the sample and the differences to PyTorch, paired by query.

    conjoin export runs/demo/model --format onnx --out runs/onnx
    conjoin export runs/demo/model --format onnx-int8 --out runs/onnx-int8
    python benchmarks/onnx_export.py runs/demo/model runs/onnx runs/onnx-int8 --openvino --json speed.json
    python benchmarks/onnx_export.py runs/demo/model runs/onnx runs/onnx-int8 --loss --json loss.json
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from conjoin.data import load_emoji
from conjoin.evaluation.metrics import bootstrap_ci
from conjoin.hub.onnx_export import GRAPHS
from conjoin.retrieval import ItemEncoder, load_encoder

KINDS = {"text": ("text",), "image": ("image",), "fused": ("image", "text")}
HITS = {"text → image, R@10": ("text", 10), "image → image, R@1": ("image", 1), "both → image, R@1": ("fused", 1)}

Batch = Mapping[str, torch.Tensor]
Runner = Callable[[Batch], np.ndarray]


def runner(encoder: ItemEncoder) -> Runner:
    """The model of an encoder, in PyTorch or onnxruntime."""
    encoder.model.eval()
    return lambda batch: encoder.model(**batch).embeddings.numpy()


def openvino_runner(folder: Path, kind: str, threads: int) -> Runner:
    """One graph of an export in OpenVINO, in the precision of the export."""
    import openvino

    options = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": threads}
    graph = openvino.Core().compile_model(folder / GRAPHS[kind], "CPU", options)
    names = [each.any_name for each in graph.inputs]
    return lambda batch: graph({name: batch[name].numpy() for name in names})["embeddings"]


def make_batches(encoder: ItemEncoder, kind: str, args: argparse.Namespace) -> list[Batch]:
    """The first items of the sample in batches, shortest texts first."""
    rows = load_emoji("test", styles=("twemoji",))
    rows = rows.select(range(min(args.items, len(rows))))
    items = [{name: row[name] for name in KINDS[kind]} for row in rows]
    items.sort(key=lambda item: len(item.get("text", "")))
    return [encoder.processor(items[at : at + args.batch_size]) for at in range(0, len(items), args.batch_size)]


def seconds(run: Runner, batches: Sequence[Batch]) -> tuple[float, float]:
    """Wall time and processor time."""
    wall, cpu = time.perf_counter(), time.process_time()
    for batch in batches:
        run(batch)
    return time.perf_counter() - wall, time.process_time() - cpu


def compare(
    kind: str, encoders: dict[str, ItemEncoder], folders: dict[str, Path], args: argparse.Namespace
) -> list[dict[str, Any]]:
    """Speed and vectors of every program on one kind of item."""
    runners = {name: runner(encoder) for name, encoder in encoders.items()}
    if args.openvino:
        for name, folder in folders.items():
            runners[f"{name}, OpenVINO"] = openvino_runner(folder, kind, args.threads)
    batches = make_batches(encoders["PyTorch"], kind, args)
    vectors = {name: np.concatenate([run(batch) for batch in batches]) for name, run in runners.items()}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in runners}
    for _ in range(args.turns):
        for name, run in runners.items():
            times[name].append(seconds(run, batches))
    expected = vectors["PyTorch"]
    rows = []
    for name, taken in times.items():
        wall, cpu = (
            statistics.median(base[part] / own[part] for base, own in zip(times["PyTorch"], taken, strict=True))
            for part in (0, 1)
        )
        cosines = (vectors[name] * expected).sum(1)
        rows.append(
            {
                "items": kind,
                "model": name,
                "items_per_second": len(expected) / statistics.median(own[0] for own in taken),
                "over_pytorch": wall,
                "cpu_over_pytorch": cpu,
                "largest_difference": float(np.abs(vectors[name] - expected).max()),
                "mean_cosine": float(cosines.mean()),
                "least_cosine": float(cosines.min()),
            }
        )
    return rows


def sample_vectors(encoder: ItemEncoder) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Vectors of the gallery, Twemoji's pictures of the test concepts, and of the queries with OpenMoji's, by kind."""
    styles = {name: load_emoji("test", styles=(name,)) for name in ("twemoji", "openmoji")}
    drawn = {name: dict(zip(rows["concept"], rows, strict=True)) for name, rows in styles.items()}
    shared = [concept for concept in drawn["openmoji"] if concept in drawn["twemoji"]]
    gallery = [{"image": drawn["twemoji"][concept]["image"]} for concept in shared]
    queries = {
        kind: [{name: drawn["openmoji"][concept][name] for name in parts} for concept in shared]
        for kind, parts in KINDS.items()
    }
    vectors = {kind: torch.from_numpy(encoder.encode(items)) for kind, items in queries.items()}
    return torch.from_numpy(encoder.encode(gallery)), vectors


def hits(encoder: ItemEncoder) -> dict[str, np.ndarray]:
    """Whether each query finds its picture among the first k; ties count as failures."""
    gallery, queries = sample_vectors(encoder)
    found = {}
    for label, (kind, k) in HITS.items():
        similarities = queries[kind] @ gallery.T
        right = similarities.diagonal()[:, None]
        found[label] = ((similarities >= right).sum(1) <= k).numpy()
    return found


def measure_loss(encoders: dict[str, ItemEncoder]) -> list[dict[str, Any]]:
    """Hit rates on the sample in percent, and the difference to PyTorch with its 95 % interval over the queries."""
    found = {name: hits(encoder) for name, encoder in encoders.items()}
    rows = []
    for label in HITS:
        base = found["PyTorch"][label]
        for name, each in found.items():
            gap = each[label].astype(float) - base
            low, high = bootstrap_ci(gap)
            row = {"query": label, "model": name, "queries": len(gap), "hits": 100 * float(each[label].mean())}
            rows.append(row | {"difference": 100 * float(gap.mean()), "low": 100 * low, "high": 100 * high})
    return rows


COLUMNS = {
    "items": "{}",
    "model": "{}",
    "items_per_second": "{:.1f}",
    "over_pytorch": "{:.2f}",
    "cpu_over_pytorch": "{:.2f}",
    "largest_difference": "{:.1e}",
    "mean_cosine": "{:.5f}",
    "least_cosine": "{:.5f}",
}
LOSS_COLUMNS = {"query": "{}", "model": "{}", "hits": "{:.1f}", "difference": "{:+.1f}", "low": "{:+.1f}"}
LOSS_COLUMNS |= {"high": "{:+.1f}"}


def show(rows: list[dict[str, Any]], columns: dict[str, str]) -> None:
    print("\n| " + " | ".join(columns) + " |\n|" + " --- |" * len(columns))
    for row in rows:
        print("| " + " | ".join(form.format(row[name]) for name, form in columns.items()) + " |", flush=True)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL", help="the model in PyTorch")
    parser.add_argument("exports", metavar="EXPORT", nargs="+", type=Path, help="its exports; named by their folders")
    parser.add_argument("--items", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--openvino", action="store_true", help="also run the exports in OpenVINO")
    parser.add_argument("--loss", action="store_true", help="measure retrieval on the sample instead of speed")
    parser.add_argument("--json", type=Path, help="write all results to this file")
    args = parser.parse_args(words)
    torch.set_num_threads(args.threads)
    folders = {folder.name: folder for folder in args.exports}
    if len(folders) < len(args.exports):
        parser.error("two exports have folders of the same name")
    loaded = {"PyTorch": args.model} | folders
    encoders = {name: load_encoder(path, device="cpu", batch_size=args.batch_size) for name, path in loaded.items()}
    setup = {"torch": torch.__version__, "processor": platform.processor(), "threads": args.threads}
    print(", ".join(f"{name} {value}" for name, value in setup.items()))
    found: dict[str, Any] = {"setup": setup}
    if args.loss:
        found["loss"] = measure_loss(encoders)
        show(found["loss"], LOSS_COLUMNS)
    else:
        found["throughput"] = []
        with torch.inference_mode():
            for kind in KINDS:
                rows = compare(kind, encoders, folders, args)
                show(rows, COLUMNS)
                found["throughput"] += rows
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
