"""A miniature MERIT: products and queries made of the emoji sample, in the layout of the published data."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np

from conjoin.data.make.made import check_queries, is_made, write_settings
from conjoin.data.merit.catalogue import MiniProduct, mini_products
from conjoin.data.merit.layout import query_file
from conjoin.data.merit.products import PRODUCT_FEATURES
from conjoin.storage import publish_folder, write_text

MARKER = "mini_merit.json"
HELD_OUT = {
    "language": ("id", "de", "pt"),
    "attribute": ("gender", "skin tone"),
    "class": ("food", "animal", "transport"),
}
"""What the out-of-distribution tests of the miniature hold out."""

_VERSION = 2
_SPLITS = {"train": "train", "validation": "validation", "test": "test"}
_CONDITIONS = {2: 0.75, 3: 0.10, 4: 0.15}
"""Numbers of conditions and their shares before filtering (App. A.3.1)."""

_MOST_POSITIVES = 0.05
"""Of the pool; a query with more is dropped."""

_HARD_NEGATIVES = 5
_ONE_LANGUAGE = 0.5
"""Share of the queries that ask for titles in one language, and show products with such titles."""

_TRIES = 50
_LANGUAGE_NAMES = {"en": "English", "es": "Spanish", "id": "Indonesian", "de": "German", "pt": "Portuguese"}


def make_mini_merit(
    out: str | Path,
    *,
    train_queries: int = 10000,
    validation_queries: int = 500,
    test_queries: int = 1000,
    seed: int = 0,
    cache_dir: str | Path | None = None,
    show_progress: bool = False,
) -> Path:
    """Write the miniature to `out`; where it already is, nothing is done.

    It is made beside `out` and moved there when it is whole. Concepts, and with them all products of a concept, never
    cross splits; a drawing is in one split.

    Args:
        out: The folder to make.
        train_queries: Queries for training, as the next two for validation and test. There may be fewer, if the
            catalogue has no more.
        validation_queries: Validation, a split that the published data lacks.
        test_queries: Test.
        seed: Of the queries.
        cache_dir: Instead of the cache folder of `datasets`.
        show_progress: Show progress bars.

    Raises:
        FileExistsError: `out` is there and is something else.
        ImportError: The `sample` extra is not installed.
        ValueError: A number of queries is not positive.
    """
    limits = {"train": train_queries, "validation": validation_queries, "test": test_queries}
    check_queries(limits)
    out = Path(out)
    settings = {"version": _VERSION, "seed": seed, "queries": limits}
    if is_made(out, MARKER, settings, "this miniature of MERIT"):
        return out
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    (partial / "data").mkdir(parents=True)
    captions: list[str] = []
    first_id, drawn = 1, set[bytes]()
    for number, (split, limit) in enumerate(limits.items()):
        products = list(mini_products(split, first_id, drawn, cache_dir, show_progress))
        first_id += len(products)
        _write_products(partial, split, products)
        captions += [json.dumps({"idx": each.row["idx"], "caption": each.caption}) for each in products]
        queries = _Sampler(products, np.random.default_rng([seed, number])).sample(limit)
        write_text(query_file(partial, split), "".join(json.dumps(query) + "\n" for query in queries))
    write_text(partial / "captions.jsonl", "".join(f"{line}\n" for line in captions))
    write_text(partial / "ood.json", json.dumps(HELD_OUT, indent=1) + "\n")
    write_settings(partial / MARKER, settings)
    publish_folder(partial, out)
    return out


def _write_products(folder: Path, split: str, products: Sequence[MiniProduct]) -> None:
    columns: dict[str, list[Any]] = {
        name: [each.row[name] for each in products] for name in ("title", "idx", "class", "country", "language")
    }
    columns["image"] = [{"bytes": each.image, "path": None} for each in products]
    columns["attribute"] = [json.dumps(each.attributes) for each in products]
    table = datasets.Dataset.from_dict({name: columns[name] for name in PRODUCT_FEATURES}, features=PRODUCT_FEATURES)
    table.to_parquet(str(folder / f"data/{split}-00000-of-00001.parquet"))


@dataclass
class _Query:
    """A query in numbers: the product that shows each condition, the answers and what nearly is one."""

    conditions: dict[str, int]
    positives: np.ndarray
    negatives: list[int]
    language: str | None


class _Sampler:
    """Conventional uniform sampling (App. A.3.1): conditions of a random product, each shown by another product."""

    def __init__(self, products: Sequence[MiniProduct], generator: np.random.Generator) -> None:
        self.products = products
        self.generator = generator
        self.names = sorted({name for each in products for name in each.attributes})
        self.values = {name: np.array([each.attributes.get(name, "") for each in products]) for name in self.names}
        self.kinds = np.array([each.row["class"] for each in products])
        self.languages = np.array([each.row["language"] for each in products])
        has = np.array([(self.values[name] != "").sum() for name in self.names])
        self.weights = dict(zip(self.names, 1 / np.sqrt(has), strict=True))  # frequent keys are damped
        sizes = np.array(list(_CONDITIONS.values()))
        self.sizes = sizes / sizes.sum()

    def sample(self, limit: int) -> list[dict[str, Any]]:
        """Return at most `limit` different queries, as rows of the file."""
        rows: dict[str, dict[str, Any]] = {}
        for _ in range(limit * _TRIES):
            if len(rows) == limit:
                break
            query = self._draw()
            if query is not None:
                row = self._row(query)
                rows.setdefault(json.dumps(row["query"]) + row["query instruction"], row)
        return list(rows.values())

    def _draw(self) -> _Query | None:
        """Draw a query; None if it has no answer, too many answers, or a condition that no product can show."""
        target = int(self.generator.integers(len(self.products)))
        own = [name for name in self.names if self.values[name][target]]
        size = int(self.generator.choice(list(_CONDITIONS), p=self.sizes))
        if size > len(own):
            return None
        weights = np.array([self.weights[name] for name in own])
        chosen = [str(name) for name in self.generator.choice(own, size, replace=False, p=weights / weights.sum())]
        language = str(self.languages[target]) if self.generator.random() < _ONE_LANGUAGE else None
        allowed = np.full(len(self.products), True) if language is None else self.languages == language
        same = {name: self.values[name] == self.values[name][target] for name in chosen}
        shown: dict[str, int] = {}
        for name in chosen:
            # it differs in the other conditions, so that no single product shows two of them
            fits = allowed & same[name] & ~np.any([same[other] for other in chosen if other != name], axis=0)
            fits[list(shown.values())] = False
            places = np.flatnonzero(fits)
            if not len(places):
                return None
            shown[name] = int(self.generator.choice(places))
        inside = allowed & (self.kinds == self.kinds[target])
        positives = np.flatnonzero(inside & np.all(list(same.values()), axis=0))
        if not 0 < len(positives) < _MOST_POSITIVES * len(self.products):
            return None
        return _Query(shown, positives, self._negatives(inside, same, shown), language)

    def _negatives(self, inside: np.ndarray, same: dict[str, np.ndarray], shown: dict[str, int]) -> list[int]:
        """Draw products of the class that satisfy all conditions but one, evenly over the conditions."""
        found = []
        for name in same:
            others = np.all([same[other] for other in same if other != name], axis=0)
            places = np.setdiff1d(np.flatnonzero(inside & others & ~same[name]), list(shown.values()))
            found.append(self.generator.permutation(places).tolist())
        mixed = [places[turn] for turn in range(_HARD_NEGATIVES) for places in found if turn < len(places)]
        return mixed[:_HARD_NEGATIVES]

    def _row(self, query: _Query) -> dict[str, Any]:
        """Return a query as the published files have it: ids are integers but for the keys of `query`."""
        ids = [int(each.row["idx"]) for each in self.products]
        texts = [
            f"the same {name} as <Product {number}> <image>\n{self.products[place].row['title']} </Product {number}>"
            for number, (name, place) in enumerate(query.conditions.items(), start=1)
        ]
        titled = "" if query.language is None else f" with a title in {_LANGUAGE_NAMES[query.language]}"
        kind = self.kinds[query.positives[0]]
        return {
            "query": {
                str(ids[place]): {name: str(self.values[name][place])} for name, place in query.conditions.items()
            },
            "pos_candidate": [ids[place] for place in query.positives],
            "hard_negative": [ids[place] for place in query.negatives],
            "query instruction": f"Find a product of {kind}{titled} that has {' and '.join(texts)}.",
        }
