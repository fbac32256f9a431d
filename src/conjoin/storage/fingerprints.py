"""Fingerprints: of names, weights, processors and rows, by which a cache knows what it was made from."""

import hashlib
import json
import os
import reprlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from PIL import ExifTags, Image
from tokenizers import Tokenizer
from torch import nn
from transformers import ImageProcessingMixin, PreTrainedTokenizerBase, ProcessorMixin

from conjoin.processing.item_images import array_to_image
from conjoin.storage.files import file_digest

_INCIDENTAL_CONFIG_KEYS = frozenset({"transformers_version", "dtype", "torch_dtype", "architectures", "auto_map"})


def text_digest(text: str) -> str:
    """A fingerprint of a text."""
    return hashlib.sha256(text.encode()).hexdigest()


def stable_id(name: str) -> int:
    """A 63-bit id, equal exactly where the names are (up to hash collisions)."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 1


def name_ids(names: Sequence[str]) -> torch.Tensor:
    """The `stable_id` of each name, `(N,)` int64."""
    return torch.tensor([stable_id(name) for name in names])


def weights_digest(model: nn.Module, prefixes: tuple[str, ...] = ("",)) -> str:
    """A fingerprint of a model's weights, or of those whose names begin with one of `prefixes`."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        if name.startswith(prefixes):
            digest.update(f"\0{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def model_fingerprint(model: Any, settings: Mapping[str, Any] | None = None) -> str:  # noqa: ANN401 - an nn.Module
    """A fingerprint of a model's configuration and weights, wherever it is stored.

    Args:
        model: The model.
        settings: What decides its vectors beside the weights; None for its configuration.
    """
    known = model.config.to_dict() if settings is None else dict(settings)
    return text_digest(json.dumps(_essential(known), sort_keys=True, default=str) + weights_digest(model))


def settings_digest(settings: Mapping[str, Any]) -> str:
    """A fingerprint of settings, without what depends on where they were saved or on the last call."""
    incidental = ("auto_map", "processor_class", "truncation", "padding")
    kept = {name: value for name, value in settings.items() if name not in incidental}
    return text_digest(json.dumps(kept, sort_keys=True, default=str))


def part_digest(part: Any) -> str:  # noqa: ANN401
    """A fingerprint of an image processor, a tokenizer or a processor of transformers; of anything else, its type."""
    if isinstance(part, ProcessorMixin):
        return processor_digest(part)
    if isinstance(part, PreTrainedTokenizerBase):
        words = json.loads(part.backend_tokenizer.to_str()) if part.is_fast else part.get_vocab()
        return settings_digest({"words": settings_digest(words), "longest": part.model_max_length})
    if isinstance(part, ImageProcessingMixin):
        return settings_digest(part.to_dict())
    if isinstance(part, Tokenizer):  # of a static model
        return settings_digest(json.loads(part.to_str()))
    return text_digest(type(part).__name__)


def processor_digest(processor: ProcessorMixin) -> str:
    """A fingerprint of what a processor makes of items, wherever it was loaded from."""
    parts = processor.get_attributes()
    elsewhere = (*parts, "prompts")  # prompts are for sentence-transformers
    settings: dict[str, Any] = {name: value for name, value in processor.to_dict().items() if name not in elsewhere}
    settings["chat_template"] = getattr(processor, "chat_template", None)  # which `to_dict` leaves out
    return settings_digest(settings | {name: part_digest(getattr(processor, name)) for name in parts})


def rows_digest(rows: Any) -> str:  # noqa: ANN401 - any rows of pairs
    """A fingerprint of rows in their order: all their fields, as `row_digest` takes them.

    Raises:
        ValueError: The rows have no length and order, or are resampled each time they are read.
    """
    if isinstance(rows, datasets.Dataset):
        if rows.format["type"] == "custom":
            raise ValueError("the rows have a transform, so their images may change; cache the rows without it")
        if isinstance(rows.features.get("image"), datasets.Image):
            rows = rows.cast_column("image", datasets.Image(decode=False))
    elif not isinstance(rows, Sequence):
        raise ValueError(f"expected rows with a length and an order to cache, got {type(rows).__name__}")
    return text_digest(",".join(str(row_digest(row)) for row in rows))


def row_digest(row: Mapping[str, Any]) -> int:
    """A 63-bit fingerprint of a row, never 0: of all fields; of an image file, its path, size and time.

    Raises:
        OSError: A file cannot be read.
        ItemError: An array is no image.
    """
    return _digest(row, lambda path: repr((path, os.stat(path).st_size, os.stat(path).st_mtime_ns)).encode())


def item_digest(item: Mapping[str, Any]) -> int:
    """As `row_digest`, but of an image file, the bytes in it: a file that was moved or touched has the same one."""
    return _digest(item, lambda path: file_digest(Path(path)).encode())


def _digest(row: Mapping[str, Any], of_file: Callable[[str], bytes]) -> int:
    words = repr([(name, row[name]) for name in sorted(row) if name != "image"])
    digest = hashlib.sha256(words.encode("utf-8", "surrogatepass"))
    images = row.get("image")
    for image in images if isinstance(images, list) else [] if images is None else [images]:
        if isinstance(image, Mapping):
            image = image.get("bytes") or image.get("path")
        if isinstance(image, np.ndarray | torch.Tensor):
            image = array_to_image(image)
        if isinstance(image, Image.Image):
            digest.update(b"picture" + content_digest(image).encode())
        elif isinstance(image, bytes):
            digest.update(b"bytes" + hashlib.sha256(image).digest())
        elif isinstance(image, str | os.PathLike) and os.path.isfile(image):
            digest.update(b"file" + hashlib.sha256(of_file(str(image))).digest())
        else:  # such as a URL; what is no image may be deep
            words = repr(image) if isinstance(image, str | os.PathLike) else reprlib.repr(image)
            digest.update(b"name" + hashlib.sha256(words.encode("utf-8", "surrogatepass")).digest())
    return max(1, int.from_bytes(digest.digest()[:8], "big") >> 1)


def content_digest(image: Image.Image) -> str:
    """A fingerprint of a decoded image, with what else says how it is shown: palette, transparency and orientation."""
    digest = hashlib.sha256(f"{image.mode} {image.size}".encode() + image.tobytes())
    shown = (image.getpalette(), image.info.get("transparency"), image.getexif().get(ExifTags.Base.Orientation, 1))
    if shown != (None, None, 1):
        digest.update(repr(shown).encode())
    return digest.hexdigest()


def _essential(config: Any) -> Any:  # noqa: ANN401 - any JSON value
    """Drop what depends on where and by which version a configuration was saved."""
    if isinstance(config, Mapping):
        return {
            str(key): _essential(value)
            for key, value in config.items()
            if str(key) not in _INCIDENTAL_CONFIG_KEYS and not str(key).startswith("_")
        }
    return [_essential(value) for value in config] if isinstance(config, list | tuple) else config


def differences(recorded: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """Name each entry that differs between two keys, with both values; empty if none does."""
    names = [name for name in {**recorded, **wanted} if recorded.get(name) != wanted.get(name)]
    return ", ".join(f"{name} {recorded.get(name)!r:.60}, not {wanted.get(name)!r:.60}" for name in names)
