"""Token fusion: image patches as tokens of a text encoder (VISTA)."""

from transformers import AutoConfig, AutoModel

from .configuration_token_fusion import TokenFusionConfig as TokenFusionConfig
from .modeling_token_fusion import TokenFusionModel as TokenFusionModel

AutoConfig.register("token_fusion", TokenFusionConfig, exist_ok=True)
AutoModel.register(TokenFusionConfig, TokenFusionModel, exist_ok=True)
TokenFusionConfig.register_for_auto_class()
TokenFusionModel.register_for_auto_class("AutoModel")
