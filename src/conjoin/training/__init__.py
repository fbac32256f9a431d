"""Training code shared by all methods: configuration, trainer, objective, recipes and runs."""

from conjoin.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
