"""Stock transformers checkpoints give the vectors that the library itself gives."""

import numpy as np
import pytest
import torch
from transformers import AutoImageProcessor, AutoModel, AutoTokenizer

from conjoin.retrieval import load_encoder

TEXTS = ["a red apple", "two green chairs by the sea", "no", "photo 12"]


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_two_towers(kind, tiny_checkpoints, pictures):
    found = load_encoder(tiny_checkpoints[kind], batch_size=3, device="cpu").encode([*TEXTS, *pictures])
    model = AutoModel.from_pretrained(tiny_checkpoints[kind])
    padding = "max_length" if kind == "siglip" else "longest"
    words = AutoTokenizer.from_pretrained(tiny_checkpoints[kind])(
        TEXTS, padding=padding, truncation=True, return_tensors="pt"
    )
    seen = AutoImageProcessor.from_pretrained(tiny_checkpoints[kind])(images=pictures, return_tensors="pt")
    with torch.no_grad():
        texts, images = model.get_text_features(**words), model.get_image_features(**seen)
    wanted = torch.nn.functional.normalize(torch.cat([texts.pooler_output, images.pooler_output]))
    np.testing.assert_allclose(found, wanted, atol=1e-5)


def test_a_text_encoder_is_read_at_cls(tiny_checkpoints):
    words = AutoTokenizer.from_pretrained(tiny_checkpoints["bert"])("find a red apple", return_tensors="pt")
    with torch.no_grad():
        wanted = AutoModel.from_pretrained(tiny_checkpoints["bert"])(**words).last_hidden_state[:, 0]
    found = load_encoder(tiny_checkpoints["bert"], device="cpu").encode(["a red apple"], instruction=" find ")
    np.testing.assert_allclose(found, torch.nn.functional.normalize(wanted), atol=1e-5)


def test_a_vision_transformer_is_read_at_cls(tiny_checkpoints, pictures):
    seen = AutoImageProcessor.from_pretrained(tiny_checkpoints["dinov2"])(images=pictures, return_tensors="pt")
    with torch.no_grad():
        wanted = AutoModel.from_pretrained(tiny_checkpoints["dinov2"])(**seen).last_hidden_state[:, 0]
    found = load_encoder(tiny_checkpoints["dinov2"], device="cpu").encode(pictures)
    np.testing.assert_allclose(found, torch.nn.functional.normalize(wanted), atol=1e-5)


def test_image_and_text_of_two_towers_are_added(tiny_checkpoints, pictures):
    encoder = load_encoder(tiny_checkpoints["clip"], device="cpu")
    inputs = AutoImageProcessor.from_pretrained(tiny_checkpoints["clip"])(images=pictures[:1], return_tensors="pt")
    inputs |= AutoTokenizer.from_pretrained(tiny_checkpoints["clip"])(TEXTS[:1], return_tensors="pt")
    model = AutoModel.from_pretrained(tiny_checkpoints["clip"])
    with torch.no_grad():
        image = model.get_image_features(inputs.pop("pixel_values")).pooler_output
        wanted = torch.nn.functional.normalize(image + model.get_text_features(**inputs).pooler_output)
    found = encoder.encode([{"image": pictures[0], "text": TEXTS[0]}, TEXTS[1]])
    np.testing.assert_allclose(found[:1], wanted, atol=1e-5)
    with pytest.raises(
        ValueError, match=r"^item 1: 2 images, but this model takes one image per item; choose input type cat"
    ):
        encoder.encode([TEXTS[0], {"image": pictures[:2]}])
