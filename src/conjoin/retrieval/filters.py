"""Conditions on the kept columns of an index, in a small part of SQL.

    category = 'shoes' and (price < 50 or "on sale" = true) and not brand in ('a', 'b')

* Comparisons: `=`, `!=` (or `<>`), `<`, `<=`, `>`, `>=`, `in (...)`, `not in (...)`, `like 'a%'`, `not like`,
  `is null`, `is not null`; `and`, `or`, `not` and parentheses combine them.
* Values: `'text'` (`''` is a quote), numbers, `true`, `false`. A text is read as a date or time for such a column, and
  has the zone of the column unless it names another.
* A name with spaces or special characters stands in double quotes. The columns are `id`, `text`, `image` and the kept
  ones.
* As in SQL, a comparison with a missing value is neither true nor false, so such a row is not found.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from conjoin.retrieval.kept_rows import KeptRows

_TOKEN = re.compile(
    r"""\s*(?:(?P<number>[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)(?![\w.])|(?P<text>'(?:[^']|'')*')|"""
    r"""(?P<quoted>"(?:[^"]|"")*")|(?P<name>[^\W\d]\w*)|(?P<symbol><=|>=|<>|!=|[=<>(),]))"""
)
_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "=": pc.equal,
    "!=": pc.not_equal,
    "<": pc.less,
    "<=": pc.less_equal,
    ">": pc.greater,
    ">=": pc.greater_equal,
}
_LIKE, _NULL = "like", "is null"
_WORDS = frozenset({"and", "or", "not", "in", "is", "null", "like", "true", "false"})
_DEEPEST = 100


class _Token(NamedTuple):
    kind: str
    value: Any
    start: int


@dataclass(frozen=True)
class Comparison:
    """A column compared with a value; `operator` is one of `=`, `!=`, `<`, `<=`, `>`, `>=`, `like`, `is null`."""

    name: str
    operator: str
    value: Any = None


@dataclass(frozen=True)
class Negation:
    """What holds where `part` does not."""

    part: "Node"


@dataclass(frozen=True)
class Combination:
    """What holds where both parts do (`word` is `and`), or one of them (`or`)."""

    word: str
    first: "Node"
    second: "Node"


Node = Comparison | Negation | Combination


@dataclass(frozen=True)
class Condition:
    """A condition that was read.

    Attributes:
        text: As it was written.
        columns: The columns that it names.
        node: Its meaning.
    """

    text: str
    columns: list[str]
    node: Node

    def select(self, rows: KeptRows) -> np.ndarray:
        """The positions `(M,)` of the rows that it holds for, ascending.

        Raises:
            ValueError: A column is unknown, or its values cannot be compared with those of the condition.
        """
        known: set[str] = set()
        found, start = [], 0
        for table in rows.tables(self.columns):
            known.update(table.column_names)
            mask = np.asarray(pc.fill_null(self._mask(self.node, table), False))
            found.append(np.flatnonzero(mask) + start)
            start += table.num_rows
        self._check_names(known, lambda: {name for table in rows for name in table.column_names})
        return np.concatenate([np.empty(0, dtype=np.int64), *found])

    def check(self, schema: pa.Schema) -> None:
        """Make sure that it can be evaluated on rows with some columns.

        Raises:
            ValueError: As `select`.
        """
        self._check_names(set(schema.names), lambda: set(schema.names))
        self._mask(self.node, schema.empty_table())

    def _check_names(self, known: set[str], columns: Callable[[], set[str]]) -> None:
        if unknown := [name for name in self.columns if name not in known]:
            raise ValueError(
                f"the condition {self.text!r} names the unknown column {unknown[0]!r}; there are {sorted(columns())}"
            )

    def _mask(self, node: Node, table: pa.Table) -> Any:  # noqa: ANN401 - pyarrow has no types
        """True, false or null for each row."""
        if isinstance(node, Comparison):
            return _compare(self.text, table, node)
        if isinstance(node, Negation):
            return pc.invert(self._mask(node.part, table))
        combine = pc.and_kleene if node.word == "and" else pc.or_kleene
        return combine(self._mask(node.first, table), self._mask(node.second, table))


def is_plain_name(name: str) -> bool:
    """Whether a condition can name a column without double quotes."""
    return re.fullmatch(r"[^\W\d]\w*", name) is not None and name.lower() not in _WORDS


def parse_condition(text: str) -> Condition:
    """Read a condition.

    Raises:
        ValueError: It is no condition; the message shows where.
    """
    return _Parser(text).parse()


