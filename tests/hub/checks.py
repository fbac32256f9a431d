"""What the tests of saved models share."""

import json

import numpy as np
import torch
from sentence_transformers import SentenceTransformer


@torch.no_grad()
def embed(model, processor, batch, **options):
    return model(**processor(batch, **options)).embeddings.numpy()


def load(folder, **options):
    return SentenceTransformer(str(folder), device="cpu", **options)


def read(file):
    return json.loads(file.read_text())


def far(found, expected):
    """The largest difference."""
    return np.abs(found - expected).max()


def message(*content):
    """One chat message of texts and pictures."""
    kinds = ["text" if isinstance(part, str) else "image" for part in content]
    return [{"role": "user", "content": [{"type": k, k: part} for k, part in zip(kinds, content, strict=True)]}]
