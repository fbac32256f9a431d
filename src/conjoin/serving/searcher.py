"""A collection with the model that made it: what the app and the endpoint search."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from pydantic_core import to_jsonable_python

from conjoin.constants import Role
from conjoin.retrieval import (
    Collection,
    Hit,
    ItemEncoder,
    Searchable,
    check_model,
    load_encoder,
    open_collection,
    search_items,
)
from conjoin.retrieval.collection_table import published_version
from conjoin.retrieval.pictures import has_picture, make_thumbnail, picture_folders, read_picture
from conjoin.retrieval.search import SERVED_BYTES, check_column, load_query_encoder, weighted_parts
from conjoin.serving.batching import MicroBatcher
from conjoin.serving.columns import Column, describe_columns
from conjoin.serving.limits import ItemError, Limits


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
        limits: Limits = Limits(),
        prompt: str | None = None,
        prompt_name: str | None = None,
    ) -> None:
        if collection is not None:
            check_model(collection, encoder)
        self.encoder, self.collection, self.limits = encoder, collection, limits
        self.query_prompt = encoder.prompt_of("query", prompt, prompt_name)
        self.batcher = MicroBatcher(encoder, limits.items, limits.waiting)

    @classmethod
    def load(
        cls,
        collection: str | Path | None,
        model: str | None = None,
        limits: Limits = Limits(),
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

    def refresh(self) -> bool:
        """Search the published version of the collection from now on; returns whether it is another.

        Searches that began go on in the version before.

        Raises:
            FileNotFoundError: There is no collection any more.
            ValueError: It is damaged, or of another model; the version before is searched.
        """
        collection = self.collection
        if not isinstance(collection, Collection) or published_version(collection.uri) == collection.version:
            return False
        opened = open_collection(collection.uri, memory=SERVED_BYTES)
        check_model(opened, self.encoder)
        self.collection = opened
        return True

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

    def encode(self, items: Sequence[Any], role: Role | None = None, prompt: str | None = None) -> np.ndarray:
        """Encode items into `(N, D)`, together with those of concurrent calls.

        Args:
            items: Of a request.
            role: What they are; None for the model's default prompt, if it has one.
            prompt: Theirs, in place of that of the role.
        """
        return self.batcher.encode(items, self.prompt_of(role, prompt), role)

    def prompt_of(self, role: Role | None, prompt: str | None = None) -> str | None:
        """The prompt of items in a role: the one given, else the server's for queries, else the model's own."""
        if prompt is not None:
            return prompt
        return self.query_prompt if role == "query" else self.encoder.prompt_of(role)

    def search(
        self,
        items: Sequence[Any],
        k: int = 10,
        *,
        offset: int = 0,
        prompt: str | None = None,
        **how: Any,  # noqa: ANN401
    ) -> list[list[Hit]]:
        """Search for items as `search_items` does; one list of results for each, best first.

        Args:
            items: The queries.
            k: Results of each.
            offset: Results that are left out before them.
            prompt: Of the queries, in place of the server's or the model's own.
            how: As for `search_items`.

        Raises:
            BusyError: Too many items wait for the model.
            ItemError: An item cannot be used.
            ValueError: There is no collection; `k` or `offset` is out of range; and as `search_items`.
        """
        collection, batcher = self._check_range(k, offset), self.batcher
        how |= {"prompt": self.query_prompt if prompt is None else prompt}
        try:
            hits = search_items(collection, batcher, items, k, offset=offset, **how)  # type: ignore[arg-type]
        except ItemError as error:
            if how.get("weights") is None:
                raise
            raise ItemError(weighted_parts(items, how["weights"])[error.item][0], error.problem) from error
        return [[replace(hit, row=_plain_row(hit.row)) for hit in each] for each in hits]

    def _check_range(self, k: int, offset: int) -> Searchable:
        """The collection, if it has results of these ranks."""
        if self.collection is None:
            raise ValueError("there is no collection to search; start with one: conjoin serve COLLECTION")
        if type(k) is not int or not 1 <= k <= self.limits.results:
            raise ValueError(f"k must be an integer from 1 to {self.limits.results}, got {k!r:.40}")
        if not 0 <= offset <= self.limits.depth - k:
            raise ValueError(f"offset + k must be at most {self.limits.depth:,}, got {offset} + {k}")
        return self.collection

    def browse(self, k: int, where: str | None = None, group_by: str | None = None, offset: int = 0) -> list[Hit]:
        """The first rows that a condition holds for, with thumbnails and without scores.

        Args:
            k: How many at most.
            where: Only rows that this condition holds for.
            group_by: A column: one row of each of its values.
            offset: Rows that are left out before them.

        Raises:
            ValueError: The condition cannot be evaluated, or there is no such column; or the collection, such as one
                in Milvus, has no order of its rows.
        """
        collection = self._check_range(k, offset)
        if not isinstance(collection, Collection):
            raise ValueError("nothing to search for: write a text, add an image, or both")
        if group_by is not None:
            check_column(collection, group_by)
        first: dict[Any, str] = {}
        for batch in collection.scan([*dict.fromkeys(("id", group_by or "id"))], where):
            for row in batch.to_pylist():
                value = row.get(group_by or "id")
                first.setdefault(("row", row["id"]) if value is None else str(value), row["id"])
            if len(first) >= offset + k:
                break
        chosen = [*first.values()][offset : offset + k]
        rows = zip(chosen, collection.rows(chosen, pictures=True), strict=True)
        return [Hit(id_, math.nan, _plain_row(row)) for id_, row in rows]


def _plain_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row as JSON can hold it: dates as texts, numbers that are not finite as None; a thumbnail stays as it is."""
    kept = {name: value for name, value in row.items() if name not in ("id", "picture")}
    plain = to_jsonable_python(kept, inf_nan_mode="null", bytes_mode="base64", serialize_unknown=True)
    return plain | ({"picture": row["picture"]} if "picture" in row else {})
