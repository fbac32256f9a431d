"""The layer-pruned MLLM retriever of PUMA; LamRA's and Coral's readouts are settings of it."""

from transformers import AutoConfig, AutoModel

from .configuration_mllm_retriever import MllmRetrieverConfig
from .modeling_mllm_retriever import MllmRetrieverModel, MllmRetrieverOutput

AutoConfig.register("mllm_retriever", MllmRetrieverConfig, exist_ok=True)
AutoModel.register(MllmRetrieverConfig, MllmRetrieverModel, exist_ok=True)
MllmRetrieverConfig.register_for_auto_class()
MllmRetrieverModel.register_for_auto_class("AutoModel")

__all__ = ["MllmRetrieverConfig", "MllmRetrieverModel", "MllmRetrieverOutput"]
