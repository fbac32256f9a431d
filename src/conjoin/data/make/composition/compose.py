"""From a catalogue of products with attributes to queries of several conditions, in the layout of MERIT."""

import hashlib
import json
import logging
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from conjoin.data.merit import PRODUCT_FEATURES, query_file
from conjoin.progress import progress
from conjoin.storage import publish_folder, write_text

from .catalogue import DEFAULT_CLASS, MISSING, Catalogue
from .instructions import load_templates, write_instruction
from .samplers import SAMPLERS, Draft, Pool, VisionModel, draw_cold, draw_draft, hard_negatives, weighted

logger = logging.getLogger(__name__)
COLD_START = "cold_start"
PRINCIPLES = ("non_omission", "vision_centric")
ATTEMPTS = 100
"""Draws of one number, of which the first that makes a query counts."""
GIVE_UP = 300
"""Numbers in a row without a new query, after which a split has no more."""
_GROUP = 256


@dataclass(frozen=True)
class CompositionSettings:
    """How many queries are composed, and by which probabilities.

    Attributes:
        queries: Of the training split.
        test_queries: Of the test split.
        test_share: Of the products (with families: of the families) that are in the test split. 0: no test split.
        samplers: The weight of each sampler, of `SAMPLERS` or `"cold_start"`; by default the authors' (their code).
        conditions: The weight of each number of conditions, before filtering (App. A.3.1).
        max_positive_share: A query with this share of the pool as positives, or more, is not kept (the authors' code).
        hard_negatives: At most, for each query.
        languages: Of the instructions, drawn uniformly.
        seed: Of all draws.
    """

    queries: int = 10000
    test_queries: int = 1000
    test_share: float = 0.1
    samplers: dict[str, float] = field(
        default_factory=lambda: {"conventional": 0.3, "attribute_uniform": 0.2, "high_similarity": 0.5}
    )
    conditions: dict[int, float] = field(default_factory=lambda: {2: 0.75, 3: 0.10, 4: 0.15})
    max_positive_share: float = 0.05
    hard_negatives: int = 8
    languages: tuple[str, ...] = ("en",)
    seed: int = 0

    def __post_init__(self) -> None:
        for name, is_right, expected in (
            ("queries", self.queries > 0, "at least 1"),
            ("samplers", {*self.samplers} <= {*SAMPLERS, COLD_START}, f"some of {', '.join((*SAMPLERS, COLD_START))}"),
            ("samplers", min(self.samplers.values()) >= 0 < sum(self.samplers.values()), "weights of at least 0"),
            ("conditions", min(self.conditions) > 1, "at least 2 for each query"),
        ):
            if not is_right:
                raise ValueError(f"{name}={vars(self)[name]!r}; expected {expected}")


class Case(NamedTuple):
    """A query before a judge: its instruction, and the condition, id and title of each of its products."""

    instruction: str
    conditions: Sequence[tuple[str, str]]
    ids: Sequence[str]
    titles: Sequence[str]


Judge = Callable[[Case], bool]
"""Whether a query stays."""


