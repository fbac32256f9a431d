"""The benchmarks, one file each; importing one registers it."""

MODULES = {
    "emoji": "conjoin.evaluation.benchmarks.emoji",
    "mbeir": "conjoin.evaluation.benchmarks.mbeir",
    "merit": "conjoin.evaluation.benchmarks.merit",
    "mmeb": "conjoin.evaluation.benchmarks.mmeb",
    "pairs": "conjoin.evaluation.benchmarks.pairs",
    "symmetric": "conjoin.evaluation.benchmarks.symmetric",
}
"""The module of each benchmark, imported when `conjoin.evaluation.BENCHMARKS` is asked for it."""
