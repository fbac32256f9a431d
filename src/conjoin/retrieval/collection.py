"""A collection: encoded items with what is known of them, in one Lance table.

`SHA256SUMS` lists the files of the published version and names that version; `sha256sum -c` takes it. A file of Lance
never changes, so each is hashed once, at publication. Readers hash it again when they open it; in a large collection
only those that are newer than `SHA256SUMS` (`check_files`).
"""

import json
import os
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date, datetime, timedelta
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import lancedb
import lancedb.index
import numpy as np
import pandas as pd
import pyarrow as pa
import torch
from lancedb.index import BTree
from lancedb.table import Table

from conjoin.constants import INDEX_KINDS
from conjoin.data.row_checks import SKIPPED_FILE, Skipped as Skipped, read_skipped
from conjoin.devices import choose_device
from conjoin.retrieval.encoder import ModelIdentity, recorded_identity
from conjoin.retrieval.faiss_index import PROBES, SETTINGS, FaissIndex, default_factory, train_faiss
from conjoin.retrieval.notebook import table_with_pictures
from conjoin.retrieval.pictures import picture_folders
from conjoin.retrieval.results import Ranking, Searchable, by_score
from conjoin.retrieval.vectors import check_search, exact_search
from conjoin.retrieval.words import WordIndex, WordQuery, bonuses
from conjoin.storage import (
    FOLDER_CHECKSUMS,
    DamagedError,
    check_checksums,
    file_digest,
    locked,
    read_checksums,
    write_text,
)

