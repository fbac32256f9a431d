"""A collection: encoded items with what is known of them, in one Lance table."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import lancedb.index
import numpy as np
import pyarrow as pa
import torch
from lancedb.table import Table

from conjoin.constants import INDEX_KINDS
from conjoin.data.row_checks import SKIPPED_FILE, Skipped as Skipped, read_skipped
from conjoin.devices import choose_device
from conjoin.retrieval.collection_table import (
    OWN_COLUMNS,
    check_files,
    committing,
    condition,
    id_conditions,
    index_names,
    local_folder,
    open_newest,
    open_published,
    publish,
    published_version,
    read_metadata,
    reading,
    write_metadata,
    writing,
)
from conjoin.retrieval.encoder import ModelIdentity, recorded_identity
from conjoin.retrieval.faiss_index import PROBES, SETTINGS, FaissIndex, default_factory, train_faiss
from conjoin.retrieval.results import Ranking, Searchable, by_score
from conjoin.retrieval.vectors import check_search, exact_search
from conjoin.retrieval.words import WordIndex, WordQuery, bonuses

logger = logging.getLogger(__name__)
_FAISS = "faiss"
"""The folder of an index of FAISS, beside the table."""
_BYTES_AT_ONCE = 2**26
_DEPTH = 10
"""How many of the nearest the recall counts."""
MOST_WORDS = 2_000_000
"""Rows up to which a search compares words by default."""
_BY_VECTORS, _BY_WORDS = 100, 300
"""The first rows by vectors and by words, whose scores are added."""


class Changes(NamedTuple):
    """How many rows an encoding added, replaced, removed, left as they were, and skipped as unusable.

    `encoded` counts the rows that were encoded: a replaced row whose image and text are the same keeps its vector.
    """

    added: int = 0
    replaced: int = 0
    removed: int = 0
    unchanged: int = 0
    skipped: int = 0
    encoded: int = 0


class Collection(Searchable):
    """The published state of a collection: it stays the same while others write.

    Args:
        uri: A folder; or `s3://`, `gs://`, `az://`; or `hf://datasets/OWNER/NAME`, which can only be read.
        memory: Keep the vectors in memory and rank there (on a GPU if there is one), exactly, if they take at most
            this many bytes and there is no index of FAISS.

    Attributes:
        uri: As given.
        table: The Lance table, at this version.
        metadata: `key`, what the vectors were made from; `details`, what else is known; `index`, how to search them.
        dimension: Length of the vectors.
        dtype: Of their numbers, `"float32"` or `"float16"`.
        changes: What the encoding did that made this object; None if it was opened.

    Raises:
        FileNotFoundError: There is no collection.
        ValueError: It is unfinished or damaged, or the folder holds something else.
    """

    def __init__(self, uri: str | Path, memory: int = 0) -> None:
        self.uri = str(uri)
        self.changes: Changes | None = None
        self._memory = memory
        self._load()

    def _load(self) -> None:
        self.table = open_published(self.uri)
        self.metadata = read_metadata(self.table)
        field = self.table.schema.field("vector").type
        self.dimension: int = field.list_size
        self.dtype = {pa.float16(): "float16", pa.float32(): "float32"}[field.value_type]
        for name in ("faiss", "words"):
            self.__dict__.pop(name, None)
        self._held: tuple[pa.Array, np.ndarray, np.ndarray, torch.device] | None = None
        is_small = len(self) * self.dimension * np.dtype(self.dtype).itemsize <= self._memory
        if self._memory and self.faiss is None and is_small:  # a server reads the index now, not in a search
            self._held = *self._sorted_vectors(), choose_device()

    @cached_property
    def faiss(self) -> FaissIndex | None:
        """The index of FAISS beside the table, if it is of this version; searches without a condition use it."""
        folder = local_folder(self.uri)
        if folder is None or not (folder / _FAISS / SETTINGS).is_file():
            return None
        return FaissIndex.open(folder / _FAISS, self.version)

    @property
    def has_words(self) -> bool:  # type: ignore[override]
        """Whether the default ranking also compares words: up to `MOST_WORDS` rows, it reads them in seconds."""
        return len(self) <= MOST_WORDS

    @cached_property
    def words(self) -> WordIndex:
        """The words of the rows, read when they are first searched."""
        with reading(self.uri):
            return WordIndex(self._query(self.schema.names, None).with_row_id(True).to_batches())

    def __len__(self) -> int:
        """How many rows there are."""
        return self.table.count_rows()

    @property
    def version(self) -> int:
        """The version of the table; each publication has a higher one."""
        return int(self.table.version)

    @property
    def model(self) -> ModelIdentity:
        """The model that made the vectors, and its input type if there are items with several images."""
        return recorded_identity(self.metadata)

    @property
    def schema(self) -> pa.Schema:
        """Names and types of the columns that a condition may name: the id, the text, the images, the kept ones."""
        return pa.schema([field for field in self.table.schema if field.name == "id" or field.name not in OWN_COLUMNS])

    @property
    def skipped(self) -> list[Skipped]:
        """The rows of the data that the last encoding skipped because they cannot be used; of a folder only."""
        folder = local_folder(self.uri)
        return [] if folder is None else read_skipped(folder / SKIPPED_FILE)

    @property
    def ids(self) -> list[str]:
        """All ids, in the order of `vectors`."""
        return self.select()

    def batches(self, where: str | None = None) -> Iterator[tuple[pa.Array, np.ndarray]]:
        """The ids and the vectors `(n, D)` of all rows, or of those that a condition holds for, batch by batch."""
        for batch in self.scan(["id", "vector"], where):
            yield batch["id"], matrix(batch["vector"], self.dimension)

    def vectors(self, ids: Sequence[str] | None = None) -> np.ndarray:
        """Return the vectors `(N, D)` of all rows, or of `ids` in their order, in the stored type.

        Raises:
            ValueError: An id is not in the collection.
        """
        if ids is None:
            return matrix(self._read(["vector"])["vector"], self.dimension)
        table, places = self._look_up(ids, ["id", "vector"])
        vectors = matrix(table["vector"], self.dimension)
        del table  # of the size of the vectors
        return vectors[places]

    def rows(self, ids: Sequence[str], pictures: bool = False) -> list[dict[str, Any]]:
        """Return a mapping for each id: the id, the text, the image's path and the kept columns that its row has.

        Args:
            ids: Of the rows.
            pictures: Also give the JPEG file of each row's thumbnail as `"picture"`, where the collection keeps them.

        Raises:
            ValueError: An id is not in the collection.
        """
        names = self.table.schema.names
        columns = ["id", *(name for name in names if name not in OWN_COLUMNS)]
        columns += ["picture"] if pictures and "picture" in names else []
        table, places = self._look_up(ids, columns)
        return [_known_values(row) for row in table.take(places).to_pylist()]

    def select(self, where: str | None = None) -> list[str]:
        """The ids of the rows that a condition holds for, or of all.

        Raises:
            ValueError: It cannot be evaluated; the message names the columns.
        """
        return list(self._read(["id"], where)["id"].to_pylist())

    def scan(self, columns: list[str], where: str | None = None) -> Iterator[pa.RecordBatch]:
        """Some columns of all rows, or of those that a condition holds for, batch by batch.

        Args:
            columns: Their names.
            where: SQL, such as `"price < 50 and category = 'shoes'"`.

        Raises:
            ValueError: The condition cannot be evaluated; the message names the columns.
        """
        with reading(self.uri, where, self.schema):
            yield from self._query(columns, where).to_batches()

    def _query(self, columns: list[str], where: str | None) -> Any:  # noqa: ANN401 - lancedb's
        query = self.table.search().select(columns)
        return query if where is None else query.where(condition(where))

    def _read(self, columns: list[str], where: str | None = None) -> pa.Table:
        """As `scan`, at once, with Lance's number of each row as `_rowid`."""
        with reading(self.uri, where, self.schema):
            return self._query(columns, where).with_row_id(True).to_arrow()

    def _look_up(self, ids: Sequence[str], columns: list[str]) -> tuple[pa.Table, np.ndarray]:
        """A table with the rows of ids, and where each stands in it.

        Raises:
            ValueError: An id is not in the collection.
        """
        conditions = [None] if 4 * len(ids) > len(self) else [*id_conditions(ids)] or ["false"]
        table = pa.concat_tables([self._read(columns, where) for where in conditions])
        places = {id_: place for place, id_ in enumerate(table["id"].to_pylist())}
        if missing := [id_ for id_ in ids if id_ not in places]:
            raise ValueError(f"the collection has no row {missing[0]!r}")
        return table.select(columns), np.array([places[id_] for id_ in ids], dtype=np.int64)

    def rank(
        self,
        vectors: np.ndarray | None,
        k: int = 10,
        *,
        where: str | None = None,
        words: Sequence[str | WordQuery] | None = None,
        exact: bool = False,
    ) -> Ranking:
        """Rank the rows that are most similar to each query.

        Args:
            vectors: Of the queries `(Q, D)`, L2-normalised; None to rank by words alone.
            k: How many to return; fewer if the collection, or what `where` leaves of it, is smaller.
            where: Search only the rows that this SQL condition holds for.
            words: The text of each query, "" for none, to find its words in ids, texts and kept columns of texts.
            exact: Compare with every vector, also where there is an index.

        Returns:
            Scores are the inner product v, from -1 to 1; with words, v + c³, where c, from 0 to 1, is the share of the
            query whose words the row has (`conjoin.retrieval.words`); by words alone c, of the rows that have some.
            A row without a text has the mean c³ of the rows with one that are nearer, if its columns have no more.
            Equal scores are in the order of their ids, as far as the search found them.

        Raises:
            ValueError: `k` below 1; queries of another dimension, not finite or not normalised; a condition that
                cannot be evaluated; not as many texts as vectors.
        """
        queries = None if vectors is None else check_search(vectors, k, self.dimension)
        if words is not None:
            return self._rank_words(queries, k, where, [WordQuery.of(each) for each in words], exact)
        if queries is None:
            raise ValueError("there is nothing to rank by: pass vectors, words or both")
        if self.faiss is not None and where is None and not exact:
            return self.faiss.rank(queries, k)
        if self._held is not None:
            ids, numbers, stored, device = self._held
            among = None
            if where is not None:
                among = np.flatnonzero(np.isin(numbers, self._read(["id"], where)["_rowid"].to_numpy()))
            return Ranking.at(ids, *exact_search(queries, stored, k, among=among, device=device))
        at_once = max(1, _BYTES_AT_ONCE // (4 * self.dimension * min(k, max(len(self), 1))))
        parts = (queries[start : start + at_once] for start in range(0, len(queries), at_once))
        return Ranking.join(each for part in parts for each in self._nearest(part, k, where, exact))

    def _nearest(
        self, queries: np.ndarray, k: int, where: str | None, exact: bool
    ) -> list[tuple[list[str], np.ndarray]]:
        """The nearest rows of a few queries, scored again in float64."""
        search: Any = self.table.search(queries)
        search = search.distance_type("dot").limit(k).select(["id", "vector", "_distance"])
        settings = self.metadata.get("index") or {}
        if exact or not settings:
            search = search.bypass_vector_index()
        else:
            search = search.nprobes(settings["probes"]).refine_factor(settings["refine"])
        with reading(self.uri, where, self.schema):
            table = (search if where is None else search.where(condition(where))).to_arrow()
        owners = table["query_index"].to_numpy() if "query_index" in table.column_names else np.zeros(len(table), int)
        ids, candidates = table["id"].to_pylist(), matrix(table["vector"], self.dimension)
        rankings = []
        for number, query in enumerate(queries.astype(np.float64)):
            own = np.flatnonzero(owners == number)
            scores = np.einsum("nd,d->n", candidates[own].astype(np.float64), query).astype(np.float32)
            rankings.append(by_score([ids[place] for place in own], scores))
        return rankings

    def _rank_words(
        self, queries: np.ndarray | None, k: int, where: str | None, words: list[WordQuery], exact: bool
    ) -> Ranking:
        """Rank the first rows by words, and those by vectors if there are any, by the sum of their scores."""
        index = self.words
        among = None if where is None else np.isin(index.numbers, self._read(["id"], where)["_rowid"].to_numpy())
        if queries is None:
            nearest = [([], np.empty(0, dtype=np.float32))] * len(words)
        else:
            nearest = self.rank(queries, max(k, _BY_VECTORS), where=where, exact=exact).queries()
        if len(nearest) != len(words):
            raise ValueError(f"got the words of {len(words)} queries for the vectors of {len(nearest)}")
        rankings = []
        for number, ((ids, products), query) in enumerate(zip(nearest, words, strict=True)):
            shares = index.shares(query, among)
            best = np.argsort(-shares, kind="stable")[: max(k, _BY_WORDS)]
            best = best[shares[best] > 0]
            if queries is None:
                rankings.append(by_score(index.ids.take(pa.array(best)).to_pylist(), shares[best]))
                continue
            near = index.places(ids)
            best = best[~np.isin(best, near)]
            places = np.concatenate([near, best])
            vectors = self._at(index.numbers[best]).astype(np.float64)
            products = np.concatenate([products, np.einsum("nd,d->n", vectors, queries[number].astype(np.float64))])
            bonus = np.concatenate([bonuses(shares[near], index.has_text[near]), bonuses(shares[best])])
            scores = products.astype(np.float32) + bonus
            rankings.append(by_score(index.ids.take(pa.array(places)).to_pylist(), scores))
        return Ranking.join((ids[:k], scores[:k]) for ids, scores in rankings)

    def _at(self, numbers: np.ndarray) -> np.ndarray:
        """The vectors `(N, D)` of the rows that have some of Lance's numbers."""
        if self._held is not None:
            _, known, vectors, _ = self._held
            chosen = np.flatnonzero(np.isin(known, numbers))
            known, vectors = known[chosen], vectors[chosen]
        else:
            with reading(self.uri):
                table = self.table.take_row_ids(numbers.tolist()).select(["vector"]).with_row_id().to_arrow()
            known, vectors = table["_rowid"].to_numpy(), matrix(table["vector"], self.dimension)
        order = np.argsort(known)
        return vectors[order[np.searchsorted(known[order], numbers)]]

    def _sorted_vectors(self) -> tuple[pa.Array, np.ndarray, np.ndarray]:
        """The ids, Lance's numbers and the vectors of all rows, in the order of the ids."""
        table = self._read(["id", "vector"])
        ids, numbers = table["id"].combine_chunks(), table["_rowid"].to_numpy()
        order = np.argsort(np.array(ids.to_pylist(), dtype=object), kind="stable")
        return ids.take(pa.array(order)), numbers[order], matrix(table["vector"], self.dimension)[order]

    def remove(self, ids: Sequence[str]) -> None:
        """Remove rows and publish the collection without them; this object sees that state from then on.

        Raises:
            ValueError: An id is not in the collection, which stays as it was, or another process writes into it.
            OSError: The disk is full or fails; readers see the collection as it was.
        """
        self._look_up(ids, ["id"])  # refuses unknown ones

        def delete(table: Table) -> None:
            for where in id_conditions(ids):
                table.delete(where)

        self._write(delete)

    def index(
        self, kind: str | None = "ivf_hnsw_sq", *, probes: int = 20, refine: int = 10, recall_queries: int = 100
    ) -> float | None:
        """Index the vectors and the kept columns, and publish.

        Rows that come later are found as well; the next publication adds them to the indexes.

        Args:
            kind: One of `INDEX_KINDS`; None leaves the search exact and indexes columns alone.
            probes: Partitions that a search looks into: more is slower and more exact.
            refine: Candidates that are scored again with their whole vectors, for each result.
            recall_queries: Vectors of the collection that are searched for to measure the recall.

        Returns:
            The recall@10: the share of the ten nearest that are found, on average; None without an index of vectors.

        Raises:
            ValueError: There is no such kind, there are too few rows to train it, or another process writes.
            OSError: The disk is full or fails; readers see the collection as it was.
        """
        if kind is not None and kind not in INDEX_KINDS:
            raise ValueError(f"unknown kind {kind!r} of index; expected one of {list(INDEX_KINDS)}")
        settings: dict[str, Any] | None = None if kind is None else {"kind": kind, "probes": probes, "refine": refine}

        def build(table: Table) -> None:
            if kind is not None:
                try:
                    index = vars(lancedb.index)[kind.title().replace("_", "")]
                    table.create_index("vector", config=index(distance_type="dot"), name="vector")
                except (RuntimeError, ValueError) as error:
                    raise ValueError(f"cannot build an index of kind {kind!r} of {len(self)} rows: {error}") from error
            elif "vector" in index_names(table):
                table.drop_index("vector")
            write_metadata(table, self.metadata | {"index": settings})

        columns = [field.name for field in self.schema if field.name != "text" and _can_be_indexed(field.type)]
        self._write(build, columns)
        return None if kind is None else self.recall(recall_queries)

    def index_faiss(self, factory: str | None = None, *, probes: int = PROBES, recall_queries: int = 100) -> float:
        """Build an index of FAISS in memory, which this object then searches, and lay it beside the table.

        It is of this version: after an update, searches use the table until it is built again.

        Args:
            factory: As `faiss.index_factory` takes it, such as `"IVF4096,PQ64"` or `"HNSW32"`; None for clusters of
                float16 vectors.
            probes: Clusters that a search looks into, or the candidates of a graph: more is slower and more exact.
            recall_queries: Vectors that are searched for to measure the recall@10, which is returned.

        Raises:
            ImportError: FAISS is not installed.
            ValueError: FAISS does not know the factory or cannot train it with so few vectors, the collection is in no
                folder of this machine, or another process writes into it.
        """
        folder = local_folder(self.uri)
        if folder is None:
            raise ValueError(f"{self.uri!r} is no folder of this machine: FAISS searches only those")
        with writing(self.uri):
            self._load()
            if not len(self):
                raise ValueError(f"the collection {self.uri!r} has no rows to index")
            ids, _, vectors = self._sorted_vectors()
            factory = factory or default_factory(len(self))
            settings: dict[str, Any] = {"version": self.version, "factory": factory, "probes": probes}
            self.faiss = FaissIndex(train_faiss(factory, vectors), ids, settings)
            self.faiss.write(folder / _FAISS)
        return self.recall(recall_queries)

    def recall(self, queries: int = 100) -> float:
        """Return the mean share of a vector's ten nearest others that `search` finds.

        Args:
            queries: How many vectors of the collection to search for, spread evenly.
        """
        indices = np.unique(np.linspace(0, len(self) - 1, min(queries, len(self))).round().astype(int)).tolist()
        sample = self.table.take_offsets(indices).select(["id", "vector"]).to_arrow()
        names = sample["id"].to_pylist()
        vectors = matrix(sample["vector"], self.dimension)
        wanted = self.rank(vectors, _DEPTH + 1, exact=True).ids
        approximate = self.rank(vectors, _DEPTH + 1).ids
        shares = []
        for query, right, ids in zip(names, wanted, approximate, strict=True):
            right = [name for name in right if name != query][:_DEPTH]
            if right:
                shares.append(len({*right} & {*[name for name in ids if name != query][:_DEPTH]}) / len(right))
        return float(np.mean(shares)) if shares else 1.0

    def verify(self) -> None:
        """Hash all files of a folder and compare them with their checksums.

        Raises:
            ValueError: One is missing or damaged, or the collection is not in a folder of this machine.
        """
        folder = local_folder(self.uri)
        if folder is None:
            raise ValueError(f"{self.uri!r} is no folder of this machine: only those have checksums")
        check_files(folder, self.version, everything=True)
        for _ in self.scan(self.table.schema.names):  # a missing file is an error of Lance
            pass

    def to_dataset(self) -> datasets.Dataset:
        """The rows as a dataset in memory: id, vector, text, image, the kept columns, and the thumbnails."""
        columns = [name for name in self.table.schema.names if name not in ("item_digest", "row_digest")]
        table = self._read(columns).select(columns).replace_schema_metadata(None)
        table = table if len(table) else table.schema.empty_table()
        rows = datasets.Dataset(datasets.table.InMemoryTable(table))
        return rows.cast_column("picture", datasets.Image()) if "picture" in columns else rows

    def _write(self, change: Callable[[Table], object], columns: Sequence[str] = ()) -> None:
        """Change the table, publish it, and see the new state; arguments as for `publish`."""
        with writing(self.uri), committing(self.uri):
            table = open_newest(self.uri)
            if published_version(table) != table.version and not _has_same_rows(table, self.uri):
                raise ValueError(
                    f"the last change of {self.uri!r} did not end: run the same `conjoin encode` again first"
                )
            change(table)
            publish(self.uri, table, columns)
        self._load()


def _has_same_rows(table: Table, uri: str) -> bool:
    """Whether a table has the published rows, as one has that an interrupted `index` left."""
    published = open_published(uri)
    now, before = (each.search().select(["id", "row_digest"]).to_arrow().sort_by("id") for each in (table, published))
    return bool(table.schema.equals(published.schema) and now.equals(before))


def matrix(column: Any, dimension: int) -> np.ndarray:  # noqa: ANN401 - pyarrow has no types
    """A column of vectors as a matrix `(n, D)` that may be written to."""
    chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    parts = [chunk.flatten().to_numpy(zero_copy_only=False).reshape(-1, dimension) for chunk in chunks]
    return np.concatenate(parts) if parts else np.empty((0, dimension), dtype=np.float32)


def _known_values(row: Mapping[str, Any]) -> dict[str, Any]:
    """The values that a row has, its id, text and image first; one image is no list."""
    known = {name: value for name, value in row.items() if value is not None}
    if len(known.get("image", ())) == 1:
        known["image"] = known["image"][0]
    first = {name: known[name] for name in ("id", "text", "image") if known.get(name)}
    return first | {name: value for name, value in known.items() if name not in ("text", "image")}


def _can_be_indexed(kind: pa.DataType) -> bool:
    types = pa.types
    return any(test(kind) for test in (types.is_integer, types.is_floating, types.is_string, types.is_temporal))
