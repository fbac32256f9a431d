"""Texts, image paths and kept columns: from the rows through the store and the index to the results."""

import datetime

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

from conjoin.retrieval import EmbeddingStore, build_index, encode_corpus, load_index, rows_of
from conjoin.retrieval.store import STORE, write_embeddings
from conjoin.storage import FolderWriter
from tiny_encoder import tiny_encoder

DAY = datetime.date(2026, 11, 21)


@pytest.fixture
def rows(tmp_path):
    """Ten rows; a column that begins late, one that ends early, an image in a file, one in memory, one of each."""
    made = []
    for number in range(10):
        image = Image.new("RGB", (4, 4), (20 * number, 0, 0))
        if number == 1:
            image.save(tmp_path / "one.png")
            image = str(tmp_path / "one.png")
        made.append({"id": f"row/{number}", "text": f"text {number}", "image": image if number < 3 else None})
        made[-1]["kept"] = {"price": number if number < 5 else number + 0.5, "tags": ["a", str(number)]}
        if number > 7:
            made[-1]["kept"] = {"day": DAY}
    made[3]["text"], made[3]["image"] = None, image
    del made[4]["kept"]
    return made


def expected(tmp_path):
    found = [{"text": f"text {n}", "price": float(n), "tags": ["a", str(n)]} for n in range(8)]
    found[1]["image"] = str(tmp_path / "one.png")
    del found[3]["text"], found[4]["price"], found[4]["tags"]
    for number in range(5, 8):
        found[number]["price"] += 0.5
    return [*found, {"text": "text 8", "day": DAY}, {"text": "text 9", "day": DAY}]


def encode(rows, folder, size=3):
    return encode_corpus(rows, tiny_encoder(), folder, shard_size=size)


def test_a_store_gives_them_back_in_any_order(rows, tmp_path):
    store = encode(rows, tmp_path / "store")
    assert store.manifest.details["kept"] == ["day", "image", "price", "tags", "text"]
    order = [9, 0, 3, 1, 1, 8, 4]
    assert store.kept.take(order) == [expected(tmp_path)[place] for place in order]
    assert store.kept.take([]) == [] and store.kept.take([10]) == [{}]


@pytest.mark.parametrize("kind", ["exact", "flat"])
def test_an_index_gives_them_for_what_it_found(rows, tmp_path, kind):
    index = build_index(encode(rows, tmp_path / "store"), kind)
    index.save(tmp_path / "index")
    loaded = load_index(tmp_path / "index")
    for one in (index, loaded):
        assert rows_of(one, one.ids[::-1]) == expected(tmp_path)[::-1]
    assert rows_of(loaded, []) == []
    loaded.add(["new"], np.eye(8, dtype=np.float32)[:1])
    assert rows_of(loaded, ["new", "row/9"]) == [{}, expected(tmp_path)[9]]
    (file,) = (tmp_path / "index").glob("kept-*.parquet")
    table = pq.read_table(file, filters=[("price", ">", 6)])
    assert table["id"].to_pylist() == ["row/6", "row/7"]
    loaded.kept = None
    loaded.save(tmp_path / "index")
    assert not file.exists() and rows_of(load_index(tmp_path / "index"), ["new"]) == [{}]


def test_a_store_of_an_earlier_version_opens(tmp_path):
    with FolderWriter(tmp_path / "store", STORE, {"fingerprint": "f", "dtype": "float32"}) as writer:
        writer.details["model"] = "m"
        write_embeddings(writer, 0, ["a", "b"], np.eye(2, 8, dtype=np.float32), [1, 2])
        writer.finish()
    assert EmbeddingStore(tmp_path / "store").kept is None
    build_index(tmp_path / "store").save(tmp_path / "index")
    assert rows_of(load_index(tmp_path / "index"), ["b", "a"]) == [{}, {}]


def test_resuming_compares_them(rows, tmp_path):
    encode(rows, tmp_path / "whole")
    with pytest.raises(ValueError, match='"kept" must be a mapping'):
        encode([*rows[:7], rows[7] | {"kept": 5}], tmp_path / "part")
    encode(rows, tmp_path / "part")
    for file in (tmp_path / "whole").glob("*.*"):
        assert (tmp_path / "part" / file.name).read_bytes() == file.read_bytes()
    rows[5]["kept"] = {"price": 9, "tags": []}
    with pytest.raises(ValueError, match="row 5 with the id 'row/5' has another text, image or kept column"):
        encode(rows, tmp_path / "part")


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        (["price"], """item 'row/1': "kept" must be a mapping from names to values, got \\['price'\\]"""),
        ({"id": 3}, '''item 'row/1': "kept" holds an "id"'''),
        ({"price": "low"}, "the column 'price' cannot be kept: .*low"),
        ({"price": {1}}, "the column 'price' cannot be kept: .*"),
        ({"sizes": {"shoe": {}}}, "the column 'sizes' cannot be kept: .*no child field"),
        ({"words": ["\ud800"]}, "the column 'words' cannot be kept: .*surrogates"),
    ],
)
def test_what_cannot_be_kept_is_named(rows, tmp_path, kept, message):
    rows[1]["kept"] = kept
    with pytest.raises(ValueError, match=message):
        encode(rows, tmp_path / "store")


def test_types_that_differ_between_shards_are_named(rows, tmp_path):
    rows[3]["kept"] = rows[5]["kept"] = {"price": "low"}
    store = encode(rows[:6], tmp_path / "store")
    with pytest.raises(ValueError, match=r"a kept column has several types: .*price.*; give all its values one type"):
        build_index(store).save(tmp_path / "index")
