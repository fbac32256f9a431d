"""Find and mask the tokens that image and text share: threshold, evolutionary mask, segments, samples."""

from conjoin.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
