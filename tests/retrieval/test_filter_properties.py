"""Random conditions find the rows that Python's own evaluation finds; random texts are conditions or a ValueError."""

import operator
import re

import pyarrow as pa
import pytest

pytest.importorskip("hypothesis")

from hypothesis import example, given, settings, strategies as st

from conjoin.retrieval.filters import parse_condition
from conjoin.retrieval.kept_rows import KeptRows

TEXTS = st.text(st.sampled_from("ab'\" %_é"), max_size=3)
COLUMNS = {
    "price": (pa.int64(), st.integers(-3, 3)),
    "weight": (pa.float64(), st.sampled_from([-1.5, 0.0, 0.5, 2.0, 1e300])),
    "kind of": (pa.string(), TEXTS),
    "on": (pa.bool_(), st.booleans()),
}
ORDER = {"=": operator.eq, "!=": operator.ne, "<>": operator.ne, "<": operator.lt, "<=": operator.le}
ORDER |= {">": operator.gt, ">=": operator.ge}


def name_of(column):
    return '"kind of"' if " " in column else column


def literal(value):
    if isinstance(value, bool):
        return str(value).upper()
    return "'" + value.replace("'", "''") + "'" if isinstance(value, str) else repr(value)


def like(pattern, value):
    parts = {"%": ".*", "_": "."}
    return (
        re.fullmatch("".join(parts.get(letter, re.escape(letter)) for letter in pattern), value, re.DOTALL) is not None
    )


@st.composite
def comparisons(draw):
    """The text of a comparison, and the function of a row that it stands for: True, False or None."""
    column = draw(st.sampled_from(list(COLUMNS)))
    values = COLUMNS[column][1]
    if column in ("price", "weight"):
        values = st.integers(-3, 3) | st.sampled_from([-1.5, 0.5, 2.0])
    name = name_of(column)
    kind = draw(st.sampled_from(["compare", "in", "null", "like"]))
    no = draw(st.booleans())
    if kind == "null":
        return f"{name} is {'not ' if no else ''}null", lambda row: (row[column] is None) != no
    if kind == "like" and column == "kind of":
        pattern = draw(st.text(st.sampled_from("ab%_"), max_size=3))
        text = f"{name} {'NOT ' if no else ''}LIKE {literal(pattern)}"
        return text, lambda row: None if row[column] is None else like(pattern, row[column]) != no
    if kind == "in":
        chosen = draw(st.lists(values, min_size=1, max_size=3))
        text = f"{name} {'not ' if no else ''}in ({', '.join(map(literal, chosen))})"
        return text, lambda row: None if row[column] is None else (row[column] in chosen) != no
    symbol, value = draw(st.sampled_from(["=", "!=", "<>"] if column == "on" else list(ORDER))), draw(values)
    text = f"{name}{draw(st.sampled_from([' ', '']))}{symbol}{literal(value)}"
    return text, lambda row: None if row[column] is None else ORDER[symbol](row[column], value)


def negated(part):
    text, holds = part
    return f"not ({text})", lambda row: None if holds(row) is None else not holds(row)


def combined(parts):
    word, (first, one), (second, other) = parts

    def holds(row):
        found = [one(row), other(row)]
        deciding = word == "or"  # a truth value that decides whatever the other is
        return deciding if deciding in found else None if None in found else not deciding

    return f"({first}) {word} ({second})", holds


CONDITIONS = st.recursive(
    comparisons(),
    lambda parts: parts.map(negated) | st.tuples(st.sampled_from(["and", "or"]), parts, parts).map(combined),
    max_leaves=6,
)
ROWS = st.lists(
    st.fixed_dictionaries({name: st.none() | values for name, (_, values) in COLUMNS.items()}), min_size=1, max_size=6
)


@given(CONDITIONS, ROWS, st.integers(1, 4))
@settings(max_examples=150)
def test_conditions_find_what_python_finds(condition, rows, size):
    text, holds = condition
    tables = [
        pa.table({name: pa.array([row[name] for row in some], type_) for name, (type_, _) in COLUMNS.items()})
        for some in (rows[start : start + size] for start in range(0, len(rows), size))
    ]
    kept = KeptRows([len(table) for table in tables], lambda number, columns: tables[number])
    assert parse_condition(text).select(kept).tolist() == [place for place, row in enumerate(rows) if holds(row)]


WORDS = ["price", '"kind of"', "and", "or", "not", "in", "is", "null", "like", "(", ")", ",", "=", "<", "<>", "'a'"]
WORDS += ["1", "-.5e3", "9" * 5000, "1e999", "true", "'", '"', "''", "\0", "\udc80", "é", ";", "{{", "--"]
TABLE = pa.table({"price": pa.array([1, None]), "kind of": pa.array(["a", None])})


@given(st.text(max_size=30) | st.lists(st.sampled_from(WORDS), max_size=12).map(" ".join))
@example("not " * 2000 + "price = 1")
@example("(" * 5000)
@example("price = 1 or " * 5000 + "price = 2")
@example("price = 1 and " * 2000 + "price = 1")
@example("price in (" + ", ".join(map(str, range(5_000))) + ")")
@example("price = " + "9" * 5000)
@example('"kind of" like \'' + "%a" * 2000 + "'")
@example("\"kind of\" = '\udc80'")
@settings(max_examples=300)
def test_every_text_is_a_condition_or_a_value_error(text):
    try:
        found = parse_condition(text).select(KeptRows([2], lambda number, columns: TABLE))
    except ValueError:
        return
    assert set(found.tolist()) <= {0, 1}


def test_long_lists_and_chains():
    kept = KeptRows([2], lambda number, columns: TABLE)
    values = ", ".join(map(str, range(5_000)))
    assert parse_condition(f"price in ({values})").select(kept).tolist() == [0]
    assert parse_condition(f"price not in ({values})").select(kept).tolist() == []
    assert parse_condition("price = 7 or " * 2000 + "price = 1").select(kept).tolist() == [0]
