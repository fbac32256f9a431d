"""From an address to something that is searched, and from items to results."""

from collections.abc import Collection as Container, Iterable, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from conjoin.constants import RANKINGS, RankBy
from conjoin.processing.item_error import ItemError
from conjoin.processing.item_inputs import SystemText, item_parts
from conjoin.retrieval.collection import Collection, condition, milvus_address, sql_literal, with_kind
from conjoin.retrieval.encoder import ItemEncoder
from conjoin.retrieval.load import load_encoder
from conjoin.retrieval.milvus import MilvusCollection
from conjoin.retrieval.results import Hits, Ranking, Searchable
from conjoin.retrieval.vectors import exact_search, subtract_centers, truncate
from conjoin.retrieval.words import WordQuery

SERVED_BYTES = 10**9
"""Vectors of a collection that a server keeps in memory."""


def open_collection(uri: str | Path, memory: int = 0, device: str | torch.device | None = None) -> Searchable:
    """Open what can be searched at an address.

    Args:
        uri: A folder, `s3://`, `gs://`, `az://`, `hf://datasets/OWNER/NAME`; or `http://HOST:PORT/NAME` for a
            collection in Milvus.
        memory: As for `Collection`.
        device: As for `Collection`.

    Raises:
        FileNotFoundError: There is nothing.
        ValueError: It is unfinished, damaged, or something else.
        ConnectionError: A server does not answer.
    """
    return MilvusCollection(uri) if milvus_address(uri) else Collection(uri, memory, device=device)


def search_items(
    collection: Searchable,
    encoder: ItemEncoder | None,
    items: Sequence[Any],
    k: int = 10,
    *,
    offset: int = 0,
    pictures: bool = False,
    **how: Any,  # noqa: ANN401
) -> Hits:
    """Encode items as queries, and find the rows of a collection that are most similar to each.

    Args:
        collection: What to search.
        encoder: Must hold the model that made the vectors of the collection; None to rank by words alone.
        items: The queries: strings, images, `{"text", "image"}` or chat messages.
        k: Results per query.
        offset: Results that are left out before them.
        pictures: Also give the thumbnail of each row, as `"picture"`, where the collection keeps them.
        how: As for `rank_items`: `ranking`, `where`, `kind`, `weights`, `group_by`, `prompt`, `prompt_name`,
            `min_score`; and errors as there.

    Returns:
        For each query a list of `Hit` (`id`, `score`, `row`), best first.
    """
    return collection.hits(rank_items(collection, encoder, items, k + offset, **how), offset, pictures)


