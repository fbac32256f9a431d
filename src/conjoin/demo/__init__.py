"""What `conjoin demo` and `conjoin start` run, over the public names of the package."""

from conjoin.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
