"""Time and memory of the contrastive kernel beside the dense matrix: one forward and backward of GCL and InfoNCE.

Every measurement is a process of its own. Its extra memory is its peak resident size less that of a process which
holds the embeddings and their gradients only (on a GPU: the peak of the allocator less the embeddings). Dense and
kernel take turns, and a row shows medians over the turns. `cpu_ratio` compares processor time, which other programs on
the machine disturb less than the clock. The dense matrix is skipped where it would not fit.

    python benchmarks/contrastive_kernel.py --sizes 1024 2048 4096 8192 --threads 2 --json kernel.json

On a GPU (not measured yet) the table adds two yardsticks: the time of the products alone as dense bfloat16 products,
and the arithmetic floor, which is the kernel's operations at `--peak-tflops`.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from conjoin.losses import gcl, info_nce

GIB = 2**30
DENSE_COPIES = 6.2
"""Matrices that a dense forward and backward holds at its peak (measured for GCL); decides only what is skipped."""


def dense_info_nce(queries: Tensor, candidates: Tensor, temperature: Tensor) -> Tensor:
    scores = F.normalize(queries, dim=-1) @ F.normalize(candidates, dim=-1).T / temperature
    return F.cross_entropy(scores, torch.arange(len(queries), device=scores.device))


def dense_gcl(image: Tensor, text: Tensor, fused: Tensor, temperature: Tensor) -> Tensor:
    views = [F.normalize(view, dim=-1) for view in (image, text, fused)]
    vectors = torch.cat(views)
    scores = (vectors @ vectors.T / temperature).fill_diagonal_(float("-inf"))
    denominators = scores.logsumexp(1).view(3, -1)
    positives = [(views[a] * views[b]).sum(-1) / temperature for a, b in ((0, 1), (0, 2), (1, 2))]
    return (2 * denominators.sum() - 2 * sum(positive.sum() for positive in positives)) / (6 * len(image))


LOSSES: dict[str, dict[str, Callable[..., Tensor]]] = {
    "gcl": {"dense": dense_gcl, "kernel": gcl},
    "info_nce": {"dense": dense_info_nce, "kernel": info_nce},
}
VIEWS = {"gcl": 3, "info_nce": 2}


def matrix_width(loss: str, size: int) -> int:
    """Rows and columns of the similarity matrix."""
    return 3 * size if loss == "gcl" else size


def kernel_operations(loss: str, size: int, width: int) -> float:
    """Floating-point operations of the products: one forward, three backward, half of each if symmetric."""
    return 4 * 2.0 * matrix_width(loss, size) ** 2 * width * (0.5 if loss == "gcl" else 1.0)


def measure(loss: str, kind: str, size: int, args: argparse.Namespace) -> dict[str, float]:
    """Run in a process of its own: wall and processor seconds of one warm step, peak memory in bytes, the loss."""
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    device = torch.device(args.device)
    embeddings = [torch.randn(size, args.width, device=device).requires_grad_() for _ in range(VIEWS[loss])]
    temperature = torch.tensor(0.07, device=device, requires_grad=True)
    for tensor in (*embeddings, temperature):
        tensor.grad = torch.ones_like(tensor)
    held = torch.cuda.memory_allocated() if device.type == "cuda" else 0

    def step(rows: int, function: Callable[..., Tensor]) -> float:
        value = function(*(view[:rows] for view in embeddings), temperature)
        value.backward()
        return value.item()

    step(64, LOSSES[loss]["kernel"])  # loads what the first step of a process loads
    seconds = cpu_seconds = value = float("nan")
    if kind != "baseline":
        step(size, LOSSES[loss][kind])
        start, cpu_start = time.perf_counter(), time.process_time()
        value = step(size, LOSSES[loss][kind])
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated() - held
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"seconds": seconds, "cpu_seconds": cpu_seconds, "peak": peak, "loss": value}


def in_child(loss: str, kind: str, size: int, args: argparse.Namespace) -> dict[str, float]:
    command = [sys.executable, __file__, "--child", loss, kind, str(size), "--device", args.device]
    command += ["--threads", str(args.threads), "--width", str(args.width)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def compare(loss: str, size: int, args: argparse.Namespace) -> dict[str, float | int | str | None]:
    """One row of the table."""
    matrix_gib = 4 * matrix_width(loss, size) ** 2 / GIB
    kinds = ["kernel"]
    if DENSE_COPIES * matrix_gib <= args.max_naive_gib:
        kinds.insert(0, "dense")
    held = 0.0 if args.device == "cuda" else in_child(loss, "baseline", size, args)["peak"]
    runs: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
    for _ in range(args.repeats):
        for kind in kinds:
            runs[kind].append(in_child(loss, kind, size, args))
    row: dict[str, float | int | str | None] = {"loss": loss, "size": size, "matrix_gib": matrix_gib}
    for kind in ("dense", "kernel"):
        measured = runs.get(kind)
        row[f"{kind}_seconds"] = statistics.median(run["seconds"] for run in measured) if measured else None
        row[f"{kind}_gib"] = statistics.median(run["peak"] - held for run in measured) / GIB if measured else None
    row["time_ratio"] = row["cpu_ratio"] = row["difference"] = None
    if "dense" in kinds:
        pairs = list(zip(runs["kernel"], runs["dense"], strict=True))
        row["time_ratio"] = statistics.median(ours["seconds"] / theirs["seconds"] for ours, theirs in pairs)
        row["cpu_ratio"] = statistics.median(ours["cpu_seconds"] / theirs["cpu_seconds"] for ours, theirs in pairs)
        row["difference"] = max(abs(ours["loss"] - theirs["loss"]) for ours, theirs in pairs)
    if args.device == "cuda":
        operations = kernel_operations(loss, size, args.width)
        row["bf16_products_seconds"] = operations / bf16_rate(args.width)
        row["floor_seconds"] = operations / (args.peak_tflops * 1e12)
    return row


def bf16_rate(width: int, size: int = 8192) -> float:
    """Operations per second of a dense bfloat16 product on the GPU."""
    left = torch.randn(size, width, device="cuda", dtype=torch.bfloat16)
    seconds = []
    for _ in range(10):
        torch.cuda.synchronize()
        start = time.perf_counter()
        torch.mm(left, left.T)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return 2.0 * size * size * width / statistics.median(seconds)


COLUMNS = {
    "loss": "{}",
    "size": "{}",
    "dense_seconds": "{:.2f}",
    "kernel_seconds": "{:.2f}",
    "time_ratio": "{:.2f}",
    "cpu_ratio": "{:.2f}",
    "dense_gib": "{:.2f}",
    "kernel_gib": "{:.2f}",
    "difference": "{:.0e}",
}
CUDA_COLUMNS = {"bf16_products_seconds": "{:.3f}", "floor_seconds": "{:.3f}"}


def line(row: dict[str, float | int | str | None], columns: dict[str, str], max_naive_gib: float) -> str:
    cells = ["skipped" if row[name] is None else form.format(row[name]) for name, form in columns.items()]
    note = "" if row["dense_gib"] is not None else f" dense: over {max_naive_gib:g} GiB"
    return "| " + " | ".join(cells) + " |" + note


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1024, 2048, 4096, 8192], help="batch sizes N")
    parser.add_argument("--losses", nargs="+", choices=sorted(LOSSES), default=sorted(LOSSES))
    parser.add_argument("--width", type=int, default=512, help="embedding size D")
    parser.add_argument("--repeats", type=int, default=3, help="turns of dense and kernel")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--max-naive-gib", type=float, default=8.0, help="skip the dense matrix above this")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--peak-tflops", type=float, default=989.0, help="of the GPU, for the arithmetic floor")
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--child", nargs=3, metavar=("LOSS", "KIND", "SIZE"), help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    if args.child:
        loss, kind, size = args.child
        print(json.dumps(measure(loss, kind, int(size), args)))
        return
    columns = COLUMNS | (CUDA_COLUMNS if args.device == "cuda" else {})
    print(f"torch {torch.__version__}, {args.device}, {args.threads} threads, D={args.width}, {args.repeats} turns")
    print("| " + " | ".join(columns) + " |\n|" + " --- |" * len(columns))
    rows = []
    for loss in args.losses:
        for size in args.sizes:
            rows.append(compare(loss, size, args))
            print(line(rows[-1], columns, args.max_naive_gib), flush=True)
    if args.json:
        setup = {"torch": torch.__version__, "device": args.device, "threads": args.threads, "width": args.width}
        args.json.write_text(json.dumps({"setup": setup | {"repeats": args.repeats}, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
