"""Configuration of score fusion."""

from typing import Any

from transformers import AutoConfig, PreTrainedConfig


class ScoreFusionConfig(PreTrainedConfig):
    """Configuration of `ScoreFusionModel`: a two-tower model and the weights of its two vectors.

    Args:
        backbone_config: Configuration (or its dict) of a two-tower model: CLIP, SigLIP, TinyCLIP, ...
        image_weight: Weight `w_i` of the image vector; UniIR adds both with weight 1.
        text_weight: Weight `w_t` of the text vector.
        learnable_weights: Train both weights, from these initial values; they train as logarithms and stay positive.
        normalize_inputs: L2-normalise both vectors before the sum. UniIR does not, so the longer vector has more
            influence.
        text_attends_padding: Let the text tower attend to padding; by default True for SigLIP, trained without a mask.

    Raises:
        ValueError: The backbone does not have two towers, or a weight is not positive.
    """

    model_type = "score_fusion"
    sub_configs = {"backbone_config": AutoConfig}  # noqa: RUF012 - the library's convention

    def __init__(
        self,
        backbone_config: PreTrainedConfig | dict[str, Any] | None = None,
        image_weight: float = 1.0,
        text_weight: float = 1.0,
        learnable_weights: bool = False,
        normalize_inputs: bool = False,
        text_attends_padding: bool | None = None,
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        if not isinstance(backbone_config, PreTrainedConfig):
            values = dict(backbone_config or {})
            backbone_config = AutoConfig.for_model(values.pop("model_type", "clip"), **values)
        if not {"vision_config", "text_config"} <= set(backbone_config.sub_configs):
            raise ValueError(
                f"backbone_config: {backbone_config.model_type!r} does not have a vision and a text tower; "
                "expected a two-tower model such as CLIP or SigLIP"
            )
        if not (image_weight > 0 and text_weight > 0):
            raise ValueError(f"image_weight={image_weight} and text_weight={text_weight} must be positive")
        self.backbone_config = backbone_config
        self.image_weight = image_weight
        self.text_weight = text_weight
        self.learnable_weights = learnable_weights
        self.normalize_inputs = normalize_inputs
        if text_attends_padding is None:
            text_attends_padding = backbone_config.model_type.startswith("siglip")
        self.text_attends_padding = text_attends_padding
        super().__init__(**kwargs)

    @property
    def hidden_size(self) -> int:
        """Width of the embedding: CLIP's projection, or the towers' common width without a projection (SigLIP)."""
        fields = self.backbone_config.to_dict()
        return fields.get("projection_dim") or self.backbone_config.vision_config.hidden_size

    def get_text_config(self, *args: Any, **kwargs: Any) -> PreTrainedConfig:  # noqa: ANN401
        """The text tower's configuration."""
        return self.backbone_config.get_text_config(*args, **kwargs)


__all__ = ["ScoreFusionConfig"]
