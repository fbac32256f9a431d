"""Tables as spreadsheets and shops export them: read as they are meant, or refused by the line."""

import os

import datasets
import numpy as np
import pandas as pd
import pytest
from PIL import Image

from conjoin.data import QueryTable, load_pairs

CP1252 = "id;text\n1;Grüne Lampe\n".encode("cp1252")


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"sep=;\nid;text\n1;a, b\n", [("1", "a, b")]),
        (b'id;text;"price, EUR"\n1;a;3\n', [("1", "a")]),
        (b"id;text;price, EUR\n1;a;3\n", [("1", "a")]),
        (b"id\ttext\r\n1\ta\r\n", [("1", "a")]),
        (b"id|text\n1|a\n", [("1", "a")]),
        (b"id,text,,\n1,a,,\n2,b\n", [("1", "a"), ("2", "b")]),
        (b"id,text\n\n1,a\n,\n\n2,b\n", [("1", "a"), ("2", "b")]),
        (b"text\n\na\n\nb\n", [("0", "a"), ("1", "b")]),
        (b'id,text\n1,"a, b\nc, d"\n2,"5"" pipe"\n', [("1", "a, b\nc, d"), ("2", '5" pipe')]),
        (b"text,id\n" + b"a" * 140_000 + b",1\n", [("1", "a" * 140_000)]),
        ("\ufeffid,text\n1,ü\n".encode(), [("1", "ü")]),
        ("id,text\n1,ü\n".encode("utf-16"), [("1", "ü")]),
        (CP1252, [("1", "Grüne Lampe")]),
    ],
)
def test_what_is_read(tmp_path, content, expected, streaming, caplog):
    (tmp_path / "a.csv").write_bytes(content)
    rows = load_pairs(tmp_path / "a.csv", only="text", streaming=streaming)
    assert [(row["id"], row["text"]) for row in rows] == expected
    assert ("line 2: not valid UTF-8 (byte 0xfc); read as Windows-1252" in caplog.text) == (content == CP1252)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'id,image,text\n1,a,"wide\n2,b,mouse\n3,c,the 24" desk\n4,d,e\n', r"lines 2 to 4: .*a cell begins with a"),
        (
            b'id,image,text\n1,a,"wide\n2,b,mouse\n3,c,desk 24"\n4,d,e\n',
            "the lines 2 to 4 are one row, because a cell",
        ),
        (b'id,text\n\n1,"wide\n2,mouse\n', "lines 3 to 4: unexpected end of data"),
        (b"image,text\n" + b"[" * 3000 + b",a\n", r"row 0 \(id '0'\): image '.*\[\[\[.*: no such file"),
    ],
)
def test_what_is_refused(tmp_path, content, message):
    (tmp_path / "a.csv").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_pairs(tmp_path / "a.csv", only="image" if b"image,text\n[" in content else "text")


@pytest.mark.parametrize("streaming", [False, True])
def test_an_empty_cell_is_no_value_everywhere(tmp_path, streaming):
    (tmp_path / "a.csv").write_text("id,text,group\n1,a,\n2,b,x\n3,,x\n")
    rows = load_pairs(
        tmp_path / "a.csv", only="text", columns=["group=group"], keep=["group"], on_error="skip", streaming=streaming
    )
    assert [row["group"] for row in rows] == [row["metadata"]["group"] for row in rows] == [None, "x", "x"]
    assert [row["problem"] for row in rows] == [None, None, "row 2 (id '3'): the text is missing"]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([1001.0, 2.5], ["1001", "2.5"]),
        ([7, 8], ["7", "8"]),
        ([b"a", "é".encode()], ["a", "é"]),
        (["007", " x"], ["007", "x"]),
        ([True, False], ["True", "False"]),
        ([1.0, np.nan], "row 1: the id is missing"),
        (["a", None], "row 1: the id is missing"),
        (["a", "  "], "row 1: the id is missing"),
        ([b"a", b"\xff"], "the column 'id' holds 'utf-8' codec can't decode byte 0xff"),
        ([["a"], ["b"]], r"the column 'id' holds \['a'\]; expected texts or numbers"),
        ([1e22, 2.0], r"the column 'id' holds 1e\+22, a 64-bit float that lost digits"),
    ],
)
def test_ids(tmp_path, ids, expected, streaming):
    pd.DataFrame({"id": ids, "text": ["x", "y"]}).to_parquet(tmp_path / "a.parquet")

    def read(**options):
        return [row["id"] for row in load_pairs(tmp_path / "a.parquet", only="text", streaming=streaming, **options)]

    if isinstance(expected, list):
        assert read() == expected
        return
    with pytest.raises(ValueError, match=expected):
        read()
    if "missing" in expected:
        assert read(on_error="skip")[1] == "row 1"


