"""A copy has the rows, the vectors and the indexes of its source; a published one has no path of this machine."""

import io

import numpy as np
import pytest
from PIL import Image

from conjoin.retrieval import Collection, encode_collection
from conjoin.retrieval.collection import index_names
from conjoin.retrieval.collection_copy import copy_collection
from tiny_encoder import tiny_encoder


def make(folder, count=40, name="collection", **options):
    rows = []
    for number in range(count):
        path = folder / f"{number}.png"
        Image.new("RGB", (60, 30), (number * 5 % 256, 9, 200)).save(path)
        image = str(path) if number % 3 else None
        kept = {
            "price": number,
            "odd name": f"k{number % 3}",
            "file": str(path),
            "files": [str(path), "b"],
            "of": {"file": str(path)},
        }
        rows.append({"id": f"it's {number}", "image": image, "text": f"thing {number}", "metadata": kept})
    return encode_collection(rows, tiny_encoder(batch_size=16), folder / name, **options)


@pytest.fixture
def collection(tmp_path):
    return make(tmp_path)


def everything(collection):
    return collection.ids, collection.vectors(), collection.rows(collection.ids, pictures=True)


def is_below(folder, text):
    """Whether a text stands in a file below a folder."""
    return [path for path in folder.rglob("*") if path.is_file() and str(text).encode() in path.read_bytes()]


def test_a_copy_is_equal(collection, tmp_path):
    copy = copy_collection(collection, tmp_path / "copy")
    (ids, vectors, rows), (other_ids, other_vectors, other_rows) = everything(collection), everything(copy)
    assert ids == other_ids and rows == other_rows
    np.testing.assert_array_equal(vectors, other_vectors)
    assert copy.metadata == collection.metadata and copy.schema == collection.schema
    assert index_names(copy.table) == index_names(collection.table)
    copy.verify()
    again = make(tmp_path, name="copy")
    assert again.changes.encoded == again.changes.added == 0, "encoding into the copy finds its rows"


def test_its_readers_see_one_version_and_it_replaces_only_when_told(collection, tmp_path):
    first = copy_collection(collection, tmp_path / "copy")
    collection.remove(collection.ids[:10])
    with pytest.raises(ValueError, match=r"holds a collection, .*--replace"):
        copy_collection(collection, tmp_path / "copy")
    assert len(Collection(tmp_path / "copy")) == 40
    second = copy_collection(collection, tmp_path / "copy", replace=True)
    assert len(second) == len(second.rows(second.ids)) == 30 and len(first.rows(first.ids)) == 40
    assert "id" in index_names(second.table)
    second.verify()


def test_a_copy_that_fails_leaves_what_was_there(collection, tmp_path, monkeypatch):
    monkeypatch.setenv("CONJOIN_ROOTS", str(tmp_path))
    copy = copy_collection(collection, tmp_path / "copy")
    collection.remove(collection.ids[:1])
    (tmp_path / "4.png").write_bytes(b"no picture")
    for target in ("copy", "new"):
        with pytest.raises(ValueError, match=r"item \"it's 4\": .*cannot read the image"):
            copy_collection(collection, tmp_path / target, side=8, replace=True)
    assert len(Collection(tmp_path / "copy")) == len(copy)
    assert len(copy_collection(collection, tmp_path / "new")) == 39


@pytest.mark.parametrize("kind", ["ivf_flat", None])
def test_indexes_are_built_again(tmp_path, kind):
    collection = make(tmp_path, 300)
    collection.index(kind, probes=3, refine=4)
    copy = copy_collection(collection, tmp_path / "copy")
    assert sorted(index_names(copy.table)) == sorted(index_names(collection.table))
    assert "price" in index_names(copy.table)
    if kind:
        assert copy.metadata["index"] == collection.metadata["index"]
    vectors = collection.vectors()[:5]
    assert copy.rank(vectors, 3, exact=True).ids == collection.rank(vectors, 3, exact=True).ids
    assert copy.rank(None, 1, words=["thing 7"]).ids == collection.rank(None, 1, words=["thing 7"]).ids


def test_a_published_copy_names_no_path_of_this_machine_and_has_pictures(collection, tmp_path, monkeypatch):
    monkeypatch.setenv("CONJOIN_ROOTS", str(tmp_path))
    assert is_below(tmp_path / "collection", tmp_path)
    copy = copy_collection(collection, tmp_path / "copy", model_name="me/model", side=20)
    assert not is_below(tmp_path / "copy", tmp_path)
    assert copy.model.name == "me/model" and copy.model.fingerprint == collection.model.fingerprint
    text, both = copy.rows(["it's 0", "it's 1"], pictures=True)
    assert "picture" not in text and text["file"] == "0.png" and text["files"] == ["0.png", "b"]
    assert text["of"] == {"file": "0.png"}
    assert both["image"] == "1.png" and both["text"] == "thing 1"
    assert Image.open(io.BytesIO(both["picture"])).size == (20, 10)


def test_thumbnails_of_the_source_and_urls_are_kept(tmp_path):
    rows = [{"id": "a", "text": "a", "image": str(tmp_path / "a.png"), "metadata": {"page": "https://example.org/a"}}]
    Image.new("RGB", (60, 30)).save(tmp_path / "a.png")
    source = encode_collection(rows, tiny_encoder(), tmp_path / "collection", keep_pictures=30)
    (tmp_path / "a.png").unlink()
    copy = copy_collection(source, tmp_path / "copy", model_name="me/model", side=10)
    (row,) = copy.rows(["a"], pictures=True)
    assert Image.open(io.BytesIO(row["picture"])).size == (30, 15) and row["page"] == "https://example.org/a"
