"""Data: fixed columns out of any source, the embedded sample, triplets and the collator."""

from conjoin.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
