"""The features of frozen towers, computed once, so that training on a CPU takes minutes instead of hours."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from datasets import Array2D, Array3D, List, Value
from PIL import Image
from torch import Tensor, nn
from transformers import ProcessorMixin, TrainingArguments

from conjoin.data import EpochRows, ImageAugmentation, name_rows
from conjoin.data.row_images import map_images, plain_text
from conjoin.models.joint_encoder import JointEncoderModel
from conjoin.processing import load_image
from conjoin.storage import name_ids, processor_digest, rows_digest, weights_digest
from conjoin.trainers.precompute import precompute

MASKS = ("attention_mask", "special_tokens_mask")
BATCH_SIZE = 64
"""Images for each forward of a tower."""
Change = Callable[[Image.Image], Image.Image]
"""A change of a picture, such as `conjoin.data.ImageAugmentation`."""


class CachedFeatures(EpochRows):
    """Rows of tower features; each epoch samples one stored copy of the image and one of its texts.

    Args:
        images: Of each row `image_features` `(copies, 1 + P, h)`, `ids`, and `text_rows` `(2,)`, its rows of `texts`.
        texts: Of each distinct text `text_features` and masks.
        rows: What they were computed from.
        dtype: Of the image features.
        first_only: Always use the first copy and the first text (for evaluation).
        seed: Seed of the sampling.
    """

    def __init__(
        self,
        images: datasets.Dataset,
        texts: datasets.Dataset,
        rows: Any,
        dtype: torch.dtype = torch.float32,
        first_only: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__(images, seed)
        self.source, self.first_only = rows, first_only
        self.images = {name: _column(images, name) for name in images.column_names}
        self.images["image_features"] = self.images["image_features"].to(dtype)
        self.texts = {name: _column(texts, name) for name in texts.column_names}

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.choose(index)

    def choose(self, index: int, *salt: int) -> dict[str, Tensor]:
        """Return the row with this epoch's copy and text; another `salt` gives another sample."""
        copies, texts = self.images["image_features"][index], self.images["text_rows"][index]
        copy, choice = 0, 0
        if not self.first_only:
            random = self.numpy_random(index, *salt)
            copy, choice = int(random.integers(len(copies))), int(random.integers(int((texts >= 0).sum())))
        row = {"ids": self.images["ids"][index], "image_features": copies[copy]}
        return row | {name: values[int(texts[choice])] for name, values in self.texts.items()}

    @property
    def first_texts(self) -> Tensor:
        """The row in `texts` of each row's first text `(N,)`, equal for equal texts."""
        return self.images["text_rows"][:, 0]


def collate_features(rows: Sequence[Mapping[str, Tensor]]) -> dict[str, Any]:
    """Stack cached rows into a batch with the layout of `PairCollator`: `pairs` and `ids`."""
    stacked = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    return {"ids": stacked.pop("ids"), "pairs": stacked}


