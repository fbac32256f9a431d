"""Encoders out of checkpoints that are no models of this package, as BGE-m3, DINOv2 and CLIP (SOLAR App. D.4)."""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoImageProcessor,
    AutoModel,
    AutoTokenizer,
    PreTrainedConfig,
)
from transformers.utils import cached_file

from conjoin.ops import choose_device
from conjoin.processing.item_inputs import parse_items
from conjoin.retrieval.encoder import ItemEncoder, loading

_LONGEST = 512


def load_encoder(path: str | Path, **options: Any) -> ItemEncoder:  # noqa: ANN401
    """Load a model of this package as `ItemEncoder.from_pretrained` does, any other by `load_stock_encoder`.

    Args:
        path: A local folder or the name of a repository on the Hub.
        options: As for `ItemEncoder.from_pretrained`.

    Raises:
        FileNotFoundError: There is no such model.
    """
    with loading(path):
        config, _ = PreTrainedConfig.get_config_dict(path)
    return (
        ItemEncoder.from_pretrained(path, **options) if "auto_map" in config else load_stock_encoder(path, **options)
    )


def load_stock_encoder(
    path: str | Path,
    batch_size: int = 32,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    *,
    num_workers: int = 0,
) -> ItemEncoder:
    """An encoder out of a text encoder, a vision transformer, or a checkpoint with a tower for each (CLIP, SigLIP).

    A text encoder is read at CLS, or as the mean of its tokens where the repository's `1_Pooling/config.json` says so;
    a vision transformer at CLS; two towers at their projections, image and text of one item added. The arguments are
    those of `ItemEncoder.from_pretrained`.
    """
    device = choose_device(device)
    with loading(path):
        model = AutoModel.from_pretrained(path)
        stock = _StockModel(model, mean_pooling=_pools_by_mean(path))
        processor = partial(
            _process,
            AutoImageProcessor.from_pretrained(path) if stock.sees else None,
            AutoTokenizer.from_pretrained(path) if stock.reads else None,
            "max_length" if model.config.model_type.startswith("siglip") else "longest",
        )
    name = str(Path(path).resolve()) if Path(path).is_dir() else str(path)
    return ItemEncoder(stock, processor, batch_size, device, dtype, num_workers=num_workers, name=name)  # type: ignore[arg-type]


class _Output:
    """What `ItemEncoder` reads of a model's output."""

    def __init__(self, embeddings: Tensor) -> None:
        self.embeddings = embeddings


class _StockModel(torch.nn.Module):
    """A transformers model with one embedding per item."""

    def __init__(self, model: Any, mean_pooling: bool) -> None:  # noqa: ANN401 - any transformers model
        super().__init__()
        self.model: Any = model
        self.config = model.config
        self.mean_pooling = mean_pooling
        self.two_towers = {"text_config", "vision_config"} <= set(model.config.sub_configs)
        self.sees = self.two_towers or "patch_size" in model.config.to_dict()
        self.reads = self.two_towers or not self.sees

    def forward(self, items: Tensor, **inputs: Tensor) -> _Output:
        """Embed a batch of `_process`; `items` `(N, 2)` says which have an image and which a text."""
        parts = {}
        if "pixel_values" in inputs:
            parts[0] = self._image(inputs.pop("pixel_values"))
        if inputs:
            parts[1] = self._text(inputs)
        width = next(iter(parts.values())).shape[1]
        features = torch.zeros(len(items), width, device=items.device)
        for column, part in parts.items():
            features[items[:, column]] += part.float()
        return _Output(torch.nn.functional.normalize(features, dim=-1))

    def _image(self, pixel_values: Tensor) -> Tensor:
        if self.two_towers:
            return self.model.get_image_features(pixel_values=pixel_values).pooler_output
        return self.model(pixel_values=pixel_values).last_hidden_state[:, 0]

    def _text(self, inputs: dict[str, Tensor]) -> Tensor:
        if self.two_towers:
            return self.model.get_text_features(**inputs).pooler_output
        states = self.model(**inputs).last_hidden_state
        if not self.mean_pooling:
            return states[:, 0]
        weights = inputs["attention_mask"].unsqueeze(-1).to(states)
        return (states * weights).sum(dim=1) / weights.sum(dim=1)


def _process(image_processor: Any, tokenizer: Any, padding: str, items: Sequence[Any]) -> Mapping[str, Tensor]:  # noqa: ANN401
    """The inputs of `_StockModel.forward`: images and texts of those items that have them."""
    parsed = parse_items(items)
    images = [image for item in parsed for image in item.images]
    texts = [text for item in parsed for text in item.texts]
    for number, item in enumerate(parsed):
        if len(item.images) > 1 or len(item.texts) > 1:
            raise ValueError(f"item {number}: expected at most one image and one text")
        if (item.images and image_processor is None) or (item.texts and tokenizer is None):
            raise ValueError(f"item {number}: this model cannot take {item.modality!r}")
    batch = {"items": torch.tensor([[bool(item.images), bool(item.texts)] for item in parsed])}
    if images:
        batch["pixel_values"] = image_processor(images=images, return_tensors="pt")["pixel_values"]
    if texts:
        limit = min(tokenizer.model_max_length, _LONGEST)
        batch |= tokenizer(texts, padding=padding, truncation=True, max_length=limit, return_tensors="pt")
    return batch


def _pools_by_mean(path: str | Path) -> bool:
    """What sentence-transformers' description of the pooling says, if there is one."""
    file = cached_file(path, "1_Pooling/config.json", _raise_exceptions_for_missing_entries=False)
    return file is not None and bool(
        json.loads(Path(file).read_text(encoding="utf-8")).get("pooling_mode_mean_tokens")
    )
