"""conjoin: any item (text, image, interleaved) in, one comparable vector out."""

from conjoin.lazy import attach

__version__ = "0.1.0.dev0"
__getattr__, __dir__, __all__ = attach(__name__, __file__)
__all__ += ["__version__"]
