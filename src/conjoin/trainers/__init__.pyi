from .base import (
    RetrievalConfig as RetrievalConfig,
    RetrievalTrainer as RetrievalTrainer,
    TemperatureConfig as TemperatureConfig,
)
from .contrastive import (
    ContrastiveConfig as ContrastiveConfig,
    ContrastiveTrainer as ContrastiveTrainer,
    QueryContrastiveTrainer as QueryContrastiveTrainer,
)
from .coral import CoralConfig as CoralConfig, CoralTrainer as CoralTrainer
from .features import CachedFeatures as CachedFeatures, collate_features as collate_features, precompute as precompute
from .gcl import GclConfig as GclConfig, GclTrainer as GclTrainer
from .peft import add_adapters as add_adapters, merge_lora as merge_lora
from .puma import (
    PumaStage1Config as PumaStage1Config,
    PumaStage1Trainer as PumaStage1Trainer,
    PumaStage2Config as PumaStage2Config,
    PumaStage2Trainer as PumaStage2Trainer,
)
from .queries import QueryCandidateConfig as QueryCandidateConfig, QueryCandidateTrainer as QueryCandidateTrainer
from .recipe import (
    ModelArguments as ModelArguments,
    Recipe as Recipe,
    load_recipe as load_recipe,
    parse_recipe as parse_recipe,
    recipe_folder as recipe_folder,
)
from .runs import build_trainer as build_trainer, run as run, train as train
from .solar import (
    SolarStage1Config as SolarStage1Config,
    SolarStage1Trainer as SolarStage1Trainer,
    SolarStage2Config as SolarStage2Config,
    SolarStage2Trainer as SolarStage2Trainer,
)
from .solar_explain import explain_pair as explain_pair
