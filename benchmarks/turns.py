"""What the scripts that compare two ways side by side share: turns, both clocks, ratios and tables."""

import argparse
import gc
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import psutil

PACKAGES = ("torch", "transformers", "sentence-transformers", "faiss-cpu", "numpy", "pillow")


class Times(NamedTuple):
    """Seconds of one call: of wall time, of processor time in this process and those it started, and in this one."""

    wall: float
    cpu: float
    own: float


def seconds_of_children() -> float:
    """Processor time of the processes that this one started, both those that run and those that have ended."""
    ended = os.times()
    running = sum(sum(child.cpu_times()[:2]) for child in psutil.Process().children(recursive=True))
    return ended.children_user + ended.children_system + running


def timed(function: Callable[[], object]) -> Times:
    """Run a function once."""
    gc.collect()
    started = seconds_of_children()
    start, own_start = time.perf_counter(), time.process_time()
    function()
    own, wall = time.process_time() - own_start, time.perf_counter() - start
    return Times(wall, own + max(0.0, seconds_of_children() - started), own)


def take_turns(functions: Mapping[str, Callable[[], object]], turns: int) -> dict[str, list[Times]]:
    """Run the functions in turn, `turns` times, after one call of each; the order is reversed in every second turn."""
    for function in functions.values():
        function()
    found: dict[str, list[Times]] = {name: [] for name in functions}
    for turn in range(turns):
        names = list(functions) if turn % 2 == 0 else [*functions][::-1]
        for name in names:
            found[name].append(timed(functions[name]))
    return found


def speed_up(theirs: Sequence[Times], ours: Sequence[Times]) -> dict[str, float]:
    """How many times as fast ours is: the median over the turns of the ratio of times, and its range."""
    walls = [a.wall / b.wall for a, b in zip(theirs, ours, strict=True)]
    cpus = [a.cpu / b.cpu for a, b in zip(theirs, ours, strict=True)]
    return {
        "wall": statistics.median(walls),
        "wall_low": min(walls),
        "wall_high": max(walls),
        "cpu": statistics.median(cpus),
    }


def median(times: Sequence[Times]) -> Times:
    """The median of each clock."""
    return Times(*(statistics.median(clock) for clock in zip(*times, strict=True)))


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(rows[0]) + " |", "|" + " --- |" * len(rows[0])]
    cells = [[f"{value:.3g}" if isinstance(value, float) else str(value) for value in row.values()] for row in rows]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in cells])


def setup(args: argparse.Namespace) -> dict[str, Any]:
    """The options, the machine and the versions."""
    found = {name: value for name, value in vars(args).items() if name != "json"}
    names = [line for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    machine = names[0].partition(":")[2].strip() if names else platform.processor()
    shown: dict[str, Any] = {name: str(value) if isinstance(value, Path) else value for name, value in found.items()}
    shown |= {"machine": machine, "cores": os.cpu_count(), "date": time.strftime("%Y-%m-%d")}
    return shown | {"python": platform.python_version()} | {name: version(name) for name in PACKAGES}


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def write_json(path: Path | None, found: Mapping[str, Any]) -> None:
    """Write the results, if a path is given."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
