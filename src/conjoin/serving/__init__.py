"""A search app and an HTTP endpoint over a collection and its model.

Importing this package loads neither torch nor a web framework, so that the app answers before the model is loaded.
"""

from conjoin.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
