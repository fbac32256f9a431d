"""Cache the features of frozen towers, so that training on a CPU takes minutes instead of hours."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import torch
from PIL import Image
from safetensors.torch import save
from torch import Tensor, nn
from transformers import PreTrainedModel, ProcessorMixin

from conjoin.data import EpochRows, ImageAugmentation, name_rows
from conjoin.data.interleaved import map_images, plain_text
from conjoin.models.joint_encoder import JointEncoderModel
from conjoin.ops import choose_bf16
from conjoin.processing import load_image
from conjoin.progress import progress
from conjoin.storage import (
    FolderKind,
    StoredFolder,
    is_current,
    name_ids,
    processor_digest,
    read_folder,
    replace_folder,
    rows_digest,
    weights_digest,
)

from .config import RetrievalConfig

MASKS = ("attention_mask", "special_tokens_mask")
TEXT_INPUTS = ("input_ids", "attention_mask")
FEATURES = FolderKind("feature cache", 2, "run `conjoin train`", is_cache=True)


class CachedFeatures(EpochRows):
    """Rows of tower features; each epoch samples one stored copy of the image and one of its texts.

    Args:
        folder: The output of `cache_features`.
        first_only: Always use the first copy and the first text (for evaluation).
        seed: Seed of the sampling.

    Raises:
        FileNotFoundError: There is no cache.
        ValueError: It is damaged or of another version.
    """

    def __init__(self, folder: str | Path, first_only: bool = False, seed: int = 0) -> None:
        self.tensors: dict[str, Tensor] = read_folder(folder, FEATURES, _read_tensors)
        super().__init__(self.tensors["ids"], seed)
        self.first_only = first_only

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.choose(index)

    def choose(self, index: int, *salt: int) -> dict[str, Tensor]:
        """Return the row with this epoch's copy and text; another `salt` gives another sample."""
        images, texts = self.tensors["image_features"], self.tensors["text_rows"][index]
        copy, choice = 0, 0
        if not self.first_only:
            random = self.numpy_random(index, *salt)
            copy, choice = int(random.integers(images.shape[0])), int(random.integers(int((texts >= 0).sum())))
        text = int(texts[choice])
        row = {"ids": self.tensors["ids"][index], "image_features": images[copy, index]}
        return row | {name: self.tensors[name][text] for name in ("text_features", *MASKS)}

    @property
    def texts(self) -> Tensor:
        """A label `(N,)` of each row's first text, equal for equal texts."""
        return self.tensors["text_rows"][:, 0]


def _read_tensors(folder: StoredFolder) -> dict[str, Tensor]:
    with folder.shard(0) as file:
        return {name: file.get_tensor(name) for name in file.keys()}


def collate_features(rows: Sequence[Mapping[str, Tensor]]) -> dict[str, Any]:
    """Stack cached rows into a batch with the layout of `PairCollator`: `pairs` and `ids`."""
    stacked = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    return {"ids": stacked.pop("ids"), "pairs": stacked}


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
    key: Mapping[str, Any] | None = None,
) -> Path:
    """Run the towers over `rows` and store the features; an intact cache with the same `key` is kept.

    A cache with another key, or a damaged one, is replaced in one step.

    Args:
        encoder: A joint encoder whose towers are frozen.
        processor: Its processor.
        rows: Pairs: `image`, `text`, optionally `alternative_text` (a second text to draw from), `group` or `id`.
        folder: Where the cache lies; everything is held in memory, twice while it is written.
        augment: Applied to every copy of an image but the first.
        copies: How many versions of each image to store.
        batch_size: Images per forward.
        dtype: What the vision tower computes in and its features are stored as.
        key: What the cache is made from (model, data, settings), each part under a name; plain values, as JSON holds
            them. None recomputes the cache.

    Returns:
        The folder.

    Raises:
        ValueError: The folder holds something else, or another process writes into it.
    """
    folder = Path(folder)
    if key is not None and is_current(folder, FEATURES, key):
        return folder
    encoder.eval()  # no dropout in what is stored
    tensors = _text_tensors(encoder, processor, rows, batch_size)
    tensors["image_features"] = _image_tensor(encoder, processor, rows, augment, copies, batch_size, dtype)
    tensors["ids"] = name_ids(name_rows(rows) or [str(index) for index in range(len(rows))])
    files = {"features.safetensors": lambda path: path.write_bytes(save(tensors))}
    replace_folder(folder, FEATURES, key or {}, files, {"rows": len(rows), "copies": copies})
    return folder


