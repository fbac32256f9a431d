"""From a catalogue of products with attributes to queries of several conditions, in the layout of MERIT."""

import hashlib
import itertools
import json
import logging
import math
import shutil
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from conjoin.data.make.made import is_made, made_with, write_settings
from conjoin.data.merit import PRODUCT_FEATURES, query_file
from conjoin.data.row_checks import row_name
from conjoin.processing.item_error import ItemError
from conjoin.progress import progress
from conjoin.storage import atomic_path, differences, lock_folder, publish_folder, write_text

from .catalogue import MISSING, Catalogue
from .composer import COLD_START, Composer, CompositionSettings
from .instructions import Template, load_templates
from .judges import Judge, VisionModel
from .samplers import Pool

logger = logging.getLogger(__name__)
MARKER = "composition.json"
DISTRIBUTION_FILE = "distribution.json"
GIVE_UP = 300
"""Numbers in a row without a new query, after which a split has no more."""
_VERSION = 4
POSITIVE_BINS = (1, 2, 5, 10, 50, 100, 500, 1000, 5000)
"""Lower ends of the bins of the number of positives."""
_GROUP = 256


class Distribution:
    """Counts over the outcomes of a split, see `Composer.outcome`.

    Args:
        catalogue: All products.
        rows: Those of the split.
    """

    def __init__(self, catalogue: Catalogue, rows: np.ndarray) -> None:
        having = (catalogue.codes[:, rows] != MISSING).sum(axis=1).tolist()
        self.products, self.candidates, self.kept, self.duplicates = len(rows), 0, 0, 0
        self.attributes = {"products": Counter(dict(zip(catalogue.attributes, having, strict=True)))}
        self.attributes |= {name: Counter() for name in ("conventional", "drawn", "kept")}
        self.languages = {"products": Counter(catalogue.languages[row] for row in rows.tolist())}
        self.languages |= {name: Counter() for name in ("conventional", "drawn", "kept", "positives", "instructions")}
        self.conditions: dict[str, Counter[str]] = {"drawn": Counter(), "kept": Counter()}
        self.samplers: dict[str, Counter[str]] = {"drawn": Counter(), "kept": Counter()}
        self.rejected: Counter[str] = Counter()
        self.positives: Counter[str] = Counter()
        self.hard_negatives = 0

    def add(self, record: Mapping[str, Any]) -> None:
        """Count what was drawn for a number."""
        self.candidates += 1
        self.conditions["drawn"].update(record["conditions"])
        self.rejected.update(record["rejected"])
        if "asked" not in record:
            return
        self.samplers["drawn"][record["sampler"]] += 1
        for name in ("drawn", "conventional") if record["sampler"] == "conventional" else ("drawn",):
            self.attributes[name].update(record["asked"])
            self.languages[name].update(record["shown"])

    def keep(self, record: Mapping[str, Any]) -> None:
        """Count a query that is kept."""
        query = record["query"]
        self.kept += 1
        self.samplers["kept"][record["sampler"]] += 1
        self.conditions["kept"][str(len(query["query"]))] += 1
        self.attributes["kept"].update(record["asked"])
        self.languages["kept"].update(record["shown"])
        self.languages["positives"].update(record["answered"])
        self.languages["instructions"][query["language"]] += 1
        self.positives[str(max(least for least in POSITIVE_BINS if least <= len(query["pos_candidate"])))] += 1
        self.hard_negatives += len(query["hard_negative"])

    def to_dict(self) -> dict[str, Any]:
        """All counts, and the evenness of each distribution over attributes."""
        return vars(self) | {"evenness": {name: evenness(counts) for name, counts in self.attributes.items()}}