def cache_features(
    encoder: JointEncoderModel,
    processor: ProcessorMixin,
    rows: Any,
    folder: str | Path,
    *,
    copies: int = 1,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    first_only: bool = False,
    args: TrainingArguments | None = None,
) -> CachedFeatures:
    """Return the features of the frozen towers for rows, from `folder`, where they were computed before.

    Args:
        encoder: A joint encoder whose towers are frozen.
        processor: Its processor.
        rows: Pairs: `image`, `text`, optionally `alternative_text` (a second text to draw from), `group` or `id`.
        folder: Where the files are kept.
        copies: Stored versions of each image; the first is unchanged, the others are made by `ImageAugmentation`.
        seed: Of the sampling in training.
        dtype: What the vision tower computes in.
        first_only: Always use the first version and the first text (for evaluation).
        args: Of a trainer, whose main process computes; and where to compute.

    Raises:
        ValueError: The model is not a joint encoder, a tower is trained, or the rows are a stream.
    """
    if not isinstance(encoder, JointEncoderModel):
        raise ValueError(f"feature_copies: only the towers of a joint encoder, got {type(encoder).__name__}")
    for name in ("vision_model", "text_model"):
        if any(parameter.requires_grad for parameter in encoder.get_submodule(name).parameters()):
            raise ValueError(f"feature_copies: {name} is trained; set freeze_towers, or feature_copies to 0")
    if isinstance(rows, datasets.IterableDataset) or not hasattr(rows, "__len__"):
        raise ValueError("feature_copies: the features of a stream are not kept; set dataset_streaming to false")
    if args is not None:
        nn.Module.to(encoder, args.device)  # the trainer moves it only later
    was_training = encoder.training
    encoder.eval()  # no dropout in what is stored
    changes = [None, *[ImageAugmentation(0)] * (copies - 1)]  # of one generator, in turn
    words, text_rows = distinct_texts(rows)
    inputs = processor(text=words).to(encoder.device)  # at once, so that all have one length
    drawn = drawn_images(rows, changes, BATCH_SIZE)
    ids = name_ids(name_rows(rows) or [str(index) for index in range(len(rows))])

    @torch.inference_mode()
    def of_images(chosen: list[int]) -> dict[str, Any]:
        # those of finished shards are drawn again, for their random numbers
        images, names = next((images, names) for rows, images, names in drawn if rows.start == chosen[0])
        features = torch.stack([_image_features(encoder, processor, copy, names, dtype) for copy in images], 1)
        some = slice(chosen[0], chosen[-1] + 1)
        return {"image_features": features.numpy(), "ids": ids[some].tolist(), "text_rows": text_rows[some].numpy()}

    @torch.inference_mode()
    def of_texts(chosen: list[int]) -> dict[str, Any]:
        some = slice(chosen[0], chosen[-1] + 1)
        features = encoder.run_text_tower(inputs["input_ids"][some], inputs["attention_mask"][some]).cpu()
        return {"text_features": features.numpy()} | {name: inputs[name][some].cpu().numpy() for name in MASKS}

    width, length = encoder.config.text_config.hidden_size, inputs["input_ids"].shape[1]
    key: dict[str, Any] = {
        "towers": weights_digest(encoder, ("vision_model.", "text_model.")),
        "layers": [encoder.config.vision_hidden_layer, str(dtype), copies],
        "processor": processor_digest(processor),
        "rows": rows_digest(rows),
    }
    masks = {name: List(Value(str(inputs[name].dtype).partition(".")[2]), length=length) for name in MASKS}
    texts = precompute(
        range(len(words)),
        of_texts,
        folder,
        key=key | {"part": "texts"},
        features=datasets.Features({"text_features": Array2D((1 + length, width), "float32"), **masks}),
        batch_size=BATCH_SIZE,
        args=args,
    )
    with torch.inference_mode():
        shape = _image_features(encoder, processor, [rows[0]["image"]], [str(rows[0].get("id", 0))], dtype).shape
    images = precompute(
        range(len(rows)),
        of_images,
        folder,
        key=key | {"part": "images"},
        features=datasets.Features(
            {
                "image_features": Array3D((copies, *shape[1:]), "float32"),
                "ids": Value("int64"),
                "text_rows": List(Value("int64"), 2),
            }
        ),
        batch_size=BATCH_SIZE,
        args=args,
    )
    encoder.train(was_training)
    return CachedFeatures(images, texts, rows, dtype, first_only, seed)


def drawn_images(
    rows: Any, copies: Sequence[Change | None], batch_size: int
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


def _changed(change: Change, name: str, image: Any) -> Any:
    return map_images(lambda single: change(load_image(single, name)), image)


def distinct_texts(rows: Any) -> tuple[list[str], Tensor]:
    """Return the distinct texts, sorted, and the text indices of each row `(N, 2)`, -1 for none."""
    row_texts = [
        [plain_text(row.get("image"), t) for t in (row["text"], row.get("alternative_text")) if t] for row in rows
    ]
    texts = sorted({text for of_row in row_texts for text in of_row})
    indices = {text: index for index, text in enumerate(texts)}
    return texts, torch.tensor([[indices[t] for t in of_row] + [-1] * (2 - len(of_row)) for of_row in row_texts])


def _image_features(
    encoder: JointEncoderModel, processor: ProcessorMixin, images: list[Any], names: list[str], dtype: torch.dtype
) -> Tensor:
    """`(images, 1 + P, h)`, computed in `dtype`."""
    batch = processor(images=images, ids=names).to(encoder.device)
    with torch.autocast(encoder.device.type, dtype, enabled=dtype != torch.float32):
        return encoder.run_vision_tower(batch["pixel_values"]).to("cpu", dtype).float()


def _column(rows: datasets.Dataset, name: str) -> Tensor:
    """Return a column of arrays of one shape as one tensor `(N, ...)`."""
    feature, values = rows.features[name], rows.data.column(name)
    shape = getattr(feature, "shape", None) or ((feature.length,) if isinstance(feature, List) else ())
    parts = []
    for chunk in values.chunks:
        chunk = getattr(chunk, "storage", chunk)
        while hasattr(chunk, "flatten") and chunk.type.num_fields:
            chunk = chunk.flatten()
        parts.append(chunk.to_numpy(zero_copy_only=False))
    return torch.from_numpy(np.concatenate(parts).reshape(len(rows), *shape))
