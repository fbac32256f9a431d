"""Configuration of token fusion."""

from typing import Any

from transformers import AutoConfig, PreTrainedConfig

POOLINGS = ("cls", "mean")


class TokenFusionConfig(PreTrainedConfig):
    """Configuration of `TokenFusionModel`: a vision tower whose patches enter a text encoder as tokens.

    Args:
        vision_config: Configuration (or its dict) of any transformers vision tower.
        text_config: Configuration (or its dict) of a BERT-family text encoder.
        pooling: `"cls"` reads the embedding at CLS (VISTA, BGE); `"mean"` averages over all tokens (MiniLM, E5).
        vision_hidden_layer: Index of the `hidden_states` entry to read in the vision tower (as in LLaVA, e.g. -2). The
            blocks above it are not built. None reads the tower's final, normalised output.
        cls_token_id: Id of the text encoder's CLS token, the first of every item.
        sep_token_id: Id of its SEP token, the last of every item.

    Raises:
        ValueError: `pooling` is unknown.
    """

    model_type = "token_fusion"
    sub_configs = {"vision_config": AutoConfig, "text_config": AutoConfig}  # noqa: RUF012 - the library's convention

    def __init__(
        self,
        vision_config: PreTrainedConfig | dict[str, Any] | None = None,
        text_config: PreTrainedConfig | dict[str, Any] | None = None,
        pooling: str = "cls",
        vision_hidden_layer: int | None = None,
        cls_token_id: int = 101,
        sep_token_id: int = 102,
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        if pooling not in POOLINGS:
            raise ValueError(f"pooling={pooling!r}; expected one of {POOLINGS}")
        self.vision_config = _as_config(vision_config, "dinov2")
        self.text_config = _as_config(text_config, "bert")
        self.pooling = pooling
        self.vision_hidden_layer = vision_hidden_layer
        self.cls_token_id = cls_token_id
        self.sep_token_id = sep_token_id
        super().__init__(**kwargs)

    @property
    def hidden_size(self) -> int:
        """Width of the embedding, which is the text encoder's width."""
        return self.text_config.hidden_size

    @property
    def num_vision_layers(self) -> int:
        """Number of vision-tower blocks to build: those up to `vision_hidden_layer`."""
        depth, layer = self.vision_config.num_hidden_layers, self.vision_hidden_layer
        kept = depth if layer is None else layer if layer >= 0 else depth + 1 + layer
        if not 1 <= kept <= depth:
            raise ValueError(
                f"vision_hidden_layer={layer} is outside a tower of {depth} layers; "
                f"expected 1..{depth} or -1..-{depth}"
            )
        return kept

    def get_text_config(self, *args: Any, **kwargs: Any) -> PreTrainedConfig:  # noqa: ANN401
        """The text encoder's configuration."""
        return self.text_config.get_text_config(*args, **kwargs)


def _as_config(config: PreTrainedConfig | dict[str, Any] | None, default: str) -> PreTrainedConfig:
    if isinstance(config, PreTrainedConfig):
        return config
    values = dict(config or {})
    return AutoConfig.for_model(values.pop("model_type", default), **values)


__all__ = ["TokenFusionConfig"]
