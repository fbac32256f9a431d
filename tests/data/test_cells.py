"""What cells of tables mean: no value, ids, numbers, texts and images."""

import csv

import datasets
import pytest

from conjoin.data import load_pairs


def read(path, column, cells, **options):
    """Load a table with the texts `a0`, `a1` ... and another column."""
    with (path / "a.csv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([["text", column], *([f"a{row}", cell] for row, cell in enumerate(cells))])
    return load_pairs(path / "a.csv", only="text", **options)


@pytest.mark.parametrize(
    ("numbers", "texts"),
    [
        ((1299, 129900, 1299999.5, 1299, 12), ("Rs. 1,299", "₹1,29,900", "₹12,99,999.50", "US$ 1,299.00", "A$12")),
        ((-5, -1299, -5, 0.75, 45), ("\u22125", "\u22121.299,00 €", "$-5", "$.75", "4.5e1")),
        ((1299.5, 12, 12.5, 1299, 1299), ("1'299.5 CHF", "CHF 12.–", "12,5", "1\u202f299 EUR", "INR 1,299.00/-")),
        ((1.299, 0.5, 1000.25, 2.5), ("1.299", "0.5", "1000.25", "2.500")),
        ((1299, 899, 49.9), ("1.299", "899", "49,90")),
        ((1299, 1299, 1299), ("1.299", "1,299", "1.299 €")),
        ((None,) * 5, ("N/A", " - ", "null", "–", "nan")),
    ],
)
@pytest.mark.parametrize("streaming", [False, True])
def test_numbers_and_prices(tmp_path, numbers, texts, streaming):
    rows = read(tmp_path, "price", texts, keep=["price:number"], streaming=streaming)
    assert tuple(row["metadata"]["price"] for row in rows) == numbers


@pytest.mark.parametrize("text", ["size 43", "10-20", "27.11.2026", "1,2,3", "12 34", "5 €/kg", "on request"])
def test_other_texts_are_no_numbers(tmp_path, text):
    with pytest.raises(ValueError, match=r"row 1 .*price is .*; expected a number, such as 9.5 or US\$ 1,299.00"):
        read(tmp_path, "price", ["3", text], keep=["price:number"])


def test_no_value_is_one_thing(tmp_path):
    cells = ["Kitchen ", " Kitchen", "N/A", "nan", "-", "<b>Kitchen</b>"]
    rows = read(tmp_path, "room", cells, keep=["room"], columns={"group": "room"})
    assert [row["room"] for row in rows["metadata"]] == ["Kitchen", "Kitchen", None, None, None, "Kitchen"]
    assert rows["group"][:5] == ["Kitchen", "Kitchen", None, None, None]
    floats = datasets.Dataset.from_dict({"text": ["a", "b", "c"], "group": [float("nan"), 3.0, float("nan")]})
    assert load_pairs(floats, only="text", columns={"group": "group"})["group"][:] == [None, "3", None]