def test_ids_of_other_tables(tmp_path):
    rows = {"query": ["a", "b"], "positive": ["x", "y"], "id": [1001.0, 2.0], "positive_id": [7.0, 2.5]}
    table = QueryTable(datasets.Dataset.from_dict(rows))
    assert table.positives == [("7",), ("2.5",)] and [table[row]["id"] for row in (0, 1)] == ["1001", "2"]
    for wrong, message in (
        ({"id": [1.0, np.nan]}, "row 1: the id is missing"),
        ({"positive_id": [7.0, np.nan]}, "one id for"),
    ):
        with pytest.raises(ValueError, match=message):
            QueryTable(datasets.Dataset.from_dict(rows | wrong))
    (tmp_path / "a.jsonl").write_text('{"id": 1.0, "text": "a"}\n{"id": "x", "text": "b"}\n{"id": NaN, "text": "c"}\n')
    pairs = load_pairs(tmp_path / "a.jsonl", only="text", on_error="skip")
    assert pairs["id"][:] == ["1", "x", "row 2"]


@pytest.mark.parametrize("streaming", [False, True])
def test_json_of_mixed_types(tmp_path, streaming):
    (tmp_path / "a.jsonl").write_text(
        '{"id": 1, "text": "a"}\n{"id": "x", "text": ["b", "c"], "late": 3}\n{"id": 2.5, "text": 7}\n'
    )
    (tmp_path / "twice.jsonl").write_text('{"id": 1, "id": 2, "text": "a"}\n')
    with pytest.raises(ValueError, match=r"twice.jsonl' cannot be read: .*/id.* was specified twice"):
        load_pairs(tmp_path / "twice.jsonl", only="text")
    own = datasets.Dataset.from_json(str(tmp_path / "a.jsonl"), cache_dir=str(tmp_path / "own"))
    for source in (tmp_path / "a.jsonl", own.to_iterable_dataset() if streaming else own):
        rows = list(load_pairs(source, only="text", streaming=streaming))
        assert [(row["id"], row["text"]) for row in rows] == [("1", "a"), ("x#0", "b"), ("x#1", "c"), ("2.5", "7")]
        assert [row["group"] for row in rows] == ["1", "x", "x", "2.5"]
    (tmp_path / "b.jsonl").write_text(
        '{"text": "a", "kind": "b", "price": 1.299}\n{"text": "c", "kind": 2, "price": "1.299,00"}\n'
        '{"text": {"en": "d"}, "kind": ["e", "f"], "price": "-"}\n'
    )
    own = datasets.Dataset.from_json(str(tmp_path / "b.jsonl"), cache_dir=str(tmp_path / "own"))
    options = {"columns": ["text=text,kind"], "keep": ["price:number"], "only": "text", "on_error": "skip"}
    rows = list(load_pairs(own, streaming=streaming, **options))
    assert [row["text"] for row in rows] == ["a b", "c 2", '{"en": "d"}'] and "expected one text in each" in rows[2][
        "problem"
    ]
    assert [row["metadata"]["price"] for row in rows] == [1.299, 1299.0, None]
    assert [row["text"] for row in load_pairs(own, only="text")] == ["a", "c", '{"en": "d"}']


def test_a_changed_file_of_the_same_time_is_read_again(tmp_path):
    for text in ("a", "other"):
        (tmp_path / "a.csv").write_text(f"text\n{text}\n")
        os.utime(tmp_path / "a.csv", (1_700_000_000, 1_700_000_000))
        assert load_pairs(tmp_path / "a.csv", only="text")["text"][:] == [text]


def test_no_numbers(tmp_path, caplog):
    cells = ["3", "N/A", "NA", "-", "n/a", "null", " ", "on request"]
    (tmp_path / "a.csv").write_text("text,price\n" + "".join(f"a{n},{cell}\n" for n, cell in enumerate(cells)))
    with pytest.raises(ValueError, match=r"row 7 \(id '7'\): price is 'on request'; expected a number"):
        load_pairs(tmp_path / "a.csv", only="text", keep=["price:number"])
    rows = load_pairs(tmp_path / "a.csv", only="text", keep=["price:number"], on_error="skip")
    assert [row["metadata"]["price"] for row in rows] == [3.0] + [None] * 7 and set(rows["problem"]) == {None}
    assert "price is 'on request'" in caplog.text
    prices = datasets.Dataset.from_dict({"text": ["a", "b"], "price": [float("nan"), 3.0]})
    assert [row["metadata"]["price"] for row in load_pairs(prices, only="text", keep=["price"])] == [None, 3.0]


