"""Which columns are read, and what becomes of repeated ids."""

import datasets
import pytest
from PIL import Image

from conjoin.data import load_pairs
from conjoin.processing.urls import ALLOW_URLS


@pytest.fixture(autouse=True)
def urls(monkeypatch):
    monkeypatch.setenv(ALLOW_URLS, "public")


def table(streaming=False, **columns):
    count = len(next(iter(columns.values())))
    rows = {"url": [f"https://a.org/{row}.png" for row in range(count)], "text": ["a"] * count} | columns
    table = datasets.Dataset.from_dict(rows)
    return table.to_iterable_dataset() if streaming else table


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("name", ["id", "key", "UID", "uuid", "item_id", "product_id", "SKU", "asin", "itemId"])
def test_the_one_column_of_ids_is_the_id(name, streaming):
    pairs = load_pairs(table(streaming, **{name: ["x7", "x9"], "ids": ["u", "v"]}))
    assert [row["id"] for row in pairs] == ["x7", "x9"]


def test_a_column_id_is_the_id_whichever_others_there_are(caplog):
    assert load_pairs(table(sku=["x", "y"], id=["u", "u2"], product_id=["p", "q"]))["id"][:] == ["u", "u2"]
    assert "the column 'id' is read as id, not 'sku', 'product_id'; choose by columns, id=COLUMN" in caplog.text
    assert load_pairs(table(sku=["x", "y"], __key__=["u", "v"]))["id"][:] == ["u", "v"]


def test_of_several_other_columns_the_first_whose_values_differ_is_the_id():
    rows = table(product_id=["p", "p"], sku=["x", "y"], asin=["u", "v"])
    assert load_pairs(rows)["id"][:] == ["x", "y"]
    assert load_pairs(rows, columns={"id": "asin"})["id"][:] == ["u", "v"]
    assert load_pairs(rows, columns={"id": ""})["id"][:] == ["0", "1"]


@pytest.mark.parametrize("names", [["red chair", "desk lamp"], ["赤い椅子", "机"], ["เก้าอี้สีแดง", "โต๊ะ"]])
def test_of_columns_with_strange_names_the_first_of_words_is_the_text(names):
    rows = {"写真": ["https://a.org/1.png", "https://a.org/2.png"], "価格": ["¥1,000", "¥2,000"], "品名": names}
    pairs = load_pairs(datasets.Dataset.from_dict(rows))
    assert pairs["text"][:] == names and pairs["image"][0]["path"] == "https://a.org/1.png"


@pytest.mark.parametrize("streaming", [False, True])
def test_the_texts_of_several_columns_are_one(streaming):
    rows = table(streaming, text=["chair", None, "lamp"], category=["office", "garden", None], size=[1, 2, 3])
    several = ["text", "category"]
    pairs = load_pairs(rows, columns={"text": several}, keep=several)
    assert [row["text"] for row in pairs] == ["chair office", "garden", "lamp"]
    assert [row["metadata"]["text"] for row in pairs] == ["chair", None, "lamp"]
    gap = table(streaming, text=[None, "b", ""], category=[None, "x", "y"])
    marked = load_pairs(gap, columns={"text": several}, only="both", on_error="skip")
    assert [(row["text"], row["problem"] is None) for row in marked] == [(None, False), ("b x", True), ("y", True)]
    with pytest.raises(ValueError, match=r"no column 'kategory'.*did you mean 'category'"):
        load_pairs(rows, columns={"text": ["text", "kategory"]})
    with pytest.raises(ValueError, match=r"column 'size' holds Value\('int64'\); expected texts"):
        [*load_pairs(rows, columns=["text=text,size"])]
    kind = datasets.ClassLabel(names=["office", "garden"])
    for column, feature in (("category", kind), ("text", datasets.List(kind))):
        values = [[0], [1]] if column == "text" else [0, 1]
        classes = {"image": ["data:a"] * 2, "text": ["chair", "lamp"], column: values}
        classes = datasets.Dataset.from_dict(classes).cast_column(column, feature)
        classes = classes.to_iterable_dataset() if streaming else classes
        with pytest.raises(ValueError, match=rf"column '{column}' holds .*; expected texts"):
            load_pairs(classes, columns={"text": several if column == "category" else "text"})


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("only", [None, "image", "text"])
def test_groups(streaming, only):
    rows = table(streaming, id=["u", "v", "w", "x"], product=[7, None, 7, 8])
    pairs = load_pairs(rows, columns={"group": "product"}, only=only)
    assert [row["group"] for row in pairs] == ["7", None, "7", "8"]


