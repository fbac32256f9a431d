"""Losses over embeddings: pure functions, and thin modules for the trainers."""

from conjoin.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
