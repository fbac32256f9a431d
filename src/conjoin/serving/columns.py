"""The columns of a collection, as somebody who filters by them needs to know them."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from conjoin.retrieval import Searchable

_ROWS = 500_000
_CHOICES = 40
_LONGEST = 60


class Column(NamedTuple):
    """A column.

    Attributes:
        name: As a condition names it.
        type: Of its values.
        values: All of them, sorted, if they are few and short texts; None otherwise.
        example: A value, or the least and the greatest number; empty if there is none.
        ends: The least and the greatest number; None if they are no numbers.
    """

    name: str
    type: str
    values: list[str] | None
    example: str
    ends: tuple[float, float] | None = None


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


def condition(
    choices: Mapping[str, Sequence[str] | None],
    ranges: Mapping[str, tuple[float | None, float | None]],
    where: str | None,
) -> str | None:
    """A condition for values and ranges by column, and for what else was written; None for neither.

    Args:
        choices: The values of each column, any of which may be; none for all.
        ranges: The least and the greatest value of each column; None for no limit.
        where: A condition; None or blank for none.
    """
    parts = []
    for name, values in choices.items():
        quoted = ", ".join("'" + value.replace("'", "''") + "'" for value in values or ())
        parts += [f"`{name}` in ({quoted})"] if quoted else []
    for name, (least, most) in ranges.items():
        parts += [f"`{name}` >= {float(least):.15g}"] if least is not None else []
        parts += [f"`{name}` <= {float(most):.15g}"] if most is not None else []
    if where is not None and where.strip():
        parts.append(f"({where.strip()})" if parts else where.strip())
    return " and ".join(parts) or None


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
        numbers = None if pa.types.is_temporal(kind) else (ends["min"], ends["max"])
        return Column(name, str(kind), None, f"{ends['min']} to {ends['max']}", numbers)
    first = "" if name == "image" else str(known[0].as_py())[:_LONGEST]  # a path of this machine
    return Column(name, "true or false" if pa.types.is_boolean(kind) else str(kind), None, first)