class _Parser:
    """Recursive descent: `or` binds less than `and`, and that less than `not`."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens = list(self._split())
        self.place = self.depth = 0
        self.columns: dict[str, None] = {}

    def parse(self) -> Condition:
        node = self._either()
        if self._next.kind != "end":
            self._fail("'and', 'or' or the end")
        return Condition(self.text, list(self.columns), node)

    def _split(self) -> Iterator[_Token]:
        place, end = 0, len(self.text.rstrip())
        while place < end:
            found = _TOKEN.match(self.text, place)
            if found is None:
                start = place + len(self.text[place:]) - len(self.text[place:].lstrip())
                raise ValueError(f"cannot read the condition {self.text!r} at {self.text[start : start + 20]!r}")
            kind, value = str(found.lastgroup), found[str(found.lastgroup)]
            place = found.end()
            if kind == "name" and value.lower() in _WORDS:
                kind, value = "word", value.lower()
            elif kind == "quoted":
                kind, value = "name", value[1:-1].replace('""', '"')
            yield _Token(kind, value, found.start(str(found.lastgroup)))
        yield _Token("end", "", end)

    @property
    def _next(self) -> _Token:
        return self.tokens[self.place]

    def _accept(self, *values: str) -> str | None:
        """Pass over the next token if it is one of some words or symbols; returns it."""
        token = self._next
        if token.kind not in ("word", "symbol") or token.value not in values:
            return None
        self.place += 1
        return str(token.value)

    def _expect(self, value: str) -> None:
        if not self._accept(value):
            self._fail(f"{value!r}")

    def _fail(self, expected: str) -> NoReturn:
        found = self.text[self._next.start : self._next.start + 20]
        place = f"at {found!r}" if found else "at its end"
        raise ValueError(f"cannot read the condition {self.text!r} {place}: expected {expected}")

    def _either(self) -> Node:
        parts = [self._both()]
        while self._accept("or"):
            parts.append(self._both())
        return _combined("or", parts)

    def _both(self) -> Node:
        parts = [self._one()]
        while self._accept("and"):
            parts.append(self._one())
        return _combined("and", parts)

    def _one(self) -> Node:
        self.depth += 1
        if self.depth > _DEEPEST:
            raise ValueError(f"the condition {self.text[:60]!r}... is nested more than {_DEEPEST} deep")
        if self._accept("not"):
            node: Node = Negation(self._one())
        elif self._accept("("):
            node = self._either()
            self._expect(")")
        else:
            node = self._comparison()
        self.depth -= 1
        return node

    def _comparison(self) -> Node:
        if self._next.kind != "name":
            self._fail("the name of a column")
        name = self._next.value
        self.columns[name] = None
        self.place += 1
        if symbol := self._accept(*_COMPARISONS, "<>"):
            return Comparison(name, "!=" if symbol == "<>" else symbol, self._value())
        if self._accept("is"):
            is_missing = not self._accept("not")
            self._expect("null")
            missing = Comparison(name, _NULL)
            return missing if is_missing else Negation(missing)
        is_inverted = bool(self._accept("not"))
        node = self._membership(name)
        return Negation(node) if is_inverted else node

    def _membership(self, name: str) -> Node:
        word = self._accept("in", "like")
        if word == "like":
            pattern = self._value()
            if not isinstance(pattern, str):
                raise ValueError(f"cannot read the condition {self.text!r}: 'like' needs a text, got {pattern!r}")
            return Comparison(name, _LIKE, pattern)
        if word is None:
            self._fail("a comparison such as '=', '<', 'in', 'like' or 'is null'")
        self._expect("(")
        parts: list[Node] = [Comparison(name, "=", self._value())]
        while self._accept(","):
            parts.append(Comparison(name, "=", self._value()))
        self._expect(")")
        return _combined("or", parts)

    def _value(self) -> str | int | float | bool:
        token = self._next
        if word := self._accept("true", "false"):
            return word == "true"
        if token.kind not in ("number", "text"):
            self._fail("a value: 'text', a number, true or false")
        self.place += 1
        if token.kind == "text":
            return str(token.value)[1:-1].replace("''", "'")
        return int(token.value) if re.fullmatch(r"[+-]?\d+", token.value) else float(token.value)


def _combined(word: str, parts: Sequence[Node]) -> Node:
    """Combine parts in halves: who evaluates a long chain or list recurses a few levels."""
    if len(parts) == 1:
        return parts[0]
    half = len(parts) // 2
    return Combination(word, _combined(word, parts[:half]), _combined(word, parts[half:]))


def _compare(text: str, table: pa.Table, node: Comparison) -> Any:  # noqa: ANN401 - pyarrow has no types
    """Compare a column with a value; a table that lacks the column, or has no values in it, gives nulls."""
    name, value = node.name, node.value
    type_ = table.schema.field(name).type if name in table.column_names else pa.null()
    if node.operator == _NULL:
        return pc.is_null(table[name]) if name in table.column_names else pa.array([True] * table.num_rows)
    if pa.types.is_null(type_):
        return pa.nulls(table.num_rows, pa.bool_())
    if not _fits(type_, node):
        hint = ""
        if pa.types.is_string(type_) and name not in ("id", "text", "image"):
            hint = f"; all columns of a CSV file are texts: encode with --keep {name}:number to compare numbers"
        raise ValueError(
            f"the condition {text!r} compares the column {name!r} of type {type_} with {value!r} of another type{hint}"
        )
    if node.operator == _LIKE:
        return pc.match_like(table[name], value)
    try:
        return _COMPARISONS[node.operator](table[name], column_value(type_, value))
    except (pa.ArrowException, OverflowError) as error:
        raise ValueError(
            f"the condition {text!r} cannot compare the column {name!r} with {value!r}: {error}"
        ) from error


def column_value(type_: pa.DataType, value: Any) -> pa.Scalar:  # noqa: ANN401
    """A value of a condition as it is compared with a column of some type."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return pa.scalar(value)
    if pa.types.is_timestamp(type_) and type_.tz is not None:
        with suppress(pa.ArrowInvalid):  # the text names a zone, or the hour is there twice
            return pc.assume_timezone(pa.scalar(value).cast(pa.timestamp(type_.unit)), type_.tz)
    return pa.scalar(value).cast(type_)


def _fits(type_: pa.DataType, node: Comparison) -> bool:
    is_text = pa.types.is_string(type_) or pa.types.is_large_string(type_)
    if node.operator == _LIKE:
        return is_text
    if isinstance(node.value, bool):
        return bool(pa.types.is_boolean(type_))
    if isinstance(node.value, str):
        return is_text or bool(pa.types.is_temporal(type_))
    return any(check(type_) for check in (pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal))
