"""Conditions in the languages of databases: LanceDB's SQL and Milvus' expressions.

A negation is moved to the comparisons, where all three languages agree: a comparison with a missing value does not
hold, and its opposite does not, either.
"""

import json
from datetime import date, datetime
from typing import Any, Protocol
from urllib.parse import unquote

import pyarrow as pa

from conjoin.retrieval.filters import Combination, Comparison, Condition, Negation, Node, column_value

_OPPOSITES = {"=": "!=", "!=": "=", "<": ">=", ">=": "<", ">": "<=", "<=": ">"}


class Dialect(Protocol):
    """How a database writes the parts of a condition."""

    def name(self, name: str) -> str:
        """A column."""

    def value(self, value: Any) -> str:  # noqa: ANN401
        """A text, number, truth value, date or time."""

    def fraction(self, name: str) -> str:
        """A column of integers, to be compared with a fraction."""

    def comparison(self, name: str, operator: str, value: str) -> str:
        """A column, compared by one of `=`, `!=`, `<`, `<=`, `>`, `>=`, `like`."""

    def null(self, name: str, is_null: bool) -> str:
        """Whether a column has no value, or has one."""


def condition_text(condition: Condition, schema: pa.Schema, dialect: Dialect) -> str:
    """Write a condition for a database that has the columns `schema`; it must have passed `Condition.check`."""
    return _text(condition.node, False, schema, dialect)


def _text(node: Node, is_negated: bool, schema: pa.Schema, dialect: Dialect) -> str:
    if isinstance(node, Negation):
        return _text(node.part, not is_negated, schema, dialect)
    if isinstance(node, Combination):
        first, second = (_text(part, is_negated, schema, dialect) for part in (node.first, node.second))
        word = {"and": "or", "or": "and"}[node.word] if is_negated else node.word
        return f"({first}) {word} ({second})"
    return _comparison(node, is_negated, schema.field(node.name).type, dialect)


def _comparison(node: Comparison, is_negated: bool, type_: pa.DataType, dialect: Dialect) -> str:
    name = dialect.name(node.name)
    if node.operator == "is null":
        return dialect.null(name, not is_negated)
    if pa.types.is_null(type_):  # nothing but missing values
        return f"not ({dialect.null(name, True)})"
    wanted = column_value(type_, node.value).as_py()
    if pa.types.is_integer(type_) and isinstance(wanted, float):
        name = dialect.fraction(name)
    value = dialect.value(wanted)
    if node.operator != "like":
        return dialect.comparison(name, _OPPOSITES[node.operator] if is_negated else node.operator, value)
    found = dialect.comparison(name, "like", value)
    return f"({dialect.null(name, False)}) and not ({found})" if is_negated else found


class LanceDialect:
    """LanceDB's SQL."""

    def name(self, name: str) -> str:
        """A column, in backticks."""
        return f"`{stored_name(name)}`"

    def value(self, value: Any) -> str:  # noqa: ANN401
        """A literal of SQL."""
        if isinstance(value, datetime) and value.tzinfo is not None:
            return f"arrow_cast('{value.isoformat()}', 'Timestamp(Microsecond, Some(\"UTC\"))')"
        if isinstance(value, datetime):
            return f"timestamp '{value.isoformat(sep=' ')}'"
        if isinstance(value, date):
            return f"date '{value.isoformat()}'"
        if isinstance(value, bool):
            return str(value).lower()
        return sql_text(value) if isinstance(value, str) else repr(value)

    def fraction(self, name: str) -> str:
        """As in SQL."""
        return f"cast({name} as double)"

    def comparison(self, name: str, operator: str, value: str) -> str:
        """As in SQL."""
        return f"{name} {operator} {value}"

    def null(self, name: str, is_null: bool) -> str:
        """As in SQL."""
        return f"{name} is {'' if is_null else 'not '}null"


class MilvusDialect:
    """Milvus' expressions over a field of JSON, which holds all columns but the ids.

    Args:
        field: Its name.
        own: The field of the ids.
        has_escapes: Whether a backslash in a pattern of `like` takes the meaning from a wildcard.
    """

    def __init__(self, field: str, own: str, has_escapes: bool = True) -> None:
        self.field, self.own, self.has_escapes = field, own, has_escapes

    def name(self, name: str) -> str:
        """A key of the field, or the field `own`."""
        return name if name == self.own else f"{self.field}[{json.dumps(name, ensure_ascii=False)}]"

    def value(self, value: Any) -> str:  # noqa: ANN401
        """A literal; dates and times are texts."""
        if isinstance(value, bool):
            return str(value).lower()
        return milvus_text(json_value(value))

    def fraction(self, name: str) -> str:
        """The column itself."""
        return name

    def comparison(self, name: str, operator: str, value: str) -> str:
        """As in Python, and `like`.

        Raises:
            ValueError: A pattern has a backslash, and there are no escapes.
        """
        if operator == "like" and not self.has_escapes and "\\" in json.loads(value):
            raise ValueError(
                f"Milvus Lite knows no backslash in a pattern of 'like', got {json.loads(value)!r}; use '_' for one "
                "character of any kind, a Milvus server, or another backend"
            )
        return f"{name} {'==' if operator == '=' else operator} {value}"

    def null(self, name: str, is_null: bool) -> str:
        """Whether the key is there."""
        if name == self.own:
            return f'{name} {"==" if is_null else "!="} ""'
        return f"not exists {name}" if is_null else f"exists {name}"


def stored_name(name: str) -> str:
    """The name of a kept column in a table of LanceDB, where names have no dots and no backticks."""
    return "".join(f"%{ord(letter):02X}" if letter in "%.`" else letter for letter in name)


def sql_text(text: str) -> str:
    """A literal of SQL."""
    return "'" + text.replace("'", "''") + "'"


def milvus_text(value: Any) -> str:  # noqa: ANN401
    """A literal of Milvus' expressions."""
    return json.dumps(value, ensure_ascii=False)


def json_value(value: Any) -> Any:  # noqa: ANN401
    """A value of a column as JSON holds it; a date or time as a text that sorts like it."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [json_value(part) for part in value]
    if isinstance(value, dict):
        return {name: json_value(part) for name, part in value.items()}
    return value.isoformat() if isinstance(value, date) else str(value)


def original_name(name: str) -> str:
    """What `stored_name` was given."""
    return unquote(name)
