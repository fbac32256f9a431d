"""The columns of a collection for people who filter: which give a choice, a range or an order, and counts of rows."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
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


def join_conditions(conditions: Mapping[str, str]) -> str | None:
    """The conditions joined; None without any."""
    return " and ".join(map(condition, conditions.values())) or None


class Columns:
    """The columns of one state of a collection, to list and count its rows; safe to use from several threads.

    Those that people filter by stay in memory, and so does which rows are of one group. Lance says which rows fulfil a
    condition.

    Args:
        collection: The state.

    Attributes:
        kinds: The columns that people filter by, with their kinds.
    """

    def __init__(self, collection: Collection) -> None:
        self.collection = collection
        rows = collection.read(["id", "row_kind"])
        self._ids, self._numbers = rows["id"], pd.Index(rows["_rowid"].to_numpy())
        self._held = {"row_kind": _series(rows["row_kind"])}
        self._groups: dict[str, np.ndarray] = {}
        self.kinds: dict[str, Kind] = {}
        for name in collection.schema.names:
            if name not in ("id", "text", "image"):
                column = collection.read([name])[name]
                if (kind := column_kind(column)) is not None:
                    self.kinds[name], self._held[name] = kind, _series(column)

    def _column(self, name: str) -> pd.Series:
        return self._held[name] if name in self._held else _series(self.collection.read([name])[name])

    def _group(self, name: str) -> np.ndarray:
        """A number `(N,)` that rows of one value of a column share; each without a value has its own."""
        if name not in self._groups:
            codes = pd.factorize(self._column(name))[0]
            self._groups[name] = np.where(codes < 0, -1 - np.arange(len(codes)), codes)
        return self._groups[name]

    def _firsts(self, rows: np.ndarray, group_by: str | None) -> np.ndarray:
        """The first row of each group among rows; all without a column of groups."""
        return rows if group_by is None else rows[~pd.Series(self._group(group_by)[rows]).duplicated()]

    def _holds(self, where: str) -> np.ndarray:
        """Which rows fulfil a condition, `(N,)`."""
        holds = np.zeros(len(self._numbers), dtype=bool)
        holds[self._numbers.get_indexer(self.collection.read(["_rowid"], where)["_rowid"].to_numpy())] = True
        return holds

    def ids(
        self, k: int, where: str | None = None, group_by: str | None = None, offset: int = 0, sort: str | None = None
    ) -> list[str]:
        """The ids of the first rows that fulfil a condition, one of each group.

        Args:
            k: How many at most.
            where: The condition.
            group_by: A column: one row of each of its values, the first in this order.
            offset: Rows that are left out before them.
            sort: A column, with `-` before it for falling values; rows without a value come last.
        """
        rows = np.arange(len(self._ids)) if where is None else np.flatnonzero(self._holds(where))
        if sort:
            column = self._column(sort.removeprefix("-")).iloc[rows]
            rows = column.sort_values(ascending=sort[0] != "-", kind="stable", na_position="last").index.to_numpy()
        return list(self._ids.take(pa.array(self._firsts(rows, group_by)[offset : offset + k])).to_pylist())

    def count(
        self,
        conditions: Mapping[str, str],
        names: Sequence[str],
        group_by: str | None = None,
        among: Iterable[str] | None = None,
    ) -> tuple[int, dict[str, Any]]:
        """Count the rows that fulfil some conditions, and the values of columns in them.

        The values of a column are counted without its own condition, so that a person can choose several.

        Args:
            conditions: By the name of the column that they filter by.
            names: Of the columns.
            group_by: A column: each of its values counts once.
            among: The ids that count; None for all.

        Returns:
            The number of rows; and of each column, its `rows` and its `values` with counts, most frequent first, or
            the `least` and `most` of numbers and dates.
        """
        fulfilled = {name: self._holds(where) for name, where in conditions.items()}
        if among is not None:
            fulfilled[".among"] = pc.is_in(self._ids, pa.array(among, pa.string())).to_numpy()

        def rows(but: str | None = None) -> np.ndarray:
            some = [each for name, each in fulfilled.items() if name != but]
            return np.flatnonzero(np.logical_and.reduce(some)) if some else np.arange(len(self._ids))

        base = rows()
        total = len(self._firsts(base, group_by))
        found: dict[str, Any] = {}
        for name in names:
            own = rows(name) if name in conditions else base
            found[name] = {"rows": len(self._firsts(own, group_by)) if name in conditions else total}
            known = self._column(name).iloc[own].dropna()
            if known.dtype.kind in "iufM":
                ends = (known.min(), known.max()) if len(known) else ()
                plain = (end.item() if hasattr(end, "item") else end.isoformat() for end in ends)
                found[name] |= zip(("least", "most"), plain, strict=False)
                continue
            if group_by is not None:
                known = known[~pd.DataFrame({0: known, 1: self._group(group_by)[known.index]}).duplicated()]
            counts = sorted(known.value_counts().items(), key=lambda each: (-each[1], str(each[0])))
            found[name]["values"] = [[value, int(count)] for value, count in counts[:_MANY] if count]
        return total, found


def _series(column: pa.ChunkedArray) -> pd.Series:
    """A column of numbers, of times, of true and false, or of categories in their order."""
    series = column.to_pandas()
    return series if series.dtype.kind in "biufM" else series.astype("category")
