"""Bare checkpoints of transformers (CLIP, SigLIP, DINOv2, BERT, ...) behind the interface of `ItemEncoder`."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import normalize
from transformers import MODEL_MAPPING, AutoConfig, AutoImageProcessor, AutoModel, AutoTokenizer, PreTrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING_NAMES,
)

from conjoin.constants import POOLINGS
from conjoin.hub.load import loading
from conjoin.processing.input_types import only_image
from conjoin.processing.item_error import ItemError
from conjoin.processing.item_images import load_image, process_image
from conjoin.processing.item_inputs import cut_text, parse_items, text_limit
from conjoin.retrieval.encoder import EncoderOutput
from conjoin.storage import part_digest, settings_digest

_ELSE = (
    "expected a model with an image and a text tower, a vision or a text encoder, a folder of sentence-transformers "
    "or of this package; MllmRetrieverModel.from_mllm makes an encoder of an MLLM, and preset= (--preset) names a "
    "published one"
)


def load_stock_model(
    path: str | Path, pooling: str | None = None, trust_remote_code: bool = False, revision: str | None = None
) -> tuple["StockModel", "StockProcessor"]:
    """Load a bare checkpoint and what turns items into its inputs, as `ItemEncoder` takes them.

    Two towers (CLIP, SigLIP) are read by `get_image_features` and `get_text_features`, image and text of one item
    added. Another model is read at the pooled output that its class was trained with, or by `pooling`. A prompt stands
    before the text as it is; an item without text ignores it.

    Args:
        path: A local folder or the name of a repository on the Hub.
        pooling: Of the last states: `"mean"` of all tokens, `"cls"` the CLS token, `"last"` the last token.
        trust_remote_code: Run the Python code that it brings.
        revision: Branch, tag or commit of the repository.

    Raises:
        FileNotFoundError: There is no such model.
        ValueError: Weights are damaged or missing, the model needs code that is not trusted or gives no embedding, or
            it does not say how it pools and `pooling` is not given.
    """
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code, "revision": revision or "main"}
    with loading(path, revision):
        config = AutoConfig.from_pretrained(path, **options)
        two_towers = _has_two_towers(config)
        if two_towers and pooling is not None:
            raise ValueError(f"pooling={pooling!r}: {config.model_type!r} has projections of its own; leave it out")
        if hasattr(config, "mask_ratio"):
            config.mask_ratio = 0.0  # ViTMAE hides random patches otherwise
        model, report = AutoModel.from_pretrained(path, config=config, output_loading_info=True, **options)
        has_decoder = "decoder" in dict(model.named_children())
        _check_weights(report, config.model_type, "decoder." if has_decoder else ())
        model = model.get_encoder() if has_decoder else model
        reads = two_towers or model.main_input_name == "input_ids"
        sees = two_towers or model.main_input_name == "pixel_values"
        if not reads and not sees:
            raise ValueError(f"{config.model_type!r} reads {model.main_input_name}; {_ELSE}")
        padding = "max_length" if config.model_type.startswith("siglip") else "longest"
        processor = StockProcessor(
            AutoImageProcessor.from_pretrained(path, **options) if sees else None,
            _tokenizer(path, padding, options) if reads else None,
            padding,
            _longest(config) if reads else None,
        )
        is_trained = not any("pooler" in name for name in report["missing_keys"])
        if pooling is None and not two_towers and (config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES
                                                   or not is_trained):  # fmt: skip
            raise _no_pooling(config)
        stock = StockModel(model.eval(), two_towers, pooling, processor.tokenizer)
        _try(stock, processor, config)
    return stock, processor


def _has_two_towers(config: PreTrainedConfig) -> bool:
    """Whether a model has an image and a text tower with one space.

    Raises:
        ValueError: It has both, and no space; or AutoModel has no class for it.
    """
    if type(config) not in MODEL_MAPPING and not hasattr(config, "auto_map"):
        raise ValueError(f"{config.model_type!r} has no single vector that AutoModel gives (ColPali and its like have "
                         f"one for each token); {_ELSE}")  # fmt: skip
    if not {"text_config", "vision_config"} <= set(config.sub_configs):
        return False
    is_blip2 = "qformer_config" in config.sub_configs  # AutoModel drops its projections
    if is_blip2 or config.model_type not in MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING_NAMES:
        raise ValueError(f"{config.model_type!r} gives no embedding; {_ELSE}")
    return True


def _check_weights(report: Mapping[str, Any], model_type: str, unread: str | tuple[()]) -> None:
    """Refuse a model of which weights would be random, but for those `unread`, or a stored projection left out."""
    missing = [name for name in sorted(report["missing_keys"]) if not name.startswith(unread) and "pooler" not in name]
    if missing:
        raise ValueError(f"{len(missing)} weights of a {model_type!r} are missing, such as {missing[:3]}")
    if dropped := [name for name in sorted(report["unexpected_keys"]) if "_projection" in name]:
        raise ValueError(f"it is one tower with a projection {dropped}, which AutoModel leaves out; load both towers")


def _tokenizer(path: str | Path, padding: str, options: Mapping[str, Any]) -> Any:  # noqa: ANN401
    """The tokenizer; where it pads to the longest text, behind the text, so that positions do not depend on others."""
    tokenizer = AutoTokenizer.from_pretrained(path, **options)
    if padding == "longest":
        tokenizer.padding_side = "right"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _longest(config: PreTrainedConfig) -> int | None:
    """The positions of the text tower; None if they have no end."""
    positions = config.get_text_config().to_dict().get("max_position_embeddings") or -1
    return positions if positions > 0 else None


def _no_pooling(config: PreTrainedConfig) -> ValueError:
    return ValueError(
        f"a {config.model_type!r} by itself does not say how the states of its tokens become one vector: pass "
        f"pooling= (--pooling), one of {', '.join(POOLINGS)}, as its authors do"
    )


def _try(model: "StockModel", processor: "StockProcessor", config: PreTrainedConfig) -> None:
    """Embed a probe twice.

    Raises:
        ValueError: That fails, the class has no pooled output, or the model gives other vectors each time.
    """
    probe = "a word" if processor.image_processor is None else Image.effect_noise((64, 64), 90).convert("RGB")
    try:
        with torch.inference_mode():
            first, second = (model(**processor([probe])).embeddings for _ in range(2))
    except _NoPooledOutputError:
        raise _no_pooling(config) from None
    except ValueError:
        raise
    except Exception as error:  # whatever an unknown architecture raises
        raise ValueError(f"a {config.model_type!r} cannot be read as an encoder: {error!r:.200}") from error
    if first.ndim != 2 or not torch.allclose(first, second, atol=1e-3):
        raise ValueError(f"a {config.model_type!r} gives another vector for the same item at each call")


class _NoPooledOutputError(Exception):
    """The model's class has no pooled output."""


