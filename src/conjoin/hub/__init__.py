"""Building models on pretrained ones, saving them so that others can load them, and loading what was saved."""

from conjoin.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
