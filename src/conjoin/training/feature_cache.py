"""Run frozen towers once and train what stands on them: the difference between minutes and hours without a GPU."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.utils.data import Dataset
from tqdm.auto import tqdm
from transformers import ProcessorMixin, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from conjoin.models.joint_encoder import JointEncoderModel
from conjoin.processing.item_inputs import load_image

from .collator import name_rows
from .digests import name_ids

MASKS = ("attention_mask", "special_tokens_mask")
TEXT_INPUTS = ("input_ids", "attention_mask")
TEACHERS_FILE = "teachers.safetensors"


class CachedFeatures(Dataset[dict[str, Tensor]]):
    """Rows of tower features: each epoch draws one of an image's stored copies and one of its texts.

    The draw depends on `seed`, `epoch` and the row alone, so a resumed run sees what the uninterrupted one would have.

    Args:
        folder: Where `cache_features` wrote them.
        first_only: Always take the first copy and the first text (for evaluation).
        seed: Seed of the draws.
        teachers: Also give what `cache_teacher_features` wrote there, of the same copy and text.
    """

    def __init__(self, folder: str | Path, first_only: bool = False, seed: int = 0, teachers: bool = False) -> None:
        self.tensors: dict[str, Tensor] = {}
        for name in ("features.safetensors", TEACHERS_FILE)[: 1 + teachers]:
            with safe_open(str(Path(folder) / name), "pt") as file:
                self.tensors |= {name: file.get_tensor(name) for name in file.keys()}
        self.first_only = first_only
        self.seed = seed
        self.epoch = 0

    def __len__(self) -> int:
        return len(self.tensors["ids"])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.draw(index)

    def draw(self, index: int, *salt: int) -> dict[str, Tensor]:
        """The row as this epoch draws it; `salt` makes other draws."""
        images, texts = self.tensors["image_features"], self.tensors["text_rows"][index]
        copy, choice = 0, 0
        if not self.first_only:
            draws = np.random.default_rng((self.seed, self.epoch, index, *salt))
            copy, choice = int(draws.integers(images.shape[0])), int(draws.integers(int((texts >= 0).sum())))
        text = int(texts[choice])
        row = {"ids": self.tensors["ids"][index]}
        for name, tensor in self.tensors.items():
            if name.startswith(("image_", "teacher_image_")):
                row[name] = tensor[copy, index]
            elif name not in ("ids", "text_rows"):
                row[name] = tensor[text]
        return row


class DrawsByEpoch(Protocol):
    """A dataset whose rows are drawn anew in every epoch."""

    epoch: int


class NewDraws(TrainerCallback):
    """Tells the dataset which epoch it is."""

    def __init__(self, dataset: DrawsByEpoch) -> None:
        self.dataset = dataset

    def on_epoch_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        """Called before the rows of an epoch, also one that is resumed half way, are read.

        Raises:
            ValueError: Workers persist, so they would draw the rows of the first epoch again and again.
        """
        if args.dataloader_persistent_workers:
            raise ValueError("rows are drawn anew in every epoch; leave dataloader_persistent_workers out")
        self.dataset.epoch = int(state.epoch or 0)


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
    for file in (marker, folder / TEACHERS_FILE):
        file.unlink(missing_ok=True)  # so that a cache half written is never taken for the one before
    encoder.eval()  # no dropout in what is stored
    tensors = _text_tensors(encoder, processor, rows, batch_size)
    tensors["image_features"] = _image_tensor(encoder, processor, rows, augment, copies, batch_size, dtype)
    tensors["ids"] = name_ids(name_rows(rows) or [str(index) for index in range(len(rows))])
    save_file(tensors, str(folder / "features.safetensors"))
    marker.write_text(json.dumps({"key": key, "rows": len(rows), "copies": copies}, indent=2) + "\n")
    return folder


def drawn_images(
    rows: Sequence[Mapping[str, Any]],
    augment: Callable[[Image.Image], Image.Image] | None,
    copies: int,
    batch_size: int,
) -> Iterator[tuple[int, slice, list[Any], list[str]]]:
    """Batches of images as they are cached: which copy, which rows, the images and the rows' names.

    A new `augment` of the same seed gives the same images again.
    """
    for start in range(0, len(rows), batch_size):
        chosen = range(start, min(start + batch_size, len(rows)))
        images, names = [rows[i]["image"] for i in chosen], [str(rows[i].get("id", i)) for i in chosen]
        for copy in range(copies):
            drawn = images
            if copy > 0 and augment is not None:
                drawn = [augment(load_image(image, name)) for image, name in zip(images, names, strict=True)]
            yield copy, slice(start, chosen.stop), drawn, names


def distinct_texts(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], Tensor]:
    """The distinct texts in order, and which of them are a row's, `(N, 2)`, -1 for none."""
    row_texts = [[t for t in (row["text"], row.get("alternative_text")) if t] for row in rows]
    texts = sorted({text for found in row_texts for text in found})
    place = {text: index for index, text in enumerate(texts)}
    return texts, torch.tensor([[place[t] for t in found] + [-1] * (2 - len(found)) for found in row_texts])


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
        for copy, chosen, images, names in drawn_images(rows, augment, copies, batch_size):
            batch = processor(images=images, ids=names).to(encoder.device)
            with torch.autocast(encoder.device.type, dtype, enabled=dtype != torch.float32):
                features = encoder.run_vision_tower(batch["pixel_values"]).to("cpu", dtype)
            if result is None:
                result = features.new_empty(copies, len(rows), *features.shape[1:])
            result[copy, chosen] = features
            progress.update(len(images))
    if result is None:
        raise ValueError("there are no rows to cache features of")
    return result


@torch.inference_mode()
def _text_tensors(
    encoder: JointEncoderModel, processor: ProcessorMixin, rows: Sequence[Mapping[str, Any]], batch_size: int
) -> dict[str, Tensor]:
    """Features and masks of the distinct texts `(M, ...)`, and `text_rows` of `distinct_texts`."""
    texts, text_rows = distinct_texts(rows)
    batch = processor(text=texts).to(encoder.device)
    parts = [
        encoder.run_text_tower(*(batch[name][start : start + batch_size] for name in TEXT_INPUTS)).cpu()
        for start in tqdm(range(0, len(texts), batch_size), desc="Text features", unit="batch")
    ]
    return {"text_features": torch.cat(parts), "text_rows": text_rows} | {name: batch[name].cpu() for name in MASKS}
