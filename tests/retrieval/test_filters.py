"""Conditions on kept columns: what they find, and what they refuse."""

import datetime

import numpy as np
import pyarrow as pa
import pytest

from conjoin.retrieval.filters import parse_condition
from conjoin.retrieval.kept_rows import KeptRows

BERLIN = pa.timestamp("us", "Europe/Berlin")
FIRST = pa.table(
    {
        "id": ["a", "b", "c"],
        "category": ["shoes", "hats", None],
        "price": pa.array([10, 60, 20], pa.int64()),
        "on sale": [True, False, None],
        "day": [datetime.date(2026, 1, 1), None, datetime.date(2026, 3, 1)],
        "tags": [["x"], [], None],
        "sent": pa.array([datetime.datetime(2026, 1, day, 22, 30) for day in (30, 31)] + [None], BERLIN),
    }
)
SECOND = pa.table({"id": ["d", "e"], "category": ["shoes", "it's"], "price": pa.array([49.5, None], pa.float64())})
ROWS = KeptRows([3, 2], lambda number, columns: (FIRST, SECOND)[number])


def select(condition):
    return "".join("abcde"[place] for place in parse_condition(condition).select(ROWS))


@pytest.mark.parametrize(
    ("condition", "found"),
    [
        ("category = 'shoes' and price < 50", "ad"),
        ("category = 'shoes' AND price < 49.5", "a"),
        ("category = 'it''s'", "e"),
        ("price >= 20", "bcd"),
        ("price <> 20", "abd"),
        ("price != 1e1 and price > -5", "bcd"),
        ("not category = 'shoes'", "be"),
        ("category is null", "c"),
        ("price is not null and category is not null", "abd"),
        ("category in ('hats', 'it''s')", "be"),
        ("category not in ('hats')", "ade"),
        ("category like 'sh%'", "ad"),
        ("category not like '_h%'", "be"),
        ('"on sale" = true', "a"),
        ('"on sale" is null', "cde"),
        ("day < '2026-02-01'", "a"),
        ("sent >= '2026-01-31'", "b"),
        ("sent <= '2026-01-31 23:30:00'", "ab"),
        ("sent < '2026-01-31T23:00:00Z'", "ab"),
        ("sent < '2026-01-31T23:00:00+01:00'", "a"),
        ("id = 'e' or id = 'a' and price > 100", "e"),
        ("(id = 'e' or id = 'a') and price > 5", "a"),
        ("not (id = 'a' or not (price = 60))", "b"),
        ("not not price = 60", "b"),
        ("tags is null", "cde"),
        ("category = 'none of them'", ""),
    ],
)
def test_finds(condition, found):
    assert select(condition) == found


def test_nothing_is_evaluated():
    with pytest.raises(ValueError, match="cannot read the condition"):
        select("__import__('os').system('true')")


@pytest.mark.parametrize(
    ("condition", "message"),
    [
        ("", r"at its end: expected the name of a column"),
        ("price", "at its end: expected a comparison such as"),
        ("price <", "at its end: expected a value: 'text', a number, true or false"),
        ("price < 5 price", "at 'price': expected 'and', 'or' or the end"),
        ("price = = 5", "at '= 5': expected a value"),
        ("(price = 5", r"at its end: expected '\)'"),
        ("price in 5", r"at '5': expected '\('"),
        ("price in ()", r"at '\)': expected a value"),
        ("price is 5", "at '5': expected 'null'"),
        ("price = 'open", r"""at "'open\""""),
        ("price ; drop", "at '; drop'"),
        ("price = 5x", "at '5x'"),
        ("5 = price", "at '5 = price': expected the name of a column"),
        ("category like 5", "'like' needs a text, got 5"),
        ("(" * 200 + "price = 5" + ")" * 200, "nested more than 100 deep"),
    ],
)
def test_syntax_errors_show_the_place(condition, message):
    with pytest.raises(ValueError, match=message):
        parse_condition(condition)


@pytest.mark.parametrize(
    ("condition", "message"),
    [
        ("colour = 'red'", r"the unknown column 'colour'; there are \['category', 'day', 'id', 'on sale', 'price'"),
        ("price = 'cheap'", "the column 'price' of type int64 with 'cheap' of another type"),
        ("category = 5", "'category' of type string with 5 of another type; all columns of a CSV file are texts"),
        ("price = true", "the column 'price' of type int64 with True of another type"),
        ("price like '5%'", "the column 'price' of type int64 with '5%' of another type"),
        ("tags = 'x'", "the column 'tags' of type list.* with 'x' of another type"),
        ("day < 'soon'", "cannot compare the column 'day' with 'soon'"),
        ("price < " + "9" * 40, "cannot compare the column 'price' with 9999"),
    ],
)
def test_columns_and_types(condition, message):
    with pytest.raises(ValueError, match=message):
        select(condition)


def test_only_kept_columns_can_be_read_as_numbers():
    for condition in ("id > 5", "category > 5"):
        with pytest.raises(ValueError, match="with 5 of another type") as error:
            select(condition)
        assert ("--keep" in str(error.value)) == condition.startswith("category")


def test_no_rows():
    assert parse_condition("x = 1").select(KeptRows([1], lambda n, c: pa.table({"x": [2]}))).tolist() == []
    assert parse_condition("x = 1").select(ROWS.__class__([1], lambda n, c: pa.table({"x": [1]}))).dtype == np.int64