PUBLISHED = "published"
"""The tag of the version that readers see."""
OWN_COLUMNS = ("id", "vector", "item_digest", "row_digest", "row_kind", "picture")
"""Columns that no column of the data may be named as: `item_digest` is of what was encoded (text, image bytes),
`row_digest` of all that a row of the data said, `row_kind` its parts (see `KINDS`), `picture` a thumbnail."""
KINDS = ("image", "text", "both")
"""Which parts of an item a row has: the values of the column `row_kind`."""
IDS_AT_ONCE = 1000
"""How many ids stand in one condition."""
_TEXTS = re.compile(r"""'(?:[^']|'')*'|"[^"]*"|`[^`]*`""")
"""Texts and quoted names in a condition."""
_PLACE = re.compile(r", (?:location: )?/\S+\.rs:\d+")
_CACHED = 2**22
"""Bytes of indexes and of metadata that a writer keeps; by default Lance keeps up to 7 GB."""
TABLE_NAME, TABLE = "train", "data/train.lance"
"""Where the table lies in a collection: as the Hub expects it."""
_SMALL = 2**28
"""Bytes that are hashed in each process; of larger collections only the files that changed after their publication."""
_VERSION = re.compile(r"^# version (\d+)$", re.MULTILINE)
_MUTABLE = {"_refs", "latest_version_hint.json"}
"""What Lance changes: tags, whose version the checksums name, and a hint that it does not rely on."""
_REMEDY = "restore it from a copy, or remove the folder and run `conjoin encode` again"
_METADATA = "conjoin"
_FAISS = "faiss"
"""The folder of an index of FAISS, beside the table."""
_FOREVER, _KEPT_FOR = timedelta(days=36_500), timedelta(days=1)
"""How long readers of an earlier version find its files."""
_BYTES_AT_ONCE = 2**26
_ROWS_AT_ONCE = 8192
"""Rows of a batch without vectors and pictures: with the 1,024 of lancedb a scan takes three to six times as long."""
_DEPTH = 10
"""How many of the nearest the recall counts."""
_MOST_SHOWN = 5
"""Rows that a notebook shows."""
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
    """A state of a collection, by default the published one: it stays the same while others write.

    Args:
        uri: A folder; or `s3://`, `gs://`, `az://`; or `hf://datasets/OWNER/NAME`, which can only be read.
        memory: Keep the vectors in memory and rank there, exactly, if they take at most this many bytes and there is
            no index of FAISS.
        table: Another state; see `newest`.
        device: Whose memory; None for a GPU if there is one.

    Attributes:
        uri: As given.
        table: The Lance table, at this version.
        dimension: Length of the vectors.
        dtype: Of their numbers, `"float32"` or `"float16"`.
        changes: What the encoding did that made this object; None if it was opened.

    Raises:
        FileNotFoundError: There is no collection.
        DamagedError: A file differs from its checksum.
        OSError: A file is missing, or cannot be read.
        ValueError: It is unfinished, or the folder holds something else.
    """

    def __init__(
        self, uri: str | Path, memory: int = 0, table: Table | None = None, device: str | torch.device | None = None
    ) -> None:
        self.uri = str(uri)
        self.changes: Changes | None = None
        self._memory, self._device = memory, choose_device(device)
        self._load(open_published(self.uri) if table is None else table)

    def _load(self, table: Table) -> None:
        self.table = table
        field = self.table.schema.field("vector").type
        self.dimension: int = field.list_size
        self.dtype = {pa.float16(): "float16", pa.float32(): "float32"}[field.value_type]
        for name in ("faiss", "words"):
            self.__dict__.pop(name, None)
        self._held: tuple[pa.Array, np.ndarray, np.ndarray | torch.Tensor] | None = None
        is_small = len(self) * self.dimension * np.dtype(self.dtype).itemsize <= self._memory
        if self._memory and self.faiss is None and is_small:  # a server reads the index now, not in a search
            ids, numbers, vectors = self._sorted_vectors()
            held = vectors if self._device.type == "cpu" else torch.tensor(vectors).to(self._device)
            self._held = ids, numbers, held
        if self._memory and self.has_words:
            _ = self.words

    def to_pandas(self) -> pd.DataFrame:
        """All rows in the order of `ids` and `vectors`: the id, the text, the image's path and the kept columns."""
        return self.read(self.schema.names).drop_columns("_rowid").to_pandas()

    def _repr_html_(self) -> str:
        first = [row["id"] for row in self.table.search().select(["id"]).limit(_MOST_SHOWN).to_list()]
        return super()._repr_html_() + table_with_pictures(self.rows(first, pictures=True), picture_folders(self.uri))

    @property
    def folder(self) -> Path | None:
        """The folder on this machine; None elsewhere."""
        return local_folder(self.uri)

    @property
    def metadata(self) -> dict[str, Any]:
        """What the table records of its vectors: `key` (their origin), `details` and `index` (how to search them).

        Raises:
            ValueError: It records nothing.
        """
        metadata = (self.table.schema.field("vector").metadata or {}).get(_METADATA.encode())
        if metadata is None:
            raise ValueError("the table has no metadata of a collection: it was not written by `conjoin encode`")
        return dict(json.loads(metadata))

    @cached_property
    def faiss(self) -> FaissIndex | None:
        """The index of FAISS beside the table, if it is of this version; searches without a condition use it."""
        if self.folder is None or not (self.folder / _FAISS / SETTINGS).is_file():
            return None
        return FaissIndex.open(self.folder / _FAISS, self.version)

    @property
    def has_words(self) -> bool:  # type: ignore[override]
        """Whether the default ranking also compares words: up to `MOST_WORDS` rows, it reads them in seconds."""
        return 0 < len(self) <= MOST_WORDS

    @cached_property
    def words(self) -> WordIndex:
        """The words of the rows, read when they are first searched."""
        with reading(self.uri):
            return WordIndex(self._query(self.schema.names, None, row_ids=True))

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
        return [] if self.folder is None else read_skipped(self.folder / SKIPPED_FILE)

    @property
    def kinds(self) -> dict[str, int]:
        """How many rows have an image, a text, or both, by these names."""
        return {kind: count for kind in KINDS if (count := self.table.count_rows(with_kind(None, kind)))}

    @property
    def ids(self) -> list[str]:
        """All ids, in the order of `vectors`."""
        return self.select()

    def batches(self) -> Iterator[np.ndarray]:
        """The vectors `(n, D)` of all rows, batch by batch."""
        return (matrix(batch["vector"], self.dimension) for batch in self.scan(["vector"]))

    def vectors(self, ids: Sequence[str] | None = None) -> np.ndarray:
        """Return the vectors `(N, D)` of all rows, or of `ids` in their order, in the stored type.

        Raises:
            ValueError: An id is not in the collection.
        """
        table = self.read(["vector"]) if ids is None else self.take(ids, ["vector"])
        return matrix(table["vector"], self.dimension)

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
        return [known_values(row) for row in self.take(ids, columns).to_pylist()]

    def take(self, ids: Sequence[str], columns: list[str]) -> pa.Table:
        """Some columns of the rows of ids, in their order.

        Raises:
            ValueError: An id is not in the collection.
        """
        conditions = [None] if 4 * len(ids) > len(self) else [*id_conditions(ids)] or ["false"]
        table = pa.concat_tables([self.read([*dict.fromkeys(("id", *columns))], where) for where in conditions])
        places = {id_: place for place, id_ in enumerate(table["id"].to_pylist())}
        if missing := [id_ for id_ in ids if id_ not in places]:
            raise ValueError(f"the collection has no row {missing[0]!r}")
        return table.select(columns).take(pa.array([places[id_] for id_ in ids], pa.int64()))

    def select(self, where: str | None = None) -> list[str]:
        """The ids of the rows that a condition holds for, or of all.

        Raises:
            ValueError: It cannot be evaluated; the message names the columns.
        """
        return list(self.read(["id"], where)["id"].to_pylist())

    def scan(self, columns: list[str], where: str | None = None) -> Iterator[pa.RecordBatch]:
        """Some columns of all rows, or of those that a condition holds for, batch by batch.

        Args:
            columns: Their names.
            where: SQL, such as `"price < 50 and category = 'shoes'"`.

        Raises:
            ValueError: The condition cannot be evaluated; the message names the columns.
        """
        with reading(self.uri, where, self.schema):
            yield from self._query(columns, where)

    def _query(self, columns: list[str], where: str | None, row_ids: bool = False) -> pa.RecordBatchReader:
        query = self.table.search().select(columns).with_row_id(row_ids)
        is_heavy = not {"vector", "picture"}.isdisjoint(columns)
        query = query if where is None else query.where(condition(where))
        return query.to_batches(batch_size=None if is_heavy else _ROWS_AT_ONCE)

    def read(self, columns: list[str], where: str | None = None) -> pa.Table:
        """As `scan`, at once, with Lance's number of each row as `_rowid`."""
        with reading(self.uri, where, self.schema):
            return self._query(columns, where, row_ids=True).read_all()

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
            ids, numbers, stored = self._held
            among = None
            if where is not None:
                among = np.flatnonzero(np.isin(numbers, self.read(["id"], where)["_rowid"].to_numpy()))
            return Ranking.at(ids, *exact_search(queries, stored, k, among=among))
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
        among = None if where is None else np.isin(index.numbers, self.read(["id"], where)["_rowid"].to_numpy())
        nearest: list[tuple[list[str], np.ndarray]] = [([], np.empty(0, dtype=np.float32))] * len(words)
        if queries is not None:
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
        with reading(self.uri):
            table = self.table.take_row_ids(numbers.tolist()).select(["vector"]).with_row_id().to_arrow()
        known, vectors = table["_rowid"].to_numpy(), matrix(table["vector"], self.dimension)
        order = np.argsort(known)
        return vectors[order[np.searchsorted(known[order], numbers)]]

    def _sorted_vectors(self) -> tuple[pa.Array, np.ndarray, np.ndarray]:
        """The ids, Lance's numbers and the vectors of all rows, in the order of the ids."""
        table = self.read(["id", "vector"])
        ids, numbers = table["id"].combine_chunks(), table["_rowid"].to_numpy()
        order = np.argsort(np.array(ids.to_pylist(), dtype=object), kind="stable")
        return ids.take(pa.array(order)), numbers[order], matrix(table["vector"], self.dimension)[order]

    @classmethod
    def newest(cls, uri: str | Path) -> "Collection | None":
        """Open the newest rows, published or not, which a writer continues; None without rows.

        Raises:
            ValueError: The folder holds something else.
        """
        try:
            table = open_table(uri, writes=True)
        except FileNotFoundError:
            return None
        is_empty = published_version(uri, table) is None and not table.count_rows()
        return None if is_empty else cls(uri, table=table)

    @classmethod
    @contextmanager
    def writing(cls, uri: str | Path) -> Iterator["Collection | None"]:
        """Be the one writer of a collection in a folder, and open it as `newest` does; Lance orders commits elsewhere.

        Raises:
            DamagedError: What readers see is damaged: a writer would give it new checksums.
            ValueError: Another process writes, the folder holds something else, or the collection can only be read.
        """
        if str(uri).startswith("hf://"):
            raise ValueError(f"{uri!r} can only be read: copy it with `conjoin copy`, or change it and push it again")
        os.environ.setdefault("LANCE_DEFAULT_FRAGMENT_READAHEAD", "1")  # memory of compaction: 100 instead of 170 MB
        folder = local_folder(uri)
        if folder is None:
            yield cls.newest(uri)
            return
        check_place(folder)
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder):
            newest = cls.newest(uri)
            if newest is not None and (version := published_version(uri, newest.table)) is not None:
                check_files(folder, version)
            yield newest

    @classmethod
    def create(cls, uri: str | Path, schema: pa.Schema) -> "Collection":
        """Make an empty table, as a new version if there is a table, which readers see as before."""
        with committing(uri):
            database = connect(uri, writes=True)
            mode = "overwrite" if TABLE_NAME in database.list_tables().tables else "create"
            return cls(uri, table=database.create_table(TABLE_NAME, schema=schema, mode=mode))

    def upsert(self, rows: pa.Table, exists: np.ndarray, details: Mapping[str, Any]) -> None:
        """Write rows: those that `exists` says `(N,)` replace the ones of their ids, the others are new.

        Args:
            rows: Columns that the table has not are added to it.
            exists: Which ids the table has.
            details: What the metadata says of the run that made them.

        Raises:
            ValueError: A column holds values of another type than before.
            OSError: The disk is full or fails.
        """
        with committing(self.uri):
            known = {*self.table.schema.names}
            if added := [each for each in rows.schema if each.name not in known and not pa.types.is_null(each.type)]:
                self.table.add_columns(added)
            rows = _cast(rows, self.table.schema)
            new, changed = rows.filter(~exists), rows.filter(exists)
            if len(new):
                self.table.add(new)
            if len(changed):
                self.table.merge_insert("id").when_matched_update_all().execute(changed)
            self._record(details=details)

    def delete(self, ids: Sequence[str]) -> None:
        """Delete rows; readers see them until `publish`."""
        with committing(self.uri):
            for where in id_conditions(ids):
                self.table.delete(where)

    def publish(self, columns: Iterable[str] = ()) -> None:
        """Let readers see this state; until then, and if this is interrupted, they see the one before.

        Indexes of columns are built again, not updated: that takes Lance less time, and a tenth of the memory.

        Args:
            columns: To index, besides those that the published version indexes.

        Raises:
            OSError: The disk is full or fails.
        """
        table, before, names = self.table, published_version(self.uri, self.table), {"id", *columns}
        if before == table.version and names <= {*index_names(table)}:
            return
        with committing(self.uri):
            if before is not None:
                table.checkout(before)
                names |= {index.name for index in table.list_indices() if index.index_type == "BTree"}
                table.checkout_latest()
                for index in table.list_indices():
                    if index.index_type == "BTree":
                        table.drop_index(index.name)
                table.optimize(cleanup_older_than=_FOREVER)
            missing = names - {*index_names(table)}
            for name in sorted(missing & {*table.schema.names}):
                table.create_index(name, config=BTree(), name=name)
            move_tag(self.folder, table, before)
            if before is not None:
                table.optimize(cleanup_older_than=_KEPT_FOR)  # now: Lance keeps all while an old version has a tag
                move_tag(self.folder, table, published_version(self.uri, table))

    def _record(self, **changes: Any) -> None:  # noqa: ANN401 - JSON values
        """Change what the metadata says, if it differs."""
        if (metadata := self.metadata | changes) != self.metadata:
            self.table.update_field_metadata({"path": "vector", "metadata": {_METADATA: json.dumps(metadata)}})

    def remove(self, ids: Sequence[str]) -> None:
        """Remove rows and publish the collection without them; this object sees that state from then on.

        Raises:
            ValueError: An id is not in the collection, which stays as it was, or another process writes into it.
            OSError: The disk is full or fails; readers see the collection as it was.
        """
        self.take(ids, ["id"])  # refuses unknown ones
        self._write(lambda newest: newest.delete(ids))

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

        def build(newest: Collection) -> None:
            with committing(self.uri):
                try:
                    if kind is not None:
                        index = vars(lancedb.index)[kind.title().replace("_", "")]
                        newest.table.create_index("vector", config=index(distance_type="dot"), name="vector")
                    elif "vector" in index_names(newest.table):
                        newest.table.drop_index("vector")
                except (RuntimeError, ValueError) as error:
                    raise ValueError(f"cannot build an index of kind {kind!r} of {len(self)} rows: {error}") from error
                newest._record(index=settings)

        kinds = pa.types.is_integer, pa.types.is_floating, pa.types.is_string, pa.types.is_temporal
        columns = [each.name for each in self.schema if each.name != "text" and any(is_(each.type) for is_ in kinds)]
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
        if self.folder is None:
            raise ValueError(f"{self.uri!r} is no folder of this machine: FAISS searches only those")
        with Collection.writing(self.uri):
            self._load(open_published(self.uri))
            if not len(self):
                raise ValueError(f"the collection {self.uri!r} has no rows to index")
            ids, _, vectors = self._sorted_vectors()
            factory = factory or default_factory(len(self))
            settings: dict[str, Any] = {"version": self.version, "factory": factory, "probes": probes}
            self.faiss = FaissIndex(train_faiss(factory, vectors), ids, settings)
            self.faiss.write(self.folder / _FAISS)
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
        wanted, found = (
            [
                {*[name for name in ids if name != query][:_DEPTH]}
                for query, ids in zip(names, self.rank(vectors, _DEPTH + 1, exact=exact).ids, strict=True)
            ]
            for exact in (True, False)
        )
        shares = [len(right & ids) / len(right) for right, ids in zip(wanted, found, strict=True) if right]
        return float(np.mean(shares or [1.0]))

    def verify(self) -> None:
        """Hash all files of a folder and compare them with their checksums.

        Raises:
            DamagedError: One differs.
            OSError: One is missing.
            ValueError: The collection is not in a folder of this machine.
        """
        if self.folder is None:
            raise ValueError(f"{self.uri!r} is no folder of this machine: only those have checksums")
        check_files(self.folder, self.version, everything=True)
        for _ in self.scan(self.table.schema.names):  # a missing file is an error of Lance
            pass

    def to_dataset(self) -> datasets.Dataset:
        """The rows as a dataset in memory: id, vector, text, image, the kept columns, and the thumbnails."""
        columns = [name for name in self.table.schema.names if name not in ("item_digest", "row_digest", "row_kind")]
        table = self.read(columns).select(columns).replace_schema_metadata(None)
        table = table if len(table) else table.schema.empty_table()
        rows = datasets.Dataset(datasets.table.InMemoryTable(table))
        return rows.cast_column("picture", datasets.Image()) if "picture" in columns else rows

    def _write(self, change: Callable[["Collection"], object], columns: Sequence[str] = ()) -> None:
        """Change the newest state, publish it, and see it; `columns` as for `publish`."""
        with Collection.writing(self.uri) as newest:
            published = open_published(self.uri)
            if newest is None or (newest.version != published.version and not _has_same_rows(newest.table, published)):
                raise ValueError(
                    f"the last change of {self.uri!r} did not end: run the same `conjoin encode` again first"
                )
            change(newest)
            newest.publish(columns)
        self._load(open_published(self.uri))


