"""Configuration of models on two towers of their own."""

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import AutoConfig, PreTrainedConfig


@strict
class TowersConfig(PreTrainedConfig):
    """Configuration of a vision and a text tower.

    Args:
        vision_config: Configuration (or its dict) of any transformers vision tower.
        text_config: Configuration (or its dict) of a text tower.
        vision_hidden_layer: Index of the `hidden_states` entry to read in the vision tower (as in LLaVA, e.g. -2). The
            blocks above it are not built. None reads the tower's final, normalised output.
    """

    sub_configs = {"vision_config": AutoConfig, "text_config": AutoConfig}  # noqa: RUF012 - the library's convention
    vision_config: Any = None
    text_config: Any = None
    vision_hidden_layer: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:  # noqa: ANN401
        for name, model_type in (("vision_config", "dinov2"), ("text_config", "bert")):
            config = getattr(self, name)
            if not isinstance(config, PreTrainedConfig):
                setattr(self, name, AutoConfig.for_model(**{"model_type": model_type} | (config or {})))
        super().__post_init__(**kwargs)

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


__all__ = ["TowersConfig"]
