"""The columns of a collection for people who filter: which give a choice, a range or an order, and counts of rows."""

import re
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, Literal

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from conjoin.retrieval import Collection, Searchable
from conjoin.retrieval.collection import condition, sql_literal
from conjoin.retrieval.search import check_column

PRICE = re.compile(r"price|preis|prix|precio|prezzo|cost", re.IGNORECASE)
"""Names of columns of prices."""
Kind = Literal["choice", "number", "date"]
_FEW, _MANY, _LONGEST = 40, 1000, 60
_DATE = re.compile(r"\d{4}-\d\d-\d\d\b.*")


def column_kind(column: Any) -> Kind | None:  # noqa: ANN401 - pyarrow has no types
    """How people filter by a column, an Arrow array.

    Returns:
        `"choice"` of values that repeat: up to 40 short texts, up to 1,000 if each stands in two rows on average;
        `"number"`, `"date"` (also texts such as 2026-11-28); None for others.
    """
    types, known = pa.types, column.drop_null()
    if types.is_boolean(column.type):
        return "choice"
    if types.is_temporal(column.type):
        return "date"
    if types.is_integer(column.type) or types.is_floating(column.type):
        return "number"
    if not len(known) or not (types.is_string(column.type) or types.is_large_string(column.type)):
        return None
    if pc.all(pc.match_substring_regex(known, rf"\A{_DATE.pattern}\z")).as_py():
        return "date"
    distinct = pc.count_distinct(known).as_py()
    repeats = distinct < len(known) if distinct <= _FEW else 2 * distinct <= len(known) and distinct <= _MANY
    return "choice" if repeats and pc.max(pc.utf8_length(known)).as_py() <= _LONGEST else None


def column_kinds(collection: Collection) -> dict[str, Kind]:
    """The columns that people filter by, with their kinds."""
    rows = _read(collection, {*collection.schema.names} - {"id", "text", "image"})
    kinds = {name: column_kind(rows[name]) for name in rows.column_names}
    return {name: kind for name, kind in kinds.items() if kind is not None}


def check_plain(collection: Searchable, name: str) -> None:
    """Make sure that the rows of a collection have a column, of values that can be sorted and counted.

    Raises:
        ValueError: They have not, or it holds lists or mappings.
    """
    check_column(collection, name)
    if pa.types.is_nested(kind := collection.schema.field(name).type):
        raise ValueError(f"the column {name!r} holds {kind}; expected texts, numbers, dates, or true and false")


def filter_condition(name: str, values: Sequence[Any] | Mapping[str, float | str | None]) -> str:
    """The condition that a column has one of some values, or lies between `"least"` and `"most"`.

    Raises:
        ValueError: There are no values.
    """
    if isinstance(values, Mapping):
        ends = [(sign, values.get(end)) for end, sign in (("least", ">="), ("most", "<="))]
        parts = [f"{_compared(name, value)} {sign} {sql_literal(value)}" for sign, value in ends if value is not None]
    else:
        parts = [f"`{name}` in ({', '.join(map(sql_literal, values))})"] if values else []
    if not parts:
        raise ValueError(f'the filter of {name!r} has no values: expected ["a", "b"] or {{"least": 1, "most": 9}}')
    return " and ".join(parts)


def _compared(name: str, value: float | str) -> str:
    """The column, as numbers with fractions where it is compared with one: Lance refuses one for integers."""
    return f"cast(`{name}` as double)" if isinstance(value, float) and not value.is_integer() else f"`{name}`"


def join_conditions(conditions: Mapping[str, str], but: str | None = None) -> str | None:
    """The conditions joined, without that of one name; None without any."""
    parts = [condition(each) for name, each in conditions.items() if name != but]
    return " and ".join(parts) or None


def listed_ids(
    collection: Collection, where: str | None = None, group_by: str | None = None, sort: str | None = None
) -> list[str]:
    """The ids of the rows that a condition holds for, one of each group.

    Args:
        collection: Of rows in an order of their own.
        where: The condition.
        group_by: A column: one row of each of its values, the first in this order.
        sort: A column, with `-` before it for falling values; rows without a value come last.
    """
    column = (sort or "").removeprefix("-")
    rows = _read(collection, {"id", column, group_by} - {"", None}, where).to_pandas()
    if sort:
        rows = rows.sort_values(column, ascending=not sort.startswith("-"), kind="stable", na_position="last")
    return list(rows[_firsts(rows, group_by)]["id"])


def count_values(
    collection: Collection,
    conditions: Mapping[str, str],
    names: Sequence[str],
    group_by: str | None = None,
    among: Iterable[str] | None = None,
) -> tuple[int, dict[str, Any]]:
    """Count the rows that some conditions hold for, and the values of columns in them.

    The values of a column are counted without its own condition, so that a person can choose several.

    Args:
        collection: What to count.
        conditions: By the name of the column that they filter by.
        names: Of the columns.
        group_by: A column: each of its values counts once.
        among: The ids that count; None for all.

    Returns:
        The number of rows; and of each column, its `rows` and its `values` with counts, most frequent first, or the
        `least` and `most` of numbers and dates.
    """
    shared = {*names, "id", group_by} - {None}

    def rows(but: str | None) -> pd.DataFrame:
        read = _read(collection, shared, join_conditions(conditions, but)).to_pandas()
        return read if among is None else read[read["id"].isin(list(among))]

    base = rows(None)
    found: dict[str, Any] = {}
    for name in names:
        part = rows(name) if name in conditions else base
        known = part[part[name].notna()]
        if known[name].dtype.kind in "iufM":
            ends = (known[name].min(), known[name].max()) if len(known) else ()
            plain = (end.item() if hasattr(end, "item") else end.isoformat() for end in ends)
            found[name] = dict(zip(("least", "most"), plain, strict=False))
        else:
            if group_by is not None:
                known = known[~(known.duplicated([name, group_by]) & known[group_by].notna())]
            counts = sorted(known[name].value_counts().items(), key=lambda each: (-each[1], str(each[0])))
            found[name] = {"values": [[value, int(count)] for value, count in counts[:_MANY]]}
        found[name]["rows"] = int(_firsts(part, group_by).sum())
    return int(_firsts(base, group_by).sum()), found


def _read(collection: Collection, names: Container[str | None], where: str | None = None) -> Any:  # noqa: ANN401
    """Columns of the rows that a condition holds for, as an Arrow table."""
    schema = pa.schema([field for field in collection.table.schema if field.name in names])
    batches = collection.scan(schema.names, where) if len(schema) else ()
    return pa.Table.from_batches(batches, schema)


def _firsts(rows: pd.DataFrame, group_by: str | None) -> Any:  # noqa: ANN401 - a series of bool
    """Which rows are the first of their group; each without a group is one."""
    return ~rows.duplicated(group_by or "id") | (rows[group_by or "id"].isna())
