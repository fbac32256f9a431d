"""An index with the model that made it: what the app and the endpoint search."""

import math
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from conjoin.retrieval import (
    Index,
    ItemEncoder,
    check_model,
    load_encoder,
    load_index,
    query_vectors,
    rows_of,
    select_rows,
)
from conjoin.retrieval.load import recorded_model
from conjoin.serving.batching import MicroBatcher
from conjoin.serving.columns import Column, describe_columns
from conjoin.serving.limits import Limits, check_length, check_results


class Found(NamedTuple):
    """A result: its rank from 1, its score, its id, and what the index keeps of the row."""

    rank: int
    score: float
    id: str
    row: dict[str, Any]


class Searcher:
    """Encodes items, and searches an index for them; safe to use from several threads.

    Args:
        encoder: The model.
        index: What it made; None to encode only.
        limits: What is accepted.
        source: Where the index came from, for people.

    Raises:
        ValueError: The index was built with another model.
    """

    def __init__(
        self, encoder: ItemEncoder, index: Index | None = None, limits: Limits | None = None, source: str = ""
    ) -> None:
        if index is not None:
            check_model(index, encoder)
        self.encoder, self.index, self.source = encoder, index, source
        self.limits = limits or Limits()
        self.batcher = MicroBatcher(encoder, self.limits.items, self.limits.waiting)
        self._rows = threading.Lock()

    @classmethod
    def load(
        cls,
        index: str | Path | None,
        model: str | None = None,
        limits: Limits | None = None,
        **options: Any,  # noqa: ANN401
    ) -> "Searcher":
        """Load an index and its model.

        Several images of an item are read as the index records or the options say. Where neither does, a model of one
        image per item averages the embeddings (input type `avg`).

        Args:
            index: A folder; None to encode only.
            model: Folder or Hub name of the model; the one that the index records if None.
            limits: What is accepted.
            options: As for `load_encoder`.

        Raises:
            FileNotFoundError: There is no such index or model.
            ValueError: The index or the model is damaged, or they do not belong together.
        """
        loaded = None if index is None else load_index(index)
        if loaded is not None and loaded.model is not None and options.get("input_type") is None:
            options["input_type"] = loaded.model.input_type
        if model is None:
            if loaded is None:
                raise ValueError("there is nothing to serve: pass an index, a model or both")
            model = recorded_model(loaded)
        searcher = cls(load_encoder(model, **options), loaded, limits, "" if index is None else str(index))
        encoder = searcher.encoder
        _ = encoder.dimension  # the first forward pass is slow
        if options.get("input_type") is None and encoder.input_type == "seq" and not _takes_several(encoder):
            encoder.input_type = "avg"
        return searcher

    @property
    def model_name(self) -> str:
        """The name of the model on the Hub, or the last two parts of its path."""
        path = Path(self.encoder.name)
        return "/".join(path.parts[-2:]) if path.is_absolute() else self.encoder.name

    @property
    def columns(self) -> list[Column]:
        """The columns that a condition may name."""
        with self._rows:
            return [] if self.index is None else describe_columns(self.index)

    def encode(self, items: Sequence[Any], instruction: str | None = None) -> np.ndarray:
        """Encode items into `(N, D)`, together with those of concurrent calls."""
        return self.batcher.encode(items, instruction)

    def search(
        self, items: Sequence[Any], k: int = 10, where: str | None = None, instruction: str | None = None
    ) -> list[list[Found]]:
        """Search for items; one list of results for each, best first.

        Raises:
            BusyError: Too many items wait for the model.
            ItemError: An item cannot be used.
            ValueError: There is no index, `k` is out of range, or the condition cannot be read.
        """
        if self.index is None:
            raise ValueError("there is no index to search; start with one: conjoin serve INDEX")
        check_results(k, self.limits)
        among = None
        if where is not None:
            check_length(where, self.limits, "the condition")
            with self._rows:
                among = select_rows(self.index, where)
        vectors = query_vectors(self.index, self.encode(items, instruction))
        with self._rows:
            found = self.index.search(vectors, k, among=among)
            rows = [rows_of(self.index, ids) for ids in found.ids]
        results = []
        for ids, scores, kept in zip(found.ids, found.scores.tolist(), rows, strict=True):
            hits = zip(ids, scores, kept, strict=False)  # an approximate index may find fewer
            results.append([Found(rank, score, id_, plain(row)) for rank, (id_, score, row) in enumerate(hits, 1)])
        return results


def plain(value: Any) -> Any:  # noqa: ANN401 - a value of a row
    """Return a value of a row as JSON can hold it: dates as texts, numbers that are not finite as None."""
    if isinstance(value, dict):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, str | int) else str(value)


def _takes_several(encoder: ItemEncoder) -> bool:
    """Whether a model reads several images of an item in their order."""
    failed: list[int] = []
    item = {"image": [Image.new("RGB", (32, 32)), Image.new("RGB", (32, 32))]}
    encoder.encode([item], on_unusable=lambda place, error: failed.append(place))
    return not failed