def _has_same_rows(table: Table, published: Table) -> bool:
    """Whether a table has the published rows, as one has that an interrupted `index` left."""
    now, before = (each.search().select(["id", "row_digest"]).to_arrow().sort_by("id") for each in (table, published))
    return bool(table.schema.equals(published.schema) and now.equals(before))


def vector_field(dimension: int, dtype: str, metadata: Mapping[str, Any]) -> pa.Field:
    """The column of vectors of a new table."""
    number = pa.float16() if dtype == "float16" else pa.float32()
    return pa.field("vector", pa.list_(number, dimension), metadata={_METADATA: json.dumps(metadata)})


def _cast(rows: pa.Table, schema: pa.Schema) -> pa.Table:
    """Give rows the columns of a table.

    Raises:
        ValueError: A column holds values of another type than before.
    """
    columns = []
    for field in schema:
        column = rows[field.name] if field.name in rows.column_names else pa.nulls(len(rows), field.type)
        try:
            both = [pa.schema([pa.field(field.name, kind)]) for kind in (field.type, column.type)]
            if pa.types.is_nested(field.type) and field.name != "vector":  # a cast drops fields that are new
                if pa.unify_schemas(both, promote_options="permissive").field(0).type != field.type:
                    raise pa.ArrowInvalid("it is another one")
            columns.append(column.cast(field.type))
        except pa.ArrowException as error:
            raise ValueError(
                f"the column {field.name!r} of the collection holds {field.type}, and some of its rows have "
                f"{column.type} now ({error}); give all its values one type, such as --keep {field.name}:number"
            ) from error
    return pa.table(columns, schema=schema)


