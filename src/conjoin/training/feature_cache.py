"""Run frozen towers once and train what stands on them: the difference between minutes and hours without a GPU."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.utils.data import Dataset
from tqdm.auto import tqdm
from transformers import ProcessorMixin

from conjoin.models.joint_encoder import JointEncoderModel

from .collator import name_ids

MASKS = ("attention_mask", "special_tokens_mask")
TEXT_INPUTS = ("input_ids", "attention_mask")


class CachedFeatures(Dataset[dict[str, Tensor]]):
    """Rows of tower features: each access draws one of an image's stored copies and one of its texts.

    Args:
        folder: Where `cache_features` wrote them.
        first_only: Always take the first copy and the first text (for evaluation).
    """

    def __init__(self, folder: str | Path, first_only: bool = False) -> None:
        with safe_open(str(Path(folder) / "features.safetensors"), "pt") as file:
            self.tensors = {name: file.get_tensor(name) for name in file.keys()}
        self.first_only = first_only

    def __len__(self) -> int:
        return len(self.tensors["ids"])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        images, texts = self.tensors["image_features"], self.tensors["text_rows"][index]
        text = int(texts[self._draw(int((texts >= 0).sum()))])
        return {
            "image_features": images[self._draw(images.shape[0]), index],
            "text_features": self.tensors["text_features"][text],
            "ids": self.tensors["ids"][index],
        } | {name: self.tensors[name][text] for name in MASKS}

    def _draw(self, count: int) -> int:
        return 0 if self.first_only else int(torch.randint(count, ()))


def collate_features(rows: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Stack cached rows into model inputs."""
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def cache_features(
    encoder: JointEncoderModel,
    processor: ProcessorMixin,
    rows: Sequence[Mapping[str, Any]],
    folder: str | Path,
    *,
    augment: Callable[[Image.Image], Image.Image] | None = None,
    copies: int = 1,
    batch_size: int = 64,
    dtype: torch.dtype = torch.float32,
    key: str = "",
) -> Path:
    """Run the towers over `rows` and store what they give; a complete cache with the same `key` is kept as it is.

    Args:
        encoder: A joint encoder whose towers are frozen.
        processor: Its processor.
        rows: Pairs: `image`, `text`, optionally `alternative_text` (a second text to draw from), `group` or `id`.
        folder: Where the cache lies; everything is held in memory once, so this is for small data.
        augment: Applied to every copy of an image but the first.
        copies: How many versions of each image to store.
        batch_size: Images per forward.
        dtype: What the vision tower computes in and its features are stored as.
        key: Names what the cache was made from (model, data, settings).

    Returns:
        The folder.
    """
    folder = Path(folder)
    marker = folder / "cache.json"
    if marker.exists() and json.loads(marker.read_text())["key"] == key:
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    encoder.eval()  # no dropout in what is stored
    tensors = _text_tensors(encoder, processor, rows, batch_size)
    tensors["image_features"] = _image_tensor(encoder, processor, rows, augment, copies, batch_size, dtype)
    tensors["ids"] = name_ids([str(row.get("group", row.get("id", index))) for index, row in enumerate(rows)])
    save_file(tensors, str(folder / "features.safetensors"))
    marker.write_text(json.dumps({"key": key, "rows": len(rows), "copies": copies}, indent=2) + "\n")
    return folder


@torch.inference_mode()
def _image_tensor(
    encoder: JointEncoderModel,
    processor: ProcessorMixin,
    rows: Sequence[Mapping[str, Any]],
    augment: Callable[[Image.Image], Image.Image] | None,
    copies: int,
    batch_size: int,
    dtype: torch.dtype,
) -> Tensor:
    """`(copies, N, 1 + P, h)` in `dtype`."""
    result: Tensor | None = None
    with tqdm(total=copies * len(rows), desc="Image features", unit="image") as progress:
        for start in range(0, len(rows), batch_size):
            images = [rows[index]["image"] for index in range(start, min(start + batch_size, len(rows)))]
            for copy in range(copies):
                drawn = images if copy == 0 or augment is None else [augment(image) for image in images]
                batch = processor(images=drawn).to(encoder.device)
                with torch.autocast(encoder.device.type, dtype, enabled=dtype != torch.float32):
                    features = encoder.run_vision_tower(batch["pixel_values"]).to("cpu", dtype)
                if result is None:
                    result = features.new_empty(copies, len(rows), *features.shape[1:])
                result[copy, start : start + len(images)] = features
                progress.update(len(images))
    if result is None:
        raise ValueError("there are no rows to cache features of")
    return result


@torch.inference_mode()
def _text_tensors(
    encoder: JointEncoderModel, processor: ProcessorMixin, rows: Sequence[Mapping[str, Any]], batch_size: int
) -> dict[str, Tensor]:
    """Features and masks of the distinct texts `(M, ...)`; `text_rows` `(N, 2)`: which are a row's, -1 for none."""
    row_texts = [[t for t in (row["text"], row.get("alternative_text")) if t] for row in rows]
    texts = sorted({text for found in row_texts for text in found})
    place = {text: index for index, text in enumerate(texts)}
    batch = processor(text=texts).to(encoder.device)
    parts = [
        encoder.run_text_tower(*(batch[name][start : start + batch_size] for name in TEXT_INPUTS)).cpu()
        for start in tqdm(range(0, len(texts), batch_size), desc="Text features", unit="batch")
    ]
    text_rows = torch.tensor([[place[t] for t in found] + [-1] * (2 - len(found)) for found in row_texts])
    return {"text_features": torch.cat(parts), "text_rows": text_rows} | {name: batch[name].cpu() for name in MASKS}
