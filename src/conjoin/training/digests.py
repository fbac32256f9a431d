"""Fingerprints: of names, weights, processors and rows, by which a cache knows what it was made from."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import torch
from PIL import Image
from torch import nn
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from conjoin.data.retrieval_collator import stable_id


def text_digest(text: str) -> str:
    """A fingerprint of a text."""
    return hashlib.sha256(text.encode()).hexdigest()


def name_ids(names: Sequence[str]) -> torch.Tensor:
    """The `stable_id` of each name, `(N,)` int64."""
    return torch.tensor([stable_id(name) for name in names])


def weights_digest(model: nn.Module, prefixes: tuple[str, ...] = ("",)) -> str:
    """A fingerprint of a model's weights, of those alone whose names begin with one of `prefixes`."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        if name.startswith(prefixes):
            data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
            digest.update(name.encode() + data.tobytes())
    return digest.hexdigest()


def settings_digest(settings: Mapping[str, Any]) -> str:
    """A fingerprint of settings, without what depends on where they were saved or on the last call."""
    incidental = ("auto_map", "processor_class", "truncation", "padding")
    kept = {name: value for name, value in settings.items() if name not in incidental}
    return text_digest(json.dumps(kept, sort_keys=True, default=str))


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """A fingerprint of how a tokenizer cuts texts."""
    if not tokenizer.is_fast:
        return settings_digest(tokenizer.get_vocab())
    return settings_digest(json.loads(tokenizer.backend_tokenizer.to_str()))


def processor_digest(processor: ProcessorMixin) -> str:
    """A fingerprint of what a processor makes of items, wherever it was loaded from."""
    own: dict[str, Any] = {name: value for name, value in processor.to_dict().items() if name != "image_processor"}
    parts: Any = processor  # an image processor and a tokenizer
    images, words = settings_digest(parts.image_processor.to_dict()), tokenizer_digest(parts.tokenizer)
    return settings_digest(own | {"images": images, "words": words, "longest": parts.tokenizer.model_max_length})


def rows_digest(rows: Any) -> str:  # noqa: ANN401 - any rows of pairs
    """A fingerprint of rows in their order: what they say, and their images; of an image file, its path and its age.

    Raises:
        ValueError: The rows have no length and order, or are drawn anew each time they are read.
    """
    if isinstance(rows, datasets.Dataset):
        if rows.format["type"] == "custom":
            raise ValueError("the rows have a transform, so their images may change; cache the rows without it")
        rows = rows.cast_column("image", datasets.Image(decode=False))
    elif not isinstance(rows, Sequence):
        raise ValueError(f"expected rows with a length and an order to cache, got {type(rows).__name__}")
    digest = hashlib.sha256()
    for row in rows:
        words = sorted((name, value) for name, value in row.items() if name != "image")
        digest.update(_row_bytes(words, row.get("image")))
    return digest.hexdigest()


def content_digest(image: Image.Image) -> str:
    """A fingerprint of a decoded image."""
    return hashlib.sha256(f"{image.mode} {image.size}".encode() + image.tobytes()).hexdigest()


def _row_bytes(words: list[tuple[str, Any]], image: Any) -> bytes:  # noqa: ANN401 - decoded, a file, or None
    if isinstance(image, Image.Image):
        return repr((words, content_digest(image))).encode()
    stored = image if isinstance(image, Mapping) else {"path": image}
    file, data = Path(stored.get("path") or ""), stored.get("bytes") or b""
    changed = file.stat().st_mtime_ns if file.is_file() and not data else None
    return repr((words, str(file), changed)).encode() + data