@pytest.mark.parametrize(
    ("cell", "names"),
    [
        ("red.png|blue.png", ["red", "blue"]),
        ("red.png; blue.png", ["red", "blue"]),
        ('"red.png,blue.png"', ["red", "blue"]),
        ('"[""red.png"", ""blue.png""]"', ["red", "blue"]),
        ("red.png|", ["red"]),
    ],
)
@pytest.mark.parametrize("streaming", [False, True])
def test_several_pictures_in_a_cell(image_folder, cell, names, streaming):
    (image_folder / "a.csv").write_text(f"image,text\n{cell},a\ngreen.png,b\n")
    first, second = load_pairs(image_folder / "a.csv", streaming=streaming)
    images, other = ([each["image"]] if len(names) == 1 else each["image"] for each in (first, second))
    assert [image["path"] for image in images] == [str(image_folder / f"{name}.png") for name in names]
    assert [image["path"] for image in other] == [str(image_folder / "green.png")]


def test_the_first_rows_of_a_stream_say_whether_there_are_several_pictures(image_folder):
    for alone in (1, 100):
        (image_folder / "a.csv").write_text("image,text\n" + "green.png,b\n" * alone + "red.png|blue.png,a\n")
        counts = [1] * alone + [2]
        assert [len(row["image"]) for row in load_pairs(image_folder / "a.csv")] == counts
        stream = load_pairs(image_folder / "a.csv", streaming=True)
        if alone == 1:
            assert [len(row["image"]) for row in stream] == counts
    with pytest.raises(ValueError, match=r"row 100 \(id '100'\): it has 2 images, .*; read without streaming"):
        list(stream)
    rows = list(load_pairs(image_folder / "a.csv", streaming=True, on_error="skip"))
    assert [row["problem"] is None for row in rows] == [True] * 100 + [False]


@pytest.mark.parametrize("streaming", [False, True])
def test_rows_of_a_further_picture_of_a_product(image_folder, streaming, caplog):
    """As Shopify exports them: the same handle, no SKU and no title."""
    rows = ["Handle,Title,Variant SKU,Image Src", "chair,Chair,A1,red.png", "chair,,,green.png", "chair,,,blue.png"]
    rows += ["chair,,A2,", "lamp,Desk lamp,A3,green.png", "lamp,,,red.png"]
    (image_folder / "shop.csv").write_text("\n".join(rows) + "\n")
    found = list(load_pairs(image_folder / "shop.csv", streaming=streaming, on_error="skip"))
    assert [(row["id"], row["group"]) for row in found] == [("A1", "chair"), ("A2", "chair"), ("A3", "lamp")]
    assert [row["problem"] is None for row in found] == [True, False, True]
    several = "some" if streaming else "3 of 6"
    assert f"{several} rows, such as row 1, only hold a further image of their 'Handle', and are left" in caplog.text


def test_the_first_row_of_an_id_is_kept(image_folder):
    (image_folder / "a.csv").write_text("id,image,text\nA,red.png,a\n\nB,green.png,b\nA,blue.png,c\nA,red.png,d\n")
    with pytest.raises(ValueError, match="row 2: the id 'A' occurs twice, in rows 0 and 2; choose a column of unique"):
        load_pairs(image_folder / "a.csv")
    rows = load_pairs(image_folder / "a.csv", on_error="skip")
    assert rows["problem"][:] == [
        None,
        None,
        "row 2: the id 'A' occurs twice, in rows 0 and 2; the first is kept",
        None,
    ]
    assert rows["id"][:] == ["A#0", "B", "A#row 2", "A#1"]


def test_the_name_of_a_file_that_is_not_utf_8(tmp_path):
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    (tmp_path / "caf\udce9.png").write_bytes((tmp_path / "a.png").read_bytes())
    with pytest.raises(FileNotFoundError, match=r"row 1 \(id 'caf.*udce9.png'\): .*no such file"):
        load_pairs(tmp_path, only="image")
    rows = load_pairs(tmp_path, only="image", on_error="skip")
    assert rows["problem"][0] is None and "no such file" in rows["problem"][1]


def test_a_stream_of_rows_without_some_values():
    def rows():
        for number in range(5):
            yield {"id": number, "text": None if number == 3 else "a", "image": None if number == 2 else b"x"}

    found = list(load_pairs(datasets.IterableDataset.from_generator(rows), only="both", on_error="skip"))
    assert [row["problem"] for row in found] == [
        None, None, "row 2 (id '2'): the image is missing", "row 3 (id '3'): the text is missing", None,
    ]  # fmt: skip
    assert found[4]["image"] == {"bytes": b"x", "path": None}
