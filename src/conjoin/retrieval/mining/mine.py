"""Offline hard-negative mining: the union of what several encoders rank as similar.

Each miner names a model and a view (text, image or both) of the anchor and of the candidate. Every (model, view) is
encoded once; every miner searches, one file of results per block of anchors; the results are united into one file.
Each of these steps resumes after an interruption.
"""

import hashlib
import json
import logging
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from conjoin.data.pair_sources import AnyDataset
from conjoin.data.row_images import row_item
from conjoin.progress import progress
from conjoin.retrieval.collection import Collection
from conjoin.retrieval.encode import encode_collection
from conjoin.retrieval.encoder import ItemEncoder, Role
from conjoin.retrieval.faiss_index import search_faiss, train_faiss
from conjoin.retrieval.load import load_encoder
from conjoin.retrieval.mining.negatives import NEGATIVES_FILE, write_mined
from conjoin.retrieval.options import MiningOptions
from conjoin.retrieval.reranker import Reranker, load_reranker
from conjoin.retrieval.vectors import exact_search
from conjoin.storage import atomic_path, differences, locked, write_text

logger = logging.getLogger(__name__)
VIEWS = {"image": ("image",), "text": ("text",), "fused": ("image", "text")}
"""The views of an item, and the columns of each."""
DUPLICATE_ABOVE = 0.95
_SPARE = 8
_DEEPEST = 1024
_RERANKED = 10
"""As `mine_hard_negatives` of sentence-transformers: candidates that are scored again for each negative."""
_HITS = pa.list_(pa.struct({"position": pa.int64(), "score": pa.float32()}))
_RESULTS = pa.schema({"limit": pa.float64(), "close": _HITS, "others": _HITS})
"""What a miner found for each anchor of a block: the largest score of a negative; the candidates that reach
`duplicate_above`; and the first below it, none of them above the limit unless a reranker scores them."""


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
        if not isinstance(self.duplicate_above, int | float) or math.isnan(self.duplicate_above):
            raise ValueError(f"miner {self.name!r}: duplicate_above must be a number, got {self.duplicate_above!r}")
        for name in ("absolute_margin", "relative_margin", "max_score"):
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
    if not isinstance(described, Mapping) or not described:
        raise ValueError(f"expected miners as name: {{model, query, candidate}}, got {described!r:.80}")
    known = {field.name for field in fields(Miner)} - {"name"}
    needed = {"model", "query", "candidate"}
    for name, miner in described.items():
        keys = set(miner) if isinstance(miner, Mapping) else set()
        if not needed <= keys <= known:
            raise ValueError(
                f"miner {name!r}: expected the keys model, query, candidate and optionally "
                f"{', '.join(sorted(known - needed))}; "
                f"got {miner!r:.120}"
            )
    return [Miner(str(name), **miner) for name, miner in described.items()]


def needed_parts(miners: Sequence[Miner], separate_anchors: bool) -> dict[str, Literal["image", "text"] | None]:
    """The one part that the miners compare of the rows of each source, None for both: `only` of `load_pairs`."""
    of_anchors = "anchors" if separate_anchors else "corpus"
    views: dict[str, set[str]] = defaultdict(set)
    for miner in miners:
        views["corpus"].add(miner.candidate)
        views[of_anchors].add(miner.query)
    one: dict[str, Literal["image", "text"]] = {"image": "image", "text": "text"}
    return {source: one.get(next(iter(seen))) if len(seen) == 1 else None for source, seen in views.items()}


def check_miners(miners: Sequence[Miner], k: int = 1) -> None:
    """Refuse miners that cannot be used together, and a `k` below 1.

    Raises:
        ValueError: No miner, two of one name, or `k` < 1.
    """
    names = [miner.name for miner in miners]
    if not names or len(set(names)) != len(names):
        raise ValueError(f"expected at least one miner and no name twice, got {names}")
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")