def matrix(column: Any, dimension: int) -> np.ndarray:  # noqa: ANN401 - pyarrow has no types
    """A column of vectors as a matrix `(n, D)` that may be written to."""
    chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    parts = [chunk.flatten().to_numpy(zero_copy_only=False).reshape(-1, dimension) for chunk in chunks]
    return np.concatenate(parts) if parts else np.empty((0, dimension), dtype=np.float32)


def known_values(row: Mapping[str, Any]) -> dict[str, Any]:
    """The values that a row has, its id, text and image first; one image is no list."""
    known = {name: value for name, value in row.items() if value is not None}
    if len(known.get("image", ())) == 1:
        known["image"] = known["image"][0]
    first = {name: known[name] for name in ("id", "text", "image") if known.get(name)}
    return first | {name: value for name, value in known.items() if name not in ("text", "image")}


def local_folder(uri: str | Path) -> Path | None:
    """The folder of a collection on this machine; None for one elsewhere."""
    return None if "://" in str(uri) else Path(uri).absolute()


def milvus_address(uri: str | Path) -> re.Match[str] | None:
    """The server, or the file of Milvus Lite, and the name: `http://HOST:PORT/NAME`, `FILE.db/NAME`; else None."""
    return re.fullmatch(r"(https?://[^/]+|.+\.db)/(\w+)", str(uri))


