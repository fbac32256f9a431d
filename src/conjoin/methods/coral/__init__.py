"""Coral: contrastive learning with masked reconstruction of the retrieval target, for an MLLM retriever."""

from conjoin.training import METHODS, Method, QueryArguments

from .decoders import ReconstructionDecoder as ReconstructionDecoder
from .language_head import load_language_head as load_language_head, prepare_coral
from .trainer import CoralConfig as CoralConfig, CoralObjective as CoralObjective, CoralTrainer as CoralTrainer

METHODS.register(Method("coral", CoralConfig, CoralTrainer, {"data": QueryArguments}, prepare_coral))
