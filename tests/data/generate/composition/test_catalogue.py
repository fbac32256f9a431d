import logging

import pytest

from conjoin.data import read_catalogue
from tiny_catalogue import write_catalogue


def row(sku, **change):
    """A product; two of them with equal columns make a catalogue."""
    return {"sku": sku, "image": "0.png", "title": f"thing {sku}", "color": "red", "size": "s"} | change


def described(catalogue):
    """The attributes that each product has."""
    return [{name: value for name, value in row.items() if isinstance(value, str)}
            for row in catalogue.attributes.to_dict("records")]  # fmt: skip


FOUR = [row("1"), row("2", color="blue", size="m"), row("3"), row("4", color="blue", size="m")]


def test_columns_are_attributes(tmp_path):
    rows = [row("1", color=" Red "), row("2", color="blue", size="none"), row("3", color="", size="m"), row("4"),
            row("5", color="blue", size="m")]  # fmt: skip
    catalogue = read_catalogue(write_catalogue(tmp_path, rows))
    assert described(catalogue)[:3] == [{"color": "red", "size": "s"}, {"color": "blue"}, {"size": "m"}]
    assert catalogue.products.to_dict("records")[1] == {
        "idx": "2", "title": "thing 2", "class": "", "country": "", "language": "en", "family": "id 2",
    }  # fmt: skip


def test_facts_are_not_attributes(tmp_path):
    path = write_catalogue(tmp_path)
    catalogue = read_catalogue(path, columns={"group": "family"})
    assert [*catalogue.attributes] == ["color", "material", "style", "shape"]
    assert [*catalogue.products["class"][:2]] == ["shoes", "bags"]
    assert [*catalogue.products["language"][:3]] == ["en", "th", "id"]
    assert [*catalogue.products["family"][2:4]] == ["group f0", "group f1"]
    named = read_catalogue(path, attributes=["class", "color"])
    assert [*named.attributes] == ["class", "color"]
    assert {*named.products["class"]} == {*named.attributes["class"]} == {"shoes", "bags"}


def test_json_lines_may_hold_objects_and_numbers(tmp_path):
    rows = [
        {"id": number, "image": "0.png", "title": "a", "attribute": {"color": colour, "Depth": depth}}
        for number, (colour, depth) in enumerate([("red", 1), ("red", 2), ("blue", 1), (None, 2)])
    ]
    catalogue = read_catalogue(write_catalogue(tmp_path, rows, "shop.jsonl"))
    expected = [{"color": "red", "Depth": "1"}, {"color": "red", "Depth": "2"}, {"color": "blue", "Depth": "1"}]
    assert described(catalogue) == [*expected, {"Depth": "2"}]


def test_objects_may_have_different_keys(tmp_path):
    told = [{"color": "red"}, {"color": "blue", "size": "s"}, {}, {"size": "m"}, {"color": "red", "size": "s"}]
    told += [{"color": "blue"}, {"size": "m"}, None]
    rows = [{"id": n, "image": "0.png", "title": "a", "attribute": each} for n, each in enumerate(told)]
    path = write_catalogue(tmp_path, rows, "shop.jsonl")
    catalogue = read_catalogue(path)
    assert described(catalogue) == [each or {} for each in told]


def test_columns_that_are_guessed_and_useless_are_named(tmp_path, caplog):
    rows = [one | {"note": f"text {place}", "shop": "a", "none": ""} for place, one in enumerate(FOUR)]
    with caplog.at_level(logging.WARNING):
        assert [*read_catalogue(write_catalogue(tmp_path, rows)).attributes] == ["color", "size"]
    assert "unlike 'note' (4 values), 'shop' (1 values), 'none' (0 values), which are left out" in caplog.text


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({"image": "absent.png"}, {}, r"row 1 \(id '2'\): image .*absent.png.*: no such file"),
        ({"sku": "a b"}, {}, "a product id must be .* of one word, got 'a b'"),
        ({}, {"attributes": ["colour"]}, "no column 'colour'; the columns are .*; did you mean 'color'"),
        ({}, {"attributes": ["color", "shop"]}, r"an attribute needs two values, .*unlike 'shop' \(1 values\)"),
        ({}, {"attributes": ["note"]}, r"one that several products have, unlike 'note' \(4 values\)"),
        ({}, {"attributes": []}, "no attribute column; the columns are 'sku', 'image'"),
    ],
)
def test_bad_input_is_named(tmp_path, change, options, message):
    rows = [one | {"shop": "a", "empty": "", "note": str(place)} for place, one in enumerate(FOUR)]
    rows[1] |= change
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        read_catalogue(write_catalogue(tmp_path, rows), **options)


def test_lists_are_no_attributes(tmp_path):
    rows = [one | {"color": ["red", "blue"]} for one in FOUR]
    with pytest.raises(ValueError, match=r"the attribute 'color' holds lists; expected a text or number"):
        read_catalogue(write_catalogue(tmp_path, rows, "shop.jsonl"))
