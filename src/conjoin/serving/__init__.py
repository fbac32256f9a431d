"""A search app and an HTTP endpoint over a collection and its model.

Importing this package loads neither torch nor a web framework.
"""

from conjoin.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
