"""One configuration and one trainer per method, and the recipes that run them."""

from .arguments import RetrievalConfig
from .collator import PairCollator
from .contrastive import ContrastiveConfig, ContrastiveTrainer
from .feature_cache import CachedFeatures, cache_features, collate_features
from .gcl import GclConfig, GclTrainer
from .gradient_cache import cached_backward
from .lora import LoraArguments, add_lora, merge_lora
from .objective import Objective
from .recipes import METHODS, DataArguments, FeatureArguments, ModelArguments, Recipe, load_recipe
from .run import build_model, build_trainer, train
from .trainer import RetrievalTrainer

__all__ = [
    "METHODS",
    "CachedFeatures",
    "ContrastiveConfig",
    "ContrastiveTrainer",
    "DataArguments",
    "FeatureArguments",
    "GclConfig",
    "GclTrainer",
    "LoraArguments",
    "ModelArguments",
    "Objective",
    "PairCollator",
    "Recipe",
    "RetrievalConfig",
    "RetrievalTrainer",
    "add_lora",
    "build_model",
    "build_trainer",
    "cache_features",
    "cached_backward",
    "collate_features",
    "load_recipe",
    "merge_lora",
    "train",
]
