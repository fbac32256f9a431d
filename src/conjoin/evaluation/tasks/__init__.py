"""The benchmarks, one file each."""

TASKS = ("emoji", "mbeir", "merit", "mmeb", "pairs", "symmetric")
"""The name of each, which is that of its file."""
