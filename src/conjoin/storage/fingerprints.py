"""Fingerprints: of names, weights, processors and rows, by which a cache knows what it was made from."""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import datasets
import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer
from torch import nn
from transformers import ImageProcessingMixin, PreTrainedTokenizerBase, ProcessorMixin

from conjoin.processing.item_images import array_to_image

_ORIENTATION = 0x0112  # the tag of EXIF
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


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """A fingerprint of how a tokenizer cuts texts."""
    if not tokenizer.is_fast:
        return settings_digest(tokenizer.get_vocab())
    return settings_digest(json.loads(tokenizer.backend_tokenizer.to_str()))


def part_digest(part: Any) -> str:  # noqa: ANN401
    """A fingerprint of an image processor, a tokenizer or a processor of transformers; of anything else, its type."""
    if isinstance(part, PreTrainedTokenizerBase):
        return settings_digest({"words": tokenizer_digest(part), "longest": part.model_max_length})
    if isinstance(part, ImageProcessingMixin):
        return settings_digest(part.to_dict())
    if isinstance(part, Tokenizer):  # of a static model
        return settings_digest(json.loads(part.to_str()))
    if isinstance(part, ProcessorMixin):
        return settings_digest({name: part_digest(vars(part)[name]) for name in part.get_attributes()})
    return text_digest(type(part).__name__)


def processor_digest(processor: ProcessorMixin) -> str:
    """A fingerprint of what a processor makes of items, wherever it was loaded from."""
    elsewhere = ("image_processor", "prompts")  # prompts are for sentence-transformers
    settings: dict[str, Any] = {name: value for name, value in processor.to_dict().items() if name not in elsewhere}
    if settings.get("input_type") == "seq":  # what processors without this setting do
        del settings["input_type"]
    parts: Any = processor  # an image processor and a tokenizer
    images, words = settings_digest(parts.image_processor.to_dict()), tokenizer_digest(parts.tokenizer)
    return settings_digest(settings | {"images": images, "words": words, "longest": parts.tokenizer.model_max_length})


def rows_digest(rows: Any) -> str:  # noqa: ANN401 - any rows of pairs
    """A fingerprint of rows in their order: all their fields, and their images as `row_bytes` takes them.

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
    digest = hashlib.sha256()
    for row in rows:
        digest.update(row_bytes(row))
    return digest.hexdigest()


def row_digest(row: Mapping[str, Any]) -> int:
    """A 63-bit fingerprint of a row as `row_bytes` takes it."""
    return int.from_bytes(hashlib.sha256(row_bytes(row)).digest()[:8], "big") >> 1


def row_bytes(row: Mapping[str, Any]) -> bytes:
    """What a fingerprint hashes of a row: its fields; of an image file, its path, size and time, undecoded.

    Of several images, one after the other. A row of which no item can be made counts as the types of its fields.
    """
    try:
        return _readable_bytes(row)
    except Exception:  # whatever a decoder raises; who encodes the row says what is wrong with it
        return repr(sorted((name, type(value).__name__) for name, value in row.items())).encode()


def _readable_bytes(row: Mapping[str, Any]) -> bytes:
    words = sorted((name, value) for name, value in row.items() if name != "image")
    image = row.get("image")
    if isinstance(image, list):
        return repr(words).encode("utf-8", "surrogatepass") + b"".join(
            _readable_bytes({"image": single}) for single in image
        )
    if isinstance(image, np.ndarray | torch.Tensor):
        image = array_to_image(image)
    if isinstance(image, Image.Image):
        return repr((words, content_digest(image))).encode("utf-8", "surrogatepass")
    stored = image if isinstance(image, Mapping) else {"bytes" if isinstance(image, bytes) else "path": image}
    data = stored.get("bytes") or b""
    name, state = "" if data else str(stored.get("path") or ""), None
    if name and os.path.isfile(name):
        stat = os.stat(name)
        state = (stat.st_size, stat.st_mtime_ns)
    return repr((words, name, state)).encode("utf-8", "surrogatepass") + data


def item_digest(item: Mapping[str, Any]) -> int:
    """A 63-bit fingerprint, never 0, of what an item holds: of an image file, the bytes in it.

    A file that was moved or touched has the same one, and a picture that was changed another one. An image that is no
    file here, such as a URL, counts as its name. What is no item counts as in `row_bytes`.
    """
    try:
        digest = _content_of(item)
    except Exception:  # as in `row_bytes`
        digest = hashlib.sha256(row_bytes(item))
    return max(1, int.from_bytes(digest.digest()[:8], "big") >> 1)


def _content_of(item: Mapping[str, Any]) -> "hashlib._Hash":
    words = [(name, item[name]) for name in sorted(item) if name != "image"]
    digest = hashlib.sha256(repr(words).encode("utf-8", "surrogatepass"))
    image = item.get("image")
    for single in image if isinstance(image, list) else [] if image is None else [image]:
        path = single.get("path") if isinstance(single, Mapping) and not single.get("bytes") else single
        if isinstance(path, str | os.PathLike) and os.path.isfile(path):
            with open(path, "rb") as file:
                digest.update(b"\0" + hashlib.file_digest(file, "sha256").digest())
        elif single is not None:
            digest.update(b"\1" + row_bytes({"image": single}))
    return digest


def content_digest(image: Image.Image) -> str:
    """A fingerprint of a decoded image, with what else says how it is shown: palette, transparency and orientation."""
    digest = hashlib.sha256(f"{image.mode} {image.size}".encode() + image.tobytes())
    shown = (image.getpalette(), image.info.get("transparency"), image.getexif().get(_ORIENTATION, 1))
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
    return ", ".join(f"{name} {_short(recorded.get(name))}, not {_short(wanted.get(name))}" for name in names)


def _short(value: object) -> str:
    """A value for a message; of a long text, such as a digest, the beginning."""
    if isinstance(value, list):
        return f"[{', '.join(map(_short, value))}]"
    if isinstance(value, str) and len(value) > 40:
        return f"{value[:12]!r}..."
    return repr(value)
