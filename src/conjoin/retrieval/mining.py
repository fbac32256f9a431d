"""Offline hard-negative mining: the union of what several encoders rank as similar.

Each miner names a model and a view (text, image or both) of the anchor and of the candidate. Every (model, view) is
encoded once; every miner searches, one file of results per block of anchors; the results are united into one file.
Each of these steps resumes after an interruption.

The file, `negatives.parquet`, has checksums of its pages and the columns

* `id`: string, the anchor;
* `negatives`: list of strings, the ids of its negatives, best rank first;
* `found_by`: for each of the negatives, in the same order, a list of `{miner, rank, score}`: the miners that found
  it, its rank there (from 1, the anchor itself and its duplicates not counted) and its cosine.
"""

import hashlib
import json
import logging
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from conjoin.constants import Role
from conjoin.data.row_images import row_item
from conjoin.progress import progress
from conjoin.retrieval.collection import Collection
from conjoin.retrieval.encode import encode_collection
from conjoin.retrieval.encoder import ItemEncoder
from conjoin.retrieval.faiss_index import search_faiss, train_faiss
from conjoin.retrieval.load import load_encoder
from conjoin.retrieval.reranker import Reranker, load_reranker
from conjoin.retrieval.vectors import exact_search
from conjoin.storage import atomic_path, differences, locked, read_json, reading, remove_temporary, write_text

logger = logging.getLogger(__name__)
NEGATIVES_FILE = "negatives.parquet"
_REMEDY = "run `conjoin mine` again"
MINED_SCHEMA = pa.schema(
    {
        "id": pa.string(),
        "negatives": pa.list_(pa.string()),
        "found_by": pa.list_(pa.list_(pa.struct({"miner": pa.string(), "rank": pa.int32(), "score": pa.float32()}))),
    }
)
VIEWS = {"image": ("image",), "text": ("text",), "fused": ("image", "text")}
"""The views of an item, and the columns of each."""
DUPLICATE_ABOVE = 0.95
_SPARE = 8
_DEEPEST = 1024
_RERANKED = 10
"""As `mine_hard_negatives` of sentence-transformers: candidates that are scored again for each negative."""
Search = Callable[..., tuple[np.ndarray, np.ndarray]]
_HIT = pa.struct({"position": pa.int64(), "score": pa.float32(), "is_close": pa.bool_()})
_RESULTS = pa.schema({"limit": pa.float64(), "hits": pa.list_(_HIT)})
"""What a miner found for each anchor of a block: the largest score of a negative; the candidates that reach
`duplicate_above` (`is_close`) and the first below it, none above the limit unless a reranker scores them."""


@dataclass(frozen=True)
class Miner:
    """One way of finding hard negatives.

    Attributes:
        name: Unique; also the name of its folder.
        model: Folder or Hub name, as `load_encoder` takes it.
        query: The view of the anchor: `"image"`, `"text"` or `"fused"`.
        candidate: The view of the candidates.
        duplicate_above: A candidate of at least this cosine is a duplicate of the anchor in `parts`. Models differ in
            what 0.95 means; above 1 there are no duplicates.
        absolute_margin: The score of a negative is at least this much below that of the positive. The positives of an
            anchor are the candidate with its id, unless that is the anchor itself, and those of its group; of several
            the least similar counts. As in `mine_hard_negatives` of sentence-transformers, like the next four.
        relative_margin: Likewise, as a share of the positive's score.
        max_score: A negative scores at most this.
        range_min: Of the candidates that are left, skip this many of the first.
        reranker: A `CrossEncoder` of sentence-transformers, whose scores replace the cosines for the first candidates
            and the positives; duplicates are still told by cosines.
    """

    name: str
    model: str
    query: str
    candidate: str
    duplicate_above: float = DUPLICATE_ABOVE
    absolute_margin: float | None = None
    relative_margin: float | None = None
    max_score: float | None = None
    range_min: int = 0
    reranker: str | None = None

    def __post_init__(self) -> None:
        if not re.fullmatch(r"\w[\w.-]*", self.name):
            raise ValueError(f"the name of a miner is letters, digits, '.', '_' and '-', got {self.name!r}")
        for role, view in (("query", self.query), ("candidate", self.candidate)):
            if view not in VIEWS:
                raise ValueError(f"miner {self.name!r}: unknown {role} {view!r}; expected one of {list(VIEWS)}")
        for name in ("duplicate_above", "absolute_margin", "relative_margin", "max_score"):
            value = vars(self)[name]
            if value is not None and (not isinstance(value, int | float) or not math.isfinite(value)):
                raise ValueError(f"miner {self.name!r}: {name} must be a number, got {value!r}")
        if not isinstance(self.range_min, int) or self.range_min < 0:
            raise ValueError(f"miner {self.name!r}: range_min must be a whole number from 0, got {self.range_min!r}")

    @property
    def has_margin(self) -> bool:
        """Whether negatives are compared with the positives."""
        return self.absolute_margin is not None or self.relative_margin is not None

    def limit(self, positive: float) -> float:
        """Return the largest score of a negative, given that of the positive."""
        limits = [math.inf if self.max_score is None else self.max_score]
        if self.absolute_margin is not None:
            limits.append(positive - self.absolute_margin)
        if self.relative_margin is not None:
            limits.append(positive - abs(positive) * self.relative_margin)
        return min(limits)

    @property
    def parts(self) -> set[str]:
        """The parts of items that it compares: `"image"`, `"text"` or both."""
        return {*VIEWS[self.query], *VIEWS[self.candidate]}