def compose_queries(
    catalogue: Catalogue,
    out: str | Path,
    settings: CompositionSettings | None = None,
    *,
    vectors: np.ndarray | None = None,
    judges: Sequence[Judge] = (),
    cold_start: VisionModel | None = None,
    template_files: Sequence[str | Path] = (),
    show_progress: bool = False,
) -> Path:
    """Compose queries and write them with the products in the layout of MERIT (App. A.3).

    * `data/train-*.parquet`, `data/test-*.parquet`: the products with their images. No family is in both.
    * `queries-train.json`, `queries-test.json`: JSON lines with `query`, `pos_candidate`, `hard_negative` and
      `query instruction`; beside the published fields, the `sampler` and the `language` of the instruction.
    * `distribution.json`: what the report shows.

    Query i is a function of the seed, the split and i, so an interrupted call resumes and writes the same bytes. All
    products that satisfy the conditions are positives, most similar first; hard negatives satisfy all but one, or are
    siblings of the first product. All is made beside `out`, in `OUT.partial`, and moved there when it is whole.

    Args:
        catalogue: See `read_catalogue`.
        out: The folder to make; if it holds the same composition, nothing is done.
        settings: How; None for the defaults.
        vectors: `(N, D)`, L2-normalised, of any encoder: they find similar products and rank positives and negatives.
        judges: Filters, see `judge_with` and `judge_by_titles`.
        cold_start: The model of the sampler `cold_start`.
        template_files: Templates of further languages, see `load_templates`.
        show_progress: Show progress bars.

    Raises:
        FileExistsError: `out` is there and is something else.
        ValueError: No query is possible (the message counts the reasons); a split has no products; the vectors do
            not fit; models worked for an interrupted composition of other settings; cold start without a model or
            without products.
    """
    settings = settings or CompositionSettings()
    templates = load_templates(settings.languages, template_files)
    _check_vectors(vectors, len(catalogue))
    _check_cold_start(catalogue, settings, cold_start, vectors)
    out = Path(out)
    key = _key(catalogue, settings, templates, vectors, judges, cold_start)
    if is_made(out, MARKER, key, "this composition"):
        return out
    rows_of = _split(catalogue, settings)
    for number, (split, rows) in enumerate(rows_of.items()):
        pool = Pool(catalogue, rows, vectors, settings.damping, settings.exclude_most_frequent)
        _check_possible(split, Composer(catalogue, pool, number, settings, templates))
    partial = out.with_name(out.name + ".partial")
    partial.mkdir(parents=True, exist_ok=True)
    lock = lock_folder(partial)
    try:
        _begin(partial, key, Path(lock.lock_file))
        counts = {}
        for number, (split, rows) in enumerate(rows_of.items()):
            pool = Pool(catalogue, rows, vectors, settings.damping, settings.exclude_most_frequent)
            composer = Composer(catalogue, pool, number, settings, templates, judges, cold_start)
            counts[split] = _write_queries(partial, split, composer, show_progress).to_dict()
            path = partial / "data" / f"{split}-00000-of-00001.parquet"
            if not path.exists():
                write_products(path, catalogue, rows, split, show_progress)
        write_text(partial / DISTRIBUTION_FILE, json.dumps(counts, indent=1, ensure_ascii=False) + "\n")
        for path in (*partial.glob("*.journal"), Path(lock.lock_file)):
            path.unlink(missing_ok=True)
    finally:
        lock.release()
    publish_folder(partial, out)
    return out


def _write_queries(folder: Path, split: str, composer: Composer, show_progress: bool) -> Distribution:
    """Write the queries of a split, each set of conditions once, and count how they are distributed."""
    wanted = composer.settings.splits[split]
    distribution = Distribution(composer.catalogue, composer.pool.rows)
    seen: set[str] = set()
    latest = 0
    outcomes = _outcomes(folder / f"{split}.journal", composer)
    bar = progress(total=wanted, desc=f"{split} queries", unit="query", show=show_progress)
    with closing(outcomes), bar, atomic_path(query_file(folder, split)) as temporary:
        with temporary.open("w", encoding="utf-8") as file:
            for number, record in enumerate(outcomes):
                distribution.add(record)
                query = record["query"]
                name = json.dumps(query and query["query"], sort_keys=True)
                if query is not None and name in seen:
                    distribution.duplicates += 1
                elif query is not None:
                    seen.add(name)
                    latest = number
                    distribution.keep(record)
                    file.write(json.dumps(query, ensure_ascii=False) + "\n")
                    bar.update()
                if distribution.kept == wanted or number - latest >= GIVE_UP:
                    break
        _check_found(split, composer.settings, distribution)
    return distribution