def connect(uri: str | Path, writes: bool) -> Any:  # noqa: ANN401 - lancedb.DBConnection
    """The database of one table; a writer keeps few indexes and little metadata in memory."""
    folder = local_folder(uri)
    if folder is not None:  # a search of 10⁶ × 384 then takes 240 to 300 MB instead of 620, and no longer
        os.environ.setdefault("LANCE_DEFAULT_IO_BUFFER_SIZE", str(2**25))
    session = lancedb.Session(_CACHED, _CACHED) if writes else None
    return lancedb.connect(f"{str(uri).rstrip('/')}/data" if folder is None else str(folder / "data"), session=session)


def open_table(uri: str | Path, writes: bool = False) -> Table:
    """Open the newest state of a table, published or not, to write it or only to read it.

    Raises:
        FileNotFoundError: There is none.
        ValueError: The folder holds something else.
    """
    folder = local_folder(uri)
    if folder is not None and not (folder / "data").is_dir():
        check_place(folder)
        raise FileNotFoundError(f"there is no collection in {str(uri)!r}: run `conjoin encode`")
    with reading(uri):
        return connect(uri, writes).open_table(TABLE_NAME)


def published_version(uri: str | Path, table: Table | None = None) -> int | None:
    """The version that readers see; None while the first run is unfinished.

    Args:
        uri: As for the collection.
        table: Its table, if it is open.
    """
    table = open_table(uri) if table is None else table
    with reading(uri):
        tags = table.tags.list()
    return int(tags[PUBLISHED]["version"]) if PUBLISHED in tags else None


