"""What frozen models say of rows, computed once and read while training; and the features of frozen towers."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from torch import Tensor, nn
from transformers import ProcessorMixin, TrainingArguments

from conjoin.data import EpochRows, augment_image, name_rows
from conjoin.data.collators import TEXT_IDS
from conjoin.data.row_images import map_images, plain_text
from conjoin.models.joint_encoder import JointEncoderModel
from conjoin.models.shortcuts import evaluation_mode
from conjoin.processing import load_image
from conjoin.storage import name_ids, processor_digest, rows_digest, settings_digest, weights_digest

MASKS = ("attention_mask", "special_tokens_mask")
BATCH_SIZE = 64
"""Images for each forward of a tower."""


def precompute(
    rows: Any,
    compute: Callable[[list[Any]], Mapping[str, Any]],
    folder: str | Path,
    *,
    key: Mapping[str, Any],
    batch_size: int = 32,
    args: TrainingArguments | None = None,
) -> datasets.Dataset:
    """Return what `compute` says of each row, as torch tensors; from `folder`, where it was computed before.

    Args:
        rows: Rows with a length and an order.
        compute: Maps some rows, in their order, to columns of numbers or vectors, NumPy arrays `(N,)` or `(N, D)`.
        folder: Where the result is kept when it is complete, under a digest of `key`; another key has another file.
        key: All that the result depends on, as JSON holds it: digests of weights, processor and rows, settings.
        batch_size: Rows for each call.
        args: Of a trainer with several processes: the main one computes, the others wait.
    """
    digest = settings_digest(dict(key))[:40]
    Path(folder).mkdir(parents=True, exist_ok=True)
    alone = nullcontext() if args is None else args.main_process_first(local=False, desc="precomputing")
    with alone:
        computed = datasets.Dataset.from_dict({"row": list(range(len(rows)))}).map(
            lambda batch: dict(compute([rows[index] for index in batch["row"]])),
            batched=True,
            batch_size=batch_size,
            remove_columns=["row"],
            cache_file_name=str(Path(folder) / f"{digest}.arrow"),
            new_fingerprint=digest,
            desc=f"Precomputing in {Path(folder).name}",
        )
    return computed.with_format("torch")


class CachedFeatures(EpochRows):
    """Rows of the features of frozen towers; each epoch samples one stored copy of the image and one of its texts.

    They are computed once, and read from `folder` afterwards.

    Args:
        encoder: A joint encoder whose towers are frozen.
        processor: Its processor.
        rows: Pairs: `image`, `text`, optionally `alternative_text` (a second text to draw from), `group` or `id`.
        folder: Where the files are kept.
        copies: Stored versions of each image; the first is unchanged, the others are made by `augment_image`.
        seed: Of the sampling in training.
        dtype: What the vision tower computes in.
        first_only: Always use the first version and the first text (for evaluation).
        args: Of a trainer, whose main process computes; and where to compute.

    Attributes:
        images: Of each row `image_features` `(N, copies, 1 + P, h)`; `ids` `(N,)`, equal for rows that show the same
            thing; `text_rows` `(N, 2)`, the rows of `texts` that it may use, -1 for none.
        texts: Of each distinct text `text_features` and masks.

    Raises:
        ValueError: The model is not a joint encoder, a tower is trained, or the rows are a stream.
    """

    def __init__(
        self,
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
    ) -> None:
        super().__init__(rows, seed)
        self.first_only = first_only
        if not isinstance(encoder, JointEncoderModel):
            raise ValueError(f"feature_copies: only the towers of a joint encoder, got {type(encoder).__name__}")
        for name in ("vision_model", "text_model"):
            if any(parameter.requires_grad for parameter in encoder.get_submodule(name).parameters()):
                raise ValueError(f"feature_copies: {name} is trained; set freeze_towers, or feature_copies to 0")
        if not hasattr(rows, "__len__"):
            raise ValueError("feature_copies: the features of a stream are not kept; set dataset_streaming to false")
        if args is not None:
            nn.Module.to(encoder, args.device)  # the trainer moves it only later
        texts_of = [
            [plain_text(row.get("image"), text) for text in (row["text"], row.get("alternative_text")) if text]
            for row in rows
        ]
        words = sorted({text for of_row in texts_of for text in of_row})
        places = {text: place for place, text in enumerate(words)}
        # at once, so that all have one length
        inputs = processor([{"text": text} for text in words]).to(encoder.device)
        random = np.random.default_rng(0)  # one for all rows, in their order

        def augmented(image: Any, name: str) -> Any:
            return map_images(lambda one: augment_image(load_image(one, name), random), image)

        def of_images(chosen: list[int]) -> dict[str, Any]:
            some, found = [rows[index] for index in chosen], []
            names = [str(row.get("id", index)) for index, row in zip(chosen, some, strict=True)]
            for version in range(copies):
                images = [row["image"] for row in some]
                if version:
                    images = [*map(augmented, images, names)]
                batch = processor([{"image": image} for image in images], ids=names).to(encoder.device)
                with torch.autocast(encoder.device.type, dtype, enabled=dtype != torch.float32):
                    found.append(encoder.run_vision_tower(batch["pixel_values"]).to("cpu", dtype).float())
            return {"image_features": torch.stack(found, 1).flatten(1).numpy()}

        def of_texts(chosen: list[int]) -> dict[str, Any]:
            some = slice(chosen[0], chosen[-1] + 1)
            features = encoder.run_text_tower(inputs["input_ids"][some], inputs["attention_mask"][some])
            columns = {"text_features": features.flatten(1)} | {name: inputs[name][some] for name in MASKS}
            return {name: column.cpu().numpy() for name, column in columns.items()}

        key: dict[str, Any] = {
            "towers": weights_digest(encoder, ("vision_model.", "text_model.")),
            "layers": [encoder.config.vision_hidden_layer, str(dtype), copies],
            "processor": processor_digest(processor),
            "rows": rows_digest(rows),
        }
        stored = []
        with evaluation_mode(encoder), torch.inference_mode():  # no dropout in what is stored
            for part, (count, compute) in {"texts": (len(words), of_texts), "pixels": (len(rows), of_images)}.items():
                found = precompute(
                    range(count), compute, folder, key=key | {"part": part}, batch_size=BATCH_SIZE, args=args
                ).with_format("numpy")[:]
                stored.append({name: torch.from_numpy(column) for name, column in found.items()})
        self.texts, self.images = stored
        config, text = encoder.config, self.texts["text_features"]
        self.texts["text_features"] = text.view(len(text), -1, config.text_config.hidden_size)
        pixels = self.images["image_features"].to(dtype)
        self.images = {
            "image_features": pixels.view(len(rows), copies, -1, config.vision_config.hidden_size),
            "ids": name_ids(name_rows(rows)),
            "text_rows": torch.tensor([([places[text] for text in of_row] + [-1])[:2] for of_row in texts_of]),
        }

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.choose(index)

    def choose(self, index: int, *salt: int) -> dict[str, Tensor]:
        """Return the row with this epoch's copy and text; another `salt` gives another sample."""
        copies, texts = self.images["image_features"][index], self.images["text_rows"][index]
        copy, choice = 0, 0
        if not self.first_only:
            random = self.numpy_random(index, *salt)
            copy, choice = int(random.integers(len(copies))), int(random.integers(int((texts >= 0).sum())))
        row = {"ids": self.images["ids"][index], TEXT_IDS: texts[0], "image_features": copies[copy]}
        return row | {name: values[int(texts[choice])] for name, values in self.texts.items()}


def collate_features(rows: Sequence[Mapping[str, Tensor]]) -> dict[str, Any]:
    """Stack cached rows into a batch with the layout of `PairCollator`: `pairs`, `ids` and the ids of their texts."""
    stacked = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    return {"ids": stacked.pop("ids"), TEXT_IDS: stacked.pop(TEXT_IDS), "pairs": stacked}