def rank_items(
    collection: Searchable,
    encoder: ItemEncoder | None,
    items: Sequence[Any],
    k: int = 10,
    *,
    ranking: RankBy = "default",
    where: str | None = None,
    kind: str | None = None,
    weights: Mapping[str, float] | None = None,
    group_by: str | None = None,
    prompt: str | None = None,
    prompt_name: str | None = None,
    min_score: float | None = None,
) -> Ranking:
    """Encode items as queries, and rank the rows of a collection for each.

    Args:
        collection: What to search.
        encoder: Must hold the model that made the vectors of the collection; None to rank by words alone.
        items: The queries: strings, images, `{"text", "image"}` or chat messages.
        k: Results per query.
        ranking: `"default"` adds the scores by vectors and by the words of the items, as `Collection.rank` does;
            `"vectors"` and `"words"` take one of them. Milvus, and collections of over two million rows, have vectors
            by default.
        where: Search only the rows that a condition holds for, such as `"category = 'shoes' and price < 50"`.
        kind: Search only rows with an `"image"` alone, a `"text"` alone, or `"both"`.
        weights: Of the parts `"image"` and `"text"`: an item `{"text", "image"}` then has the vector
            Σ weight · vector of the part, L2-normalised, in place of the model's vector of both. Words count as much
            as the text does; without weights, half as much in an item with an image as in one without.
        group_by: A column: only the best row of each of its values is a result; see `search_groups`.
        prompt: Of the queries, in place of the model's own; see `ItemEncoder.encode`.
        prompt_name: The name of one of the model's prompts, likewise.
        min_score: Leave out results that score below it.

    Raises:
        ItemError: There are `weights`, and an item has no parts, or a part without a weight; or an item without words
            is to be ranked by them.
        ValueError: There is no such ranking; the collection was made with another model; there is no such
            column; and as `ItemEncoder.encode` and `Collection.rank`.
    """
    if ranking not in RANKINGS:
        raise ValueError(f"unknown ranking {ranking!r}; expected one of {list(RANKINGS)}")
    vectors, words, where = None, None, with_kind(where, kind)
    if ranking != "words":
        if encoder is None:
            raise ValueError(f"the ranking {ranking!r} compares vectors: pass the encoder that made the collection")
        check_model(collection, encoder)
        how: dict[str, Any] = {"prompt": prompt, "prompt_name": prompt_name}
        if weights is None:
            kinds = [_item_kind(item, f"item {index}") for index, item in enumerate(items)]
            vectors = query_vectors(collection, encoder.encode_query(items, **how), kinds)
        else:
            parts = weighted_parts(items, weights)
            encoded = encoder.encode_query([{part: items[index][part]} for index, part in parts], **how)
            vectors = weighted_sums(query_vectors(collection, encoded, [part for _, part in parts]), parts, weights)
    if ranking == "words" or (ranking == "default" and collection.has_words):
        words = [_item_words(item, f"item {index}", weights) for index, item in enumerate(items)]
        empty = [index for index, (text, _) in enumerate(words) if not text]
        if ranking == "words" and empty:
            raise ItemError(f"item {empty[0]}", "it has no words to rank by")
        words = None if len(empty) == len(words) else words
    if group_by is not None:
        result = search_groups(collection, vectors, k, group_by, where=where, words=words)
    else:
        result = collection.rank(vectors, k, where=where, words=words)
    if min_score is None:
        return result
    return Ranking.join((ids[: int((scores >= min_score).sum())], scores[scores >= min_score])
                        for ids, scores in result.queries())  # fmt: skip


def _item_kind(item: Any, name: str) -> str:  # noqa: ANN401
    """`"image"`, `"text"` or `"both"`, as of a row."""
    texts, has_image = _texts(item, name)
    return "text" if not has_image else "both" if texts else "image"


def _texts(item: Any, name: str) -> tuple[list[str], bool]:  # noqa: ANN401
    """The texts of an item, less those of system messages, and whether it has an image."""
    parts = [part for part in item_parts(item, name) if not isinstance(part, SystemText)]
    texts = [part for part in parts if isinstance(part, str)]
    return texts, len(texts) < len(parts)


def _item_words(item: Any, name: str, weights: Mapping[str, float] | None) -> WordQuery:  # noqa: ANN401
    """The words of an item, and the share of it that they are: by the weights, else half beside an image."""
    texts, has_image = _texts(item, name)
    share = 0.5 if has_image else 1.0
    if weights and has_image:
        share = max(weights["text"], 0.0) / ((abs(weights["text"]) + abs(weights["image"])) or 1.0) if texts else 0.0
    return WordQuery(" ".join(texts), share)