def cache_run_features(
    arguments: Any,  # noqa: ANN401 - `FeatureArguments` of recipe.py
    model: PreTrainedModel,
    processor: ProcessorMixin,
    train_rows: Any,  # noqa: ANN401
    eval_rows: Any,  # noqa: ANN401
    training: RetrievalConfig,
) -> tuple[CachedFeatures, CachedFeatures | None]:
    """Replace the rows of a run with the cached features of the frozen towers.

    Raises:
        ValueError: The model is not a joint encoder, a tower is trainable, or the rows are a stream.
    """
    if not isinstance(model, JointEncoderModel):
        raise ValueError(f"features: only a joint encoder supports cached features, got {type(model).__name__}")
    for name in ("vision_model", "text_model"):
        if any(parameter.requires_grad for parameter in model.get_submodule(name).parameters()):
            raise ValueError(f"features: {name} is being trained; set model.freeze_towers, or remove the section")
    nn.Module.to(model, training.device)  # the trainer moves it only later
    arguments.bf16 = choose_bf16(arguments.bf16, training.device)
    settings = asdict(arguments) | {"folder": None, "batch_size": None}
    key = {
        "towers": weights_digest(model, ("vision_model.", "text_model.")),
        "processor": processor_digest(processor),
        "settings": settings,
    }
    cached: list[CachedFeatures] = []
    for name, rows in (("train", train_rows), ("eval", eval_rows)):
        if rows is None:
            continue
        if not isinstance(rows, datasets.Dataset):
            raise ValueError("features: a stream cannot be cached; set data.streaming: false, or remove the section")
        with training.main_process_first(local=False, desc="caching features"):
            folder = cache_features(
                model,
                processor,
                rows,
                Path(arguments.folder) / name,
                augment=ImageAugmentation(arguments.seed) if arguments.augment and name == "train" else None,
                copies=arguments.copies if name == "train" else 1,
                batch_size=arguments.batch_size,
                dtype=torch.bfloat16 if arguments.bf16 else torch.float32,
                key=key | {"data": rows_digest(rows)},
            )
        cached.append(CachedFeatures(folder, first_only=name == "eval", seed=training.seed))
    return cached[0], cached[1] if len(cached) > 1 else None


def drawn_images(
    rows: Sequence[Mapping[str, Any]],
    augment: Callable[[Image.Image], Image.Image] | None,
    copies: int,
    batch_size: int,
) -> Iterator[tuple[int, slice, list[Any], list[str]]]:
    """Yield batches of images to cache: copy number, row slice, images and row names.

    A new `augment` with the same seed gives the same images.
    """
    for start in range(0, len(rows), batch_size):
        chosen = range(start, min(start + batch_size, len(rows)))
        images, names = [rows[i]["image"] for i in chosen], [str(rows[i].get("id", i)) for i in chosen]
        for copy in range(copies):
            drawn = images
            if copy > 0 and augment is not None:
                drawn = [
                    map_images(partial(_changed, augment, name), image)
                    for image, name in zip(images, names, strict=True)
                ]
            yield copy, slice(start, chosen.stop), drawn, names


def _changed(augment: Callable[[Image.Image], Image.Image], name: str, image: Any) -> Image.Image:  # noqa: ANN401
    return augment(load_image(image, name))


def distinct_texts(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], Tensor]:
    """Return the distinct texts, sorted, and the text indices of each row `(N, 2)`, -1 for none."""
    row_texts = [
        [plain_text(row.get("image"), t) for t in (row["text"], row.get("alternative_text")) if t] for row in rows
    ]
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
    with progress(total=copies * len(rows), desc="Image features", unit="image") as bar:
        for copy, chosen, images, names in drawn_images(rows, augment, copies, batch_size):
            batch = processor(images=images, ids=names).to(encoder.device)
            with torch.autocast(encoder.device.type, dtype, enabled=dtype != torch.float32):
                features = encoder.run_vision_tower(batch["pixel_values"]).to("cpu", dtype)
            if result is None:
                result = features.new_empty(copies, len(rows), *features.shape[1:])
            result[copy, chosen] = features
            bar.update(len(images))
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
        for start in progress(range(0, len(texts), batch_size), desc="Text features", unit="batch")
    ]
    return {"text_features": torch.cat(parts), "text_rows": text_rows} | {name: batch[name].cpu() for name in MASKS}
