"""InfoNCE between images and their texts, or from queries to candidates: the baseline of every method."""

from conjoin.training import METHODS, Method

from .trainer import (
    ContrastiveArguments as ContrastiveArguments,
    ContrastiveConfig as ContrastiveConfig,
    ContrastiveTrainer as ContrastiveTrainer,
    QueryContrastiveObjective as QueryContrastiveObjective,
    QueryContrastiveTrainer as QueryContrastiveTrainer,
)

METHODS.register(
    Method(
        "contrastive",
        ContrastiveConfig,
        ContrastiveTrainer,
        {"data": ContrastiveArguments},
        query_trainer=QueryContrastiveTrainer,
    )
)
