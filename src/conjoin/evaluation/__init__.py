"""Evaluation: metrics, protocols, run files, results and their report; `tasks` has the benchmarks."""

from conjoin.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
