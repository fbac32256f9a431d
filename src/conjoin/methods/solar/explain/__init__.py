"""Visualise what image and text share: heat maps of one pair and charts of scores."""

from conjoin.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
