"""A collection knows which parts its rows have, and searches those of a kind."""

import pytest
from PIL import Image

from conjoin.retrieval import Collection, encode_collection, search_items
from tiny_encoder import tiny_encoder

RED = Image.new("RGB", (8, 8), "red")
PARTS = {"image": {"image": RED}, "text": {"text": "red"}, "both": {"image": RED, "text": "red"}}
ROWS = [{"id": f"{kind} {n}", **parts, "metadata": {"price": n}} for n in range(2) for kind, parts in PARTS.items()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kinds") / "c"
    assert encode_collection(ROWS, tiny_encoder(), folder).kinds == {"image": 2, "text": 2, "both": 2}
    return folder


@pytest.mark.parametrize("memory", [0, 10**6])
@pytest.mark.parametrize("kind", PARTS)
def test_rows_of_a_kind(folder, kind, memory):
    collection, encoder = Collection(folder, memory=memory), tiny_encoder()
    own = {f"{kind} {n}" for n in (0, 1)}
    assert {*search_items(collection, encoder, ["red"], kind=kind).ids[0]} == own
    assert search_items(collection, encoder, ["red"], kind=kind, where="price > 0").ids == [[f"{kind} 1"]]
    cheap = "price = 0 or price > 5"
    assert search_items(collection, encoder, ["red"], kind=kind, where=cheap).ids == [[f"{kind} 0"]]
    assert search_items(collection, encoder, ["red"], kind=kind, group_by="price", k=1).ids[0][0] in own
    assert "row_kind" not in collection.rows([f"{kind} 0"])[0]


def test_a_row_changes_its_kind(tmp_path):
    encoder = tiny_encoder()
    encode_collection([{"id": "a", "image": RED}], encoder, tmp_path)
    collection = encode_collection([{"id": "a", "text": "red"}], encoder, tmp_path)
    assert collection.kinds == {"text": 1} and collection.select("row_kind = 'text'") == ["a"]


def test_other_kinds_are_refused(folder):
    with pytest.raises(ValueError, match="unknown kind 'picture' of row; expected one of image, text, both"):
        search_items(Collection(folder), tiny_encoder(), ["red"], kind="picture")
    with pytest.raises(ValueError, match="cannot be a column"):
        encode_collection([{"id": "a", "text": "a", "metadata": {"row_kind": "x"}}], tiny_encoder(), folder)
