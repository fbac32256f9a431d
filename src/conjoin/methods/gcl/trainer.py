"""Generalized contrastive learning: one loss over the image, text and fused embeddings of each pair (GCL)."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

from transformers import PreTrainedModel

from conjoin.losses import GclLoss
from conjoin.training import RetrievalTrainer, TemperatureConfig


@dataclass
class GclConfig(TemperatureConfig):
    """Arguments of `GclTrainer`; the flags default to the paper's values.

    Args:
        exclude_self: Exclude the anchor from its own denominator.
        exclude_same_modality: Exclude all embeddings of the anchor's modality from its denominator.
        exclude_other_positive: Exclude the third embedding of the anchor's pair from its denominator.
    """

    exclude_self: bool = field(default=True)
    exclude_same_modality: bool = field(default=False)
    exclude_other_positive: bool = field(default=False)


class GclTrainer(RetrievalTrainer):
    """Trains with the generalized contrastive loss over (image, text, fused)."""

    views: ClassVar[tuple[str, ...]] = ("image", "text", "fused")

    def __init__(self, model: PreTrainedModel, args: GclConfig, **kwargs: Any) -> None:  # noqa: ANN401
        loss = GclLoss(
            temperature=args.temperature,
            learn_temperature=args.learn_temperature,
            exclude_self=args.exclude_self,
            exclude_same_modality=args.exclude_same_modality,
            exclude_other_positive=args.exclude_other_positive,
        )
        super().__init__(model, args, loss, **kwargs)
