"""InfoNCE between images and their texts, or from queries to candidates: the baseline of every method."""

from conjoin.training import METHODS, Method

from .queries import (
    ContrastiveArguments as ContrastiveArguments,
    QueryContrastiveObjective as QueryContrastiveObjective,
    QueryContrastiveTrainer as QueryContrastiveTrainer,
)
from .trainer import ContrastiveConfig as ContrastiveConfig, ContrastiveTrainer as ContrastiveTrainer

METHODS.register(
    Method(
        "contrastive",
        ContrastiveConfig,
        ContrastiveTrainer,
        {"data": ContrastiveArguments},
        query_trainer=QueryContrastiveTrainer,
    )
)
