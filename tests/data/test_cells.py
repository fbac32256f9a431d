"""What cells of tables mean: no value, ids, numbers, texts and images."""

import base64
import csv
import json

import datasets
import pytest
from PIL import Image

from conjoin.data import load_pairs
from conjoin.data.cells import row_kind
from conjoin.processing import load_image
from conjoin.processing.urls import ALLOW_URLS


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
        (
            (9, 9.9, 12.5, 1299, 1299),
            ("from $9", "ab 9,90 €", "12,50 Euro inkl. Steuer", "１２９９円(税込)", "S/ 1299"),
        ),
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


@pytest.mark.parametrize(
    "text", ["size 43", "10-20", "27.11.2026", "1,2,3", "12 34", "5 €/kg", "on request", "$1.2k", "1,2 Mio. €"]
)
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


@pytest.fixture
def shop(tmp_path, monkeypatch):
    """A folder with three pictures; `{"red": base64, ...}`."""
    monkeypatch.setenv(ALLOW_URLS, "public")
    encoded = {}
    for name in ("red", "green", "blue"):
        Image.new("RGB", (8, 8), name).save(tmp_path / f"{name}.png")
        encoded[name] = base64.b64encode((tmp_path / f"{name}.png").read_bytes()).decode()
    return tmp_path, encoded


def images_of(row):
    """The images of a row: the colours of pictures, and URLs."""
    images = row["image"] if isinstance(row["image"], list) else [row["image"]]
    colours = {(255, 0, 0): "red", (0, 128, 0): "green", (0, 0, 255): "blue"}
    is_url = [str(image["path"]).startswith("https:") for image in images]
    return [
        image["path"] if url else colours[load_image(image).getpixel((0, 0))]
        for image, url in zip(images, is_url, strict=True)
    ]


URL = "https://cdn.shop.example/w_80,h_80/a.jpg?v=1"
IMAGES = [
    (" red.png ", ["red"]),
    ("red.png|blue.png", ["red", "blue"]),
    ("red.png; blue.png", ["red", "blue"]),
    ("red.png,blue.png", ["red", "blue"]),
    ("red.png\nblue.png", ["red", "blue"]),
    (f"red.png,{URL}", ["red", URL]),
    ('["red.png", "blue.png"]', ["red", "blue"]),
    ("['red.png', 'blue.png']", ["red", "blue"]),
    ("['red.png' 'blue.png']", ["red", "blue"]),
    ("red.png|", ["red"]),
    (URL, [URL]),
    (URL.removeprefix("https:"), [URL]),
    (f"{URL}, {URL}1", [URL, f"{URL}1"]),
    (f"{URL},{URL}1", [URL, f"{URL}1"]),
    (f"{URL} {URL}1", [URL, f"{URL}1"]),
    ({"src": URL, "alt": "a chair"}, [URL]),
    ({"url": URL}, [URL]),
    ({"alt": "a chair", "tags": ["wood"], "originalSrc": URL}, [URL]),
    ({"edges": [{"node": {"image": {"url": URL}}}]}, [URL]),
    ([{"src": URL}, {"src": f"{URL}1"}], [URL, f"{URL}1"]),
    ("data:image/png;base64,{red}", ["red"]),
    ("{red}", ["red"]),
    ("{red}|{blue}", ["red", "blue"]),
    ("data:image/png;base64,{red},data:image/png;base64,{blue}", ["red", "blue"]),
    ("b'{red}'", ["red"]),
]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(("cell", "expected"), IMAGES)
def test_images_as_shops_write_them(shop, cell, expected, streaming):
    folder, encoded = shop
    written = [cell]
    if isinstance(cell, str) and "{red}" in cell:
        written = [cell.format(**encoded), cell.format(**{name: text.rstrip("=") for name, text in encoded.items()})]
        written += [written[0].replace("+", "-")]
    for each in written:
        (folder / "a.jsonl").write_text(json.dumps({"image": each, "text": "one"}) + "\n")
        (row,) = load_pairs(folder / "a.jsonl", streaming=streaming, columns={"image": "image"})
        assert images_of(row) == expected
        text = each if isinstance(each, str) else json.dumps(each)
        (row,) = read_image(folder, text, streaming)
        assert images_of(row) == expected


def read_image(folder, cell, streaming):
    with (folder / "images.csv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([["image", "text"], [cell, "one"]])
    return load_pairs(folder / "images.csv", streaming=streaming)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_row_has_a_picture_or_a_text_or_both(shop, streaming, caplog):
    folder, _ = shop
    (folder / "a.csv").write_text("image,text,id\nred.png,a,both\ngreen.png,,image\nN/A,c,text\ngone.png,d,gone\n")
    rows = list(load_pairs(folder / "a.csv", streaming=streaming))
    assert [(row["id"], row_kind(row)) for row in rows] == [
        ("both", "both"), ("image", "image"), ("text", "text"), ("gone", "text"),
    ]  # fmt: skip
    assert "row 3 (id 'gone'): image" in caplog.text and "no such file" in caplog.text
    assert streaming or "1 of 4 rows name an image that does not exist, and are read by their text" in caplog.text
    (folder / "b.csv").write_text("image,text,id\nred.png,a,both\n-,,x\ngone.png,,gone\n")
    with pytest.raises(ValueError, match=r"row 1 \(id 'x'\): the image and the text are missing"):
        list(load_pairs(folder / "b.csv", streaming=streaming))
    rows = list(load_pairs(folder / "b.csv", streaming=streaming, on_error="skip"))
    assert [row["problem"] is None for row in rows] == [True, False, False] and "no such file" in rows[2]["problem"]


def test_a_wrong_folder_is_no_table_of_texts(shop):
    (shop[0] / "a.csv").write_text("image,text\nphotos/red.png,a\nphotos/green.png,b\n")
    with pytest.raises(FileNotFoundError, match=r"row 0 .*no such file \(2 of 2 rows cannot be used\)"):
        load_pairs(shop[0] / "a.csv")


def test_texts_are_cleaned_once(tmp_path):
    texts = [" Caf&eacute; &amp; bar<br>new ", "<p>one</p><p>two</p>", "5 < 6 & 7 > 3", "a <image> of it", "a\nb"]
    datasets.Dataset.from_dict({"text": texts, "note": texts}).to_parquet(tmp_path / "a.parquet")
    rows = load_pairs(tmp_path / "a.parquet", only="text", keep=["note"])
    expected = ["Café & bar new", "one two", "5 < 6 & 7 > 3", "a <image> of it", "a\nb"]
    assert rows["text"][:] == expected == [row["note"] for row in rows["metadata"]]


def test_html_that_is_not_closed_hides_the_rest_or_stays(tmp_path):
    """As in a browser; and a million letters of it take no longer than others."""
    texts = ["a <!-- b", "a <script>b", "a <!doctype b", "a <b", 'a <b "c', *("<!--x", "<script>", '<a "', "<!d")]
    texts[5:] = [text * 100_000 for text in texts[5:]]
    datasets.Dataset.from_dict({"id": [*map(str, range(9))], "text": texts}).to_parquet(tmp_path / "a.parquet")
    rows = load_pairs(tmp_path / "a.parquet", only="text", on_error="skip")
    assert rows["text"][:5] == ["a", "a", "a", "a <b", 'a <b "c']
    assert [row["id"] for row in rows if row["problem"]] == ["5", "6", "8"] and rows[7]["text"] == texts[7].strip()
