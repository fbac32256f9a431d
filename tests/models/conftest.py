import copy

import pytest
import torch
from tiny_models import MODELS

from conjoin.hub.build import image_text_processor
from tiny_mllms import MLLMS


@pytest.fixture(scope="session")
def built(tiny_checkpoints, retriever):
    """`built(name)` is a fresh copy of that model in eval mode, and its processor; of MLLMs, three layers."""
    cache = {}

    def get(name):
        if name in MLLMS:
            return retriever(name, 3)
        if name not in cache:
            build, vision, text, config = MODELS[name]
            folders = tiny_checkpoints[vision], tiny_checkpoints[text]
            torch.manual_seed(0)
            cache[name] = build(*folders, **config).eval(), image_text_processor(*folders)
        return copy.deepcopy(cache[name][0]), cache[name][1]

    return get


@pytest.fixture(scope="session")
def items(pictures):
    """Texts of different lengths, images and pairs, mixed."""
    return [
        "a red box",
        pictures[0],
        {"text": "x", "image": pictures[1]},
        "7 more words",
        pictures[2],
        {"text": "blue 12", "image": pictures[3]},
    ]


@pytest.fixture(scope="session")
def pairs(pictures):
    """Items that all have an image and a text."""
    texts = ["a red box", "x", "7 more words", "blue 12"]
    return [{"text": text, "image": picture} for text, picture in zip(texts, pictures, strict=True)]


@pytest.fixture(scope="session")
def messages(pictures):
    """Texts, images, pairs and interleaved messages, mixed."""
    parts = [
        {"type": "text", "text": "like"},
        {"type": "image", "image": pictures[0]},
        {"type": "text", "text": "but as in"},
        {"type": "image", "image": pictures[3]},
    ]
    pair = {"image": pictures[1], "text": "x <|im_end|> [RET]"}
    return ["a red box", pictures[2], pair, [{"role": "user", "content": parts}], "7 more words"]