def open_published(uri: str | Path) -> Table:
    """Open the version that readers see.

    Raises:
        FileNotFoundError: There is no collection.
        DamagedError: A file differs from its checksum.
        OSError: A file is missing or cannot be read.
        ValueError: It is unfinished.
    """
    table = open_table(uri)
    version = published_version(uri, table)
    if version is None:
        raise ValueError(
            f"the collection {str(uri)!r} is unfinished, {table.count_rows()} rows so far: run the same `conjoin "
            "encode` again, it resumes"
        )
    try:
        if (folder := local_folder(uri)) is not None:
            check_files(folder, version)
        with reading(uri):
            table.checkout(PUBLISHED)
    except (DamagedError, OSError):
        if published_version(uri) == version:
            raise
        return open_published(uri)  # another process has published meanwhile
    return table


def index_names(table: Table) -> list[str]:
    """The names of the indexes of a table; those of this package are named as their column."""
    return [index.name for index in table.list_indices()]


def condition(where: str) -> str:
    """A condition in parentheses: without them Lance passes over all that follows a whole expression.

    Raises:
        ValueError: It closes a parenthesis that it did not open.
    """
    depth = 0
    for sign in _TEXTS.sub("", where):
        depth += {"(": 1, ")": -1}.get(sign, 0)
        if depth < 0:
            raise ValueError(f"the condition {where!r} closes a parenthesis that it did not open")
    return f"({where})"


