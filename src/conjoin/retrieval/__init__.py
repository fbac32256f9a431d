"""Encoding items into a collection, and searching it."""

from conjoin.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
