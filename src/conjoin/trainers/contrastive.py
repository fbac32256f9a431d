"""InfoNCE between images and their texts, or from queries to their candidates: the baseline of every method."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from conjoin.losses import ContrastiveLoss, Temperature
from conjoin.trainers.base import RetrievalTrainer, TemperatureConfig
from conjoin.trainers.queries import QueryCandidateConfig, QueryCandidateTrainer, query_info_nce


@dataclass
class ContrastiveConfig(TemperatureConfig, QueryCandidateConfig):
    """Arguments of `ContrastiveTrainer` and `QueryContrastiveTrainer`; `one_dataset_per_batch` is for queries."""


class ContrastiveTrainer(RetrievalTrainer):
    """Trains with symmetric InfoNCE over (image, text), with negatives from all devices; see the base."""

    config_class = ContrastiveConfig

    def make_loss(self, model: PreTrainedModel, args: ContrastiveConfig) -> ContrastiveLoss:
        """Return the loss."""
        return ContrastiveLoss(temperature=args.temperature, learn_temperature=args.learn_temperature)


class QueryContrastiveTrainer(QueryCandidateTrainer):
    """Trains with InfoNCE from queries to the candidates of all devices; see the base."""

    config_class = ContrastiveConfig

    def make_loss(self, model: PreTrainedModel, args: ContrastiveConfig) -> Temperature:
        """Return the temperature."""
        return Temperature(args.temperature, args.learn_temperature)

    def loss_terms(self, embeddings: dict[str, Tensor], inputs: dict[str, Any]) -> dict[str, Tensor]:
        """Return `contrastive_loss` and the metric `temperature`."""

        def loss(cut: dict[str, Tensor]) -> dict[str, Tensor]:
            temperature = self.loss()
            return {"contrastive_loss": query_info_nce(cut, inputs, temperature), "temperature": temperature.detach()}

        return self.matryoshka(loss, embeddings)