def with_kind(where: str | None, kind: str | None) -> str | None:
    """A condition that holds for rows of a kind alone, one of `KINDS`; None for all kinds.

    Raises:
        ValueError: There is no such kind.
    """
    if kind is None:
        return where
    if kind not in KINDS:
        raise ValueError(f"unknown kind {kind!r} of row; expected one of {', '.join(KINDS)}")
    return " and ".join([*([] if where is None else [condition(where)]), f"row_kind == '{kind}'"])  # == of Milvus


def id_conditions(ids: Sequence[str]) -> Iterator[str]:
    """Conditions that hold for the rows under some ids, each for `IDS_AT_ONCE` of them."""
    for start in range(0, len(ids), IDS_AT_ONCE):
        yield f"id in ({', '.join(map(sql_literal, ids[start : start + IDS_AT_ONCE]))})"


def sql_literal(value: str | float | date) -> str:
    """A text, a number, a date, or true or false, as a condition writes it."""
    if isinstance(value, str):
        return "'" + value.replace("'", "''") + "'"
    if isinstance(value, date):
        return f"{'timestamp' if isinstance(value, datetime) else 'date'} '{value}'"
    whole = isinstance(value, float) and value.is_integer() and abs(value) < 2**63
    return str(int(value)) if whole else repr(value).lower()  # Lance compares no column of integers with `3.0`


@contextmanager
def committing(uri: str | Path) -> Iterator[None]:
    """Name the collection in what Lance raises while it writes.

    Raises:
        OSError: The disk is full or fails.
    """
    try:
        yield
    except (RuntimeError, OSError) as error:
        raise OSError(
            f"cannot write the collection {str(uri)!r}: {_first_line(error)}; readers see it as it was, and the rows "
            "that were written are safe: run the same again, it resumes"
        ) from error


@contextmanager
def reading(uri: str | Path, where: str | None = None, columns: pa.Schema | None = None) -> Iterator[None]:
    """Name the collection, or the condition, in what Lance raises.

    Raises:
        FileNotFoundError: There is no table.
        OSError: A file of a folder is missing or cannot be read.
        ConnectionError: The collection is elsewhere and cannot be reached.
        ValueError: The condition cannot be evaluated.
    """
    try:
        yield
    except Exception as error:  # of a damaged file Lance makes a ValueError, RuntimeError, OSError or RustPanic
        reason = _first_line(error)
        if isinstance(error, ValueError) and where is not None:
            named = ", ".join(f"{field.name} ({field.type})" for field in columns or ())
            if "could not convert" in reason:
                named += "; `conjoin encode --keep NAME:number` reads texts as numbers"
            problem = f"cannot be evaluated: {reason}; the columns are {named}"
            raise ValueError(f"the condition {where!r:.200} {problem}") from error
        if f"Table '{TABLE_NAME}' was not found" in reason:
            raise FileNotFoundError(f"there is no collection in {str(uri)!r}: run `conjoin encode`") from error
        problem = f"the collection {str(uri)!r} cannot be read: {reason}"
        if local_folder(uri) is not None:
            raise OSError(f"{problem}; {_REMEDY}") from error
        raise ConnectionError(f"{problem}; check the address, the network and your credentials") from error


