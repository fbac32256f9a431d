"""A collection knows which parts its rows have, and searches those of a kind."""

import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import datasets
import numpy as np
import pytest
from PIL import Image

from conjoin.data import name_rows
from conjoin.processing.urls import ALLOW_URLS
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


@pytest.fixture
def gone(monkeypatch, tmp_path):
    """A URL that answers 404."""
    monkeypatch.setenv(ALLOW_URLS, "private")
    monkeypatch.chdir(tmp_path)
    with ThreadingHTTPServer(("127.0.0.1", 0), SimpleHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/gone.png"
        server.shutdown()


@pytest.mark.parametrize("as_dataset", [False, True])
def test_a_row_whose_picture_is_gone_is_a_row_of_its_text(tmp_path, gone, as_dataset, caplog):
    rows = [{"id": "a", "image": gone, "text": "red"}, {"id": "b", "image": str(tmp_path / "gone.png"), "text": "red"}]
    given = datasets.Dataset.from_list(rows).cast_column("image", datasets.Image()) if as_dataset else rows
    collection = encode_collection(given, tiny_encoder(), tmp_path / "c", keep_pictures=8)
    assert collection.kinds == {"text": 2} and "2 rows name an image that does not exist" in caplog.text
    text = encode_collection([{"id": "a", "text": "red"}], tiny_encoder(), tmp_path / "text").vectors()
    np.testing.assert_allclose(collection.vectors(), np.repeat(text, 2, axis=0), atol=1e-6)
    assert encode_collection(given, tiny_encoder(), tmp_path / "c", keep_pictures=8).changes.unchanged == 2
    for row in rows:
        with pytest.raises(FileNotFoundError, match=f"item '{row['id']}': .*gone.png"):
            encode_collection([row | {"text": None}], tiny_encoder(), tmp_path / "other")


def test_what_is_no_value_is_none(tmp_path):
    values = [1.5, float("nan"), None]
    rows = [{"id": f"{n}", "text": "a", "metadata": {"price": value}} for n, value in enumerate(values)]
    collection = encode_collection(rows, tiny_encoder(), tmp_path / "c")
    assert collection.select("price is null") == ["1", "2"]
    rows = [{"id": float("nan"), "text": "a"}, {"id": None, "group": float("nan"), "text": "b"}]
    assert name_rows(rows) == ["text a", "text b"]


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
    with pytest.raises(ValueError, match="closes a parenthesis that it did not open"):
        search_items(Collection(folder), tiny_encoder(), ["red"], kind="text", where="true) or (true")
