"""Bare checkpoints of transformers (CLIP, SigLIP, DINOv2, BERT, ...) behind the interface of `ItemEncoder`."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image
from sentence_transformers.sentence_transformer.modules import Pooling
from torch import Tensor
from transformers import MODEL_MAPPING, AutoConfig, AutoImageProcessor, AutoModel, AutoTokenizer
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING_NAMES,
)

from conjoin.constants import POOLINGS
from conjoin.hub.load import loading
from conjoin.processing.item_error import ItemError
from conjoin.processing.item_images import load_image, process_image
from conjoin.processing.item_inputs import parse_items
from conjoin.processing.processing_image_text import only_image, text_limit
from conjoin.retrieval.encoder import EncoderOutput
from conjoin.storage import part_digest, settings_digest

_TOWERS = {"text_config", "vision_config"}
_ELSE = (
    "expected a model with an image and a text tower, a vision or a text encoder, a folder of sentence-transformers "
    "or this package; conjoin.from_mllm makes a model of an MLLM, preset= (--preset) a published one"
)


def load_stock_model(
    path: str | Path, pooling: str | None = None, trust_remote_code: bool = False, revision: str | None = None
) -> tuple["StockModel", "StockProcessor"]:
    """Load a bare checkpoint and what turns items into its inputs, as `ItemEncoder` takes them.

    Args:
        path: A local folder or the name of a repository on the Hub.
        pooling: How the states of the tokens become one vector, one of `POOLINGS`. None: by the projections of two
            towers, else by the pooled output that its class was trained with.
        trust_remote_code: Run the Python code that it brings.
        revision: Branch, tag or commit of the repository.

    Raises:
        FileNotFoundError: There is no such model.
        ValueError: Weights are damaged or missing, code is needed and not trusted, the model gives no embedding, or it
            does not say how it pools and `pooling` is not given.
    """
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code, "revision": revision or "main"}
    with loading(path, revision):
        config = AutoConfig.from_pretrained(path, **options)
        kind = config.model_type
        is_aligned = kind in MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING_NAMES
        if set(config.sub_configs) >= _TOWERS and (kind == "blip-2" or not is_aligned):  # loses its projections
            raise ValueError(f"{kind!r} gives no embedding; {_ELSE}")
        if type(config) not in MODEL_MAPPING and not hasattr(config, "auto_map"):
            raise ValueError(f"{kind!r} has no single vector that AutoModel gives, as ColPali has none; {_ELSE}")
        if hasattr(config, "mask_ratio"):
            config.mask_ratio = 0.0  # ViTMAE hides random patches otherwise
        model, report = AutoModel.from_pretrained(path, config=config, output_loading_info=True, **options)
        has_decoder = "decoder" in dict(model.named_children())
        absent = [name for name in sorted(report["missing_keys"]) if not (has_decoder and name.startswith("decoder."))]
        if missing := [name for name in absent if "pooler" not in name]:
            raise ValueError(f"{len(missing)} weights of a {kind!r} are missing, such as {missing[:3]}")
        if left := [name for name in sorted(report["unexpected_keys"]) if "_projection" in name]:
            raise ValueError(f"it is one tower with a projection {left}, which AutoModel leaves out; load both towers")
        for name in absent:  # random in each process and never used: its fingerprint must not depend on them
            torch.nn.init.zeros_(model.get_parameter(name))
        is_trained = not absent and kind not in MODEL_FOR_MASKED_LM_MAPPING_NAMES  # else a pooler for another end
        stock = StockModel(model.get_encoder() if has_decoder else model, pooling, is_trained).eval()
        processor = StockProcessor(
            AutoImageProcessor.from_pretrained(path, **options) if stock.sees else None,
            AutoTokenizer.from_pretrained(path, **options) if stock.reads else None,
            "max_length" if kind.startswith("siglip") else "longest",
            config.get_text_config().to_dict().get("max_position_embeddings"),
        )
        if processor.tokenizer is not None and processor.padding == "longest":
            processor.tokenizer.padding_side = "right"  # so that the positions of a text do not depend on its batch
            processor.tokenizer.pad_token = processor.tokenizer.pad_token or processor.tokenizer.eos_token
        first = None if stock.sees else processor.tokenizer("a")["input_ids"][0]
        names = {name.rpartition(".")[2] for name, _ in model.named_parameters()} & {"cls_token", "class_embedding"}
        if pooling == "cls" and not (names if first is None else first == processor.tokenizer.cls_token_id):
            raise ValueError(f'pooling="cls": a {kind!r} has no CLS token; pass another pooling')
        _check_vectors(stock, processor)
    return stock, processor


def _check_vectors(model: "StockModel", processor: "StockProcessor") -> None:
    """Refuse a model that cannot embed an item, or does so in another way each time."""
    item = Image.effect_noise((64, 64), 90).convert("RGB") if model.sees else "a word"
    try:
        with torch.inference_mode():
            first, second = (model(**processor([item])).embeddings for _ in range(2))
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError) as error:  # of an unknown architecture
        raise ValueError(f"a {model.config.model_type!r} cannot be read as an encoder: {error!r:.200}") from error
    if not torch.allclose(first, second, atol=1e-3):
        raise ValueError(f"a {model.config.model_type!r} gives another vector for the same item at each call")


class StockModel(torch.nn.Module):
    """A transformers model with one L2-normalised embedding per item; those of an item's image and text are added.

    Args:
        model: A text encoder, a vision encoder, or a model with a tower for each.
        pooling: As for `load_stock_model`.
        is_trained: Whether the pooled output of its class, if there is one, was trained to be read.
    """

    def __init__(self, model: Any, pooling: str | None, is_trained: bool) -> None:  # noqa: ANN401
        super().__init__()
        self.model, self.config, self.is_trained = model, model.config, is_trained
        self.config.pooling = pooling  # a part of its fingerprint
        self.two_towers = set(self.config.sub_configs) >= _TOWERS
        self.sees = self.two_towers or model.main_input_name == "pixel_values"
        self.reads = self.two_towers or model.main_input_name == "input_ids"
        if not self.sees and not self.reads:
            raise ValueError(f"a {self.config.model_type!r} reads {model.main_input_name}; {_ELSE}")
        able = [] if self.two_towers else [name for name in POOLINGS if name != "last" or not self.sees]
        if pooling not in (None, *able):
            expected = f"one of {', '.join(able)}" if able else "none, it has projections"
            raise ValueError(f"pooling={pooling!r} of a {self.config.model_type!r}; expected {expected}")
        self.pool = None if pooling is None else Pooling(1, {"last": "lasttoken"}.get(pooling, pooling))

    def forward(
        self, items: Tensor, images: dict[str, Tensor] | None = None, texts: dict[str, Tensor] | None = None
    ) -> EncoderOutput:
        """Embed a batch of `StockProcessor`; `items` `(N, 2)` says which have an image and which a text."""
        features: Any = 0
        for column, (inputs, part) in enumerate(((images, "image"), (texts, "text"))):
            if inputs is not None:
                vectors = self._vectors(inputs, part).float()
                spread = vectors.new_zeros(len(items), vectors.shape[1])
                spread[items[:, column]] = vectors
                features = features + spread
        return EncoderOutput(torch.nn.functional.normalize(features, dim=-1))

    def _vectors(self, inputs: dict[str, Tensor], part: str) -> Tensor:
        if self.two_towers:
            return getattr(self.model, f"get_{part}_features")(**inputs).pooler_output
        output = self.model(**inputs)
        if self.pool is None:
            if not self.is_trained or "pooler_output" not in output:
                raise ValueError(
                    f"a {self.config.model_type!r} by itself does not say how the states of its tokens become one "
                    f"vector: pass pooling= (--pooling), one of {', '.join(POOLINGS)}, as its authors do"
                )
            return output.pooler_output.flatten(1)
        states = output.last_hidden_state
        if states.ndim == 4:  # of a convolutional network, (N, D, H, W)
            states = states.flatten(2).transpose(1, 2)
        return self.pool(inputs | {"token_embeddings": states})["sentence_embedding"]


class StockProcessor(NamedTuple):
    """What turns items into the inputs of a `StockModel`.

    Attributes:
        image_processor: Of its images, if it takes any.
        tokenizer: Of its texts, if it takes any.
        padding: Of texts, to the `"longest"` of a batch or to `"max_length"`.
        longest: Most tokens of a text, beside the tokenizer's own limit.
    """

    image_processor: Any
    tokenizer: Any
    padding: str
    longest: int | None = None

    def __call__(self, items: Sequence[Any], instruction: Sequence[str | None] | None = None) -> dict[str, Any]:
        """The inputs of `StockModel.forward`: images and texts of those items that have them, behind their prompts."""
        read = load_image if self.image_processor is None else partial(process_image, self.image_processor)
        parsed = parse_items(items, read=read)
        for number, item in enumerate(parsed):
            only_image(item, f"item {number}")
            if (item.images and self.image_processor is None) or (item.texts and self.tokenizer is None):
                raise ItemError(f"item {number}", f"this model cannot take {item.modality!r}")
        images: list[Mapping[str, Tensor]] = [image for item in parsed for image in item.images]
        pairs = zip(instruction or [None] * len(parsed), parsed, strict=True)
        texts = [f"{prompt or ''}{' '.join(item.texts)}" for prompt, item in pairs if item.texts]
        batch: dict[str, Any] = {"items": torch.tensor([[bool(item.images), bool(item.texts)] for item in parsed])}
        if images:
            batch["images"] = {name: torch.cat([image[name] for image in images]) for name in images[0]}
        if texts:
            limit = text_limit(self.tokenizer, self.longest if (self.longest or 0) > 0 else None)
            how = {"padding": self.padding, "truncation": limit is not None, "max_length": limit}
            batch["texts"] = dict(self.tokenizer(texts, return_tensors="pt", **how))
        return batch

    @property
    def digest(self) -> str:
        """Equal for equal settings."""
        return settings_digest({"parts": [part_digest(part) for part in self[:2]], "texts": self[2:]})
