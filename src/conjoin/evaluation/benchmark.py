"""What a benchmark registers, so that `conjoin evaluate` finds it."""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from conjoin.evaluation.results import Results
from conjoin.registry import Registry
from conjoin.retrieval import ItemEncoder


@dataclass(frozen=True)
class Benchmark:
    """A benchmark of `conjoin evaluate`.

    Args:
        name: What `--benchmark` takes.
        help: One line about what it measures and what `--data` is.
        add_arguments: Adds the benchmark's own options to the parser of the command.
        run: Called as `run(encoder, args, out)` with the model, all options, and the folder to write to. `args` holds
            the benchmark's own options and the shared ones: `data`, `seed`, `quiet` and so on.
        reads_data: Whether `--data` must, can or cannot be given. It is a path, or with `"source"`, any source of
            `conjoin.data.load_pairs`, and must be given.
        reranks: Whether it uses `args.reranker`, a `conjoin.retrieval.Reranker` or None, on the first
            `args.rerank_top` candidates of each query.
    """

    name: str
    help: str
    add_arguments: Callable[[ArgumentParser], None]
    run: Callable[[ItemEncoder, Namespace, Path], Results]
    reads_data: Literal["required", "optional", "none", "source"] = "required"
    reranks: bool = False


BENCHMARKS: Registry[Benchmark] = Registry("benchmark", "conjoin.evaluation.benchmarks", "conjoin.benchmarks")
"""Every benchmark by name."""