@pytest.mark.parametrize("streaming", [False, True])
def test_rows_to_skip_are_marked(image_folder, streaming):
    (image_folder / "a.csv").write_text("image,text,id\nred.png,a,u\ngone.png,b,v\ngreen.png,,w\n,d,x\n")
    rows = list(load_pairs(image_folder / "a.csv", on_error="skip", streaming=streaming, only="both"))
    assert [row["id"] for row in rows] == ["u", "v", "w", "x"]
    assert rows[0]["problem"] is None and rows[0]["text"] == "a"
    for row, problem in zip(
        rows[1:], ("gone.png': no such file", "the text is missing", "the image is missing"), strict=True
    ):
        assert problem in row["problem"]
    with pytest.raises(ValueError, match="on_error='keep'; expected 'raise' or 'skip'"):
        load_pairs(image_folder / "a.csv", on_error="keep")


class TestKeep:
    def test_further_columns_come_with_every_pair(self, tmp_path):
        rows = [
            {"id": "a", "text": ["one", "two"], "price": 3, "tags": ["x"]},
            {"id": "b", "text": ["three"], "price": None, "tags": []},
        ]
        path = tmp_path / "t.parquet"
        datasets.Dataset.from_list(rows).to_parquet(path)
        first = {"price": 3, "tags": ["x"], "text": ["one", "two"]}
        expected = [first, first, {"price": None, "tags": [], "text": ["three"]}]
        for streaming in (False, True):
            pairs = load_pairs(path, only="text", keep=["price", "tags", "text"], streaming=streaming)
            assert [row["metadata"] for row in pairs] == expected
            assert [row["id"] for row in pairs] == ["a#0", "a#1", "b"]
        assert "metadata" not in load_pairs(path, only="text").column_names

    def test_what_cannot_be_kept(self):
        features = datasets.Features({"image": datasets.Image(), "text": datasets.Value("string")})
        rows = datasets.Dataset.from_list([{"image": Image.new("RGB", (2, 2)), "text": "a"}], features=features)
        with pytest.raises(ValueError, match=r"the column 'image' holds Image.*; only plain values can be kept"):
            load_pairs(rows, keep=["image"])
        with pytest.raises(ValueError, match=r"no column 'texts'; the columns are .*; did you mean 'text'"):
            load_pairs(rows, keep=["texts"])


@pytest.mark.parametrize("streaming", [False, True])
def test_columns_of_a_table_of_texts_are_kept_as_numbers(tmp_path, streaming, caplog):
    (tmp_path / "shop.csv").write_text("id,text,code,price\na,red,007,29\nb,blue,008,\nc,green,009, 4.5e1 \n")
    options = {"only": "text", "streaming": streaming}
    pairs = load_pairs(tmp_path / "shop.csv", keep=["code", "price:number"], **options)
    assert [row["metadata"] for row in pairs] == [
        {"code": "007", "price": 29.0},
        {"code": "008", "price": None},
        {"code": "009", "price": 45.0},
    ]
    with pytest.raises(ValueError, match=r"no column 'prize'; .* did you mean 'price'"):
        load_pairs(tmp_path / "shop.csv", keep=["prize:number"], **options)
    for value in ("29 apples", "1e999"):
        (tmp_path / "wrong.csv").write_text(f"id,text,price\na,red,29\nb,blue,{value}\n")
        with pytest.raises(ValueError, match=rf"row 1 \(id 'b'\): price is '{value}'; expected a number"):
            list(load_pairs(tmp_path / "wrong.csv", keep=["price:number"], **options))
    found = list(load_pairs(tmp_path / "wrong.csv", keep=["price:number"], on_error="skip", **options))
    assert [row["problem"] for row in found] == [None, None] and found[1]["metadata"] == {"price": None}
    assert "price is '1e999'; expected a number, such as 9.5 or US$ 1,299.00; it is no value" in caplog.text
    (tmp_path / "odd.jsonl").write_text('{"id": "a", "text": "red", "x:number": "as it is", "flag": true}\n')
    (row,) = load_pairs(tmp_path / "odd.jsonl", keep=["x:number"], **options)
    assert row["metadata"] == {"x:number": "as it is"}
    with pytest.raises(ValueError, match="flag is True; expected a number"):
        list(load_pairs(tmp_path / "odd.jsonl", keep=["flag:number"], **options))


def test_brackets_and_invisible_letters_of_a_header_do_not_hide_its_name():
    rows = {
        "SKU (intern)": ["a-1", "a-2"],
        "Ti\u00adtle (de)": ["a red mug", "a blue mug"],
        "other": ["one two", "three four"],
    }
    pairs = load_pairs(datasets.Dataset.from_dict(rows), only="text")
    assert pairs["id"][:] == ["a-1", "a-2"] and pairs["text"][:] == ["a red mug", "a blue mug"]
