"""Every kind of encoder embeds items with several images, as `input_type` says; collections remember it."""

import numpy as np
import pytest

from conjoin.hub import export
from conjoin.processing.input_types import apply_input_type
from conjoin.retrieval import Collection, ItemEncoder, encode_collection, load_encoder, search_items
from tiny_encoder import tiny_encoder


@pytest.fixture
def query(pictures):
    content = ["like", pictures[0], "in the colour of", pictures[1], "but new"]
    return [
        {
            "role": "user",
            "content": [part if isinstance(part, str) else {"type": "image", "image": part} for part in content],
        }
    ]


@pytest.fixture(scope="module")
def folders(exports, sentence_folders, tiny_checkpoints):
    found = {"st-clip": sentence_folders["clip"], "clip": tiny_checkpoints["clip"]}
    return found | {kind: exports(kind)[0] for kind in ("joint_encoder", "score_fusion", "token_fusion")}


def unit(vectors):
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)


@pytest.mark.parametrize("kind", ["joint_encoder", "score_fusion", "token_fusion", "clip", "st-clip"])
def test_models_of_one_image_answer_queries_of_several(kind, folders, query, pictures, caplog):
    if kind == "st-clip":  # takes an image or a text
        query = {"image": [pictures[0], pictures[1]]}
    with pytest.raises(ValueError, match=r"item 'q': 2 images, .* choose input type cat .* or avg .*--input cat"):
        load_encoder(folders[kind], device="cpu", input_type="seq").encode([query], ids=["q"])
    plain = load_encoder(folders[kind], device="cpu")
    by_default = plain.encode([query, query], ids=["q", "r"])
    assert caplog.text.count("is the mean of those of its images") == 1 and "item 'q'" in caplog.text
    averaging = load_encoder(folders[kind], device="cpu", input_type="avg", batch_size=2)
    wanted = plain.encode(apply_input_type(query, "avg"))
    items = ["a text", query, pictures[2], query] if kind != "st-clip" else [pictures[2], query, pictures[3], query]
    found = averaging.encode(items)
    np.testing.assert_allclose(found[1], unit(wanted.mean(axis=0)), atol=1e-5)
    np.testing.assert_allclose(found[[0, 2]], plain.encode([items[0], items[2]]), atol=1e-5)
    np.testing.assert_allclose(found[3], found[1], atol=1e-5)
    np.testing.assert_allclose(by_default[1], found[1], atol=1e-5)
    joined = load_encoder(folders[kind], device="cpu", input_type="cat").encode([query, items[2]])
    np.testing.assert_allclose(joined[0], plain.encode(apply_input_type(query, "cat"))[0], atol=1e-6)
    assert np.abs(joined[0] - found[1]).max() > 1e-3


def test_the_average_of_an_mllm_and_its_instruction(exports, query):
    _, model, processor = exports("mllm_retriever")
    encoders = {name: ItemEncoder(model, processor, input_type=name) for name in ("seq", "cat", "avg")}
    found = {name: encoder.encode([query], prompt="Find it.") for name, encoder in encoders.items()}
    parts = encoders["seq"].encode(apply_input_type(query, "avg"), prompt="Find it.")
    np.testing.assert_allclose(found["avg"][0], unit(parts.mean(axis=0)), atol=1e-5)
    for one, other in (("seq", "cat"), ("seq", "avg"), ("cat", "avg")):
        assert np.abs(found[one] - found[other]).max() > 1e-4


def test_errors_name_the_item(pictures, tmp_path):
    encoder = tiny_encoder(batch_size=4, input_type="avg")
    broken = {"image": [pictures[0], str(tmp_path / "none.png")]}
    with pytest.raises(FileNotFoundError, match=r"item 'b': image '.*none\.png': no such file"):
        encoder.encode([pictures[0], broken], ids=["a", "b"])
    left = []
    vectors = encoder.encode(["a", broken, {"image": pictures[:3]}], on_unusable=lambda place, _: left.append(place))
    assert left == [1] and np.isnan(vectors[1]).all() and np.isfinite(vectors[[0, 2]]).all()
    assert encoder.model.batches == [4], "the others are one batch"
    with pytest.raises(ValueError, match="item 'c': a bare list is ambiguous"):
        encoder.encode([[pictures[0], "a"]], ids=["c"])
    with pytest.raises(ValueError, match="input_type='mean'; expected one of"):
        tiny_encoder(input_type="mean")


def test_a_model_saved_with_cat_encodes_so(own_export, query, tmp_path):
    _, model, processor = own_export
    processor.input_type = "cat"
    try:
        folder = export(model, processor, tmp_path)
    finally:
        processor.input_type = "seq"
    saved, other = load_encoder(folder, device="cpu"), load_encoder(own_export[0], device="cpu", input_type="cat")
    assert saved.input_type == "cat" and saved.fingerprint == other.fingerprint
    np.testing.assert_array_equal(saved.encode([query]), other.encode([query]))
    with pytest.raises(ValueError, match="choose input type cat"):
        load_encoder(folder, device="cpu", input_type="seq").encode([query])


def test_collections_record_the_input_type(pictures, tmp_path):
    rows = [{"id": "two", "image": pictures[:2]}, {"id": "one", "image": pictures[2]}, {"id": "text", "text": "a"}]
    encoder = tiny_encoder(input_type="cat")
    encode_collection(rows, encoder, tmp_path)
    collection = Collection(tmp_path)
    assert collection.model.input_type == "cat"
    assert search_items(collection, encoder, [{"image": pictures[:2]}], 1).ids == [["two"]]
    with pytest.raises(ValueError, match="several images under input type cat, these queries are encoded under avg"):
        search_items(collection, tiny_encoder(input_type="avg"), ["a"], 1)
    with pytest.raises(ValueError, match="was made with input_type 'cat', not 'avg'"):
        encode_collection(rows, tiny_encoder(input_type="avg"), tmp_path)
    assert encode_collection(rows[1:], encoder, tmp_path).model.input_type == "cat"  # the row of two is still there


def test_a_collection_of_single_images_takes_every_input_type(pictures, tmp_path):
    rows = [{"id": str(place), "image": picture} for place, picture in enumerate(pictures[:3])]
    collection = encode_collection(rows, tiny_encoder(), tmp_path)
    assert collection.model.input_type is None
    for name in ("seq", "cat", "avg"):
        assert search_items(collection, tiny_encoder(input_type=name), [pictures[1]], 1).ids == [["1"]]
