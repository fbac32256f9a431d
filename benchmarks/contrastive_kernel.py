"""Time and memory of every contrastive loss beside the same loss on a dense matrix, forward and backward.

Each row of the table is one process per loss and batch size N. The kernel and the naive loss alternate in it, and the
ratio is the median over pairs of consecutive runs. Extra memory is the peak resident size of a process that runs one
of the two, less that of a process that holds the embeddings only. The naive loss is skipped where its matrices exceed
`--max-naive-gib`. On a GPU: `gpu.py --sections kernel`.

    python benchmarks/contrastive_kernel.py --sizes 256 512 1024 2048 4096 8192 --json kernel.json
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

from conjoin.losses import gcl, info_nce, mac, multi_positive, symmetric_info_nce

GIB = 2**30
NAIVE_COPIES = 6.2
"""Matrices that a naive forward and backward holds at its peak (measured for GCL); decides only what is skipped."""

MODALITIES = 3
"""Modalities of the candidates of MAC; the candidate i has the modality i % 3."""

Loss = Callable[[list[Tensor], list[Tensor]], Tensor]
"""Of the embeddings `(N, D)` and the temperatures."""


def scores(a: Tensor, b: Tensor) -> Tensor:
    return F.normalize(a, dim=-1) @ F.normalize(b, dim=-1).T


def diagonal_entropy(logits: Tensor) -> Tensor:
    return F.cross_entropy(logits, torch.arange(len(logits), device=logits.device))


def naive_info_nce(x: list[Tensor], t: list[Tensor]) -> Tensor:
    return diagonal_entropy(scores(x[0], x[1]) / t[0])


def naive_symmetric(x: list[Tensor], t: list[Tensor]) -> Tensor:
    logits = scores(x[0], x[1]) / t[0]
    return (diagonal_entropy(logits) + diagonal_entropy(logits.T)) / 2


def modalities(x: list[Tensor]) -> Tensor:
    return torch.arange(len(x[1]), device=x[1].device) % MODALITIES


def naive_mac(x: list[Tensor], t: list[Tensor]) -> Tensor:
    modality = modalities(x)
    return diagonal_entropy(scores(x[0], x[1]) / torch.where(modality[:, None] == modality, t[1], t[0]))


def naive_multi_positive(x: list[Tensor], t: list[Tensor]) -> Tensor:
    """One positive and one negative per anchor."""
    anchors, positives, negatives = (F.normalize(view, dim=-1) for view in x)
    others = (anchors @ anchors.T / t[0]).fill_diagonal_(float("-inf"))
    own = torch.stack([(anchors * positives).sum(-1), (anchors * negatives).sum(-1)], dim=1) / t[0]
    return (torch.cat([own, others], dim=1).logsumexp(1) - own[:, 0]).mean()


def naive_gcl(x: list[Tensor], t: list[Tensor]) -> Tensor:
    views = [F.normalize(view, dim=-1) for view in x]
    vectors = torch.cat(views)
    matrix = (vectors @ vectors.T / t[0]).fill_diagonal_(float("-inf"))
    denominators = matrix.logsumexp(1).view(3, -1)
    positives = [(views[a] * views[b]).sum(-1) / t[0] for a, b in ((0, 1), (0, 2), (1, 2))]
    return (2 * denominators.sum() - 2 * sum(positive.sum() for positive in positives)) / (6 * len(x[0]))


LOSSES: dict[str, tuple[int, Loss, Loss]] = {
    "info_nce": (2, naive_info_nce, lambda x, t: info_nce(x[0], x[1], t[0])),
    "symmetric_info_nce": (2, naive_symmetric, lambda x, t: symmetric_info_nce(x[0], x[1], t[0])),
    "mac": (2, naive_mac, lambda x, t: mac(x[0], x[1], modalities(x), t[0], t[1])),
    "multi_positive": (3, naive_multi_positive, lambda x, t: multi_positive(x[0], x[1][:, None], x[2][:, None], t[0])),
    "gcl": (3, naive_gcl, lambda x, t: gcl(x[0], x[1], x[2], t[0])),
}
"""How many views each loss has, its naive form and the package's."""


def matrix_width(loss: str, size: int) -> int:
    """Rows and columns of the similarity matrix."""
    return 3 * size if loss == "gcl" else size


def naive_fits(loss: str, size: int, args: argparse.Namespace) -> bool:
    return NAIVE_COPIES * 4 * matrix_width(loss, size) ** 2 <= args.max_naive_gib * GIB


class Step:
    """One forward and backward of either form of a loss."""

    def __init__(self, loss: str, size: int, args: argparse.Namespace) -> None:
        torch.set_num_threads(args.threads)
        torch.manual_seed(0)
        views, self.naive, self.kernel = LOSSES[loss]
        self.embeddings = [torch.randn(size, args.width, requires_grad=True) for _ in range(views)]
        learn = not args.fixed_temperature
        self.temperatures = [torch.tensor(t, requires_grad=learn) for t in (0.07, 0.05)]

    def run(self, kind: str, rows: int | None = None) -> tuple[float, float]:
        """Seconds and loss."""
        function: Loss = getattr(self, kind)
        for leaf in (*self.embeddings, *self.temperatures):
            leaf.grad = None
        start = time.perf_counter()
        value = function([view[:rows] for view in self.embeddings] if rows else self.embeddings, self.temperatures)
        value.backward()
        return time.perf_counter() - start, value.item()


