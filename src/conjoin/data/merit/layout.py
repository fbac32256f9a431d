"""The layout of MERIT on disk: its files, its queries and the subsets of its out-of-distribution tests.

As published (Chow et al., "MERIT", arXiv 2506.03144), products are Parquet files and queries are JSON lines. A product
id is a string in the products, and an integer or a string in the queries.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conjoin.data.interleaved import PLACEHOLDER
from conjoin.data.merit.products import MeritProduct, MeritProducts, check_attributes, product_id
from conjoin.processing.item_error import ItemError

OOD_VALUES: dict[str, tuple[str, ...]] = {
    "language": ("th", "ms", "id"),
    "attribute": ("brand", "pattern/print", "region of origin"),
    "class": ("drink", "table", "phone"),
}
"""What the out-of-distribution tests hold out (Table 7), in the order in which the authors assign queries."""

_OOD_FILE = "ood.json"
_TITLE = re.compile(rf"{PLACEHOLDER}(?:(?!{PLACEHOLDER}).)*?(?=</Product\s*\d+\s*>)", flags=re.DOTALL)
_FIELDS = ("query", "pos_candidate", "query instruction")


@dataclass(frozen=True)
class MeritQuery:
    """A query.

    Attributes:
        id: Its line in the file of queries, from 1; published queries have no id.
        where: The file and the line, for error messages.
        conditions: The attributes (name to value) that the answer shares with each product of the query, by id.
        positives: Ids of the products that answer it.
        negatives: Ids of products that nearly do; a product that the file lists as both is a positive.
        instruction: The text, with `<image>` for the image of each product in order, and titles as plain text.
    """

    id: str
    where: str
    conditions: dict[str, dict[str, Any]]
    positives: tuple[str, ...]
    negatives: tuple[str, ...]
    instruction: str

    @property
    def products(self) -> tuple[str, ...]:
        """Ids of the products that it shows."""
        return tuple(self.conditions)

    @property
    def touched(self) -> tuple[str, ...]:
        """Ids of all products that it names: its own, positives and negatives."""
        return (*self.conditions, *self.positives, *self.negatives)

    @property
    def attributes(self) -> set[str]:
        """Names of its attributes."""
        return {name for condition in self.conditions.values() for name in condition}


def query_file(folder: str | Path, split: str) -> Path:
    """Return the file of a split's queries."""
    return Path(folder) / f"queries-{split}.json"


def read_query(row: Mapping[str, Any], path: str | Path, line: int) -> MeritQuery:
    """Check one line of a file of queries.

    `query` is `{product id: {attribute: value}}`, or a list of product ids whose attributes are not known. In the
    queries of the cold start, the attribute is `others`, and further conditions are text only.

    Raises:
        ValueError: A field is missing or malformed, an attribute is empty, there is no positive, a positive is a
            product of the query, or the placeholders are not as many as the products. The message starts with file
            and line.
    """
    where = f"{str(path)!r}, line {line}"
    for name in _FIELDS:
        if name not in row:
            raise ItemError(where, f"the field {name!r} is missing; there are {', '.join(row)}")
    conditions = _conditions(row["query"], where)
    positives = _ids(row["pos_candidate"] or [], f"{where}: pos_candidate")
    negatives = _ids(row.get("hard_negative") or [], f"{where}: hard_negative")
    if not positives:
        raise ItemError(where, f"the query has no positive; pos_candidate is {row['pos_candidate']!r}")
    own = [pid for pid in positives if pid in conditions]
    if own:
        raise ItemError(where, f"the positive {own[0]!r} is a product of its own query")
    negatives = tuple(pid for pid in negatives if pid not in positives)
    instruction = row["query instruction"]
    if not isinstance(instruction, str) or not instruction.strip():
        raise ItemError(where, f"'query instruction' must be a text, got {instruction!r:.80}")
    shown = instruction.count(PLACEHOLDER)
    if shown != len(conditions):
        raise ItemError(
            where,
            f"the instruction has {shown} placeholders {PLACEHOLDER} for {len(conditions)} products of the "
            f"query: {instruction!r:.200}",
        )
    return MeritQuery(str(line), where, conditions, positives, negatives, instruction)