def parse_miners(described: Mapping[str, Mapping[str, Any]]) -> list[Miner]:
    """Read miners from `{name: {model, query, candidate, ...}}`, as in YAML; the keys are the attributes of `Miner`.

    Raises:
        ValueError: None at all, a key is missing or unknown, or a value is not one of those expected.
    """
    if not isinstance(described, Mapping):
        raise ValueError(f"expected miners as name: {{model, query, candidate}}, got {described!r:.80}")
    miners = []
    for name, miner in described.items():
        try:
            miners.append(Miner(str(name), **miner))
        except TypeError as error:
            raise ValueError(f"miner {name!r}: expected {{model, query, candidate ...}}; {error}") from error
    return miners


def needed_part(views: Sequence[str]) -> Literal["image", "text", "both"]:
    """The one part that some views are of, or both: `only` of `load_pairs`."""
    return "image" if {*views} == {"image"} else "text" if {*views} == {"text"} else "both"


def mine_hard_negatives(  # noqa: C901 - it reads top to bottom
    corpus: datasets.Dataset,
    miners: Sequence[Miner],
    folder: str | Path,
    *,
    anchors: datasets.Dataset | None = None,
    load_encoder: Callable[[str], ItemEncoder] = load_encoder,
    load_reranker: Callable[[str], Reranker] = load_reranker,
    show_progress: bool = False,
    k: int = 10,
    index: str = "exact",
    device: str = "cpu",
    block: int = 4096,
    dtype: str = "float32",
    prompt: str | None = None,
    prompt_name: str | None = None,
) -> datasets.Dataset:
    """Find the hard negatives of every anchor: the union of the top `k` of every miner.

    Never among them: the anchor itself (the same id), rows of its `group`, and near-duplicates: candidates that reach
    `duplicate_above` in every view that the miners compare. With miners of pictures and of texts, a candidate with
    the same picture and another text is a negative, the hardest there is. The search goes deeper for an anchor until
    `k` candidates below `duplicate_above` and the limits of the miner are found (to a depth of 1024). In memory are
    the embeddings that one miner compares.

    Args:
        corpus: Candidates, columns `id`, `image` and `text` as `load_pairs` gives them, and optionally `group`.
        miners: See `Miner`; of equal rank, the earlier one goes first.
        folder: For embeddings, results and `negatives.parquet`; the same call with the same folder resumes. More
            miners may be added later; those that are done stay.
        anchors: Whose negatives to find, ids and groups meaning the same as in the corpus; `None`: of all of the
            corpus.
        load_encoder: Makes the encoder of a model.
        load_reranker: Makes the reranker of a miner that has one.
        show_progress: Show progress bars.
        k: Negatives per miner.
        index: How to search: `"exact"`, or a factory string of FAISS such as `"IVF4096,PQ64"`.
        device: Where `"exact"` ranks, such as `"cuda"`.
        block: Anchors that are searched at once.
        dtype: Type of the stored embeddings, `"float32"` or `"float16"`.
        prompt: Of the anchors, in place of each model's own prompt for queries.
        prompt_name: The name of one of the model's prompts, likewise.

    Returns:
        A row for each anchor: `id`, `negatives` (ids, best rank first) and `found_by`, for each negative the miners
        that found it, with rank and score. `load_mined` reads the same file for training.

    Raises:
        ValueError: Two miners of one name, `k` < 1, a row without the view of a miner, or a folder that was begun with
            other settings (the message names them); and as `encode_collection`.
    """
    names = [miner.name for miner in miners]
    if not names or len(set(names)) != len(names):
        raise ValueError(f"expected at least one miner and no name twice, got {names}")
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
    folder = Path(folder)
    of_anchors = "corpus" if anchors is None else "anchors"
    sources = {"corpus": corpus} | ({} if anchors is None else {"anchors": anchors})

    # The collection of every miner and role, one model at a time in memory
    made: dict[Path, Collection] = {}
    collections: dict[tuple[str, Role], Collection] = {}
    for model in dict.fromkeys(miner.model for miner in miners):
        encoder = load_encoder(model)
        is_alike = encoder.is_symmetric and prompt is None and prompt_name is None
        label = (
            re.sub(r"\W+", "-", Path(model).name) + "-" + hashlib.blake2b(model.encode(), digest_size=4).hexdigest()
        )
        for miner in (miner for miner in miners if miner.model == model):
            searched: list[tuple[str, str, Role]]
            searched = [("corpus", miner.candidate, "document"), (of_anchors, miner.query, "query")]
            for name, view, role in searched:
                how: dict[str, Any] = {"role": "document" if is_alike else role, "sync": True, "dtype": dtype}
                place = folder / "embeddings" / f"{name}-{view}-{label}"
                if how["role"] == "query":
                    how |= {"prompt": prompt, "prompt_name": prompt_name}
                    place = place.with_name(f"{place.name}-queries")
                if place not in made:
                    rows = sources[name].select_columns(["id", *VIEWS[view]])
                    made[place] = encode_collection(rows, encoder, place, show_progress=show_progress, **how)
                collections[miner.name, role] = made[place]
        del encoder

    candidates, queries = _Names.read(corpus), _Names.read(sources[of_anchors])
    position_of = {name: position for position, name in enumerate(candidates.ids)}
    members: dict[str | None, list[int]] = defaultdict(list)
    for position, group in enumerate(candidates.groups):
        members[group].append(position)
    count = len(queries.ids)
    blocks = [range(start, min(start + block, count)) for start in range(0, count, block)]
    with locked(folder):
        for miner in sorted(miners, key=lambda miner: (miner.model, miner.candidate)):
            query_vectors = collections[miner.name, "query"].vectors(queries.ids)
            vectors = collections[miner.name, "document"].vectors(candidates.ids)
            reranker = None if miner.reranker is None else load_reranker(miner.reranker)
            digests = {"corpus": candidates.digest(vectors), "anchors": queries.digest(query_vectors)}
            settings = {name: value for name, value in asdict(miner).items() if name not in ("name", "model")}
            settings |= digests | {"k": k, "index": index, "block": block}
            settings |= {} if reranker is None else {"reranker": reranker.fingerprint}
            place = folder / "miners" / miner.name
            place.mkdir(parents=True, exist_ok=True)
            remove_temporary(place)
            if not (place / "settings.json").is_file():
                write_text(place / "settings.json", json.dumps(settings))
            elif differing := differences(read_json(place / "settings.json", _REMEDY), settings):
                raise ValueError(
                    f"{str(place)!r}: it was made with {differing}; mine into another folder, or as before"
                )
            is_self = digests["corpus"] == digests["anchors"] and miner.query == miner.candidate
            of_queries = sources[of_anchors].select_columns([*VIEWS[miner.query]])
            of_candidates = corpus.select_columns([*VIEWS[miner.candidate]])
            paths = [place / f"{number:05}.parquet" for number in range(len(blocks))]
            left = [(path, some) for path, some in zip(paths, blocks, strict=True) if not path.is_file()]
            search: Search = partial(exact_search, vectors=vectors, device=device)
            if left and index != "exact":
                search = partial(search_faiss, train_faiss(index, vectors))
            for path, some in progress(left, desc=miner.name, unit="block", show=show_progress):
                positives: list[list[int]] = [[]] * len(some)
                if miner.has_margin:  # the candidate of the anchor's id unless it is itself, and those of its group
                    for row, anchor in enumerate(some):
                        name, group = queries.ids[anchor], queries.groups[anchor]
                        own = [] if is_self or name not in position_of else [position_of[name]]
                        same = [] if group is None else members.get(group, [])
                        positives[row] = [*dict.fromkeys([*own, *(n for n in same if candidates.ids[n] != name)])]
                        if not positives[row]:
                            raise ValueError(
                                f"miner {miner.name!r} has a margin, but the anchor {name!r} has no positive among "
                                f"the candidates{' other than itself' if is_self else ''}: compare another view, or "
                                "name a group column"
                            )
                results = _search(miner, some, queries, candidates, query_vectors, vectors, positives, search, k)
                if reranker is not None:
                    for result, anchor, right in zip(results, some, positives, strict=True):
                        query = row_item(of_queries[anchor], f"item {queries.ids[anchor]!r}")
                        hits = result["hits"]
                        places = [*right, *(hit["position"] for hit in hits)]
                        items = [row_item(of_candidates[n], f"item {candidates.ids[n]!r}") for n in places]
                        scores = reranker.score(query, items, activate=True).tolist()
                        result["limit"] = miner.limit(min(scores[: len(right)], default=0.0))
                        for hit, score in zip(hits, scores[len(right) :], strict=True):
                            hit["score"] = score
                with atomic_path(path) as temporary:
                    pq.write_table(pa.Table.from_pylist(results, _RESULTS), temporary)
            del query_vectors, vectors, search  # one corpus at a time in memory

        def united() -> Iterator[list[dict[str, Any]]]:
            without = 0
            for number, some in enumerate(progress(blocks, desc="uniting", unit="block", show=show_progress)):
                paths = [folder / "miners" / miner.name / f"{number:05}.parquet" for miner in miners]
                found = [pq.read_table(path).to_pylist() for path in paths]
                rows = [
                    _unite(dict(zip(miners, each, strict=True)), k, candidates.ids)
                    for each in zip(*found, strict=True)
                ]
                without += sum(not row["negatives"] for row in rows)
                yield [{"id": queries.ids[anchor], **row} for anchor, row in zip(some, rows, strict=True)]
            if without:
                logger.warning("%d of %d anchors have no hard negative", without, count)

        write_mined(folder / NEGATIVES_FILE, united())
    return datasets.Dataset(datasets.table.InMemoryTable(pq.read_table(folder / NEGATIVES_FILE)))


