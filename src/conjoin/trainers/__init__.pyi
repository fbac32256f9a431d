from .base import (
    RetrievalConfig as RetrievalConfig,
    RetrievalTrainer as RetrievalTrainer,
    TemperatureConfig as TemperatureConfig,
    load_trainable as load_trainable,
)
from .contrastive import (
    ContrastiveConfig as ContrastiveConfig,
    ContrastiveTrainer as ContrastiveTrainer,
    QueryContrastiveTrainer as QueryContrastiveTrainer,
)
from .coral import CoralConfig as CoralConfig, CoralTrainer as CoralTrainer
from .features import (
    CachedFeatures as CachedFeatures,
    cache_features as cache_features,
    collate_features as collate_features,
)
from .gcl import GclConfig as GclConfig, GclTrainer as GclTrainer
from .peft import add_adapters as add_adapters, load_adapted as load_adapted, merge_lora as merge_lora
from .precompute import precompute as precompute
from .queries import QueryCandidateConfig as QueryCandidateConfig, QueryCandidateTrainer as QueryCandidateTrainer
from .recipe import (
    DataArguments as DataArguments,
    ModelArguments as ModelArguments,
    Recipe as Recipe,
    load_recipe as load_recipe,
    parse_recipe as parse_recipe,
    recipe_folder as recipe_folder,
)
from .runs import build_trainer as build_trainer, run as run, train as train