class StockModel(torch.nn.Module):
    """A transformers model with one L2-normalised embedding per item.

    Args:
        model: A text encoder, a vision encoder, or a model with a tower for each.
        two_towers: Whether it has one for each.
        pooling: As for `load_stock_model`; None for the class's own pooled output.
        tokenizer: Of its texts, if it takes any.

    Raises:
        ValueError: The model has no token that `pooling` could read.
    """

    def __init__(self, model: Any, two_towers: bool, pooling: str | None, tokenizer: Any = None) -> None:  # noqa: ANN401
        super().__init__()
        self.model, self.two_towers, self.pooling = model, two_towers, pooling
        self.config: PreTrainedConfig = model.config
        self.config.pooling = pooling  # a part of its fingerprint
        self.cls_token_id = None if tokenizer is None else tokenizer.cls_token_id
        if pooling not in (None, *POOLINGS):
            raise ValueError(f"pooling={pooling!r}; expected one of {', '.join(POOLINGS)}")
        if pooling == "last" and tokenizer is None:
            raise ValueError('pooling="last" is for texts; for pictures, pass mean or cls')
        if tokenizer is None:
            names = {name.rpartition(".")[2] for name, _ in model.named_parameters()}
            has_cls = not names.isdisjoint({"cls_token", "class_embedding"})
        else:
            has_cls = self.cls_token_id in tokenizer("a")["input_ids"]
        if pooling == "cls" and not has_cls:
            raise ValueError(f'pooling="cls": a {self.config.model_type!r} has no CLS token; pass another pooling')

    def forward(
        self, items: Tensor, images: dict[str, Tensor] | None = None, texts: dict[str, Tensor] | None = None
    ) -> EncoderOutput:
        """Embed a batch of `StockProcessor`; `items` `(N, 2)` says which have an image and which a text."""
        parts = {0: (images, "get_image_features"), 1: (texts, "get_text_features")}
        embedded = {
            column: getattr(self.model, method)(**inputs).pooler_output if self.two_towers else self._pooled(inputs)
            for column, (inputs, method) in parts.items()
            if inputs is not None
        }
        features = torch.zeros(len(items), next(iter(embedded.values())).shape[1], device=items.device)
        for column, part in embedded.items():
            features[items[:, column]] += part.float()
        return EncoderOutput(normalize(features, dim=-1))

    def _pooled(self, inputs: Mapping[str, Tensor]) -> Tensor:
        output = self.model(**inputs)
        if self.pooling is None:
            if "pooler_output" not in output:
                raise _NoPooledOutputError
            return output.pooler_output.flatten(1)
        states = output.last_hidden_state
        if states.ndim == 4:  # of a convolutional network, (N, D, H, W)
            states = states.flatten(2).transpose(1, 2)
        mask = inputs["attention_mask"] if "attention_mask" in inputs else states.new_ones(states.shape[:2])
        if self.pooling == "mean":
            return (states.float() * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        rows = torch.arange(len(states), device=states.device)
        if self.pooling == "last":
            return states[rows, mask.sum(1) - 1]
        if "input_ids" not in inputs:
            return states[:, 0]
        is_cls: Tensor = inputs["input_ids"] == self.cls_token_id  # type: ignore[assignment]
        return states[rows, is_cls.int().argmax(1)]


class StockProcessor(NamedTuple):
    """What turns items into the inputs of a `StockModel`.

    Attributes:
        image_processor: Of its images, if it takes any.
        tokenizer: Of its texts, if it takes any.
        padding: Of texts: `"longest"` or `"max_length"`.
        longest: Most tokens of a text, beside the tokenizer's own limit.
    """

    image_processor: Any
    tokenizer: Any
    padding: str
    longest: int | None = None

    def __call__(self, items: Sequence[Any], instruction: Sequence[str | None] | None = None) -> dict[str, Any]:
        """The inputs of `StockModel.forward`: images and texts of those items that have them."""
        read = load_image if self.image_processor is None else partial(process_image, self.image_processor)
        parsed = parse_items(items, read=read)
        for number, item in enumerate(parsed):
            only_image(item, f"item {number}")
            if (item.images and self.image_processor is None) or (item.texts and self.tokenizer is None):
                raise ItemError(f"item {number}", f"this model cannot take {item.modality!r}")
        prompts = [None] * len(parsed) if instruction is None else instruction
        images = [image for item in parsed for image in item.images]
        pairs = zip(prompts, parsed, strict=True)
        texts = [f"{prompt or ''}{' '.join(item.texts)}" for prompt, item in pairs if item.texts]
        batch: dict[str, Any] = {"items": torch.tensor([[bool(item.images), bool(item.texts)] for item in parsed])}
        if images:
            batch["images"] = {name: torch.cat([image[name] for image in images]) for name in images[0]}
        if texts:
            limit = text_limit(self.tokenizer, self.longest)
            texts = texts if limit is None else [cut_text(text, self.tokenizer, limit) for text in texts]
            options = {"padding": self.padding, "truncation": limit is not None, "max_length": limit}
            batch["texts"] = dict(self.tokenizer(texts, return_tensors="pt", **options))
        return batch

    def digest(self) -> str:
        """Equal for equal settings."""
        parts = {"images": part_digest(self.image_processor), "words": part_digest(self.tokenizer)}
        return settings_digest(parts | {"pad": self.padding, "longest": self.longest})