def _outcomes(path: Path, composer: Composer) -> Generator[dict[str, Any]]:
    """The outcome of each number: first those that the journal has, then new ones, which are appended to it."""
    path.touch()
    with path.open("rb+") as file:
        done, end = 0, 0
        for line in file:
            if not line.endswith(b"\n"):
                break  # a write that was interrupted
            done, end = done + 1, end + len(line)
            try:
                yield json.loads(line)
            except ValueError as error:
                raise ValueError(f"{str(path)!r}, line {done}: damaged ({error}); remove the file") from error
        file.seek(end)
        file.truncate()
        for number in itertools.count(done):
            record = composer.outcome(number)
            file.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
            file.flush()
            yield record


def _check_possible(split: str, composer: Composer) -> None:
    """Refuse a split without queries before any work is done; models do not take part.

    Raises:
        ValueError: No query is possible.
    """
    if composer.settings.samplers.get(COLD_START):
        return
    distribution = Distribution(composer.catalogue, composer.pool.rows)
    for number in range(GIVE_UP):
        record = composer.outcome(number)
        if record["query"] is not None:
            return
        distribution.add(record)
    _check_found(split, composer.settings, distribution)


def _check_found(split: str, settings: CompositionSettings, distribution: Distribution) -> None:
    wanted, products, share = settings.splits[split], distribution.products, settings.max_positive_share
    reasons = [f"{reason} ({count})" for reason, count in distribution.rejected.most_common(4)]
    reasons += [f"drawn before ({distribution.duplicates})"] if distribution.duplicates else []
    if not distribution.kept:
        none = f"; less than {share:g} of them is no product: raise max_positive_share above 1/{products}"
        raise ValueError(
            f"no query is possible among the {products} products of {split}; the draws failed by: "
            f"{', '.join(reasons)}{none if share * products <= 1 else ''}"
        )
    if distribution.kept < wanted:
        logger.warning(
            "%s: %d of %d queries; the last %d draws gave no new one; reasons: %s",
            split, distribution.kept, wanted, GIVE_UP, ", ".join(reasons),
        )  # fmt: skip


def _split(catalogue: Catalogue, settings: CompositionSettings) -> dict[str, np.ndarray]:
    """Split the rows by a hash of the family or the id; if stratified, within each class and language."""
    if len(settings.splits) == 1:
        return {"train": np.arange(len(catalogue))}
    groups = catalogue.groups or [None] * len(catalogue)
    names = (f"group {group}" if group else f"id {pid}" for group, pid in zip(groups, catalogue.ids, strict=True))
    draws = np.array([int(hashlib.sha256(name.encode()).hexdigest()[:8], 16) / 2**32 for name in names])
    if settings.stratify:
        strata = list(zip(catalogue.languages, catalogue.classes, strict=True))
        is_test = _stratified(draws, strata, settings.test_share)
    else:
        is_test = draws < settings.test_share
    rows = {"train": np.flatnonzero(~is_test), "test": np.flatnonzero(is_test)}
    for split, members in rows.items():
        if not len(members):
            raise ValueError(
                f"the split {split!r} has none of {len(catalogue)} products (test_share {settings.test_share}); "
                "set test_share to 0 for a training split only"
            )
    return rows


def _stratified(draws: np.ndarray, strata: Sequence[tuple[str, str]], share: float) -> np.ndarray:
    """Whether each row is of the test split: the share, to one family, of each language and of each class in it.

    A family is of the stratum of its first product; those with the lowest draws are taken. The share is rounded after
    each stratum for all up to it, language by language, so the errors of small strata do not add up.
    """
    families, first, family = np.unique(draws, return_index=True, return_inverse=True)
    members: dict[tuple[str, str], list[int]] = {}
    for number, row in enumerate(first.tolist()):
        members.setdefault(strata[row], []).append(number)
    is_test = np.zeros(len(families), dtype=bool)
    seen = taken = 0
    for _, numbers in sorted(members.items()):  # each in the order of its draws
        seen += len(numbers)
        wanted = round(share * seen)
        is_test[numbers[: wanted - taken]] = True
        taken = wanted
    return is_test[family]


def _check_vectors(vectors: np.ndarray | None, count: int) -> None:
    if vectors is not None and (vectors.ndim != 2 or len(vectors) != count or not np.isfinite(vectors).all()):
        raise ValueError(
            f"vectors have shape {vectors.shape}; expected finite numbers, a row for each of {count} products"
        )


