import numpy as np
import pytest
import torch
from PIL import Image

from conjoin.retrieval import ItemEncoder
from tiny_encoder import TinyModel, tiny_encoder, tiny_processor, tiny_rows


def items(count=23):
    return [{key: row[key] for key in ("image", "text") if row[key] is not None} for row in tiny_rows(count)]


def test_order_is_kept_whatever_the_batches():
    alone = np.concatenate([tiny_encoder().encode([item]) for item in items()])
    for batch_size in (1, 4, 100):
        encoder = tiny_encoder(batch_size=batch_size)
        embeddings = encoder.encode(items())
        assert embeddings.shape == (23, 8) and embeddings.dtype == np.float32
        np.testing.assert_allclose(embeddings, alone, atol=1e-6)
        assert max(encoder.model.batches) <= batch_size
    np.testing.assert_allclose(np.linalg.norm(alone, axis=1), 1, atol=1e-6)
    assert not np.allclose(alone[0], alone[1])


def test_like_items_share_a_batch():
    seen = []

    def processor(batch):
        seen.append(batch)
        return tiny_processor(batch)

    mixed = ["a" * 50, Image.new("RGB", (4, 4)), "b", {"image": Image.new("RGB", (4, 4)), "text": "c"}, "d" * 40, "e"]
    ItemEncoder(TinyModel(), processor, batch_size=2).encode(mixed)
    assert [[mixed.index(item) for item in batch] for batch in seen] == [[3, 1], [0, 4], [2, 5]]


def test_evaluation_mode_is_undone_exactly():
    encoder = tiny_encoder()
    encoder.model.train()
    encoder.model.dropout.eval()
    frozen = encoder.encode(["some text"])
    assert encoder.model.training and not encoder.model.dropout.training
    encoder.model.train()
    np.testing.assert_array_equal(encoder.encode(["some text"]), frozen)
    assert encoder.model.dropout.training


class TestFingerprint:
    def test_is_the_same_for_the_same_model_elsewhere(self):
        moved = {"_name_or_path": "elsewhere", "transformers_version": "2", "dtype": "float32", "auto_map": {"a": "b"}}
        moved["towers"] = {"depth": 2, "_name_or_path": "x"}
        assert tiny_encoder(config=moved).fingerprint == tiny_encoder(batch_size=7, name="other").fingerprint


class TestErrors:
    @pytest.mark.parametrize(
        ("items", "ids", "error", "message"),
        [
            ([" "], None, ValueError, "^item 0: text is empty"),
            ([], None, ValueError, "expected a list of items, got an empty one"),
            (["a", "b"], ["a"], ValueError, "got 1 ids for 2 items"),
            (
                ["a long text", " ", "a longer text than that", "b"],
                None,
                ValueError,
                "^item 1: text is empty or only ",
            ),
            (["a", {"image": "/no/m.png"}], ["w", "x"], FileNotFoundError, "^item 'x': image '.*m.png': no such file"),
            (
                ["a", "b", {"image": [Image.new("RGB", (2, 2))] * 2}],
                None,
                ValueError,
                "^item 2: holds 2 images, one is",
            ),
        ],
    )
    def test_bad_items_are_named_also_what_only_the_processor_refuses(self, items, ids, error, message):
        with pytest.raises(error, match=message):
            tiny_encoder().encode(items, ids=ids)

    def test_not_finite(self):
        encoder = tiny_encoder()
        with torch.no_grad():
            encoder.model.weight[ord("z")] = 3e38  # twice that is infinite
        with pytest.raises(ValueError, match=r"^item 1: 'TinyModel' gave an embedding that is not finite"):
            encoder.encode(["a", "zz", "b"])

    def test_wrong_number_of_rows(self):
        encoder = ItemEncoder(TinyModel(), lambda batch: tiny_processor([*batch, "extra"]))
        with pytest.raises(ValueError, match=r"'TinyModel' gave embeddings of shape \(3, 8\) for 2 items"):
            encoder.encode(["a", "b"])
