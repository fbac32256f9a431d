"""The columns of a collection that come from the data: their types, and what changes them."""

import random
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import datasets
import pyarrow as pa
from lancedb.table import Table

_ATTEMPTS = 20
_WIDER = "_{}_as_double"


def kept_types(rows: Iterable[Mapping[str, Any]]) -> dict[str, pa.DataType]:
    """The types of the kept columns, where the source knows them."""
    features = rows.features if isinstance(rows, datasets.Dataset | datasets.IterableDataset) else None
    kept = (features or {}).get("metadata")
    if not isinstance(kept, dict):
        return {}
    return {
        field.name: field.type for field in datasets.Features(kept).arrow_schema if not pa.types.is_null(field.type)
    }


def make_column(name: str, values: Sequence[Any]) -> pa.Array:
    """Values as a column.

    Raises:
        ValueError: They are of different types, or of one that no column has.
    """
    try:
        try:
            column = pa.array(values)
        except UnicodeEncodeError:  # lone surrogates
            column = pa.array([v.encode("utf-8", "replace").decode() if isinstance(v, str) else v for v in values])
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"the column {name!r} cannot be kept: {error}") from error
    if pa.types.is_struct(column.type) and column.type.num_fields == 0:
        raise ValueError(f"the column {name!r} cannot be kept: its values are empty mappings")
    return column


def fit(rows: pa.Table, table: Table, is_shared: bool = False) -> pa.Table:
    """Give rows the columns of the table, and the table the columns of the rows.

    Args:
        rows: To be written.
        table: Where.
        is_shared: Whether other processes write into the table as well.

    Raises:
        ValueError: A column holds values of another type than before.
    """
    _add_columns(table, [field for field in rows.schema if not pa.types.is_null(field.type)])
    for field in rows.schema:
        if pa.types.is_floating(field.type) and pa.types.is_integer(table.schema.field(field.name).type):
            _widen(table, field.name, is_shared)
    schema = table.schema
    columns = []
    for field in schema:
        try:
            column = rows[field.name] if field.name in rows.column_names else pa.nulls(len(rows), field.type)
            if new := _new_fields(column.type, field.type):
                raise pa.ArrowInvalid(f"the field {new[0]!r} is new")
            columns.append(column.cast(field.type))
        except pa.ArrowException as error:
            raise ValueError(
                f"the column {field.name!r} of the collection holds {field.type}, and some of its rows have "
                f"{rows.schema.field(field.name).type} now ({error}); give all its values one type"
            ) from error
    return pa.table(columns, schema=schema)


def finish_widening(table: Table) -> None:
    """End what `fit` began in a process that was killed."""
    names = table.schema.names
    for name in names:
        if (wider := _WIDER.format(name)) in names:
            table.drop_columns([wider])
            names.remove(wider)
    for wider in names:
        if wider.startswith("_"):
            _rename(table, wider, wider.removeprefix("_").removesuffix("_as_double"))


def _add_columns(table: Table, fields: list[pa.Field]) -> None:
    """Add the columns that a table lacks; other processes may add columns or rows at the same time."""
    for attempt in range(_ATTEMPTS):
        missing = [field for field in fields if field.name not in table.schema.names]
        if not missing:
            return
        try:
            table.add_columns([pa.field(field.name, field.type) for field in missing])
        except RuntimeError as error:
            if "commit conflict" not in str(error) or attempt == _ATTEMPTS - 1:
                raise
            time.sleep(attempt * random.random() / 10)
        table.checkout_latest()


def _widen(table: Table, name: str, is_shared: bool) -> None:
    """Make a column of integers one of fractions.

    Raises:
        ValueError: Other processes write: the integers that they add meanwhile would be lost.
    """
    if is_shared:
        raise ValueError(
            f"the column {name!r} of the collection holds integers, and some rows have fractions: give all its values "
            "one type, or run the same with one process, which changes the column"
        )
    wider = _WIDER.format(name)
    quoted = "`" + name.replace("`", "``") + "`"
    table.add_columns({wider: f"cast({quoted} as double)"})
    table.drop_columns([name])
    _rename(table, wider, name)


def _rename(table: Table, name: str, new: str) -> None:
    change: Any = {"path": name, "rename": new}  # its type is too narrow in lancedb 0.40
    table.alter_columns(change)


def _new_fields(given: pa.DataType, known: pa.DataType) -> list[str]:
    """The fields of mappings, within lists too, that a column does not know: a cast would drop them."""
    if pa.types.is_struct(given) and pa.types.is_struct(known):
        fields = [given.field(place) for place in range(given.num_fields)]
        known_names = {known.field(place).name for place in range(known.num_fields)}
        new = [field.name for field in fields if field.name not in known_names]
        return new or [name for field in fields for name in _new_fields(field.type, known.field(field.name).type)]
    if pa.types.is_list(given) and pa.types.is_list(known):
        return _new_fields(given.value_type, known.value_type)
    return []
