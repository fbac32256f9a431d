from .adapters import load_adapted as load_adapted, load_checkpoint as load_checkpoint
from .config import RetrievalConfig as RetrievalConfig, TemperatureConfig as TemperatureConfig
from .data import PairArguments as PairArguments, QueryArguments as QueryArguments, SourceArguments as SourceArguments
from .features import (
    CachedFeatures as CachedFeatures,
    cache_features as cache_features,
    collate_features as collate_features,
)
from .gradient_cache import cached_backward as cached_backward
from .lora import LoraArguments as LoraArguments, add_lora as add_lora, merge_lora as merge_lora
from .method import METHODS as METHODS, Method as Method
from .models import ARCHITECTURES as ARCHITECTURES, build_model as build_model
from .objective import Objective as Objective
from .query_candidates import (
    QueryCandidateConfig as QueryCandidateConfig,
    QueryCandidateObjective as QueryCandidateObjective,
    QueryCandidateTrainer as QueryCandidateTrainer,
)
from .recipe import (
    FeatureArguments as FeatureArguments,
    ModelArguments as ModelArguments,
    load_recipe as load_recipe,
    recipe_folder as recipe_folder,
)
from .run import Run as Run, build_trainer as build_trainer, train as train
from .trainer import RetrievalTrainer as RetrievalTrainer