def _check_cold_start(
    catalogue: Catalogue, settings: CompositionSettings, model: VisionModel | None, vectors: np.ndarray | None
) -> None:
    if not settings.samplers.get(COLD_START):
        return
    if model is None:
        raise ValueError("the sampler cold_start needs a vision-language model")
    if catalogue.groups is None and vectors is None:
        raise ValueError("the sampler cold_start needs families of products, or vectors, to find similar products by")
    if not (catalogue.codes < 0).all(axis=0).any():
        raise ValueError("the sampler cold_start is for products without attributes; every product has some")


def _key(
    catalogue: Catalogue,
    settings: CompositionSettings,
    templates: dict[str, Template],
    vectors: np.ndarray | None,
    judges: Sequence[Judge],
    cold_start: VisionModel | None,
) -> dict[str, Any]:
    """What a composition is made from, as JSON gives it back."""
    written = json.dumps([asdict(template) for template in templates.values()], sort_keys=True)
    digest = None if vectors is None else hashlib.sha256(np.ascontiguousarray(vectors).tobytes()).hexdigest()
    key = {
        "version": _VERSION,
        **asdict(settings),
        "catalogue": catalogue.fingerprint,
        "templates": hashlib.sha256(written.encode()).hexdigest(),
        "vectors": digest,
        "judges": [judge.name for judge in judges],
        "cold_start": cold_start and cold_start.name,
    }
    restored: dict[str, Any] = json.loads(json.dumps(key))
    return restored


def _begin(partial: Path, key: dict[str, Any], lock: Path) -> None:
    """Begin a composition, or check that an interrupted one has the same settings.

    Another one is removed, unless models worked for it.

    Raises:
        ValueError: Another one that models worked for.
    """
    recorded = made_with(partial / MARKER)
    begun = any(path.stat().st_size for path in partial.glob("*.journal"))
    if recorded and recorded != key and begun and (recorded["judges"] or recorded["cold_start"]):
        raise ValueError(
            f"cannot resume the composition in {str(partial)!r}: it was made with {differences(recorded, key)}; use "
            "the same settings, or remove it"
        )
    if recorded != key:
        for path in partial.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path != lock:
                path.unlink()
        write_settings(partial / MARKER, key)


def evenness(counts: Mapping[str, int]) -> float | None:
    """The entropy of a distribution over its maximum: 1 if all are as frequent; None without counts of two."""
    total = sum(counts.values())
    if len(counts) < 2 or not total:
        return None
    return -sum(count / total * math.log(count / total) for count in counts.values() if count) / math.log(len(counts))


def write_products(path: Path, catalogue: Catalogue, rows: np.ndarray, split: str, show_progress: bool) -> None:
    """Write products; the bytes of their image files are copied as they are.

    Raises:
        FileNotFoundError: An image file is gone.
        ValueError: An image is a URL.
    """
    schema = PRODUCT_FEATURES.arrow_schema
    path.parent.mkdir(exist_ok=True)
    numbers = progress(rows.tolist(), f"{split} products", unit="product", show=show_progress)
    with atomic_path(path) as temporary, pq.ParquetWriter(temporary, schema) as writer:
        group: list[dict[str, Any]] = []
        for index, row in enumerate(numbers, start=1):
            group.append(_product(catalogue, row))
            if len(group) == _GROUP or index == len(rows):
                writer.write_table(pa.Table.from_pylist(group, schema))
                group.clear()


def _product(catalogue: Catalogue, row: int) -> dict[str, Any]:
    name = row_name(row, catalogue.ids[row])
    return {
        "image": {"bytes": _read_bytes(catalogue.rows[row]["image"], name), "path": None},
        "title": catalogue.titles[row],
        "idx": catalogue.ids[row],
        "class": catalogue.classes[row],
        "country": catalogue.countries[row],
        "language": catalogue.languages[row],
        "attribute": json.dumps(catalogue.described(row), ensure_ascii=False),
    }


def _read_bytes(image: dict[str, Any], name: str) -> bytes:
    if image["bytes"] is not None:
        return bytes(image["bytes"])
    path = image["path"]
    if "://" in path or path.startswith("data:"):
        raise ItemError(name, f"image {path!r:.80}: expected a file; download the images first")
    return Path(path).read_bytes()
