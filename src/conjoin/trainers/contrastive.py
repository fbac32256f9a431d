"""InfoNCE between images and their texts, or from queries to their candidates: the baseline of every method."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from conjoin.losses import ContrastiveLoss, Temperature, soft_labels
from conjoin.trainers.base import RetrievalTrainer, TemperatureConfig
from conjoin.trainers.queries import QueryCandidateConfig, QueryCandidateTrainer, query_info_nce


@dataclass
class ContrastiveConfig(TemperatureConfig, QueryCandidateConfig):
    """Arguments of `ContrastiveTrainer` and `QueryContrastiveTrainer`; all but the temperature is for queries.

    Args:
        negative_margin: A candidate whose cosine with the query is more than that of the positive minus this is no
            negative, see `conjoin.losses.info_nce`; None for none.
        soft_label_weight: Weight of the KL divergence from a judge's distribution over the candidates of each row to
            the model's. The rows have `scores`: of the positive, then of each of the `negatives`, of which all rows
            have equally many.
        score_temperature: Of the softmax over these scores.
    """

    negative_margin: float | None = field(default=None)
    soft_label_weight: float = field(default=0.0)
    score_temperature: float = field(default=1.0)


class ContrastiveTrainer(RetrievalTrainer):
    """Trains with symmetric InfoNCE over (image, text), with negatives from all devices; see the base."""

    config_class = ContrastiveConfig

    def make_loss(self, model: PreTrainedModel, args: ContrastiveConfig) -> ContrastiveLoss:
        """Return the loss."""
        return ContrastiveLoss(temperature=args.temperature, learn_temperature=args.learn_temperature)


class QueryContrastiveTrainer(QueryCandidateTrainer):
    """Trains with InfoNCE from queries to the candidates of all devices; see the base."""

    config_class = ContrastiveConfig
    args: ContrastiveConfig

    def make_loss(self, model: PreTrainedModel, args: ContrastiveConfig) -> Temperature:
        """Return the temperature."""
        return Temperature(args.temperature, args.learn_temperature)

    def loss_terms(self, embeddings: dict[str, Tensor], inputs: dict[str, Any]) -> dict[str, Tensor]:
        """Return `contrastive_loss`, with its weight `soft_label_loss`, and the metric `temperature`.

        Raises:
            ValueError: Soft labels have a weight, but the rows have no scores or no equal number of negatives.
        """
        args, scores = self.args, inputs.get("scores")

        def loss(cut: dict[str, Tensor]) -> dict[str, Tensor]:
            temperature = self.loss()
            terms = {"contrastive_loss": query_info_nce(cut, inputs, temperature, args.negative_margin)}
            if args.soft_label_weight:
                if scores is None or scores.ndim < 2 or "negatives" not in cut:
                    raise ValueError("soft labels need rows with negatives and their `scores`, the positive's first")
                negatives = cut["negatives"].unflatten(0, (len(scores), scores.shape[1] - 1))
                candidates = torch.cat([cut["positives"][:, None], negatives], dim=1)
                loss = soft_labels(cut["queries"], candidates, scores, temperature, args.score_temperature)
                terms["soft_label_loss"] = args.soft_label_weight * loss
            return terms | {"temperature": temperature.detach()}

        return self.matryoshka(loss, embeddings)
