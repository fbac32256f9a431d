"""Cache the features of frozen towers, so that training on a CPU takes minutes instead of hours."""

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import datasets
import torch
from PIL import Image
from torch import Tensor, nn
from transformers import PreTrainedModel, ProcessorMixin

from conjoin.data import EpochRows, ImageAugmentation, name_rows
from conjoin.data.row_images import map_images, plain_text
from conjoin.devices import choose_bf16
from conjoin.models.joint_encoder import JointEncoderModel
from conjoin.processing import load_image
from conjoin.storage import RowCache, name_ids, processor_digest, rows_digest, weights_digest

from .config import RetrievalConfig

MASKS = ("attention_mask", "special_tokens_mask")
TEXT_INPUTS = ("input_ids", "attention_mask")
_BATCHES_PER_SHARD = 4
PARTS = ("images", "texts")
"""The sub-folders of a feature cache: the rows of pairs, and the distinct texts that they name."""
Change = Callable[[Image.Image], Image.Image]
"""A change of a picture, such as `conjoin.data.ImageAugmentation`."""


class FeatureCache(RowCache):
    """The features of images or of texts, one row for each."""

    kind = "feature cache"
    remedy = "run `conjoin train`"


class CachedFeatures(EpochRows):
    """Rows of tower features; each epoch samples one stored copy of the image and one of its texts.

    Args:
        folder: The output of `cache_features`.
        first_only: Always use the first copy and the first text (for evaluation).
        seed: Seed of the sampling.

    Attributes:
        images: Of each row `image_features` `(copies, 1 + P, h)`, `ids`, and `text_rows` `(2,)`, its rows of `texts`.
        texts: Of each distinct text `text_features` and masks.

    Raises:
        FileNotFoundError: There is no cache.
        ValueError: It is unfinished, damaged or of another layout.
    """

    def __init__(self, folder: str | Path, first_only: bool = False, seed: int = 0) -> None:
        self.images, self.texts = (FeatureCache(Path(folder) / part) for part in PARTS)
        if self.images.key != self.texts.key:
            raise ValueError(
                f"the feature cache in {str(folder)!r} is unfinished: its texts are of another key; "
                f"{FeatureCache.remedy} again"
            )
        super().__init__(self.images, seed)
        self.first_only = first_only

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.choose(index)

    def choose(self, index: int, *salt: int) -> dict[str, Tensor]:
        """Return the row with this epoch's copy and text; another `salt` gives another sample."""
        row = self.images[index]
        copies, texts = row["image_features"], row["text_rows"]
        copy, choice = 0, 0
        if not self.first_only:
            random = self.numpy_random(index, *salt)
            copy, choice = int(random.integers(len(copies))), int(random.integers(int((texts >= 0).sum())))
        return {"ids": row["ids"], "image_features": copies[copy]} | self.texts[int(texts[choice])]

    @property
    def first_texts(self) -> Tensor:
        """The row in `texts` of each row's first text `(N,)`, equal for equal texts."""
        return self.images.column("text_rows")[:, 0]


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
    copies: Sequence[Change | None] = (None,),
    batch_size: int = 64,
    dtype: torch.dtype = torch.float32,
    key: Mapping[str, Any] | None = None,
) -> Path:
    """Run the towers over `rows` and store the features; what is interrupted resumes with the same `key`.

    An intact cache with the same `key` is kept, a cache with another one is replaced.

    Args:
        encoder: A joint encoder whose towers are frozen.
        processor: Its processor.
        rows: Pairs: `image`, `text`, optionally `alternative_text` (a second text to draw from), `group` or `id`.
        folder: Where the cache lies.
        copies: How each stored copy of an image is made; None leaves the image as it is.
        batch_size: Images per forward.
        dtype: What the vision tower computes in and its features are stored as.
        key: What the cache is made from (model, data, settings), each part under a name; plain values, as JSON holds
            them. None recomputes the cache.

    Returns:
        The folder.

    Raises:
        ValueError: The folder holds something else, or another process writes into it.
    """
    images, texts = (Path(folder) / part for part in PARTS)
    for part in (images, texts):
        FeatureCache.check_place(part)
        if key is None:
            shutil.rmtree(part, ignore_errors=True)
    key = key or {}
    if all(FeatureCache.is_complete(part, key) for part in (images, texts)):
        return Path(folder)
    encoder.eval()  # no dropout in what is stored
    ids = name_ids(name_rows(rows) or [str(index) for index in range(len(rows))])
    words, text_rows = distinct_texts(rows)
    batch = processor(text=words).to(encoder.device)  # at once, so that all have one length

    drawn = drawn_images(rows, copies, batch_size)

    def of_images(chosen: range) -> dict[str, Tensor]:
        copied = []
        for batch_rows, images, names in drawn:  # those of finished shards are drawn again, for their random numbers
            if batch_rows.start < chosen.start:
                continue
            copied.append(torch.stack([_image_features(encoder, processor, copy, names, dtype) for copy in images], 1))
            if batch_rows.stop == chosen.stop:
                break
        some = slice(chosen.start, chosen.stop)
        return {"image_features": torch.cat(copied), "ids": ids[some], "text_rows": text_rows[some]}

    def of_texts(chosen: range) -> dict[str, Tensor]:
        inputs = {name: batch[name][chosen.start : chosen.stop] for name in {*TEXT_INPUTS, *MASKS}}
        return _text_features(encoder, inputs, batch_size)

    options: dict[str, Any] = {"replace": True, "shard_size": _BATCHES_PER_SHARD * batch_size, "key": key}
    FeatureCache.make(texts, len(words), tensors=of_texts, description="Text features", **options)
    FeatureCache.make(images, len(rows), tensors=of_images, description="Image features", **options)
    return Path(folder)


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
        augmented = [ImageAugmentation(arguments.seed)] * (arguments.copies - 1)
        with training.main_process_first(local=False, desc="caching features"):
            folder = cache_features(
                model,
                processor,
                rows,
                Path(arguments.folder) / name,
                copies=[None, *augmented] if name == "train" else [None],
                batch_size=arguments.batch_size,
                dtype=torch.bfloat16 if arguments.bf16 else torch.float32,
                key=key | {"data": rows_digest(rows)},
            )
        cached.append(CachedFeatures(folder, first_only=name == "eval", seed=training.seed))
    return cached[0], cached[1] if len(cached) > 1 else None


