"""A deterministic stand-in for a model and its processor, and a store in the making that can be killed."""

import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import torch
from PIL import Image

from conjoin.processing import ItemError, parse_items
from conjoin.retrieval import ItemEncoder, encode_collection


class TinyConfig:
    def __init__(self, **values):
        self.values = {"width": 8, "_name_or_path": "", "transformers_version": "1", "towers": {"depth": 2}} | values

    def to_dict(self):
        return dict(self.values)


class TinyModel(torch.nn.Module):
    """Projects bytes of the text and colours of the image; attends to the batch in no way."""

    def __init__(self, seed=0, width=8, **config):
        super().__init__()
        self.config = TinyConfig(width=width, **config)
        generator = torch.Generator().manual_seed(seed)
        self.weight = torch.nn.Parameter(torch.randn(256 + 48, width, generator=generator))
        self.dropout = torch.nn.Dropout(0.5)
        self.batches = []

    def forward(self, text, pixels):
        self.batches.append(len(text))
        features = self.dropout(torch.cat([text, pixels], dim=1)) @ self.weight
        return SimpleNamespace(embeddings=torch.nn.functional.normalize(features, dim=-1))


def tiny_processor(items):
    items = parse_items(items)
    text, pixels = torch.zeros(len(items), 256), torch.zeros(len(items), 48)
    for row, item in enumerate(items):
        if len(item.images) > 1:
            raise ItemError(f"item {row}", f"holds {len(item.images)} images, one is the most")
        for byte in " ".join(item.texts).encode():
            text[row, byte] += 1
        for image in item.images:
            pixels[row] = torch.from_numpy(np.asarray(image.resize((4, 4))).reshape(-1) / 255.0)
    return {"text": text, "pixels": pixels}


def tiny_encoder(seed=0, batch_size=3, **kwargs):
    return ItemEncoder(TinyModel(seed, **kwargs.pop("config", {})), tiny_processor, batch_size, **kwargs)


def tiny_rows(count=23) -> list[dict]:
    """Texts, images and both, in turn."""
    rows = []
    for number in range(count):
        image = Image.new("RGB", (5, 5), (number * 10 % 256, number * 37 % 256, 99))
        text = f"thing number {number}" + " again" * (number % 4)
        rows.append({"id": f"row/{number}", "image": (None, image, image)[number % 3], "text": text})
        if number % 3 == 1:
            rows[-1]["text"] = None
    return rows


def slow_rows(delay: float) -> Iterator[dict]:
    for row in tiny_rows():
        time.sleep(delay)
        yield row


if __name__ == "__main__":  # python tiny_encoder.py DIRECTORY DELAY [RANK WORLD_SIZE]
    torch.set_num_threads(1)  # as in the tests; on some CPUs products of matrices depend on it
    share = [int(word) for word in sys.argv[3:]] or [0, 1]
    rows = slow_rows(float(sys.argv[2]))
    encode_collection(rows, tiny_encoder(batch_size=1), sys.argv[1])