def mine_hard_negatives(
    corpus: AnyDataset,
    miners: Sequence[Miner],
    folder: str | Path,
    *,
    anchors: AnyDataset | None = None,
    load_encoder: Callable[[str], ItemEncoder] = load_encoder,
    load_reranker: Callable[[str], Reranker] = load_reranker,
    show_progress: bool = False,
    **options: Any,  # noqa: ANN401 - fields of MiningOptions
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
        options: Fields of `MiningOptions`: `k`, `index`, `device`, `block`, `dtype`, `prompt`, `prompt_name`.

    Returns:
        A row for each anchor: `id`, `negatives` (ids, best rank first) and `found_by`, for each negative the miners
        that found it, with rank and score. `load_mined` reads the same file for training.

    Raises:
        ValueError: Two miners of one name, `k` < 1, a row without the view of a miner, or a folder that was begun with
            other settings (the message names them); and as `encode_collection`.
    """
    chosen = MiningOptions(**options)
    check_miners(miners, chosen.k)
    folder = Path(folder)
    of_anchors = "corpus" if anchors is None else "anchors"
    sources = {"corpus": corpus} | ({} if anchors is None else {"anchors": anchors})

    collections = _encode_views(sources, of_anchors, miners, folder, load_encoder, chosen, show_progress)
    candidates, queries = _Rows.read(corpus), _Rows.read(sources[of_anchors])
    count = len(queries.ids)
    blocks = [range(start, min(start + chosen.block, count)) for start in range(0, count, chosen.block)]
    with locked(folder):
        for miner in sorted(miners, key=lambda miner: (miner.model, miner.candidate)):
            vectors = (
                collections[of_anchors, miner.model, miner.query, "query"].vectors(queries.ids),
                collections["corpus", miner.model, miner.candidate, "document"].vectors(candidates.ids),
            )
            reranker = None if miner.reranker is None else load_reranker(miner.reranker)
            search = _Search(miner, queries, candidates, *vectors, chosen, reranker)
            _begin(folder / "miners" / miner.name, search.settings)
            for number, block in enumerate(progress(blocks, desc=miner.name, unit="block", show=show_progress)):
                path = _results_file(folder, miner, number)
                if _read_results(path) is None:
                    with atomic_path(path) as temporary:
                        table = pa.Table.from_pylist(search.run(block), _RESULTS)
                        pq.write_table(table, temporary, write_page_checksum=True)
            del search, vectors  # one corpus at a time in memory

        def united() -> Iterator[list[dict[str, Any]]]:
            without = 0
            for number, block in enumerate(progress(blocks, desc="uniting", unit="block", show=show_progress)):
                found = [_read_results(_results_file(folder, miner, number)) or [] for miner in miners]
                rows = [
                    _unite(dict(zip(miners, each, strict=True)), chosen.k, candidates.ids)
                    for each in zip(*found, strict=True)
                ]
                without += sum(not row["negatives"] for row in rows)
                yield [{"id": queries.ids[anchor], **row} for anchor, row in zip(block, rows, strict=True)]
            if without:
                logger.warning("%d of %d anchors have no hard negative", without, count)

        write_mined(folder / NEGATIVES_FILE, united())
    return datasets.Dataset(datasets.table.InMemoryTable(pq.read_table(folder / NEGATIVES_FILE)))


def _encode_views(
    sources: Mapping[str, AnyDataset],
    of_anchors: str,
    miners: Sequence[Miner],
    folder: Path,
    load_encoder: Callable[[str], ItemEncoder],
    chosen: MiningOptions,
    show_progress: bool,
) -> dict[tuple[str, str, str, Role], Collection]:
    """The collection of every (source, model, view, role); one model at a time in memory."""
    collections: dict[tuple[str, str, str, Role], Collection] = {}
    for model in dict.fromkeys(miner.model for miner in miners):
        encoder = load_encoder(model)
        is_alike = encoder.is_symmetric and chosen.prompt is None and chosen.prompt_name is None
        of_query = {"role": "query", "prompt": chosen.prompt, "prompt_name": chosen.prompt_name}
        for miner in (miner for miner in miners if miner.model == model):
            needed: list[tuple[str, str, Role]]
            needed = [("corpus", miner.candidate, "document"), (of_anchors, miner.query, "query")]
            for name, view, role in needed:
                stored: Role = "document" if is_alike else role
                key = name, model, view, stored
                if key not in collections:
                    options: dict[str, Any] = of_query if stored == "query" else {"role": stored}
                    options |= {"sync": True, "dtype": chosen.dtype, "show_progress": show_progress}
                    rows = sources[name].select_columns(["id", *VIEWS[view]])
                    collections[key] = encode_collection(rows, encoder, collection_folder(folder, *key), **options)
                collections[name, model, view, role] = collections[key]
        del encoder
    return collections


def collection_folder(folder: Path, source: str, model: str, view: str, role: Role) -> Path:
    """Where the embeddings of a view of `source`, `"corpus"` or `"anchors"`, in a role are kept."""
    short = re.sub(r"\W+", "-", Path(model).name) + "-" + hashlib.blake2b(model.encode(), digest_size=4).hexdigest()
    return folder / "embeddings" / f"{source}-{view}-{short}{'-queries' if role == 'query' else ''}"


def _results_file(folder: Path, miner: Miner, block: int) -> Path:
    return folder / "miners" / miner.name / f"{block:05}.parquet"


class _Rows(NamedTuple):
    """The rows of anchors or candidates, their ids and their groups, in one order."""

    rows: AnyDataset
    ids: list[str]
    groups: list[str | None]

    @classmethod
    def read(cls, rows: AnyDataset) -> "_Rows":
        columns = rows.column_names or [*next(iter(rows), {})]  # a stream may not know its columns before it is read
        named = [*rows.select_columns([name for name in ("id", "group") if name in columns])]
        groups = [row.get("group") for row in named]
        return cls(rows, [str(row["id"]) for row in named], [None if each is None else str(each) for each in groups])

    def digest(self, vectors: np.ndarray) -> str:
        """Equal for equal ids, groups and vectors."""
        named = repr(self[1:]).encode("utf-8", "surrogatepass")
        return hashlib.sha256(named + vectors.tobytes()).hexdigest()

    def item(self, view: str, index: int) -> Any:  # noqa: ANN401
        """A view of a row."""
        if not isinstance(self.rows, datasets.Dataset):
            raise ValueError(
                f"a reranker reads rows by their index; expected a dataset, got {type(self.rows).__name__}"
            )
        row = self.rows.select_columns([*VIEWS[view]])[index]
        return row_item(row, f"row {self.ids[index]!r}")


def _begin(place: Path, settings: dict[str, Any]) -> None:
    """Make the folder of a miner's results, or make sure that they are of the same settings.

    Raises:
        ValueError: They are not; the message names the settings.
    """
    place.mkdir(parents=True, exist_ok=True)
    path = place / "settings.json"
    if not path.is_file():
        for old in place.glob("*.parquet"):
            old.unlink()
        write_text(path, json.dumps(settings))
    elif differing := differences(json.loads(path.read_text(encoding="utf-8")), settings):
        raise ValueError(f"{str(place)!r}: it was made with {differing}; mine into another folder, or as before")


def _read_results(path: Path) -> list[dict[str, Any]] | None:
    """The results of a block; None if they are missing or damaged, and so are to be searched for."""
    try:
        return list(pq.read_table(path, page_checksum_verification=True).cast(_RESULTS).to_pylist())
    except FileNotFoundError:
        return None
    except (pa.ArrowException, OSError, ValueError) as error:
        logger.warning("searching again: %r is damaged (%s)", str(path), error)
        return None


class _Search:
    """Searches one corpus of embeddings for one miner; the index of FAISS is built when first needed."""

    def __init__(
        self,
        miner: Miner,
        queries: _Rows,
        candidates: _Rows,
        query_vectors: np.ndarray,
        vectors: np.ndarray,
        options: MiningOptions,
        reranker: Reranker | None,
    ) -> None:
        self.miner, self.queries, self.candidates, self.reranker = miner, queries, candidates, reranker
        self.query_vectors, self.vectors, self.options = query_vectors, vectors, options
        self.index: Any = None
        digests = {"corpus": candidates.digest(vectors), "anchors": queries.digest(query_vectors)}
        self.is_self = digests["corpus"] == digests["anchors"] and miner.query == miner.candidate
        self.settings = {
            name: value for name, value in asdict(miner).items() if name not in ("name", "model")
        } | digests
        self.settings |= {"k": options.k, "index": options.index, "block": options.block}
        self.settings |= {} if reranker is None else {"reranker": reranker.fingerprint}
        self.position_of = {name: position for position, name in enumerate(candidates.ids)}
        self.members: dict[str | None, list[int]] = defaultdict(list)
        for position, group in enumerate(candidates.groups):
            self.members[group].append(position)

    def run(self, block: range) -> list[dict[str, Any]]:
        """Search for some anchors.

        Raises:
            ValueError: An anchor has no positive to compare with.
        """
        positives = [self._positives(anchor) for anchor in block] if self.miner.has_margin else [[]] * len(block)
        results = self._nearest(block, positives)
        if self.reranker is None:
            return results
        return [self._score_again(*each) for each in zip(results, block, positives, strict=True)]

    def _positives(self, anchor: int) -> list[int]:
        """The candidates that are right for an anchor: that of its id unless it is itself, and those of its group."""
        name, group = self.queries.ids[anchor], self.queries.groups[anchor]
        own = [] if self.is_self or name not in self.position_of else [self.position_of[name]]
        members = [] if group is None else self.members.get(group, [])
        found = dict.fromkeys([*own, *(each for each in members if self.candidates.ids[each] != name)])
        if not found:
            raise ValueError(
                f"miner {self.miner.name!r} has a margin, but the anchor {name!r} has no positive among the candidates"
                f"{' other than itself' if self.is_self else ''}: compare another view, or name a group column"
            )
        return list(found)

    def _is_own(self, anchor: int, position: int) -> bool:
        """Whether a candidate is the anchor itself or of its group."""
        group = self.queries.groups[anchor]
        is_of_group = group is not None and group == self.candidates.groups[position]
        return is_of_group or self.candidates.ids[position] == self.queries.ids[anchor]

    def _ranked(self, queries: np.ndarray, depth: int) -> tuple[np.ndarray, np.ndarray]:
        if self.options.index == "exact":
            return exact_search(queries, self.vectors, depth, device=self.options.device)
        if self.index is None:
            self.index = train_faiss(self.options.index, self.vectors)
        return search_faiss(self.index, queries, depth)

    def _nearest(self, block: range, positives: list[list[int]]) -> list[dict[str, Any]]:
        """What is found for each anchor; searched again more deeply where too few of the first results can be used."""
        queries, miner = np.asarray(self.query_vectors[block.start : block.stop], dtype=np.float32), self.miner
        limits = [miner.limit(0.0)] * len(queries)
        if miner.has_margin and self.reranker is None:
            limits = [miner.limit(float((self.vectors[each].astype(np.float32) @ query).min()))
                      for each, query in zip(positives, queries, strict=True)]  # fmt: skip
        wanted = miner.range_min + self.options.k * (1 if self.reranker is None else _RERANKED)
        deepest = min(len(self.vectors), max(_DEEPEST, wanted + _SPARE))
        depth = min(deepest, wanted + _SPARE)
        results: list[dict[str, Any]] = [{}] * len(queries)
        pending = list(range(len(queries)))
        while pending:
            ranked = zip(pending, *(each.tolist() for each in self._ranked(queries[pending], depth)), strict=True)
            pending = []
            for row, positions, scores in ranked:
                close: list[dict[str, Any]] = []
                others: list[dict[str, Any]] = []
                most = math.inf if self.reranker else limits[row]
                for position, score in zip(positions, scores, strict=True):
                    if position < 0 or self._is_own(block[row], position):  # an approximate index finds fewer
                        continue
                    if score >= miner.duplicate_above:
                        close.append({"position": position, "score": score})
                    elif score <= most and len(others) < wanted:
                        others.append({"position": position, "score": score})
                results[row] = {"limit": limits[row], "close": close, "others": others}
                if len(others) < wanted and depth < deepest:
                    pending.append(row)
            depth = min(4 * depth, deepest)
        return results

    def _score_again(self, result: dict[str, Any], anchor: int, positives: list[int]) -> dict[str, Any]:
        """The result of an anchor with the scores of the reranker, and the limit that follows from them."""
        hits = [*result["close"], *result["others"]]
        positions = (*positives, *(hit["position"] for hit in hits))
        items = [self.candidates.item(self.miner.candidate, position) for position in positions]
        query = self.queries.item(self.miner.query, anchor)
        scores = self.reranker.score(query, items, activate=True).tolist()  # type: ignore[union-attr]
        limit = self.miner.limit(min(scores[: len(positives)], default=0.0))
        scored = [{**hit, "score": score} for hit, score in zip(hits, scores[len(positives) :], strict=True)]
        close = len(result["close"])
        return {"limit": limit, "close": scored[:close], "others": scored[close:]}


def _unite(found: Mapping[Miner, dict[str, Any]], k: int, names: list[str]) -> dict[str, Any]:
    """Unite what the miners found for one anchor, without duplicates: best rank first, then as the miners stand."""
    compared = {part for miner in found for part in miner.parts}
    close: dict[int, set[str]] = defaultdict(set)
    for miner, result in found.items():
        for hit in result["close"]:
            close[hit["position"]] |= miner.parts
    duplicates = {position for position, parts in close.items() if parts == compared}
    found_by: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for miner, result in found.items():
        kept = [hit for hit in (*result["close"], *result["others"])
                if hit["position"] not in duplicates and hit["score"] <= result["limit"]]  # fmt: skip
        first = sorted(kept, key=lambda hit: -hit["score"])[miner.range_min : miner.range_min + k]
        for rank, hit in enumerate(first, start=1):
            found_by[hit["position"]].append({"miner": miner.name, "rank": rank, "score": hit["score"]})
    order = sorted(found_by, key=lambda position: min(entry["rank"] for entry in found_by[position]))
    return {"negatives": [names[position] for position in order], "found_by": [found_by[each] for each in order]}
