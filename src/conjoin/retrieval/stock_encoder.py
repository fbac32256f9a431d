"""Stock transformers checkpoints (BERT, DINOv2, CLIP, ...) behind the interface of `ItemEncoder`."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoImageProcessor, AutoModel, AutoTokenizer, PreTrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING_NAMES,
)

from conjoin.hub.load import loading
from conjoin.processing.input_types import only_image
from conjoin.processing.item_error import ItemError
from conjoin.processing.item_images import load_image, process_image
from conjoin.processing.item_inputs import cut_text, parse_items
from conjoin.retrieval.encoder import EncoderOutput
from conjoin.storage import part_digest, text_digest

_LONGEST = 512


def load_stock_model(
    path: str | Path, trust_remote_code: bool = False, revision: str | None = None
) -> tuple["StockModel", "StockProcessor"]:
    """Load a stock checkpoint and what turns items into its inputs, as `ItemEncoder` takes them.

    A text encoder and a vision transformer are read at CLS; two towers (CLIP, SigLIP) at their projections, image and
    text of one item added. An instruction precedes the text, with a space between; an item without text ignores it.

    Args:
        path: A local folder or the name of a repository on the Hub.
        trust_remote_code: Run the Python code that it brings.
        revision: Branch, tag or commit of the repository.

    Raises:
        FileNotFoundError: There is no such model.
        ValueError: The weights are damaged, the model is no encoder, or it needs code that is not trusted.
    """
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code, "revision": revision or "main"}
    with loading(path, revision):
        model = StockModel(AutoModel.from_pretrained(path, **options))
        processor = StockProcessor(
            AutoImageProcessor.from_pretrained(path, **options) if model.sees else None,
            AutoTokenizer.from_pretrained(path, **options) if model.reads else None,
            "max_length" if model.config.model_type.startswith("siglip") else "longest",
        )
    return model, processor


class StockModel(torch.nn.Module):
    """A transformers model with one L2-normalised embedding per item.

    Args:
        model: A text encoder, a vision transformer, or a model with a tower for each.

    Raises:
        ValueError: It is a language model, or its two towers have no common space.
    """

    def __init__(self, model: Any) -> None:  # noqa: ANN401 - any transformers model
        super().__init__()
        self.model: Any = model
        self.config: PreTrainedConfig = model.config
        self.two_towers = {"text_config", "vision_config"} <= set(self.config.sub_configs)
        self.sees = self.two_towers or "patch_size" in self.config.to_dict()
        self.reads = self.two_towers or not self.sees
        _check_encodes(self.config, self.two_towers)

    def forward(self, items: Tensor, **inputs: Tensor) -> EncoderOutput:
        """Embed a batch of `StockProcessor`; `items` `(N, 2)` says which have an image and which a text."""
        parts = {}
        if "pixel_values" in inputs:
            parts[0] = self._image(inputs.pop("pixel_values"))
        if inputs:
            parts[1] = self._text(inputs)
        width = next(iter(parts.values())).shape[1]
        features = torch.zeros(len(items), width, device=items.device)
        for column, part in parts.items():
            features[items[:, column]] += part.float()
        return EncoderOutput(torch.nn.functional.normalize(features, dim=-1))

    def _image(self, pixel_values: Tensor) -> Tensor:
        if self.two_towers:
            return self.model.get_image_features(pixel_values=pixel_values).pooler_output
        return self.model(pixel_values=pixel_values).last_hidden_state[:, 0]

    def _text(self, inputs: dict[str, Tensor]) -> Tensor:
        if self.two_towers:
            return self.model.get_text_features(**inputs).pooler_output
        return self.model(**inputs).last_hidden_state[:, 0]


def _check_encodes(config: PreTrainedConfig, two_towers: bool) -> None:
    """Refuse the library's models that have no vector to read.

    Raises:
        ValueError: It is a language model, or its towers have no common space.
    """
    model_type = config.model_type
    generates = model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and model_type not in MODEL_FOR_MASKED_LM_MAPPING_NAMES
    aligned = model_type in MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING_NAMES
    is_blip2 = "qformer_config" in config.sub_configs  # AutoModel drops its projections
    if generates or (two_towers and (is_blip2 or not aligned)):
        raise ValueError(
            f"{model_type!r} gives no embedding; expected a text encoder, a vision transformer, a model with an image "
            "and a text tower, or a folder of sentence-transformers or of this package (MllmRetrieverModel.from_mllm "
            "makes an encoder of an MLLM)"
        )


class StockProcessor(NamedTuple):
    """What turns items into the inputs of a `StockModel`.

    Attributes:
        image_processor: Of its images, if it takes any.
        tokenizer: Of its texts, if it takes any.
        padding: Of texts: `"longest"` or `"max_length"`.
    """

    image_processor: Any
    tokenizer: Any
    padding: str

    def __call__(self, items: Sequence[Any], instruction: Sequence[str | None] | None = None) -> Mapping[str, Tensor]:
        """The inputs of `StockModel.forward`: images and texts of those items that have them."""
        read = load_image if self.image_processor is None else partial(process_image, self.image_processor)
        parsed = parse_items(items, read=read)
        for number, item in enumerate(parsed):
            only_image(item, f"item {number}")
            if (item.images and self.image_processor is None) or (item.texts and self.tokenizer is None):
                raise ItemError(f"item {number}", f"this model cannot take {item.modality!r}")
        instructions = [None] * len(parsed) if instruction is None else instruction
        images = [image for item in parsed for image in item.images]
        pairs = zip(instructions, parsed, strict=True)
        texts = [_joined(prompt, " ".join(item.texts)) for prompt, item in pairs if item.texts]
        batch = {"items": torch.tensor([[bool(item.images), bool(item.texts)] for item in parsed])}
        if images:
            batch["pixel_values"] = torch.cat([image["pixel_values"] for image in images])
        if texts:
            limit = min(self.tokenizer.model_max_length, _LONGEST)
            texts = [cut_text(text, self.tokenizer, limit) for text in texts]
            batch |= self.tokenizer(
                texts, padding=self.padding, truncation=True, max_length=limit, return_tensors="pt"
            )
        return batch

    def digest(self) -> str:
        """Equal for equal settings."""
        return text_digest("\n".join(map(part_digest, (self.image_processor, self.tokenizer))) + self.padding)


def _joined(instruction: str | None, text: str) -> str:
    return f"{instruction.strip()} {text}" if instruction and instruction.strip() else text