def judge_by_titles(principle: str, visual: Sequence[str]) -> Judge:
    """A judge that reads titles (App. A.4.1).

    Args:
        principle: `"non_omission"`: the title of a product says the value of its condition, unless the attribute is
            visual. `"vision_centric"`: the title does not say it if the attribute is visual.
        visual: The attributes that a picture shows, such as the colour.

    Raises:
        ValueError: Another principle.
    """
    if principle not in PRINCIPLES:
        raise ValueError(f"unknown principle {principle!r}; expected one of {', '.join(PRINCIPLES)}")
    says_it = principle == PRINCIPLES[0]

    def judge(case: Case) -> bool:
        return all(
            (attribute in visual) is says_it or (value in title.lower()) is says_it
            for (attribute, value), title in zip(case.conditions, case.titles, strict=True)
        )

    return judge


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
    * `composition.json`: the settings.

    Query i is a function of the seed, the split and i. All products that satisfy the conditions are positives, most
    similar first; hard negatives satisfy all but one, or are siblings of the first product. All is made beside `out`,
    in `OUT.partial`, and moved there when it is whole.

    Args:
        catalogue: See `read_catalogue`.
        out: The folder to make.
        settings: How; None for the defaults.
        vectors: `(N, D)`, L2-normalised, of any encoder: they find similar products and rank positives and negatives.
        judges: Filters: a query stays if all of these functions accept it, such as `judge_by_titles`.
        cold_start: The model of the sampler `cold_start`, see `ask_with`.
        template_files: Templates of further languages, see `load_templates`.
        show_progress: Show progress bars.

    Raises:
        FileExistsError: `out` is there.
        ValueError: No query is possible (the message counts the reasons); a split has no products; the vectors do
            not fit; cold start without a model or without products.
    """
    settings, out = settings or CompositionSettings(), Path(out)
    templates = [*load_templates(settings.languages, template_files).values()]
    if vectors is not None and (vectors.ndim != 2 or len(vectors) != len(catalogue)):
        raise ValueError(f"vectors have shape {vectors.shape}; expected ({len(catalogue)}, D)")
    if settings.samplers.get(COLD_START):
        if cold_start is None or not (catalogue.codes == MISSING).all(axis=0).any():
            raise ValueError("the sampler cold_start needs a vision-language model and products without attributes")
        if catalogue.groups is None and vectors is None:
            raise ValueError("the sampler cold_start needs families of products, or vectors, to find similar ones by")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FileExistsError(f"{str(out)!r} exists; remove it or choose another folder")
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    (partial / "data").mkdir(parents=True)
    for number, (split, rows) in enumerate(_split(catalogue, settings).items()):
        pool = Pool(catalogue, rows, vectors)
        wanted = settings.test_queries if number else settings.queries
        bar = progress(total=wanted, desc=f"{split} queries", unit="query", show=show_progress)
        with query_file(partial, split).open("w", encoding="utf-8") as file, bar:
            for query in _queries(pool, number, wanted, settings, templates, judges, cold_start):
                file.write(json.dumps(query, ensure_ascii=False) + "\n")
                bar.update()
        _write_products(partial / f"data/{split}-00000-of-00001.parquet", catalogue, rows.tolist())
    write_text(partial / "composition.json", json.dumps(asdict(settings), indent=1) + "\n")
    publish_folder(partial, out)
    return out


def _split(catalogue: Catalogue, settings: CompositionSettings) -> dict[str, np.ndarray]:
    """Split the rows by a hash of the family or the id."""
    if not (settings.test_share > 0 and settings.test_queries > 0):
        return {"train": np.arange(len(catalogue))}
    groups = catalogue.groups or [None] * len(catalogue)
    names = [f"group {group}" if group else f"id {pid}" for group, pid in zip(groups, catalogue.ids, strict=True)]
    draws = np.array([int(hashlib.sha256(name.encode()).hexdigest()[:8], 16) / 2**32 for name in names])
    is_test = draws < settings.test_share
    rows = {"train": np.flatnonzero(~is_test), "test": np.flatnonzero(is_test)}
    for split, members in rows.items():
        if not len(members):
            problem = f"the split {split!r} has none of {len(catalogue)} products; test_share is {settings.test_share}"
            raise ValueError(f"{problem}, and 0 makes a training split only")
    return rows


def _queries(
    pool: Pool,
    split: int,
    wanted: int,
    settings: CompositionSettings,
    templates: Sequence[dict[str, Any]],
    judges: Sequence[Judge],
    model: VisionModel | None,
) -> Iterator[dict[str, Any]]:
    """Yield queries of different conditions as rows of the published layout, as many as are wanted and possible."""
    catalogue, rows, names = pool.catalogue, pool.rows, pool.catalogue.names
    failed: Counter[str] = Counter()
    seen: set[str] = set()
    latest = number = -1
    while len(seen) < wanted and number - latest < GIVE_UP:
        number += 1
        generator = np.random.default_rng([settings.seed, split, number])
        sampler = weighted([*settings.samplers], [*settings.samplers.values()], generator)
        draft: Draft | str = ""
        for _ in range(1 if sampler == COLD_START else ATTEMPTS):
            if sampler == COLD_START and model is not None:
                draft = draw_cold(pool, model, generator)
            else:
                count = weighted([*settings.conditions], [*settings.conditions.values()], generator)
                drawn = SAMPLERS[sampler](pool, count, generator)
                draft = drawn if isinstance(drawn, str) else draw_draft(pool, drawn, settings.max_positive_share)
            if isinstance(draft, Draft):
                break
            failed[draft] += 1
        if isinstance(draft, str):
            continue
        asked = [pool.named(condition) for condition in draft.conditions]
        shown = [int(rows[condition.product]) for condition in draft.conditions]
        template = templates[int(generator.integers(len(templates)))]
        classes = {catalogue.facts["class"][row] for row in rows[draft.positives]}
        class_name = None if len(classes) > 1 or classes == {DEFAULT_CLASS} else classes.pop()
        titles = [catalogue.titles[row] for row in shown]
        instruction = write_instruction(template, [name for name, _ in asked], titles, class_name, generator)
        case = Case(instruction, asked, [catalogue.ids[row] for row in shown], titles)
        query = {str(names[row]): {name: value} for row, (name, value) in zip(shown, asked, strict=True)}
        key = json.dumps(query, sort_keys=True)
        if key in seen:
            failed["drawn before"] += 1
        elif not all(judge(case) for judge in judges):
            failed["rejected by a judge"] += 1
        else:
            latest = number
            seen.add(key)
            negatives = rows[hard_negatives(pool, draft, settings.hard_negatives, generator)]
            yield {
                "query": query,
                "pos_candidate": [names[row] for row in rows[draft.positives]],
                "hard_negative": [names[row] for row in negatives],
                "query instruction": instruction,
                "sampler": sampler,
                "language": template["language"],
            }
    name = "test" if split else "train"
    reasons = ", ".join(f"{reason} ({count})" for reason, count in failed.most_common(4))
    if not seen:
        few = settings.max_positive_share * len(rows) <= 1
        none = f"; raise max_positive_share above 1/{len(rows)}" if few else ""
        raise ValueError(f"no query is possible among the {len(rows)} products of {name}: {reasons}{none}")
    if len(seen) < wanted:
        logger.warning("%s: %d of %d queries; draws failed by: %s", name, len(seen), wanted, reasons)


def _write_products(path: Path, catalogue: Catalogue, rows: Sequence[int]) -> None:
    """Write products; the bytes of their image files are copied as they are.

    Raises:
        FileNotFoundError: An image is no file, such as a URL.
    """
    schema = PRODUCT_FEATURES.arrow_schema
    with pq.ParquetWriter(path, schema) as writer:
        for start in range(0, len(rows), _GROUP):
            group = []
            for row in rows[start : start + _GROUP]:
                image = catalogue.rows[row]["image"]
                content = image["bytes"] if image["bytes"] is not None else Path(image["path"]).read_bytes()
                product: dict[str, Any] = {fact: values[row] for fact, values in catalogue.facts.items()}
                product |= {"image": {"bytes": content, "path": None}, "title": catalogue.titles[row]}
                product |= {"attribute": json.dumps(catalogue.described(row), ensure_ascii=False)}
                group.append(product | {"idx": catalogue.ids[row]})
            writer.write_table(pa.Table.from_pylist(group, schema))
