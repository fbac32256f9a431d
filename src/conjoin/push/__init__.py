"""Pushing to the Hub: what to upload of a model, a collection, a dataset, a metric or a search page, in one commit."""

from conjoin.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
