"""The columns of a collection, as somebody who filters by them needs to know them."""

import re
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from conjoin.retrieval import Searchable

_ROWS = 50_000
_CHOICES = 40
_LONGEST = 60
_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_RESERVED = frozenset("and between case cast exists false in interval is like not null or true".split())


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
        """The name, in backticks where a condition needs them."""
        return quote_name(self.name)


def describe_columns(collection: "Searchable") -> list[Column]:
    """The columns of a collection, from its first rows: `id` first. Those of Milvus without values."""
    import pyarrow as pa

    from conjoin.retrieval import Collection

    if not isinstance(collection, Collection):
        return [Column(field.name, str(field.type), None, "") for field in collection.schema]
    batches, rows = [], 0
    for batch in collection.scan(collection.schema.names):
        batches.append(batch.slice(0, _ROWS - rows))
        rows += batches[-1].num_rows
        if rows >= _ROWS:
            break
    whole = pa.Table.from_batches(batches, collection.schema)
    return [describe_column(name, whole[name], len(collection) <= rows) for name in whole.column_names]


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
    return name if _PLAIN.fullmatch(name) and name.lower() not in _RESERVED else f"`{name}`"


def _quote_text(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def describe_column(name: str, column: Any, is_whole: bool) -> Column:  # noqa: ANN401 - pyarrow has no types
    """Describe a column.

    Args:
        name: Its name.
        column: Its values, an Arrow array.
        is_whole: Whether these are all of its values.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = column.type
    known = column.drop_null()
    if not len(known):
        return Column(name, str(kind), None, "")
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        distinct = pc.unique(known)
        values = sorted(filter(None, distinct.to_pylist())) if len(distinct) <= _CHOICES else None
        few = is_whole and values is not None and len(values) < len(column)
        short = values is not None and max(map(len, values), default=0) <= _LONGEST
        return Column(name, "text", values if few and short else None, str(known[0].as_py())[:_LONGEST])
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_temporal(kind):
        ends = pc.min_max(known).as_py()
        return Column(name, str(kind), None, f"{ends['min']} to {ends['max']}")
    first = "" if name == "image" else str(known[0].as_py())[:_LONGEST]  # a path of this machine
    return Column(name, "true or false" if pa.types.is_boolean(kind) else str(kind), None, first)
