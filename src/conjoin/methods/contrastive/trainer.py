"""Symmetric InfoNCE between images and their texts."""

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from conjoin.losses import ContrastiveLoss
from conjoin.training import QueryCandidateConfig, RetrievalTrainer, TemperatureConfig


@dataclass
class ContrastiveConfig(TemperatureConfig, QueryCandidateConfig):
    """Arguments of `ContrastiveTrainer` and `QueryContrastiveTrainer`; `one_dataset_per_batch` is for queries."""


class ContrastiveTrainer(RetrievalTrainer):
    """Trains with symmetric InfoNCE over (image, text), with negatives from all devices."""

    def __init__(self, model: PreTrainedModel, args: ContrastiveConfig, **kwargs: Any) -> None:  # noqa: ANN401
        loss = ContrastiveLoss(temperature=args.temperature, learn_temperature=args.learn_temperature)
        super().__init__(model, args, loss, **kwargs)
