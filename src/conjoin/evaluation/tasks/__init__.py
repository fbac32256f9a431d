"""The benchmarks, one file each, which declares it as `BENCHMARK`."""

import difflib
from importlib import import_module

from conjoin.evaluation.benchmark import Benchmark

NAMES = ("emoji", "mbeir", "merit", "mmeb", "pairs", "symmetric")
"""The benchmarks of `conjoin evaluate`, each the name of its module."""


def load_benchmark(name: str) -> Benchmark:
    """Return a benchmark by its name.

    Raises:
        ValueError: There is none of this name.
    """
    if name not in NAMES:
        near = difflib.get_close_matches(name, NAMES, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"no benchmark {name!r}; {hint}expected one of {', '.join(NAMES)}")
    benchmark: Benchmark = import_module(f"{__name__}.{name}").BENCHMARK
    return benchmark