def measure_time(loss: str, size: int, args: argparse.Namespace) -> dict[str, float | None]:
    """Run in a process of its own: medians over alternating runs, for `--seconds` or at least three pairs."""
    step = Step(loss, size, args)
    kinds = ["naive", "kernel"] if naive_fits(loss, size, args) else ["kernel"]
    values = {kind: step.run(kind)[1] for kind in kinds}
    runs: dict[str, list[float]] = {kind: [] for kind in kinds}
    start = time.perf_counter()
    while len(runs["kernel"]) < 3 or time.perf_counter() - start < args.seconds:
        for kind in kinds:
            runs[kind].append(step.run(kind)[0])
        kinds.reverse()
    row: dict[str, float | None] = {"pairs": len(runs["kernel"]), "ratio": None, "difference": None}
    for kind in ("naive", "kernel"):
        row[f"{kind}_ms"] = 1e3 * statistics.median(runs[kind]) if kind in runs else None
    if "naive" in runs:
        row["ratio"] = statistics.median(k / n for k, n in zip(runs["kernel"], runs["naive"], strict=True))
        row["difference"] = abs(values["kernel"] - values["naive"])
    return row


def measure_peak(loss: str, size: int, kind: str, args: argparse.Namespace) -> dict[str, float]:
    """Run in a process of its own: peak memory in bytes of one step; of the embeddings only for "baseline"."""
    step = Step(loss, size, args)
    for leaf in (*step.embeddings, *step.temperatures):
        leaf.grad = torch.ones_like(leaf)
    step.run("kernel", 64)  # loads what the first step of a process loads
    if kind != "baseline":
        step.run(kind)
    return {"peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}


def in_child(loss: str, kind: str, size: int, args: argparse.Namespace) -> dict[str, float | None]:
    command = [sys.executable, __file__, "--child", loss, kind, str(size)]
    command += ["--threads", str(args.threads), "--width", str(args.width), "--seconds", str(args.seconds)]
    command += ["--max-naive-gib", str(args.max_naive_gib)] + ["--fixed-temperature"] * args.fixed_temperature
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


Row = dict[str, float | int | str | None]


def compare(loss: str, size: int, args: argparse.Namespace) -> Row:
    """One row of the table."""
    row: Row = {"loss": loss, "size": size} | in_child(loss, "time", size, args)
    held = in_child(loss, "baseline", size, args)["peak"] or 0.0
    for kind in ("naive", "kernel"):
        peak = in_child(loss, kind, size, args)["peak"] if kind == "kernel" or naive_fits(loss, size, args) else None
        row[f"{kind}_mib"] = None if peak is None else (peak - held) / 2**20
    return row


COLUMNS = {
    "loss": "{}",
    "size": "{}",
    "naive_ms": "{:.1f}",
    "kernel_ms": "{:.1f}",
    "ratio": "{:.2f}",
    "pairs": "{}",
    "naive_mib": "{:.0f}",
    "kernel_mib": "{:.0f}",
    "difference": "{:.0e}",
}


def line(row: Row, max_naive_gib: float) -> str:
    cells = ["skipped" if row[name] is None else form.format(row[name]) for name, form in COLUMNS.items()]
    note = "" if row["naive_mib"] is not None else f" naive: over {max_naive_gib:g} GiB"
    return "| " + " | ".join(cells) + " |" + note


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = [256, 512, 1024, 2048, 4096, 8192]
    parser.add_argument("--sizes", type=int, nargs="+", default=sizes, help="batch sizes N")
    parser.add_argument("--losses", nargs="+", choices=list(LOSSES), default=list(LOSSES))
    parser.add_argument("--width", type=int, default=512, help="embedding size D")
    parser.add_argument("--seconds", type=float, default=3.0, help="time of the alternating runs per row")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--fixed-temperature", action="store_true", help="the temperatures are not learned")
    parser.add_argument("--max-naive-gib", type=float, default=16.0, help="skip the naive loss above this")
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--child", nargs=3, metavar=("LOSS", "KIND", "SIZE"), help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    if args.child:
        loss, kind, size = args.child
        if kind == "time":
            print(json.dumps(measure_time(loss, int(size), args)))
        else:
            print(json.dumps(measure_peak(loss, int(size), kind, args)))
        return
    print(f"torch {torch.__version__}, {args.threads} threads, D={args.width}")
    print("| " + " | ".join(COLUMNS) + " |\n|" + " --- |" * len(COLUMNS))
    rows = []
    for loss in args.losses:
        for size in args.sizes:
            rows.append(compare(loss, size, args))
            print(line(rows[-1], args.max_naive_gib), flush=True)
    if args.json:
        setup = {"torch": torch.__version__, "threads": args.threads, "width": args.width}
        args.json.write_text(json.dumps({"setup": setup, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
