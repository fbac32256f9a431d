"""Catalogues: products with an image, a title and attributes, read from any source of pairs."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import datasets
import pandas as pd

from conjoin.data.cells import as_id
from conjoin.data.columns import ColumnNames, guess_columns, matching, undecoded
from conjoin.data.merit import product_id
from conjoin.data.pair_sources import PairSource, open_source
from conjoin.data.pairs import load_pairs

logger = logging.getLogger(__name__)

SKIP = "skip"
"""A cell that means that the product does not have the attribute, as one without a value does (App. A.2.2)."""
_FACTS = {"class": ("class", "category"), "country": ("country",), "language": ("language", "lang")}
_DEFAULTS = {"class": "", "country": "", "language": "en"}


@dataclass(frozen=True)
class Catalogue:
    """Products and their attributes: the same rows in each table.

    Attributes:
        images: The column `image` (undecoded).
        products: Texts: `idx` (the id), `title`, `class`, `country`, `language` (of the title), and `family`, which
            the variants of one product share.
        attributes: A column of texts for each attribute; null where the product does not have it.
    """

    images: datasets.Dataset
    products: pd.DataFrame
    attributes: pd.DataFrame


def read_catalogue(
    source: PairSource,
    *,
    attributes: Sequence[str] | None = None,
    columns: ColumnNames | None = None,
    split: str = "train",
) -> Catalogue:
    """Read products with an image, a title and attribute columns.

    Values are compared without case and outer spaces. An empty cell, `none` and `skip` mean that the product does not
    have the attribute. A column of objects (JSON lines, Parquet) is as many attributes as its objects have keys. An
    attribute with fewer than two values, or without a value of several products, can be no condition. The columns
    `class` or `category`, `country` and `language` are found by their names.

    Args:
        source: As for `load_pairs`: a CSV, TSV, JSON-lines or Parquet file, a folder, a dataset.
        attributes: The columns of the attributes. None: all that are nothing else and that can be a condition; a
            warning names those left out.
        columns: As for `load_pairs`; the text is the title, and the group the family of a product, such as a SPU: its
            variants are similar products.
        split: As for `load_pairs`.

    Raises:
        FileNotFoundError: The source or an image does not exist.
        ValueError: As `load_pairs`; or a named attribute can be no condition, or holds lists; or there is no
            attribute; or an id is not one word.
    """
    dataset = undecoded(open_source(source, split, False)[0])
    available = list(dataset.column_names or ())
    facts = {fact: next(iter(matching(names, available)), None) for fact, names in _FACTS.items()}
    chosen = guess_columns(dataset, columns)
    named = attributes
    if named is None:
        used = {chosen.image, *chosen.text, chosen.id, chosen.group, *facts.values()}
        used |= {name for names in chosen.others.values() for name in names}
        named = [name for name in available if name not in used]
    if not named:
        raise ValueError(f"no attribute column; the columns are {', '.join(map(repr, available))}")
    keep = list(dict.fromkeys([*named, *filter(None, facts.values())]))
    rows = load_pairs(source, split=split, only="both", keep=keep, columns=columns)
    ids = rows["id"][:]
    for pid in ids:
        product_id(pid, "the catalogue")
    cells = rows["metadata"][:]
    kinds = rows.features["metadata"]  # `features` is a copy each time
    words = []
    for row in cells:
        values: dict[str, Any] = {}
        for name in named:
            if isinstance(row[name], dict):
                values |= row[name]
            elif isinstance(kinds[name], datasets.Value) or row[name] is not None:
                values[name] = row[name]
        words.append({name: _word(name, value) for name, value in values.items()})
    table = pd.DataFrame(words, dtype=object)
    counts = {name: table[name].value_counts() for name in table}
    useless = [name for name, count in counts.items() if len(count) < 2 or count.max() < 2]
    unlike = ", ".join(f"{name!r} ({len(counts[name])} values)" for name in useless)
    problem = f"an attribute needs two values, and one that several products have, unlike {unlike}"
    if len(useless) == len(counts) or (useless and attributes is not None):
        raise ValueError(problem)
    if useless:
        logger.warning("%s, which are left out", problem)
    products = pd.DataFrame({"idx": ids, "title": rows["text"][:]})
    for fact, column in facts.items():
        products[fact] = [str(row.get(column) or _DEFAULTS[fact]) for row in cells]
    groups = rows["group"][:] if chosen.group else [None] * len(rows)
    products["family"] = [f"group {group}" if group else f"id {pid}" for group, pid in zip(groups, ids, strict=True)]
    return Catalogue(rows.select_columns("image"), products, table.drop(columns=useless))


def _word(attribute: str, value: Any) -> str | None:
    """Return the value of an attribute; None if the product does not have it."""
    if isinstance(value, list | dict | bytes):
        raise ValueError(f"the attribute {attribute!r} holds lists; expected a text or number for each product")
    word = (as_id(value) or "").strip().lower()
    return None if word in ("", SKIP) else word
