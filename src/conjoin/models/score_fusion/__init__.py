"""Score fusion: the weighted sum of a two-tower model's image and text vectors (CLIP-SF of UniIR)."""

from transformers import AutoConfig, AutoModel

from .configuration_score_fusion import ScoreFusionConfig
from .modeling_score_fusion import ScoreFusionModel, ScoreFusionOutput

AutoConfig.register("score_fusion", ScoreFusionConfig, exist_ok=True)
AutoModel.register(ScoreFusionConfig, ScoreFusionModel, exist_ok=True)
ScoreFusionConfig.register_for_auto_class()
ScoreFusionModel.register_for_auto_class("AutoModel")

__all__ = ["ScoreFusionConfig", "ScoreFusionModel", "ScoreFusionOutput"]