def search_groups(
    collection: Searchable,
    vectors: np.ndarray | None,
    k: int,
    column: str,
    *,
    where: str | None = None,
    words: Sequence[str | WordQuery] | None = None,
) -> Ranking:
    """Find the best row of each of the k best groups: the rows with one value of a column, such as a product.

    A row without a value is a group by itself. While there are fewer than k groups, the rows of those that are found
    are left out of a further search.

    Args:
        collection: What to search.
        vectors: As for `Collection.rank`.
        k: Groups per query.
        column: Its name; of texts, numbers, dates or true and false.
        where: As for `Collection.rank`.
        words: As for `Collection.rank`.

    Raises:
        ValueError: There is no such column, or it holds lists or mappings; the collection is in Milvus; and as
            `Collection.rank`.
    """
    check_column(collection, column)
    if not isinstance(collection, Collection):
        raise ValueError(f"the collection {collection.uri!r} is in Milvus, where results are not grouped here")
    depth = 4 * k
    first = collection.rank(vectors, depth, where=where, words=words)
    rankings: list[tuple[list[str], np.ndarray]] = []
    for number, (ids, scores) in enumerate(first.queries()):
        best: dict[Any, tuple[str, float]] = {}
        while True:
            for id_, score, row in zip(ids, scores.tolist(), collection.rows(ids), strict=True):
                if not isinstance(value := row.get(column, ("row", id_)), str | int | float | date | tuple):
                    raise ValueError(f"cannot group by {column!r}, which holds values such as {value!r:.60}")
                best.setdefault(value, (id_, score))
            if len(best) >= k or len(ids) < depth:
                break
            others, own = without_groups(column, best, where), slice(number, number + 1)
            query = vectors if vectors is None else vectors[own]
            some = words if words is None else words[own]
            again = collection.rank(query, depth, where=others, words=some)
            ((ids, scores),) = again.queries()
        found = [*best.values()][:k]
        falling = np.minimum.accumulate(np.array([score for _, score in found], dtype=np.float32))
        rankings.append(([id_ for id_, _ in found], falling))
    return Ranking.join(rankings)


def without_groups(column: str, groups: Iterable[Any], where: str | None = None) -> str:
    """A condition that leaves out the rows of groups: values of a column, or `("row", id)`."""
    values = [sql_literal(group) for group in groups if not isinstance(group, tuple)]
    ids = [sql_literal(group[1]) for group in groups if isinstance(group, tuple)]
    parts = [] if where is None else [condition(where)]
    parts += [f"(`{column}` is null or `{column}` not in ({', '.join(values)}))"] if values else []
    parts += [f"id not in ({', '.join(ids)})"] if ids else []
    return " and ".join(parts)


def check_column(collection: Searchable, column: str) -> None:
    """Make sure that the rows of a collection have a column.

    Raises:
        ValueError: They do not; the message names the columns.
    """
    names = collection.schema.names
    if column not in names:
        raise ValueError(
            f"the collection has no column {column!r}; it has {', '.join(names)} (conjoin encode --keep COLUMN)"
        )


def weighted_parts(items: Sequence[Any], weights: Mapping[str, float]) -> list[tuple[int, str]]:
    """The parts of items that `weights` are of, each as the index of its item and `"image"` or `"text"`.

    Raises:
        ItemError: An item has no parts, or a part without a weight.
    """
    parts = []
    for index, item in enumerate(items):
        if not isinstance(item, Mapping) or not set(item) <= {"image", "text"}:
            raise ItemError(f"item {index}", 'only items {"text": ..., "image": ...} have parts to weight')
        given = [part for part, value in item.items() if value is not None]
        if not given:
            raise ItemError(f"item {index}", "has neither an image nor a text to weight")
        if missing := [part for part in given if part not in weights]:
            raise ItemError(f"item {index}", f"its {missing[0]} has no weight; the weights are {dict(weights)}")
        parts += [(index, part) for part in given]
    return parts


def weighted_sums(vectors: np.ndarray, parts: Sequence[tuple[int, str]], weights: Mapping[str, float]) -> np.ndarray:
    """The weighted sums `(N, D)` of the vectors `(P, D)` of the parts of `N` items, L2-normalised.

    Raises:
        ItemError: A sum is zero.
    """
    sums = np.zeros((1 + parts[-1][0] if parts else 0, vectors.shape[1]))
    for (index, part), vector in zip(parts, vectors, strict=True):
        sums[index] += weights[part] * vector
    norms = np.linalg.norm(sums, axis=1, keepdims=True)
    if not norms.all():
        raise ItemError(f"item {int(norms.argmin())}", f"the weights {dict(weights)} leave nothing of its parts")
    return (sums / norms).astype(np.float32)


