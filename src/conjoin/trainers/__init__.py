"""Trainers: one file per method, in the shape of `transformers.Trainer`."""

from conjoin.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
