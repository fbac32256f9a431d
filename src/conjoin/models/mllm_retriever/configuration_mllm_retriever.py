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
        self.backbone_config, _ = cut_layers(config, self.keep_layers)
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


def cut_layers(
    config: PreTrainedConfig, keep_layers: int | None, keep_last: bool = False
) -> tuple[PreTrainedConfig, list[int]]:
    """Cut a configuration to fewer layers of its language model: their number, and settings by layer.

    Args:
        config: Of the whole model; it stays as it is.
        keep_layers: Number of layers to keep; all when None.
        keep_last: Keep the first `keep_layers - 1` and the last one, in place of the first `keep_layers`.

    Returns:
        A cut copy, and the numbers of the layers that it keeps.

    Raises:
        ValueError: The model has fewer layers, or image features enter at a deeper layer (Qwen3-VL).
    """
    config = copy.deepcopy(config)
    text_config = config.get_text_config()
    depth = text_config.num_hidden_layers
    keep_layers = depth if keep_layers is None else keep_layers
    least = len(getattr(getattr(config, "vision_config", None), "deepstack_visual_indexes", None) or [0])
    if not least <= keep_layers <= depth:
        raise ValueError(
            f"keep_layers={keep_layers} of a {config.model_type!r}; expected {least} to {depth}: it has {depth} layers"
            + (f", and image features enter the first {least}" if least > 1 else "")
        )
    kept = [*range(keep_layers - 1), depth - 1 if keep_last else keep_layers - 1]
    for name, value in text_config.to_dict().items() if keep_layers < depth else ():
        if name.endswith("_layers") and isinstance(value, list) and len(value) != depth:  # which layers do something
            setattr(text_config, name, [kept.index(layer) for layer in value if layer in kept])
        elif isinstance(value, list) and len(value) == depth:
            setattr(text_config, name, [value[layer] for layer in kept])
        elif name == "per_layer_config" and value:
            parts = {str(kept.index(int(key))): part for key, part in value.items() if int(key) in kept}
            setattr(text_config, name, parts)
        elif name == "num_kv_shared_layers" and value:  # the last ones, which use keys of layers before them
            setattr(text_config, name, sum(layer >= depth - value for layer in kept))
    text_config.num_hidden_layers = keep_layers
    return config, kept


__all__ = ["MllmRetrieverConfig"]