def check_place(folder: Path) -> None:
    """Refuse to write a collection into a folder that has something else.

    Raises:
        ValueError: The message names what it holds.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(
            f"{str(folder)!r} is a file; `conjoin start {shlex.quote(str(folder))}` makes a collection of a table"
        )
    if not folder.is_dir() or (folder / "data").is_dir():
        return
    names = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    if names:
        raise ValueError(f"{str(folder)!r} is not empty and no collection: it has {names[0]!r}; choose a new folder")


def _first_line(error: BaseException) -> str:
    """What Lance says, without the place in its source."""
    line = str(error).splitlines()[0] if str(error) else type(error).__name__
    return _PLACE.split(line)[0].split(" Valid fields are ")[0].removeprefix("Invalid input, ")


def move_tag(folder: Path | None, table: Table, before: int | None) -> None:
    """Let readers see the version of a table; they saw `before`."""
    version = int(table.version)
    if folder is not None:
        _write_sums(folder, version, before)
    if before is None and folder is not None:  # Lance makes a tag below a percent-encoded path, such as M%C3%B6bel
        manifest = folder / TABLE / "_versions" / f"{2**64 - 1 - version:020}.manifest"
        tag = folder / TABLE / "_refs" / "tags" / f"{PUBLISHED}.json"
        tag.parent.mkdir(parents=True, exist_ok=True)
        write_text(tag, json.dumps({"branch": None, "version": version, "manifestSize": manifest.stat().st_size}))
    elif before is None:
        table.tags.create(PUBLISHED, version)
    elif before != version:
        table.tags.update(PUBLISHED, version)
        if folder is not None:
            _write_sums(folder, version, None)


def _write_sums(folder: Path, version: int, before: int | None) -> None:
    """Write the checksums of a version that is about to be published; readers still see `before`, if any."""
    known = read_checksums(folder)  # a file of Lance never changes
    paths = sorted(path.relative_to(folder) for path in (folder / TABLE).rglob("*") if path.is_file())
    names = [path.as_posix() for path in paths if not _MUTABLE & {*path.parts}]
    sums = {name: known[name] if name in known else file_digest(folder / name) for name in names}
    versions = dict.fromkeys([version, *([] if before is None else [before])])
    lines = [f"# {len(sums)} files", *(f"# version {number}" for number in versions)]
    write_text(
        folder / FOLDER_CHECKSUMS, "".join(f"{line}\n" for line in lines + [f"{v}  {k}" for k, v in sums.items()])
    )


def check_files(folder: Path, version: int, everything: bool = False) -> None:
    """Compare the files of a collection with their checksums.

    A file that is listed and missing belongs to an earlier version that was cleaned up, or Lance misses it by name.

    Args:
        folder: Of the collection.
        version: That readers are to see.
        everything: Hash all files, also those of a large collection that are older than its `SHA256SUMS`.

    Raises:
        DamagedError: A file differs, or another version is published than the checksums are of.
    """
    sums = folder / FOLDER_CHECKSUMS
    if not sums.is_file():
        raise OSError(f"the collection {str(folder)!r} has no {FOLDER_CHECKSUMS}; {_REMEDY}")
    check_checksums(folder, _REMEDY, ())  # whether the list itself is whole
    versions = [int(number) for number in _VERSION.findall(sums.read_text(encoding="utf-8", errors="replace"))]
    if version not in versions:
        raise DamagedError(
            f"{str(sums)!r} is of version {versions} of the collection, and version {version} is published; {_REMEDY}"
        )
    states = {name: (folder / name).stat() for name in read_checksums(folder) if (folder / name).is_file()}
    is_large = sum(state.st_size for state in states.values()) > _SMALL
    since = sums.stat().st_mtime_ns if is_large and not everything else 0
    check_checksums(folder, _REMEDY, {name for name, state in states.items() if state.st_mtime_ns >= since})
