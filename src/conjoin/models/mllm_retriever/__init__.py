"""The layer-pruned MLLM retriever of PUMA, with other readouts as settings."""

from transformers import AutoConfig, AutoModel

from .configuration_mllm_retriever import MllmRetrieverConfig as MllmRetrieverConfig
from .modeling_mllm_retriever import (
    MllmRetrieverModel as MllmRetrieverModel,
    MllmRetrieverOutput as MllmRetrieverOutput,
)

AutoConfig.register("mllm_retriever", MllmRetrieverConfig, exist_ok=True)
AutoModel.register(MllmRetrieverConfig, MllmRetrieverModel, exist_ok=True)
MllmRetrieverConfig.register_for_auto_class()
MllmRetrieverModel.register_for_auto_class("AutoModel")
