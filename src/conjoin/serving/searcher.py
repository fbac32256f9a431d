"""A collection with the model that made it: what the app and the endpoint search."""

import math
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
from pydantic_core import to_jsonable_python

from conjoin.constants import Role
from conjoin.data.row_images import plain_text
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
from conjoin.retrieval.collection import published_version, with_kind
from conjoin.retrieval.pictures import has_picture, make_thumbnail, picture_folders, read_picture
from conjoin.retrieval.results import Hits
from conjoin.retrieval.search import SERVED_BYTES, load_query_encoder, rank_items, weighted_parts, without_groups
from conjoin.serving.batching import MicroBatcher
from conjoin.serving.columns import Columns, check_plain, filter_condition, join_conditions
from conjoin.serving.explain import explain_result
from conjoin.serving.limits import ItemError, Limits, check_where

SORTED = 100
"""The best results of a query, which a column may sort."""


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
        self._columns: Columns | None = None
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
        opened = None if collection is None else open_collection(collection, SERVED_BYTES, options.get("device"))
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
    def columns(self) -> Columns | None:
        """The columns of the collection as it is now; None of one in Milvus, which has no order of its rows."""
        columns, collection = self._columns, self.collection
        if isinstance(collection, Collection) and (columns is None or columns.collection is not collection):
            columns = self._columns = Columns(collection)
        return columns

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
        opened = open_collection(collection.uri, SERVED_BYTES, self.encoder.device)
        check_model(opened, self.encoder)
        self.collection = opened
        return True

    def picture(self, id_: str, side: int = 512) -> bytes | None:
        """A JPEG file of the picture of a row: the thumbnail that is kept, or made of `side` pixels; None without one.

        Raises:
            ValueError: There is no such row, or its picture cannot be read, or may not be shown.
            FileNotFoundError: The picture is gone.
        """
        row = self._row(id_)
        if not has_picture(row):
            return None
        return row.get("picture") or make_thumbnail(read_picture(row, picture_folders(self.source)), side, "the row")

    def pictured(self, ids: Sequence[str]) -> set[str]:
        """Which of some rows, that name no picture, have one that the collection keeps."""
        collection = self.collection
        if not ids or not isinstance(collection, Collection) or "picture" not in collection.table.schema.names:
            return set()
        kinds = collection.take(ids, ["row_kind"])["row_kind"].to_pylist()
        return {id_ for id_, kind in zip(ids, kinds, strict=True) if kind != "text"}

    def _row(self, id_: str) -> dict[str, Any]:
        return {} if self.collection is None else self.collection.rows([id_], pictures=True)[0]

    def row_item(self, id_: str, part: str | None = None) -> tuple[str | None, list[str]]:
        """What a row has, as the text and the `data:` URIs of an item; or a part of it, `"image"` or `"text"`.

        Raises:
            ValueError: There is no such row, or it has no such part; and as `picture`.
            FileNotFoundError: Its picture is gone.
        """
        text = plain_text([], self._row(id_).get("text") or "")[: self.limits.text_characters] or None
        picture = None if part == "text" else self.picture(id_)
        text = None if part == "image" else text
        if text is None and picture is None:
            raise ValueError(f"the row {id_!r} has no {part or 'text and no image'} to search for")
        uris = [] if picture is None else [f"data:image/jpeg;base64,{b64encode(picture).decode()}"]
        return text, uris

    def explain(self, text: str | None, images: list[Any], id_: str) -> list[dict[str, Any]]:
        """What a query and the row of an id share; see `explain_result`."""
        return explain_result(self.encoder, text, images, self._row(id_), picture_folders(self.source))

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
        sort: str | None = None,
        **how: Any,  # noqa: ANN401
    ) -> list[list[Hit]]:
        """Search for items as `search_items` does; one list of results for each, best first.

        Args:
            items: The queries.
            k: Results of each.
            offset: Results that are left out before them.
            prompt: Of the queries, in place of the server's or the model's own.
            sort: A column that the best `SORTED` results are sorted by, with `-` before it for falling values; those
                without a value come last.
            how: As for `search_items`.

        Raises:
            BusyError: Too many items wait for the model.
            ItemError: An item cannot be used.
            ValueError: There is no collection, or no such column; `k` or `offset` is out of range; and as
                `search_items`.
        """
        collection, encoder = self._check_range(k, offset), cast(ItemEncoder, self.batcher)
        how |= {"prompt": self.query_prompt if prompt is None else prompt}
        column = (sort or "").removeprefix("-")
        if sort is not None:
            check_plain(collection, column)
        try:
            if sort is None:
                hits = search_items(collection, encoder, items, k, offset=offset, **how)
            else:
                hits = Hits()
                for best in search_items(collection, encoder, items, SORTED, **how):
                    known = [hit for hit in best if column in hit.row]
                    known.sort(key=lambda hit: hit.row[column], reverse=sort.startswith("-"))
                    hits.append([*known, *(hit for hit in best if column not in hit.row)][offset : offset + k])
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

    def browse(
        self, k: int, where: str | None = None, group_by: str | None = None, offset: int = 0, sort: str | None = None
    ) -> list[Hit]:
        """The first rows that a condition holds for, without scores.

        Args:
            k: How many at most.
            where: Only rows that this condition holds for.
            group_by: A column: one row of each of its values.
            offset: Rows that are left out before them.
            sort: A column, as for `search`.

        Raises:
            ValueError: The condition cannot be evaluated, or there is no such column; or the collection, such as one
                in Milvus, has no order of its rows.
        """
        collection, columns = self._check_range(k, offset), self.columns
        if columns is None:
            raise ValueError("nothing to search for: write a text, add an image, or both")
        for column in filter(None, (group_by, (sort or "").removeprefix("-"))):
            check_plain(collection, column)
        chosen = columns.ids(k, where, group_by, offset, sort)
        return [Hit(id_, math.nan, _plain_row(row)) for id_, row in zip(chosen, collection.rows(chosen), strict=True)]

    def conditions(
        self,
        filters: Mapping[str, Any],
        where: str | None = None,
        kind: str | None = None,
        like: Sequence[str] = (),
        group_by: str | None = None,
    ) -> dict[str, str]:
        """What a request wants of rows, as conditions by the column that they are of; `.` and a word for the others.

        Args:
            filters: By column, as for `filter_condition`.
            where: A condition of a stranger.
            kind: Of the rows.
            like: Ids of rows that are no results: other rows like them are searched.
            group_by: A column: no row of a group of these is a result either.

        Raises:
            ValueError: There is no such column, row or kind; and as `check_where`.
        """
        found = {}
        for name, values in filters.items():
            check_plain(cast(Searchable, self.collection), name)
            found[name] = filter_condition(name, values)
        if where is not None and check_where(where, self.limits).strip():
            found[".where"] = where
        if kind is not None:
            found["row_kind"] = str(with_kind(None, kind))
        if like:
            groups = [self._row(id_).get(group_by or "", ("row", id_)) for id_ in like]
            found[".like"] = without_groups(group_by or "id", groups)
        return found

    def count(
        self,
        items: Sequence[Any],
        conditions: Mapping[str, str],
        facets: Sequence[str],
        group_by: str | None = None,
        is_sorted: bool = False,
        **how: Any,  # noqa: ANN401
    ) -> dict[str, Any]:
        """Count the rows that a search or a list takes its results from, and the values of columns in them.

        Args:
            items: One query, or none. With a `min_score`, the rows that reach it count.
            conditions: Of the rows.
            facets: Names of the columns.
            group_by: A column: each of its values counts once.
            is_sorted: Whether a column sorts the results of a query, of which there are `SORTED` then.
            how: As for `search_items`.

        Returns:
            `total`, `facets` as `Columns.count` gives them, and `kinds`: how many rows have an image, a text, or both.

        Raises:
            ValueError: There is no such column, there are several items, or the collection is in Milvus.
        """
        columns = self.columns
        if columns is None or len(items) > 1:
            raise ValueError("facets count the rows for one query, of a collection that is not in Milvus")
        collection = columns.collection
        for column in facets:
            check_plain(collection, column)
        names, among = [*dict.fromkeys([*facets, "row_kind"])], None
        if items and how.get("min_score") is not None:
            where = join_conditions({name: each for name, each in conditions.items() if name not in names})
            depth = min(self.limits.depth, len(collection))
            prompt = how.pop("prompt", None)
            how |= {"prompt": self.query_prompt if prompt is None else prompt, "where": where}
            among = rank_items(collection, cast(ItemEncoder, self.batcher), items, depth, **how).ids[0]
        total, found = columns.count(conditions, names, group_by, among)
        kinds = dict(found.pop("row_kind")["values"])
        return {"total": min(total, SORTED) if items and is_sorted else total, "facets": found, "kinds": kinds}


def _plain_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row as JSON can hold it: dates as texts, numbers that are not finite as None."""
    kept = {name: value for name, value in row.items() if name != "id"}
    return dict(to_jsonable_python(kept, inf_nan_mode="null", bytes_mode="base64", serialize_unknown=True))
