"""Score fusion: the weighted sum of the image and text vectors of a two-tower model (CLIP-SF of UniIR)."""

from transformers import AutoConfig, AutoModel

from .configuration_score_fusion import ScoreFusionConfig as ScoreFusionConfig
from .modeling_score_fusion import ScoreFusionModel as ScoreFusionModel, ScoreFusionOutput as ScoreFusionOutput

AutoConfig.register("score_fusion", ScoreFusionConfig, exist_ok=True)
AutoModel.register(ScoreFusionConfig, ScoreFusionModel, exist_ok=True)
ScoreFusionConfig.register_for_auto_class()
ScoreFusionModel.register_for_auto_class("AutoModel")
