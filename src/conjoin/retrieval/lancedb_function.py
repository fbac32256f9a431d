"""Any model of `load_encoder` as an embedding function of LanceDB: `table.search("a red apple")` encodes its query.

Importing this module registers it as `"conjoin"`; a program that opens such a table imports it first.
"""

from typing import Any

import numpy as np
from lancedb.embeddings import EmbeddingFunction, register
from pydantic import Field, PrivateAttr

from conjoin.retrieval.encoder import ItemEncoder
from conjoin.retrieval.load import load_encoder


@register("conjoin")
class EncoderFunction(EmbeddingFunction):
    """An encoder of items, made by `get_registry().get("conjoin").create(name=..., options=...)`.

    The source column holds texts or the bytes of image files. A query is any item.

    Attributes:
        name: Folder or Hub name of the model.
        options: Further arguments of `load_encoder`, such as `{"device": "cpu"}`; plain values, which the table keeps.
    """

    name: str
    options: dict[str, Any] = Field(default_factory=dict)
    max_retries: int = 0  # an item that cannot be read stays so
    _encoder: ItemEncoder = PrivateAttr()

    def __init__(self, **fields: Any) -> None:  # noqa: ANN401
        super().__init__(**fields)
        self._encoder = load_encoder(self.name, **self.options)

    def compute_query_embeddings(self, query: Any, *args: Any, **kwargs: Any) -> list[np.ndarray]:  # type: ignore[override]  # noqa: ANN401
        """Encode one item as a query; a string is a text."""
        return [*self._encoder.encode_query([{"text": query} if isinstance(query, str) else query])]

    def compute_source_embeddings(self, items: Any, *args: Any, **kwargs: Any) -> list[np.ndarray]:  # type: ignore[override]  # noqa: ANN401
        """Encode the texts or image files of a column as documents."""
        values: Any = self.sanitize_input(items)
        parts = [{"image": {"bytes": each}} if isinstance(each, bytes) else {"text": each} for each in values]
        return [*self._encoder.encode_document(parts)]

    def ndims(self) -> int:
        """Length of a vector."""
        return self._encoder.dimension
