"""A stand-in for a model: what a collection needs of an encoder, with vectors that a function gives."""

from collections.abc import Callable, Iterator, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from conjoin.retrieval import ModelIdentity


class StandIn:
    """An encoder of texts.

    Args:
        vectors: Returns the vectors `(N, D)` of texts.
        dimension: D.
    """

    name = "stand-in"
    fingerprint = processing = "0"
    input_type = "seq"
    dtype = truncate_dim = None
    batch_size = 256
    identity = ModelIdentity("stand-in", "0")
    is_symmetric, load_options = True, MappingProxyType({})

    def __init__(self, vectors: Callable[[list[str]], np.ndarray], dimension: int) -> None:
        self.vectors, self.dimension = vectors, dimension

    def encode(self, items: Sequence[Any], **options: Any) -> np.ndarray:  # noqa: ANN401
        """Vectors `(N, D)`."""
        return self.vectors([item["text"] if isinstance(item, dict) else item for item in items])

    def encode_batches(self, items: Sequence[Any], *given: Any, **options: Any) -> Iterator[Any]:  # noqa: ANN401
        """All in one batch."""
        yield range(len(items)), range(len(items)), self.encode(items)

    encode_query = encode_document = encode

    def prompt_of(self, *given: Any) -> None:  # noqa: ANN401 - as of `ItemEncoder`
        """None has a prompt."""
