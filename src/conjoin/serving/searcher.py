"""A collection with the model that made it: what the app and the endpoint search."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from conjoin.retrieval import Collection, ItemEncoder, Searchable, check_model, load_encoder, open_collection
from conjoin.retrieval.collection_table import PICTURE, published_at
from conjoin.retrieval.encoder import Role
from conjoin.retrieval.pictures import has_picture, hidden_pictures, make_thumbnail, picture_folders, read_picture
from conjoin.retrieval.search import (
    SERVED_BYTES,
    check_column,
    load_query_encoder,
    query_vectors,
    search_groups,
    weighted_parts,
    weighted_sums,
)
from conjoin.serving.batching import MicroBatcher
from conjoin.serving.columns import Column, describe_columns
from conjoin.serving.limits import ItemError, Limits, check_results

_ROWS = 10_000
"""The most rows that one request without a query looks at."""


class Found(NamedTuple):
    """A result: its rank from 1, its score (not a number without a query), its id, and what is kept of the row."""

    rank: int
    score: float
    id: str
    row: dict[str, Any]


class Ranking(NamedTuple):
    """How the rows are ranked for a query.

    Attributes:
        prompt: Of the query; None for the server's, or the model's own.
        weights: Of the parts `"image"` and `"text"` of the query; see `search_items`.
        group_by: A column: only the best row of each of its values is a result.
    """

    prompt: str | None = None
    weights: Mapping[str, float] | None = None
    group_by: str | None = None


class Searcher:
    """Encodes items, and searches a collection for them; safe to use from several threads.

    Args:
        encoder: The model.
        collection: What it made; None to encode only.
        limits: What is accepted.
        prompt: Of queries, in place of the model's own, where a request gives none.
        prompt_name: The name of one of the model's prompts, likewise.

    Raises:
        ValueError: The collection was made with another model, or there is no prompt of this name.
    """

    def __init__(
        self,
        encoder: ItemEncoder,
        collection: Searchable | None = None,
        limits: Limits | None = None,
        prompt: str | None = None,
        prompt_name: str | None = None,
    ) -> None:
        if collection is not None:
            check_model(collection, encoder)
        self.encoder, self.collection = encoder, collection
        self.query_prompt = encoder.prompt_of("query", prompt, prompt_name)
        self.limits = limits or Limits()
        self.batcher = MicroBatcher(encoder, self.limits.items, self.limits)

    @classmethod
    def load(
        cls,
        collection: str | Path | None,
        model: str | None = None,
        limits: Limits | None = None,
        *,
        prompt: str | None = None,
        prompt_name: str | None = None,
        **options: Any,  # noqa: ANN401
    ) -> "Searcher":
        """Open a collection and load its model.

        Several images of an item are read as the collection records or the options say. Where neither does, a model of
        one image per item averages the embeddings (input type `avg`).

        Args:
            collection: Its address, as for `open_collection`; None to encode only.
            model: Folder or Hub name of the model; the one that the collection records if None.
            limits: What is accepted.
            prompt: As for the class.
            prompt_name: As for the class.
            options: As for `load_encoder`.

        Raises:
            FileNotFoundError: There is no such collection or model.
            ValueError: The collection or the model is damaged, or they do not belong together.
        """
        opened = None if collection is None else open_collection(collection, memory=SERVED_BYTES)
        if opened is None and model is None:
            raise ValueError("there is nothing to serve: pass a collection, a model or both")
        encoder = (
            load_encoder(str(model), **options) if opened is None else load_query_encoder(opened, model, **options)
        )
        searcher = cls(encoder, opened, limits, prompt, prompt_name)
        _ = encoder.dimension  # the first forward pass is slow
        several = options.get("input_type") or (opened and opened.model.input_type)
        if several is None and encoder.input_type == "seq" and not _takes_several(encoder):
            encoder.input_type = "avg"
        return searcher

    @property
    def model_name(self) -> str:
        """The name of the model on the Hub, or the last two parts of its path."""
        path = Path(self.encoder.name)
        return "/".join(path.parts[-2:]) if path.is_absolute() else self.encoder.name

    @property
    def source(self) -> str:
        """The address of the collection; empty without one."""
        return "" if self.collection is None else self.collection.uri

    @property
    def columns(self) -> list[Column]:
        """The columns that a condition may name."""
        return [] if self.collection is None else describe_columns(self.collection)

    @property
    def hidden_pictures(self) -> str | None:
        """Which option shows pictures that may not be shown; None if there are none."""
        return None if self.collection is None else hidden_pictures(self.collection)

    def refresh(self) -> bool:
        """Search the published version of the collection from now on; returns whether it is another.

        Searches that began go on in the version before.

        Raises:
            FileNotFoundError: There is no collection any more.
            ValueError: It is damaged, or of another model; the version before is searched.
        """
        collection = self.collection
        if not isinstance(collection, Collection):
            return False
        if published_at(collection.uri) == collection.version:
            return False
        opened = open_collection(collection.uri, memory=SERVED_BYTES)
        check_model(opened, self.encoder)
        self.collection = opened
        return True

    def code_options(self, images: Sequence[str], ranking: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """What code that repeats a search gives to `load_encoder` and to `search_items`."""
        loading = dict(self.encoder.load_options)
        if len(images) > 1:
            loading["input_type"] = self.encoder.input_type
        is_own = self.query_prompt == self.encoder.prompt_of("query")
        return loading, dict(ranking) | ({} if is_own else {"prompt": self.query_prompt})

    def picture(self, id_: str, side: int = 512) -> bytes | None:
        """A JPEG file of the picture of a row, at most `side` pixels wide and high; None without one.

        Raises:
            ValueError: There is no such row, or its picture cannot be read, or may not be shown.
            FileNotFoundError: The picture is gone.
        """
        row = {} if self.collection is None else self.collection.rows([id_], pictures=True)[0]
        if not has_picture(row):
            return None
        return make_thumbnail(read_picture(row, picture_folders(self.source)), side, "the row")

    def encode(
        self, items: Sequence[Any], role: Role | None = None, prompt: str | None = None, pixels: int = 0
    ) -> np.ndarray:
        """Encode items into `(N, D)`, together with those of concurrent calls.

        Args:
            items: Of a request.
            role: What they are; None for the model's default prompt, if it has one.
            prompt: Theirs, in place of that of the role.
            pixels: Of their images.
        """
        if prompt is None:
            prompt = self.query_prompt if role == "query" else self.encoder.prompt_of(role)
        return self.batcher.encode(items, prompt, pixels, role)

    def search(
        self,
        items: Sequence[Any],
        k: int = 10,
        where: str | None = None,
        ranking: Ranking = Ranking(),  # noqa: B008 - it cannot change
        pictures: bool = False,
        pixels: int = 0,
    ) -> list[list[Found]]:
        """Search for items; one list of results for each, best first.

        Args:
            items: The queries.
            k: Results of each.
            where: Search only the rows that this condition holds for.
            ranking: How the rows are ranked.
            pictures: Also give the thumbnails of the rows, as `"picture"`, where the collection keeps them.
            pixels: Of the images of the items.

        Raises:
            BusyError: Too many items or pixels wait for the model.
            ItemError: An item cannot be used.
            ValueError: There is no collection, `k` is out of range, the condition cannot be evaluated, there is no
                column `group_by`, or a part of an item has no weight.
        """
        if self.collection is None:
            raise ValueError("there is no collection to search; start with one: conjoin serve COLLECTION")
        check_results(k, self.limits)
        collection = self.collection
        if ranking.group_by is not None:
            check_column(collection, ranking.group_by)
        vectors = self._query_vectors(collection, items, ranking, pixels)
        if ranking.group_by is None:
            result = collection.search(vectors, k, where=where)
        else:
            result = search_groups(collection, vectors, k, ranking.group_by, where=where)
        results = []
        for ids, scores in zip(result.ids, result.scores.tolist(), strict=True):
            hits = zip(ids, scores, collection.rows(ids, pictures), strict=False)  # scores are padded
            results.append(
                [Found(rank, score, id_, _plain_row(row)) for rank, (id_, score, row) in enumerate(hits, 1)]
            )
        return results

    def _query_vectors(
        self, collection: Searchable, items: Sequence[Any], ranking: Ranking, pixels: int
    ) -> np.ndarray:
        """The vectors `(N, D)` of queries, of their parts by weight if there are weights."""
        if ranking.weights is None:
            return query_vectors(collection, self.encode(items, "query", ranking.prompt, pixels))
        parts = weighted_parts(items, ranking.weights)
        try:
            vectors = self.encode(
                [{part: items[index][part]} for index, part in parts], "query", ranking.prompt, pixels
            )
        except ItemError as error:
            raise ItemError(parts[error.item][0], error.problem) from error
        return weighted_sums(query_vectors(collection, vectors), parts, ranking.weights)

    def browse(self, k: int, where: str | None = None, group_by: str | None = None) -> list[Found]:
        """Rows spread evenly over the first ones that a condition holds for, with thumbnails and without scores.

        Args:
            k: How many at most.
            where: Only rows that this condition holds for.
            group_by: A column: one row of each of its values.

        Raises:
            ValueError: The condition cannot be evaluated, or there is no such column; or the collection, such as one
                in Milvus, has no order of its rows.
        """
        collection = self.collection
        if not isinstance(collection, Collection):
            raise ValueError("nothing to search for: write a text, add an image, or both")
        if group_by is not None:
            check_column(collection, group_by)
        first: dict[str, str] = {}
        rows = 0
        for batch in collection.scan([*dict.fromkeys(("id", group_by or "id"))], where):
            for row in batch.to_pylist():
                value = row.get(group_by or "id")
                first.setdefault(f"row {row['id']}" if value is None else f"value {value}", row["id"])
            rows += batch.num_rows
            if rows >= _ROWS:
                break
        ids = [*first.values()]
        chosen = [ids[number * len(ids) // k] for number in range(k)] if len(ids) > k else ids
        shown = collection.rows(chosen, pictures=True)
        return [
            Found(rank, math.nan, id_, _plain_row(row))
            for rank, (id_, row) in enumerate(zip(chosen, shown, strict=True), 1)
        ]


def _plain_row(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value if name == PICTURE else plain(value) for name, value in row.items() if name != "id"}


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
    encoder.encode([item], on_unusable=lambda index, error: failed.append(index))
    return not failed
