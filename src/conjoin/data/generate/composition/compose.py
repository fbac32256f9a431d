"""From a catalogue of products with attributes to queries of several conditions, in the layout of MERIT."""

import json
import logging
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from conjoin.data.merit import PRODUCT_FEATURES, query_file
from conjoin.progress import progress
from conjoin.storage import publish_folder, temporary_path, write_text

from .catalogue import Catalogue
from .instructions import load_templates, write_instruction
from .samplers import COLD_START, CompositionSettings, NoQuery, Pool, VisionModel, draw_query

logger = logging.getLogger(__name__)
GIVE_UP = 3000
"""Draws in a row without a new query, after which a split has no more."""
_PRODUCTS_AT_ONCE = 256


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
        KeyError: Another principle.
    """
    says_it = {"non_omission": True, "vision_centric": False}[principle]

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
    show_progress: bool = False,
) -> Path:
    """Compose queries and write them with the products in the layout of MERIT (App. A.3).

    * `data/train-*.parquet`, `data/test-*.parquet`: the products with their images. No family is in both.
    * `queries-train.json`, `queries-test.json`: JSON lines with `query`, `pos_candidate`, `hard_negative` and
      `query instruction`; beside the published fields, the `sampler` and the `language` of the instruction.
    * `composition.json`: the settings.

    The same seed composes the same queries, and of fewer queries the first of them. See `draw_query` for positives and
    hard negatives. The folder appears when it is whole.

    Args:
        catalogue: See `read_catalogue`.
        out: The folder to make.
        settings: How; None for the defaults.
        vectors: `(N, D)`, L2-normalised, of any encoder: they find similar products and rank positives and negatives.
            Without them, products are similar that share many values.
        judges: Filters: a query stays if all of these functions accept it, such as `judge_by_titles`.
        cold_start: The model of the sampler `cold_start`, see `ask_with`.
        show_progress: Show progress bars.

    Raises:
        FileExistsError: `out` is there.
        FileNotFoundError: An image is no file, such as a URL.
        ValueError: No query is possible (the message counts the reasons); the vectors do not fit; cold start without a
            model.
    """
    settings, out = settings or CompositionSettings(), Path(out)
    families = catalogue.products["family"]
    if vectors is not None and len(vectors) != len(families):
        raise ValueError(f"vectors have shape {vectors.shape}; expected ({len(families)}, D)")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FileExistsError(f"{str(out)!r} exists; remove it or choose another folder")
    if settings.samplers.get(COLD_START) and (cold_start is None or not catalogue.attributes.isna().all(axis=1).any()):
        raise ValueError("the sampler cold_start needs a vision-language model and products without attributes")
    test_share = settings.test_share if settings.test_queries else 0.0
    is_test = np.array([random.Random(family).random() < test_share for family in families])
    with temporary_path(out) as partial:
        (partial / "data").mkdir(parents=True)
        splits = [("train", settings.queries, ~is_test), ("test", settings.test_queries, is_test)]
        for split, wanted, is_in in splits if test_share else splits[:1]:
            if not is_in.any():
                problem = f"the split {split!r} has none of {len(is_in)} products; test_share is {test_share}"
                raise ValueError(f"{problem}, and 0 makes a training split only")
            pool = Pool(catalogue, np.flatnonzero(is_in), vectors)
            queries = _queries(pool, split, wanted, settings, judges, cold_start)
            with query_file(partial, split).open("w", encoding="utf-8") as file:
                for query in progress(queries, f"{split} queries", total=wanted, unit="query", show=show_progress):
                    file.write(json.dumps(query, ensure_ascii=False) + "\n")
            _write_products(partial / f"data/{split}-00000-of-00001.parquet", pool)
        write_text(partial / "composition.json", json.dumps(asdict(settings), indent=1) + "\n")
        publish_folder(partial, out)
    return out


def _queries(
    pool: Pool,
    split: str,
    wanted: int,
    settings: CompositionSettings,
    judges: Sequence[Judge],
    model: VisionModel | None,
) -> Iterator[dict[str, Any]]:
    """Yield queries of different conditions as rows of the published layout, as many as are wanted and possible."""
    generator = np.random.default_rng([settings.seed, split == "test"])
    templates = load_templates(settings.languages, settings.templates)
    products = pool.products.to_dict("records")
    names = list(pool.products["idx"])
    if all(re.fullmatch("0|[1-9][0-9]{,17}", pid) for pid in names):
        names = [int(pid) for pid in names]  # as published
    failed: Counter[str] = Counter()
    seen: set[str] = set()
    in_a_row = 0
    while len(seen) < wanted and in_a_row < GIVE_UP:
        in_a_row += 1
        try:
            draft = draw_query(pool, settings, model, generator)
        except NoQuery as reason:
            failed[str(reason)] += 1
            continue
        shown = [products[product] for product in draft.products]
        ids, titles = [product["idx"] for product in shown], [product["title"] for product in shown]
        query = {pid: {name: value} for pid, (name, value) in zip(ids, draft.conditions, strict=True)}
        key = json.dumps(query, sort_keys=True)
        classes = {products[product]["class"] for product in draft.positives}
        class_name = classes.pop() if len(classes) == 1 else ""
        template = templates[int(generator.integers(len(templates)))]
        asked = [(attribute, title) for (attribute, _), title in zip(draft.conditions, titles, strict=True)]
        instruction = write_instruction(template, asked, class_name, generator)
        case = Case(instruction, draft.conditions, ids, titles)
        if key in seen:
            failed["drawn before"] += 1
        elif not all(judge(case) for judge in judges):
            failed["rejected by a judge"] += 1
        else:
            in_a_row = 0
            seen.add(key)
            yield {
                "query": query,
                "pos_candidate": [names[product] for product in draft.positives],
                "hard_negative": [names[product] for product in draft.negatives[: settings.hard_negatives]],
                "query instruction": instruction,
                "sampler": draft.sampler,
                "language": template["language"],
            }
    reasons = ", ".join(f"{reason} ({count})" for reason, count in failed.most_common(4))
    if not seen:
        few = settings.max_positive_share * len(pool) <= 1
        remedy = f"; raise max_positive_share above 1/{len(pool)}" if few else ""
        raise ValueError(f"no query is possible among the {len(pool)} products of {split}: {reasons}{remedy}")
    if len(seen) < wanted:
        logger.warning("%s: %d of %d queries; draws failed by: %s", split, len(seen), wanted, reasons)


def _write_products(path: Path, pool: Pool) -> None:
    """Write products; the bytes of their image files are copied as they are."""
    schema = PRODUCT_FEATURES.arrow_schema
    with pq.ParquetWriter(path, schema) as writer:
        for start in range(0, len(pool), _PRODUCTS_AT_ONCE):
            part = slice(start, start + _PRODUCTS_AT_ONCE)
            products, attributes = pool.products[part].to_dict("records"), pool.attributes[part].to_dict("records")
            images = pool.images[part]["image"]
            for product, cells, image in zip(products, attributes, images, strict=True):
                content = image["bytes"] if image["bytes"] is not None else Path(image["path"]).read_bytes()
                product["image"] = {"bytes": content, "path": None}
                known = {name: value for name, value in cells.items() if isinstance(value, str)}
                product["attribute"] = json.dumps(known, ensure_ascii=False)
            writer.write_table(pa.Table.from_pylist(products, schema))
