"""Catalogues: products with an image, a title and attributes, read from any source of pairs."""

import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from conjoin.data.columns import COMMON_COLUMNS
from conjoin.data.pair_sources import PairSource, open_source
from conjoin.data.pairs import load_pairs
from conjoin.data.row_checks import as_name

logger = logging.getLogger(__name__)

MISSING = -1
"""The code of an attribute that a product does not have."""
NO_VALUES = ("", "none", "skip")
"""Cells that mean that the product does not have the attribute (App. A.2.2)."""
DEFAULT_CLASS = "product"
_ROLES = ("image", "text", "id", "group")
_FACTS = {"class": ("class", "category"), "country": ("country",), "language": ("language", "lang")}


@dataclass(frozen=True)
class Catalogue:
    """Products and their attributes as codes.

    Attributes:
        rows: Of `load_pairs`: the column `image` (undecoded).
        ids: Of each product.
        titles: Of each product.
        facts: `class`, `country` and `language` (of the title): a value for each product, such as `"shoes"` or `""`.
        groups: The family of each product (the variants of one product are one family), or None without families.
        attributes: Their names.
        values: The names of the values of each attribute.
        codes: `(A, N)` int: the value of each attribute and product, or `MISSING`.
    """

    rows: datasets.Dataset
    ids: list[str]
    titles: list[str]
    facts: dict[str, list[str]]
    groups: list[str | None] | None
    attributes: tuple[str, ...]
    values: tuple[tuple[str, ...], ...]
    codes: np.ndarray

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def names(self) -> list[Any]:
        """The ids as the files have them: integers, as published, if all are."""
        return list(map(int, self.ids)) if all(re.fullmatch("0|[1-9][0-9]*", pid) for pid in self.ids) else self.ids

    def described(self, product: int) -> dict[str, str]:
        """The attributes that a product has."""
        codes = enumerate(self.codes[:, product].tolist())
        return {self.attributes[index]: self.values[index][code] for index, code in codes if code != MISSING}


def read_catalogue(
    source: PairSource,
    *,
    attributes: Sequence[str] | None = None,
    columns: Mapping[str, str | Sequence[str] | None] | None = None,
    language: str = "en",
    split: str = "train",
) -> Catalogue:
    """Read products with an image, a title and attribute columns.

    Values are compared without case and outer spaces. An empty cell, `none` and `skip` mean that the product does not
    have the attribute. A column of objects (JSON lines, Parquet) is as many attributes as its objects have keys. An
    attribute with fewer than two values, or without a value of several products, can be no condition.

    Args:
        source: As for `load_pairs`: a CSV, TSV, JSON-lines or Parquet file, a folder, a dataset.
        attributes: The columns of the attributes. None: all that are nothing else and that can be a condition; a
            warning names those left out.
        columns: The column of `image`, `text` (the titles), `id`, `class`, `country` or `language` (of the title),
            where its name does not say it; and of `group`, the family of a product, such as a SPU: its variants are
            similar products.
        language: Of the titles, without such a column.
        split: As for `load_pairs`.

    Raises:
        FileNotFoundError: The source or an image does not exist.
        ValueError: As `load_pairs`; or a key of `columns` is unknown; or a named attribute can be no condition, or
            holds lists; or there is no attribute; or an id is not one word.
    """
    given = dict.fromkeys((*_ROLES, *_FACTS)) | dict(columns or {})
    if len(given) > len(_ROLES) + len(_FACTS):
        raise ValueError(f"columns: unknown {[*given][-1]!r}; expected some of {', '.join((*_ROLES, *_FACTS))}")
    available = list(open_source(source, split, False)[0].column_names or ())
    for fact, names in _FACTS.items():
        given[fact] = given[fact] or next((name for name in available if name.lower() in names), None)
    common = {name for names in COMMON_COLUMNS.values() for name in names} | {"group"}
    used = {name for value in given.values() for name in ([value] if isinstance(value, str) else value or ())}
    others = [name for name in available if name not in used and name.lower() not in common]
    named = list(others if attributes is None else attributes)
    if not named:
        raise ValueError(f"no attribute column; the columns are {', '.join(map(repr, available))}")
    keep = list(dict.fromkeys([*named, *filter(None, (given[fact] for fact in _FACTS))]))
    roles: dict[str, Any] = {f"{role}_column": given[role] for role in _ROLES}
    rows = load_pairs(source, split=split, keep=keep, **roles)
    wrong = next((pid for pid in rows["id"] if len(pid.split()) != 1), None)
    if wrong is not None:
        raise ValueError(f"the id {wrong!r} of a product must be one word")
    cells = rows.select_columns("metadata").with_format("arrow")[:]["metadata"].combine_chunks()
    facts = {}
    for fact, default in (("class", DEFAULT_CLASS), ("country", ""), ("language", language)):
        values = pc.struct_field(cells, given[fact]).to_pylist() if given[fact] else [None] * len(rows)
        facts[fact] = [default if value in (None, "") else str(value) for value in values]
    coded, useless = {}, []
    for attribute, words in _attributes({name: pc.struct_field(cells, name) for name in named}).items():
        codes, names = pd.factorize(words.mask(words.isin(NO_VALUES)))
        if len(names) < 2 or np.bincount(codes[codes != MISSING]).max() < 2:
            useless.append(f"{attribute!r} ({len(names)} values)")
        else:
            coded[attribute] = tuple(names), codes
    problem = f"an attribute needs two values, and one that several products have, unlike {', '.join(useless)}"
    if not coded or (useless and attributes is not None):
        raise ValueError(problem)
    if useless:
        logger.warning("%s, which are left out", problem)
    return Catalogue(
        rows=rows.select_columns("image"),
        ids=list(rows["id"][:]),
        titles=list(rows["text"][:]),
        facts=facts,
        groups=list(rows["group"][:]) if given["group"] else None,
        attributes=tuple(coded),
        values=tuple(names for names, _ in coded.values()),
        codes=np.stack([codes for _, codes in coded.values()]),
    )


def _attributes(columns: Mapping[str, pa.Array]) -> dict[str, Any]:
    """Return the words of each attribute: of a column, or of each key of its objects."""
    attributes = {}
    for name, column in columns.items():
        is_json = isinstance(column.type, pa.BaseExtensionType)  # objects of different keys
        cells = [json.loads(cell) if cell else {} for cell in column.storage.to_pylist()] if is_json else column
        if is_json or pa.types.is_struct(column.type):
            found = pd.DataFrame([cell or {} for cell in (cells if is_json else column.to_pylist())], dtype=object)
        else:
            found = pd.DataFrame({name: pd.Series(column.to_pylist(), dtype=object)})
        for attribute, values in found.items():
            if any(isinstance(value, list | dict | bytes) for value in values):
                raise ValueError(f"the attribute {attribute!r} holds lists; expected a text or number per product")
            attributes[str(attribute)] = values.map(lambda value: (as_name(value) or "").strip().lower())
    return attributes
