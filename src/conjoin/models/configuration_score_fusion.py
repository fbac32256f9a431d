"""Configuration of score fusion."""

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import AutoConfig, PreTrainedConfig


@strict
class ScoreFusionConfig(PreTrainedConfig):
    """Configuration of `ScoreFusionModel`: a two-tower model and the weights of its two vectors.

    Args:
        backbone_config: Configuration (or its dict) of a two-tower model: CLIP, SigLIP, TinyCLIP, ...
        image_weight: Weight `w_i` of the image vector; UniIR adds both with weight 1.
        text_weight: Weight `w_t` of the text vector.
        normalize_inputs: L2-normalise both vectors before the sum. UniIR does not, so the longer vector has more
            influence.
        text_attends_padding: Let the text tower attend to padding; by default True for SigLIP, trained without a mask.

    Raises:
        ValueError: The backbone does not have two towers.
        StrictDataclassError: A field has another type, or a weight is not positive.
    """

    model_type = "score_fusion"
    sub_configs = {"backbone_config": AutoConfig}  # noqa: RUF012 - the library's convention
    backbone_config: Any = None
    image_weight: float | int = 1.0
    text_weight: float | int = 1.0
    normalize_inputs: bool = False
    text_attends_padding: bool | None = None

    def __post_init__(self, **kwargs: Any) -> None:  # noqa: ANN401
        if not isinstance(self.backbone_config, PreTrainedConfig):
            self.backbone_config = AutoConfig.for_model(**{"model_type": "clip"} | (self.backbone_config or {}))
        kind = self.backbone_config.model_type
        if not {"vision_config", "text_config"} <= set(self.backbone_config.sub_configs):
            raise ValueError(
                f"backbone_config: {kind!r} does not have a vision and a text tower; "
                "expected a two-tower model such as CLIP or SigLIP"
            )
        if self.text_attends_padding is None:
            self.text_attends_padding = kind.startswith("siglip")
        super().__post_init__(**kwargs)

    def validate_architecture(self) -> None:
        """Refuse weights that leave a modality out; `@strict` calls it."""
        super().validate_architecture()
        if not (self.image_weight > 0 and self.text_weight > 0):
            raise ValueError(f"image_weight={self.image_weight} and text_weight={self.text_weight} must be positive")

    @property
    def hidden_size(self) -> int:
        """Width of the embedding: CLIP's projection, or the towers' common width without a projection (SigLIP)."""
        fields = self.backbone_config.to_dict()
        return fields.get("projection_dim") or self.backbone_config.vision_config.hidden_size

    def get_text_config(self, *args: Any, **kwargs: Any) -> PreTrainedConfig:  # noqa: ANN401
        """The text tower's configuration."""
        return self.backbone_config.get_text_config(*args, **kwargs)


__all__ = ["ScoreFusionConfig"]
