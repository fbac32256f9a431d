"""InfoNCE between images and their texts, or from queries to their candidates."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from conjoin.losses import ContrastiveLoss, Temperature, info_nce
from conjoin.training import (
    QueryArguments,
    QueryCandidateConfig,
    QueryCandidateObjective,
    QueryCandidateTrainer,
    RetrievalTrainer,
    TemperatureConfig,
)
from conjoin.training.query_candidates import gather_candidates


@dataclass
class ContrastiveConfig(TemperatureConfig, QueryCandidateConfig):
    """Arguments of `ContrastiveTrainer` and `QueryContrastiveTrainer`; `one_dataset_per_batch` is for queries."""


class ContrastiveTrainer(RetrievalTrainer):
    """Trains with symmetric InfoNCE over (image, text), with negatives from all devices."""

    def __init__(self, model: PreTrainedModel, args: ContrastiveConfig, **kwargs: Any) -> None:  # noqa: ANN401
        loss = ContrastiveLoss(temperature=args.temperature, learn_temperature=args.learn_temperature)
        super().__init__(model, args, loss, **kwargs)


@dataclass
class ContrastiveArguments(QueryArguments):
    """The rows for training and evaluation: image-text pairs, or queries with candidates.

    Args:
        format: `pairs`, or one of the formats of `QueryArguments`.
    """

    formats = ("pairs", *QueryArguments.formats)

    format: str = "pairs"


class QueryContrastiveObjective(QueryCandidateObjective):
    """InfoNCE from queries to the candidates of all devices.

    Args:
        encoder: Any model of this package.
        args: The temperature.
    """

    def __init__(self, encoder: PreTrainedModel, args: ContrastiveConfig) -> None:
        super().__init__(encoder)
        self.loss = Temperature(args.temperature, args.learn_temperature)

    def contrast(self, embeddings: dict[str, Tensor], ids: Tensor | None, batch: dict[str, Any]) -> dict[str, Tensor]:
        """Return `contrastive_loss` and the metric `temperature`."""
        candidates = gather_candidates(embeddings, ids, None)
        temperature = self.loss()
        loss = info_nce(
            embeddings["queries"],
            candidates.embeddings,
            temperature,
            positive_indices=candidates.positions,
            candidate_ids=candidates.ids,
        )
        return {"contrastive_loss": loss, "temperature": temperature.detach()}


class QueryContrastiveTrainer(QueryCandidateTrainer):
    """Trains with InfoNCE from queries to candidates; batches share no positive.

    Args:
        model: The encoder.
        args: The configuration.
        kwargs: Arguments of `QueryCandidateTrainer`.
    """

    def __init__(self, model: PreTrainedModel, args: ContrastiveConfig, **kwargs: Any) -> None:  # noqa: ANN401
        super().__init__(QueryContrastiveObjective(model, args), args, **kwargs)
