"""Catalogues: products with an image, a title and attributes, read from any source of pairs."""

import hashlib
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from conjoin.data.columns import COMMON_COLUMNS, IMAGE, choose_columns, unknown_column
from conjoin.data.pair_sources import PairSource, open_source
from conjoin.data.pairs import load_pairs
from conjoin.data.row_checks import check_ids, row_name
from conjoin.processing.item_error import ItemError

logger = logging.getLogger(__name__)

MISSING = -1
"""The code of an attribute that a product does not have."""
NO_VALUES = ("", "none", "skip")
"""Cells that mean that the product does not have the attribute (App. A.2.2)."""
DEFAULT_CLASS = "product"

_PAIR_ROLES = ("image", "text", "id", "group")
_FACTS = {"class": ("class", "category"), "country": ("country",), "language": ("language", "lang")}
_MARKUP = re.compile(r"<image>|</?\s*Product\b", re.IGNORECASE)


@dataclass(frozen=True)
class Catalogue:
    """Products and their attributes as codes.

    Attributes:
        rows: Of `load_pairs`: `id`, `image` (undecoded) and `text`, the title.
        classes: Of each product, such as `"shoes"`.
        countries: Of each product, or `""`.
        languages: Of each title.
        groups: The family of each product (the variants of one product are one family), or None without families.
        attributes: Their names.
        values: The names of the values of each attribute.
        codes: `(A, N)` int32: the value of each attribute and product, or `MISSING`.
    """

    rows: datasets.Dataset
    classes: list[str]
    countries: list[str]
    languages: list[str]
    groups: list[str | None] | None
    attributes: tuple[str, ...]
    values: tuple[tuple[str, ...], ...]
    codes: np.ndarray

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def ids(self) -> list[str]:
        """The id of each product."""
        return list(self.rows["id"][:])

    @cached_property
    def titles(self) -> list[str]:
        """The title of each product."""
        return list(self.rows["text"][:])

    @cached_property
    def fingerprint(self) -> str:
        """A fingerprint of all but the pixels."""
        facts = (self.ids, self.titles, self.classes, self.countries, self.languages, self.groups)
        digest = hashlib.sha256(repr((self.attributes, self.values, facts)).encode("utf-8", "surrogatepass"))
        digest.update(np.ascontiguousarray(self.codes).tobytes())
        return digest.hexdigest()

    def described(self, product: int) -> dict[str, str]:
        """The attributes that a product has."""
        codes = enumerate(self.codes[:, product].tolist())
        return {self.attributes[index]: self.values[index][code] for index, code in codes if code != MISSING}


def read_catalogue(
    source: PairSource,
    *,
    attributes: Sequence[str] | None = None,
    columns: Mapping[str, str | None] | None = None,
    language: str = "en",
    split: str = "train",
) -> Catalogue:
    """Read products with an image, a title and attribute columns.

    Values are compared without case and outer spaces. An empty cell, `none` and `skip` mean that the product does not
    have the attribute. A column of objects (JSON lines, Parquet) is as many attributes as its objects have keys.

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
        ValueError: As `load_pairs`; or a key of `columns` is unknown; or a named attribute has no values, one value,
            or a list as its value; or there is no attribute; or an id is not one word; or a title holds the marks of a
            query.
    """
    given = dict(columns or {})
    roles = (*_PAIR_ROLES, *_FACTS)
    unknown = sorted(given.keys() - {*roles})
    if unknown:
        raise ValueError(f"columns: unknown {', '.join(map(repr, unknown))}; expected some of {', '.join(roles)}")
    opened, _ = open_source(source, split, False)
    available = list(opened.column_names or ())
    pair_columns = {role: given.get(role) for role in _PAIR_ROLES}
    chosen = choose_columns(available, pair_columns, opened.features or {}, None)
    if chosen.id is not None:  # two rows of one id would be two captions of one image
        check_ids([str(value) for value in opened[chosen.id][:]])
    facts = {fact: _fact_column(available, fact, given.get(fact)) for fact in _FACTS}
    others = {chosen.image, chosen.text, chosen.id, chosen.group, *facts.values()}
    named = list(attributes) if attributes is not None else _other_columns(available, others)
    _check_named(named, opened.features)
    kept = [*named, *(column for column in facts.values() if column and column not in named)]
    named_columns: dict[str, Any] = {f"{role}_column": column for role, column in pair_columns.items()}
    rows = load_pairs(source, split=split, keep=kept, **named_columns)
    if rows.features["image"] != IMAGE:
        raise ValueError(f"the images are {rows.features['image']}; expected one image for each product")
    table = rows.with_format("arrow").select_columns("metadata")[:]["metadata"].combine_chunks()
    values = {name: pc.struct_field(table, name) for name in kept}
    codes = _read_codes({name: values[name] for name in named}, strict=attributes is not None)
    catalogue = Catalogue(
        rows=rows.remove_columns("metadata"),
        classes=_fact(values, facts["class"], len(rows), DEFAULT_CLASS),
        countries=_fact(values, facts["country"], len(rows), ""),
        languages=_fact(values, facts["language"], len(rows), language),
        groups=list(rows["group"][:]) if given.get("group") else None,
        attributes=tuple(codes),
        values=tuple(names for names, _ in codes.values()),
        codes=np.stack([numbers for _, numbers in codes.values()]),
    )
    _check_products(catalogue)
    return catalogue