def drawn_images(
    rows: Sequence[Mapping[str, Any]], copies: Sequence[Change | None], batch_size: int
) -> Iterator[tuple[range, list[list[Any]], list[str]]]:
    """Yield batches of images to cache: their rows, the images copy by copy, and the names of the rows.

    New augmentations with the same seeds give the same images, if all are read in this order.
    """
    for start in range(0, len(rows), batch_size):
        chosen = range(start, min(start + batch_size, len(rows)))
        images, names = [rows[i]["image"] for i in chosen], [str(rows[i].get("id", i)) for i in chosen]
        named = list(zip(images, names, strict=True))
        drawn = [[_changed(change, name, image) for image, name in named] if change else images for change in copies]
        yield chosen, drawn, names


def _changed(change: Change, name: str, image: Any) -> Any:  # noqa: ANN401 - one or several
    return map_images(lambda single: change(load_image(single, name)), image)


def distinct_texts(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], Tensor]:
    """Return the distinct texts, sorted, and the text indices of each row `(N, 2)`, -1 for none."""
    row_texts = [
        [plain_text(row.get("image"), t) for t in (row["text"], row.get("alternative_text")) if t] for row in rows
    ]
    texts = sorted({text for of_row in row_texts for text in of_row})
    indices = {text: index for index, text in enumerate(texts)}
    return texts, torch.tensor([[indices[t] for t in of_row] + [-1] * (2 - len(of_row)) for of_row in row_texts])


@torch.inference_mode()
def _image_features(
    encoder: JointEncoderModel, processor: ProcessorMixin, images: list[Any], names: list[str], dtype: torch.dtype
) -> Tensor:
    """`(images, 1 + P, h)` in `dtype`."""
    batch = processor(images=images, ids=names).to(encoder.device)
    with torch.autocast(encoder.device.type, dtype, enabled=dtype != torch.float32):
        return encoder.run_vision_tower(batch["pixel_values"]).to("cpu", dtype)


@torch.inference_mode()
def _text_features(encoder: JointEncoderModel, inputs: Mapping[str, Tensor], batch_size: int) -> dict[str, Tensor]:
    """Features and masks of texts `(M, ...)`."""
    parts = zip(*(inputs[name].split(batch_size) for name in TEXT_INPUTS), strict=True)
    features = torch.cat([encoder.run_text_tower(*part).cpu() for part in parts])
    return {"text_features": features} | {name: inputs[name].cpu() for name in MASKS}