class _Names(NamedTuple):
    """The ids and the groups of anchors or candidates, in one order."""

    ids: list[str]
    groups: list[str | None]

    @classmethod
    def read(cls, rows: datasets.Dataset) -> "_Names":
        groups = rows["group"] if "group" in rows.column_names else [None] * len(rows)
        return cls([str(id_) for id_ in rows["id"]], [None if group is None else str(group) for group in groups])

    def digest(self, vectors: np.ndarray) -> str:
        """Equal for equal ids, groups and vectors."""
        digest = hashlib.sha256(repr(tuple(self)).encode("utf-8", "surrogatepass"))
        digest.update(np.ascontiguousarray(vectors).data)
        return digest.hexdigest()


def _search(
    miner: Miner,
    block: range,
    queries: _Names,
    candidates: _Names,
    query_vectors: np.ndarray,
    vectors: np.ndarray,
    positives: list[list[int]],
    search: Search,
    k: int,
) -> list[dict[str, Any]]:
    """What is found for each anchor; searched again more deeply where too few of the first results can be used."""
    queried, is_reranked = np.asarray(query_vectors[block.start : block.stop], np.float32), miner.reranker is not None
    limits = [miner.limit(0.0)] * len(queried)
    if miner.has_margin and not is_reranked:
        limits = [miner.limit(float((vectors[each].astype(np.float32) @ query).min()))
                  for each, query in zip(positives, queried, strict=True)]  # fmt: skip
    wanted = miner.range_min + k * (_RERANKED if is_reranked else 1)
    deepest = min(len(vectors), max(_DEEPEST, wanted + _SPARE))
    depth = min(deepest, wanted + _SPARE)
    results: list[dict[str, Any]] = [{}] * len(queried)
    pending = list(range(len(queried)))
    while pending:
        found = search(queries=queried[pending], k=depth)
        ranked = zip(pending, *(each.tolist() for each in found), strict=True)
        pending = []
        for row, positions, scores in ranked:
            name, group = queries.ids[block[row]], queries.groups[block[row]]
            hits, count = [], 0
            for position, score in zip(positions, scores, strict=True):
                is_of_group = group is not None and group == candidates.groups[position]
                if position < 0 or is_of_group or candidates.ids[position] == name:  # an approximate index finds fewer
                    continue
                is_close = score >= miner.duplicate_above
                if is_close or ((is_reranked or score <= limits[row]) and count < wanted):
                    hits.append({"position": position, "score": score, "is_close": is_close})
                    count += not is_close
            results[row] = {"limit": limits[row], "hits": hits}
            if count < wanted and depth < deepest:
                pending.append(row)
        depth = min(4 * depth, deepest)
    return results


