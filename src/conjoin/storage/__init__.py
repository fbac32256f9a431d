"""Files and folders that appear in one step, checksums, locks, fingerprints, and the cache of training."""

from conjoin.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
