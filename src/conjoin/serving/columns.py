"""The columns of an index, as somebody who filters by them needs to know them."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import pyarrow as pa

    from conjoin.retrieval import Index

_ROWS = 50_000
_SAMPLE = 5000
_CHOICES = 40
_LONGEST = 60


class Column(NamedTuple):
    """A column.

    Attributes:
        name: As a condition names it.
        type: Of its values.
        values: All of them, sorted, if they are few and short texts; None otherwise.
        example: A value, or the least and the greatest number; empty if there is none.
    """

    name: str
    type: str
    values: list[str] | None
    example: str

    @property
    def quoted(self) -> str:
        """The name in double quotes where a condition needs them."""
        return quote_name(self.name)


def describe_columns(index: "Index") -> list[Column]:
    """The columns of an index, from its first rows: `id` first."""
    from conjoin.retrieval.kept_rows import concat

    tables, rows = [], 0
    for table in _tables(index):
        tables.append(table)
        rows += table.num_rows
        if rows >= _ROWS:
            break
    if not tables:
        return []
    whole = concat(tables).slice(0, _ROWS)
    is_whole = len(index) <= whole.num_rows
    return [_describe(name, whole[name], is_whole) for name in whole.column_names]


def _tables(index: "Index") -> Iterator["pa.Table"]:
    """The kept columns of an index, the first rows first; of a database some thousand rows."""
    import pyarrow as pa

    from conjoin.retrieval.index.rows import IndexRows
    from conjoin.retrieval.index.table import TableIndex

    if isinstance(index, IndexRows) and index.kept is not None:
        yield from index.kept.tables()
    elif isinstance(index, TableIndex):
        ids = index.some_ids(_SAMPLE)
        yield pa.Table.from_pylist([{"id": id_} | row for id_, row in zip(ids, index.rows(ids), strict=True)])


def condition(choices: dict[str, list[str]], where: str | None) -> str | None:
    """A condition for some values by column, and for what else was written; None for neither."""
    parts = [
        f"{quote_name(name)} in ({', '.join(_quote_text(value) for value in values)})"
        for name, values in choices.items()
        if values
    ]
    if where is not None and where.strip():
        parts.append(f"({where.strip()})" if parts else where.strip())
    return " and ".join(parts) or None


def quote_name(name: str) -> str:
    """The name of a column as a condition writes it."""
    from conjoin.retrieval.filters import is_plain_name

    return name if is_plain_name(name) else '"' + name.replace('"', '""') + '"'


def _quote_text(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _describe(name: str, column: Any, is_whole: bool) -> Column:  # noqa: ANN401 - pyarrow has no types
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = column.type
    known = column.drop_null()
    if not len(known):
        return Column(name, str(kind), None, "")
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        distinct = pc.unique(known)
        values = sorted(distinct.to_pylist()) if len(distinct) <= _CHOICES else None
        few = is_whole and values is not None and len(values) < len(column)
        short = values is not None and max(map(len, values)) <= _LONGEST
        first = "" if name == "image" else str(known[0].as_py())  # a path of this machine
        return Column(name, "text", values if few and short and name != "image" else None, first[:_LONGEST])
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_temporal(kind):
        ends = pc.min_max(known).as_py()
        return Column(name, str(kind), None, f"{ends['min']} to {ends['max']}")
    return Column(name, "true or false" if pa.types.is_boolean(kind) else str(kind), None, str(known[0].as_py()))