def check_products(query: MeritQuery, products: MeritProducts) -> None:
    """Check that every product that a query names is there.

    Raises:
        ValueError: One is not; the message starts with file and line.
    """
    for role, ids in (("query", query.products), ("positive", query.positives), ("hard negative", query.negatives)):
        absent = [pid for pid in ids if pid not in products]
        if absent:
            raise ItemError(query.where, f"the {role} names the unknown product {absent[0]!r}; {products} lack it")


def without_titles(instruction: str) -> str:
    """Remove the titles: the text from each image to the `</Product n>` that follows it."""
    return _TITLE.sub(PLACEHOLDER, instruction)


def ood_values(folder: str | Path) -> dict[str, tuple[str, ...]]:
    """Return what the out-of-distribution tests hold out: `OOD_VALUES`, or what a miniature says in `ood.json`.

    Raises:
        ValueError: That file is no JSON, or not `{kind: [value, ...]}` with the kinds of `OOD_VALUES`.
    """
    path = Path(folder) / _OOD_FILE
    if not path.is_file():
        return OOD_VALUES
    try:
        found = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{str(path)!r}: not valid JSON ({error})") from error
    is_known = isinstance(found, dict) and found.keys() <= OOD_VALUES.keys()
    if not is_known or not all(isinstance(values, list) for values in found.values()):
        raise ValueError(
            f"{str(path)!r}: expected lists of values for some of {', '.join(OOD_VALUES)}, got {found!r:.80}"
        )
    return {kind: tuple(map(str, values)) for kind, values in found.items()}


def subset_names(values: Mapping[str, Iterable[str]]) -> list[str]:
    """Return the names of the subsets of the out-of-distribution tests, such as `language:th`."""
    return [f"{kind}:{value}" for kind, held_out in values.items() for value in held_out]


def ood_subsets(query: MeritQuery, products: MeritProducts, values: Mapping[str, Iterable[str]]) -> list[str]:
    """Return the subsets that a test query is in, at most one of each kind, as the authors assign them.

    A query is in `language:X` if all products that it names have the language, in `attribute:X` if one of its own
    attributes is X, and in `class:X` if any product that it names is of the class. The first value that fits counts.
    """
    touched = [products[pid] for pid in query.touched]
    fits = {
        "language": lambda value: all(product.language == value for product in touched),
        "attribute": lambda value: value in query.attributes,
        "class": lambda value: any(product.kind == value for product in touched),
    }
    first = ((kind, next(filter(fits[kind], held_out), None)) for kind, held_out in values.items())
    return [f"{kind}:{value}" for kind, value in first if value is not None]


def is_held_out(product: MeritProduct, kind: str, values: Mapping[str, Iterable[str]]) -> bool:
    """Whether the out-of-distribution test of a kind keeps a product out of training."""
    if kind == "attribute":
        return any(value in product.attributes for value in values[kind])
    return (product.language if kind == "language" else product.kind) in values[kind]


def check_ood(kind: str | None, values: Mapping[str, Iterable[str]]) -> None:
    """Refuse an unknown kind of out-of-distribution test; None is none.

    Raises:
        ValueError: It is unknown.
    """
    if kind is not None and kind not in values:
        raise ValueError(f"unknown out-of-distribution test {kind!r}; expected one of {', '.join(values)}")


def _conditions(query: object, where: str) -> dict[str, dict[str, Any]]:
    if isinstance(query, list):
        listed: dict[str, dict[str, Any]] = {pid: {} for pid in _ids(query, f"{where}: query")}
        if listed:
            return listed
    if not isinstance(query, Mapping) or not query:
        expected = "{product id: {attribute: value}} or a list of product ids"
        raise ItemError(where, f"query must be {expected}, got {query!r:.80}")
    conditions = {}
    for value, condition in query.items():
        pid = product_id(value, f"{where}: query")
        conditions[pid] = check_attributes(condition, f"{where}: the condition of product {pid!r}")
        if not conditions[pid]:
            raise ItemError(where, f"the condition of product {pid!r} names no attribute")
    return conditions


def _ids(values: object, where: str) -> tuple[str, ...]:
    if not isinstance(values, list):
        raise ItemError(where, f"expected a list of product ids, got {values!r:.80}")
    return tuple(dict.fromkeys(product_id(value, where) for value in values))
