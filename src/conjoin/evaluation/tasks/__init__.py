"""The benchmarks, one file each; importing one registers it."""

MODULES = {
    name: f"conjoin.evaluation.tasks.{name}" for name in ("emoji", "mbeir", "merit", "mmeb", "pairs", "symmetric")
}
"""The module of each benchmark, imported when `conjoin.evaluation.BENCHMARKS` is asked for it."""