def _fact_column(available: Sequence[str], fact: str, given: str | None) -> str | None:
    if given is not None:
        if given not in available:
            raise unknown_column(given, available)
        return given
    return next((name for name in available if name.lower() in _FACTS[fact]), None)


def _other_columns(available: Sequence[str], taken: set[str | None]) -> list[str]:
    common = {name for names in COMMON_COLUMNS.values() for name in names} | {"group"}
    return [name for name in available if name not in taken and name.lower() not in common]


def _check_named(named: Sequence[str], available: Mapping[str, Any]) -> None:
    for name in named:
        if name not in available:
            raise unknown_column(name, list(available))
        if type(available[name]).__name__ == "Json":  # of `datasets` 4.5 on: objects with different keys, as text
            raise ValueError(f"the attribute column {name!r} holds JSON as text; pass the file itself, or its objects")
    repeated = [name for name in named if named.count(name) > 1]
    if repeated:
        raise ValueError(f"the attribute column {repeated[0]!r} is named twice")
    if not named:
        raise ValueError(f"no attribute column; the columns are {', '.join(map(repr, available))}")


def _fact(columns: Mapping[str, Any], column: str | None, count: int, default: str) -> list[str]:
    if column is None:
        return [default] * count
    return [str(value) if value not in (None, "") else default for value in columns[column].to_pylist()]


def _read_codes(columns: Mapping[str, Any], strict: bool) -> dict[str, tuple[tuple[str, ...], np.ndarray]]:
    """The values and codes of each attribute; with `strict` one that can be no condition is an error."""
    codes: dict[str, tuple[tuple[str, ...], np.ndarray]] = {}
    useless = {}
    for name, column in _flat(columns):
        if name in codes:
            raise ValueError(f"two columns hold an attribute {name!r}")
        values, numbers = _encode(name, column)
        problem = _problem(values, numbers)
        if problem and strict:
            raise ValueError(f"the attribute {name!r} {problem}; leave it out, or choose another column")
        if problem:
            useless[name] = problem
        else:
            codes[name] = (values, numbers)
    if useless:
        reasons = "; ".join(f"{name!r} {problem}" for name, problem in useless.items())
        logger.warning("columns that cannot be conditions are left out: %s", reasons)
    if not codes:
        raise ValueError(f"no column can be an attribute: {reasons}" if useless else "there is no attribute")
    return codes


def _flat(columns: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, column in columns.items():
        if pa.types.is_struct(column.type):
            yield from ((field.name, pc.struct_field(column, field.name)) for field in column.type)
        else:
            yield name, column


def _encode(name: str, column: Any) -> tuple[tuple[str, ...], np.ndarray]:  # noqa: ANN401 - an arrow array
    if pa.types.is_nested(column.type) or pa.types.is_binary(column.type):
        raise ValueError(f"the attribute {name!r} holds {column.type}; expected one text or number for each product")
    words = pc.utf8_lower(pc.utf8_trim_whitespace(pc.cast(column, pa.string())))
    absent = pc.is_in(words, value_set=pa.array(NO_VALUES))
    encoded = pc.if_else(absent, pa.scalar(None, pa.string()), words).dictionary_encode()
    codes = pc.fill_null(encoded.indices, MISSING).to_numpy(zero_copy_only=False).astype(np.int32)
    return tuple(encoded.dictionary.to_pylist()), codes


def _problem(values: tuple[str, ...], codes: np.ndarray) -> str | None:
    """Why an attribute can be no condition."""
    if not values:
        return "is empty: no product has it"
    if len(values) == 1:
        return f"has one value only, {values[0]!r}; conditions need at least two"
    if np.bincount(codes[codes >= 0]).max() == 1:
        return f"has another value in each of {len(values)} products; a condition needs a value of several products"
    return None


def _check_products(catalogue: Catalogue) -> None:
    """Refuse ids and titles that the layout of the queries cannot hold."""
    for index, (pid, title) in enumerate(zip(catalogue.ids, catalogue.titles, strict=True)):
        name = row_name(index, pid)
        if len(pid.split()) != 1:
            raise ItemError(name, "the id of a product must be one word")
        if _MARKUP.search(title):
            raise ItemError(name, f"the title {title!r} holds a mark of a query, <image> or <Product>; remove it")
