"""Checkpoints that an earlier version wrote give the vectors they gave then."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers.utils import is_torchvision_available

from conjoin.hub import load_model
from conjoin.retrieval import load_encoder

FIXTURES = Path(__file__).parents[1] / "fixtures"
NAMES = ("joint_encoder", "mllm_retriever")


@pytest.fixture(scope="module")
def items():
    random = np.random.default_rng(0)
    pictures = [
        Image.fromarray(random.integers(0, 256, (height, width, 3), dtype=np.uint8))
        for height, width in ((16, 16), (20, 30), (9, 5), (32, 17))
    ]
    return [
        "red apple",
        pictures[0],
        {"image": pictures[1], "text": "two dogs"},
        {"text": "a longer text 42"},
        {"image": pictures[3]},
    ]


TOLERANCE = 5e-3 if is_torchvision_available() else 1e-5
"""Torchvision, where it is installed, resizes images; its filter differs from Pillow's."""


def expected(name):
    vectors = load_file(FIXTURES / name / "expected.safetensors")["embeddings"]
    assert len(vectors) == 5 and torch.cdist(vectors, vectors)[~torch.eye(5, dtype=torch.bool)].min() > 1e-3
    return vectors.numpy()


@pytest.mark.parametrize("name", NAMES)
def test_load_model_gives_the_same_vectors(name, items):
    model, processor = load_model(FIXTURES / name)
    assert type(model).__module__.startswith("conjoin.models.")
    with torch.no_grad():
        vectors = model(**processor(items)).embeddings.numpy()
    assert np.abs(vectors - expected(name)).max() <= TOLERANCE


@pytest.mark.parametrize("name", NAMES)
def test_load_encoder_gives_the_same_vectors(name, items):
    encoder = load_encoder(FIXTURES / name, batch_size=2, device="cpu")
    assert np.abs(encoder.encode(items) - expected(name)).max() <= TOLERANCE