def query_vectors(collection: Searchable, vectors: np.ndarray, kinds: Sequence[str]) -> np.ndarray:
    """Embeddings `(N, D)` of queries of some kinds, truncated (Matryoshka) and centered as those of a collection are.

    Raises:
        ValueError: The collection is centered, and has no rows of a query's kind.
    """
    vectors = truncate(vectors, collection.dimension) if collection.dimension < vectors.shape[1] else vectors
    centers = collection.model.centers
    return subtract_centers(vectors, kinds, centers) if centers else vectors


def search_exactly(
    collection: Collection,
    queries: np.ndarray,
    k: int,
    *,
    ids: Container[str] | None = None,
    device: str | torch.device = "cpu",
) -> Ranking:
    """Rank a collection for queries with the exact ranker, in one pass over its vectors; pass all queries together.

    Args:
        collection: What to rank.
        queries: `(Q, D)`, L2-normalised.
        k: How many to return.
        ids: Rank these rows only.
        device: Where to rank.

    Raises:
        ValueError: None of the `ids` is in the collection; and as `exact_search`.
    """
    names, among = pa.array(collection.ids, pa.string()), None
    if ids is not None:
        among = np.flatnonzero(pc.is_in(names, pa.array([*ids], pa.string())))
        if not len(among):
            raise ValueError(f"none of the ids to search among is in the collection {collection.uri!r}")
    positions, scores = exact_search(queries, collection.batches(), k, among=among, device=device)
    return Ranking.at(names, positions, scores)


def check_model(collection: Searchable, encoder: ItemEncoder) -> None:
    """Make sure that vectors of `encoder` can be compared with those of a collection.

    Raises:
        ValueError: It was made with another model, or of items with several images under another input type.
    """
    model = collection.model
    if model.fingerprint != encoder.fingerprint:
        raise ValueError(
            f"the collection was made with model {model}, these queries come from {encoder.identity}; "
            "their vectors cannot be compared: search with the first or encode the data with the second"
        )
    if model.input_type not in (None, encoder.input_type):
        raise ValueError(
            f"the collection has items with several images under input type {model.input_type}, these queries are "
            f"encoded under {encoder.input_type}; their vectors cannot be compared: search with "
            f"--input {model.input_type} (input_type) or encode the data with --input {encoder.input_type}"
        )


def load_query_encoder(collection: Searchable, model: str | None = None, **options: Any) -> ItemEncoder:  # noqa: ANN401
    """Load the model that made a collection, to encode queries for it.

    What the options leave open is as the collection records it: the input type, the pooling, the preset,
    the precision.

    Args:
        collection: Its vectors are to be compared with those of queries.
        model: Folder or Hub name; None for the one that the collection records, whose code never runs.
        options: As for `load_encoder`.

    Raises:
        FileNotFoundError: There is no such model.
        ValueError: A model elsewhere is recorded; and as `load_encoder`.
    """
    made = collection.model
    recorded = {**made.load_options, "input_type": made.input_type}
    recorded["dtype"] = None if made.precision == "full" else made.precision
    options |= {name: value for name, value in recorded.items() if options.get(name) is None}
    if model is None:
        model, options["trust_remote_code"] = recorded_model(collection), False
    return load_encoder(model, **options)


def recorded_model(collection: Searchable) -> str:
    """The local folder of a model that a collection records.

    A collection may come from anywhere, so nothing is fetched on its word, and no code of the folder runs.

    Raises:
        FileNotFoundError: The folder is gone.
        ValueError: A model elsewhere is recorded.
    """
    name = collection.model.name
    is_local = Path(name).is_absolute()
    if is_local and not Path(name).is_dir():
        raise FileNotFoundError(f"the model that made the collection is no longer at {name!r}: pass --model")
    if not is_local:
        raise ValueError(f"the collection was made with {name!r}, which is not on this machine: pass --model {name}")
    return name
