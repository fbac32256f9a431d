"""Configuration of the MLLM retriever."""

import copy
from typing import Any, Literal

from huggingface_hub.dataclasses import strict
from transformers import AutoConfig, PreTrainedConfig

ARCHITECTURES = ("internvl", "llava", "qwen2_5_vl", "qwen2_vl", "qwen3_vl")


@strict
class MllmRetrieverConfig(PreTrainedConfig):
    """Configuration of `MllmRetrieverModel`: a multimodal language model, its kept layers and its readout.

    Args:
        backbone_config: Configuration (or its dict) of an image-text MLLM: Qwen2-VL, Qwen2.5-VL, Qwen3-VL, LLaVA or
            InternVL. The copy that is stored describes the kept layers only.
        keep_layers: Number of first layers of the language model to keep (PUMA: 12 of Qwen2-VL's 28); all when
            None.
        readout: Token whose state becomes the embedding: `"token"` is [RET] (PUMA), `"before_token"` the token before
            [RET] (LamRA), `"last"` the last token of the prompt; `"mean"` is the mean of all tokens.
        ret_token_id: Id of [RET]. It may exceed the backbone's vocabulary, which is not resized: the vector of [RET]
            is a separate parameter.
        position_mode: `"mrope"` keeps the backbone's own positions, three-dimensional within an image (Qwen);
            `"1d"` uses consecutive positions, as in PUMA's training with an older transformers.
        embedding_dim: Matryoshka dimension: embeddings are the first `embedding_dim` components, renormalised. The
            whole state when None.
        train_ret_token: Train the vector of [RET] and freeze all other token embeddings.

    Raises:
        ValueError: The backbone is of another architecture, or has fewer layers.
        StrictDataclassError: A field has another type or is out of its range.
    """

    model_type = "mllm_retriever"
    sub_configs = {"backbone_config": AutoConfig}  # noqa: RUF012 - the library's convention
    backbone_config: Any = None
    keep_layers: int | None = None
    readout: Literal["token", "before_token", "last", "mean"] = "token"
    ret_token_id: int | None = None
    position_mode: Literal["mrope", "1d"] = "mrope"
    embedding_dim: int | None = None
    train_ret_token: bool = False

    def __post_init__(self, **kwargs: Any) -> None:  # noqa: ANN401
        config = self.backbone_config
        if not isinstance(config, PreTrainedConfig):
            config = AutoConfig.for_model(**{"model_type": "qwen2_vl"} | (config or {}))
        if config.model_type not in ARCHITECTURES:
            raise ValueError(f"backbone_config={config.model_type!r}; expected one of {ARCHITECTURES}")
        self.backbone_config = keep_first_layers(config, self.keep_layers)
        self.keep_layers = self.get_text_config().num_hidden_layers
        super().__post_init__(**kwargs)

    def validate_architecture(self) -> None:
        """Refuse an embedding that is wider than the backbone; `@strict` calls it."""
        super().validate_architecture()
        dim, width = self.embedding_dim, self.get_text_config().hidden_size
        if dim is not None and not 1 <= dim <= width:
            raise ValueError(f"embedding_dim={dim}; expected 1..{width}, the backbone's width")

    @property
    def hidden_size(self) -> int:
        """Width of the embedding."""
        return self.embedding_dim or self.get_text_config().hidden_size

    def get_text_config(self, *args: Any, **kwargs: Any) -> PreTrainedConfig:  # noqa: ANN401
        """The language model's configuration."""
        return self.backbone_config.get_text_config(*args, **kwargs)


def keep_first_layers(config: PreTrainedConfig, keep_layers: int | None) -> PreTrainedConfig:
    """Return a copy of a configuration with the first `keep_layers` layers of its language model.

    Raises:
        ValueError: The model has fewer layers, or image features enter at a deeper layer (Qwen3-VL).
    """
    config = copy.deepcopy(config)
    text_config = config.get_text_config()
    depth = text_config.num_hidden_layers
    least = max(1, len(config.vision_config.deepstack_visual_indexes)) if config.model_type == "qwen3_vl" else 1
    if keep_layers is None:
        return config
    if not least <= keep_layers <= depth:
        raise ValueError(
            f"keep_layers={keep_layers}; expected {least}..{depth} of {config.model_type!r} "
            "(in a recipe: model_init_kwargs: {keep_layers: N})"
        )
    if "layer_types" in text_config.to_dict() and text_config.layer_types is not None:
        text_config.layer_types = text_config.layer_types[:keep_layers]
    text_config.num_hidden_layers = keep_layers
    return config


__all__ = ["MllmRetrieverConfig"]