def _unite(found: Mapping[Miner, dict[str, Any]], k: int, names: list[str]) -> dict[str, Any]:
    """Unite what the miners found for one anchor, without duplicates: best rank first, then as the miners stand."""
    compared = {part for miner in found for part in miner.parts}
    close: dict[int, set[str]] = defaultdict(set)
    for miner, result in found.items():
        for hit in result["hits"]:
            if hit["is_close"]:
                close[hit["position"]] |= miner.parts
    duplicates = {position for position, parts in close.items() if parts == compared}
    found_by: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for miner, result in found.items():
        kept = [hit for hit in result["hits"]
                if hit["position"] not in duplicates and hit["score"] <= result["limit"]]  # fmt: skip
        first = sorted(kept, key=lambda hit: -hit["score"])[miner.range_min : miner.range_min + k]
        for rank, hit in enumerate(first, start=1):
            found_by[hit["position"]].append({"miner": miner.name, "rank": rank, "score": hit["score"]})
    order = sorted(found_by, key=lambda position: min(entry["rank"] for entry in found_by[position]))
    return {"negatives": [names[position] for position in order], "found_by": [found_by[each] for each in order]}


class MinedNegatives(Mapping[str, list[str]]):
    """From the id of an anchor to the ids of its hard negatives, best rank first.

    The lists stay in Arrow, each id once, so that millions of anchors fit in memory.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with reading(path, _REMEDY):
            table = pq.read_table(
                path,
                columns=["id", "negatives"],
                read_dictionary=["negatives.list.element"],
                page_checksum_verification=True,
            )
        if table.column_names != ["id", "negatives"]:
            raise ValueError(f"{str(path)!r} has the columns {table.column_names}, expected {MINED_SCHEMA.names}")
        self._lists = table["negatives"].unify_dictionaries().combine_chunks()
        self._rows = {id_: row for row, id_ in enumerate(table["id"].to_pylist())}

    def __getitem__(self, anchor: str) -> list[str]:
        return list(self._lists[self._rows[anchor]].as_py())

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)


def load_mined(path: str | Path) -> MinedNegatives:
    """Read what `mine_hard_negatives` wrote.

    Args:
        path: The Parquet file, or the folder that holds it as `negatives.parquet`.

    Raises:
        FileNotFoundError: No such file.
        ValueError: It is another kind of file, or damaged.
    """
    path = Path(path)
    file = path / NEGATIVES_FILE if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(f"{str(file)!r}: no such file; `conjoin mine` writes it when it is done")
    return MinedNegatives(file)


def write_mined(path: Path, blocks: Iterable[list[dict[str, Any]]]) -> None:
    """Write blocks of rows `MINED_SCHEMA`, one row group each; the file appears when all of them are in."""
    settings: dict[str, Any] = {"compression": "zstd", "write_page_checksum": True}
    with atomic_path(path) as temporary, pq.ParquetWriter(temporary, MINED_SCHEMA, **settings) as writer:
        for rows in blocks:
            writer.write_table(pa.Table.from_pylist(rows, schema=MINED_SCHEMA))
