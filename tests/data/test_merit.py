"""The loader of MERIT: both kinds of queries, what is interleaved where, what training leaves out, bad files."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from conjoin.data import OOD_VALUES, PRODUCT_FEATURES, MeritItems, MeritProducts, MeritTraining, merit_queries
from conjoin.data.merit import ood_subsets, read_captions, read_query, without_titles
from conjoin.data.row_images import row_item
from conjoin.data.training_rows import QueryRows
from conjoin.processing import parse_items
from tiny_merit import PRODUCTS, png, product_rows, query, shown, write_merit, write_products, write_queries


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write_merit(tmp_path_factory.mktemp("merit"))


@pytest.fixture(scope="module")
def products(root):
    return MeritProducts(root, "test")


@pytest.fixture
def own_root(tmp_path):
    """A copy that a test may damage: the test products alone."""
    write_products(tmp_path, product_rows())
    return tmp_path


def message(items, query):
    row = items.query(query)
    return row_item({part: row[part] for part in ("image", "text") if part in row})


def texts_and_images(items, query):
    parts = message(items, query)[0]["content"]
    return [part["text"] if part["type"] == "text" else part["image_url"]["url"]["bytes"] for part in parts]


def test_products(products):
    assert len(products) == 7 and list(products) == list("1234567")
    product = products["5"]
    assert (product.title, product.kind, product.country, product.language) == ("โต๊ะแดง", "table", "SG", "th")
    assert product.attributes == {"color": "red", "material": "steel"}
    assert products.image("5")["bytes"] == png(PRODUCTS[4][-1])


@pytest.mark.parametrize("text", ['{"color": "red"}', "{'color': 'red'}"])
def test_attributes_may_be_json_or_python(tmp_path, text):
    unknown = [product_rows()[1] | {"attribute": None}, product_rows()[2] | {"attribute": " "}]
    write_products(tmp_path, [product_rows()[0] | {"attribute": text}, *unknown])
    products = MeritProducts(tmp_path, "test")
    assert products["1"].attributes == {"color": "red"} and products["2"].attributes == products["3"].attributes == {}


def test_queries_of_both_schemas(root, products):
    first, second, cold = merit_queries(root, products)
    assert (first.id, first.products, first.positives, first.negatives) == ("1", ("1", "2"), ("3",), ("5",))
    assert first.attributes == {"color", "material"} and first.touched == ("1", "2", "3", "5")
    assert second.conditions == {"6": {}, "4": {}} and second.positives == ("7", "1")
    assert cold.products == ("4",) and cold.attributes == {"others"}


def test_images_are_where_the_instruction_shows_them(root, products):
    first, _, cold = merit_queries(root, products)
    items = MeritItems(products)
    assert texts_and_images(items, first) == [
        "Find a table with the color of <Product 1>",
        png(PRODUCTS[0][-1]),
        "red phone </Product 1> and the material of <Product 2>",
        png(PRODUCTS[1][-1]),
        "kereta biru </Product 2>.",
    ]
    (item,) = parse_items([message(items, first)])
    assert [isinstance(part, str) for part in item.parts] == [True, False, True, False, True]
    assert item.images[1].getpixel((0, 0)) == PRODUCTS[1][-1]
    assert len(parse_items([message(items, cold)])[0].images) == 1


def test_what_the_ablations_leave_out(root, products):
    first = merit_queries(root, products)[0]
    captions = {pid: f"caption {pid}" for pid in products}
    item = MeritItems(products).product("4")
    assert list(item) == ["image", "text"] and item["text"] == "โต๊ะ"
    bare = MeritItems(products, titles=False)
    assert [row["id"] for row in bare] == list("1234567")
    assert texts_and_images(bare, first)[2] == "</Product 1> and the material of <Product 2>"
    assert list(bare.product("4")) == ["image"]
    blind = MeritItems(products, captions)
    assert blind.query(first)["text"] == first.instruction.replace("<image>", "caption 1", 1).replace(
        "<image>", "caption 2"
    )
    assert "image" not in blind.query(first)
    assert blind.product("4") == {"text": "caption 4\nโต๊ะ"}
    assert MeritItems(products, captions, titles=False).product("4") == {"text": "caption 4"}
    del captions["6"]
    with pytest.raises(ValueError, match="no caption for the product '6' of the test products"):
        MeritItems(products, captions)


def test_titles_end_where_their_product_ends():
    text = f"a {shown(1, 'x < y')} b <Product 2>a product</Product 2> c <Product 3><image>t</Product 3>"
    assert without_titles(text) == (
        "a <Product 1> <image></Product 1> b <Product 2>a product</Product 2> c <Product 3><image></Product 3>"
    )
    assert without_titles("a <image> b <image> c") == "a <image> b <image> c"


def test_training_rows(root):
    rows = MeritTraining(root, hard_negatives=2)
    assert len(rows) == 3 and rows.sources == ["merit"] * 3
    assert rows.positives == [("3",), ("7", "1"), ("5",)]
    row = rows[0]
    assert (row["id"], row["positive_id"], row["negative_ids"]) == ("1", "3", ["5", "5"])
    assert row["positive"]["text"] == "meja merah" and row["negatives"][0]["text"] == "โต๊ะแดง"
    assert row["target_modality"] == "image,text" and row["negative_modalities"] == ["image,text"] * 2
    assert {rows[1]["positive_id"] for _ in range(30)} == {"7", "1"} and rows[1]["negatives"] == []
    seeded = [[QueryRows(rows, seed=3)[1]["positive_id"] for _ in range(3)] for _ in range(2)]
    assert seeded[0] == seeded[1] and len(set(seeded[0])) == 1


def test_training_leaves_out_what_a_test_holds_out(root):
    rows = MeritTraining(root, ood="attribute")
    assert (len(rows), rows[0]["id"]) == (1, "3")  # product 1 has a brand, which is a condition of no query
    for kind in ("language", "class"):  # each query touches a product in Malay or Thai
        with pytest.raises(ValueError, match=f"the out-of-distribution test of {kind} leaves no query of the train"):
            MeritTraining(root, ood=kind)
    with pytest.raises(ValueError, match="unknown out-of-distribution test 'colour'; expected one of language"):
        MeritTraining(root, ood="colour")


def test_subsets_of_the_out_of_distribution_tests(products):
    def subsets(values=OOD_VALUES, **change):
        return ood_subsets(read_query(query(**change), "q", 1), products, values)

    thai = {"query": {"5": {"pattern/print": "x"}}, "pos_candidate": [4], "hard_negative": []}
    thai["query instruction"] = "<image>"
    assert subsets(**thai) == ["language:th", "attribute:pattern/print", "class:table"]
    assert subsets(**thai | {"hard_negative": [3]}) == ["attribute:pattern/print", "class:table"]
    both = thai | {"query": {"5": {"pattern/print": "x", "brand": "A"}}}
    assert subsets(**both)[1] == "attribute:brand"  # the first that fits, as the authors assign them
    assert subsets() == ["class:table"]  # a phone, too
    assert subsets({"class": ("phone", "table")}) == ["class:phone"]


def test_captions(tmp_path):
    path = tmp_path / "captions.jsonl"
    path.write_text('{"idx": 1, "caption": " a "}\n{"idx": "2", "caption": "b"}\n')
    assert read_captions(path) == {"1": "a", "2": "b"}
    path.write_text('{"idx": 1, "caption": "a"}\n{"idx": 2, "caption": " "}\n')
    with pytest.raises(ValueError, match=r"captions.jsonl', line 2: caption: text is empty"):
        read_captions(path)


class TestBadFiles:
    """The second line of the queries is at fault."""

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            (query(query={"1": {"color": "red"}, "99": {"a": "x"}}), "the query names the unknown product '99'"),
            (query(pos_candidate=[3, 2]), "the positive '2' is a product of its own query"),
            (query(pos_candidate=[]), "the query has no product or no positive"),
            (query(**{"query instruction": "only <image>"}), "1 placeholders <image> in the text, but 2 images"),
            (query(**{"query instruction": " "}), "query instruction: text is empty"),
            (query(query={"1": {"color": "red"}, "2": "blue"}), "query must be {product id"),
            (query(query={}), "the query has no product or no positive"),
            (query(pos_candidate=[True]), "a product id must be an integer or a string of one word, got True"),
            (query(pos_candidate=3), "expected a list of product ids, got 3"),
            ({"query_id": 1, "passage": []}, "query must be {product id: .* got None"),
            (b'{"query": "\xff"}', "cannot be read: .*byte 0xff in position 11.*expected JSON"),
        ],
    )
    def test_a_bad_query_names_file_and_line(self, own_root, line, message):
        write_queries(own_root, [query(), line])
        with pytest.raises(ValueError, match=rf"queries-test\.json', line 2:? .*{message}"):
            merit_queries(own_root, MeritProducts(own_root, "test"))

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"title": " "}, "row 1: the product '2': title: text is empty"),
            ({"idx": None}, "row 1: a product id must be"),
            ({"idx": "1"}, "the id '1' occurs twice"),
            ({"attribute": "[1]"}, "row 1: the product '2': 'attribute' is no object of JSON or Python"),
            ({"attribute": "color"}, "row 1: the product '2': 'attribute' is no object of JSON or Python"),
        ],
    )
    def test_a_bad_product_is_named(self, tmp_path, change, message):
        first, second, *_ = product_rows()
        write_products(tmp_path, [first, second | change])
        with pytest.raises(ValueError, match=message):
            MeritProducts(tmp_path, "test")

    @pytest.mark.parametrize("path", ["../2.png", "/tmp/2.png", "inner/2.png", None])
    def test_an_image_outside_of_the_folder(self, tmp_path, path):
        rows = [product_rows()[0], product_rows()[1] | {"image": {"bytes": None, "path": path}}]
        (tmp_path / "data").mkdir()
        pq.write_table(pa.Table.from_pylist(rows, PRODUCT_FEATURES.arrow_schema), tmp_path / "data/test-0.parquet")
        if path == "inner/2.png":
            (tmp_path / "inner").mkdir()
            (tmp_path / path).write_bytes(png("red"))
            assert MeritProducts(tmp_path, "test").image("2") == str(tmp_path / path)
        else:
            message = "the image is missing" if path is None else f"image '.*{path}': the file is outside"
            with pytest.raises(ValueError, match=f"the product '2': {message}"):
                MeritProducts(tmp_path, "test").image("2")

    def test_missing_files_and_columns(self, own_root):
        write_queries(own_root, [query()], "train")
        with pytest.raises(FileNotFoundError, match=r"no such file: '.*data/train-\*\.parquet'"):
            MeritTraining(own_root)
        with pytest.raises(FileNotFoundError, match=r"queries-test\.json"):
            merit_queries(own_root, MeritProducts(own_root, "test"))
        MeritProducts(own_root, "test")._images.rename_column("image", "picture").to_parquet(
            str(own_root / "data/test-00000-of-00001.parquet")
        )
        with pytest.raises(ValueError, match="no column 'image'; the columns are"):
            MeritProducts(own_root, "test")
