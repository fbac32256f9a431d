"""GCL: one generalized contrastive loss over the image, text and fused embeddings of each pair."""

from dataclasses import dataclass, field
from typing import ClassVar

from transformers import PreTrainedModel

from conjoin.losses import GclLoss
from conjoin.trainers.base import RetrievalTrainer, TemperatureConfig


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
    """Trains with the generalized contrastive loss over (image, text, fused), with negatives from all devices.

    Args:
        model: As for `RetrievalTrainer`.
        args: The configuration.
        train_dataset: Rows `{"image", "text", "id"?, "group"?}`.
        eval_dataset: Rows of the same form, for R@k.
        processing_class: The model's processor.
        kwargs: As for `RetrievalTrainer`: `peft_config`, `columns` ...
    """

    config_class = GclConfig
    views: ClassVar[tuple[str, ...]] = ("image", "text", "fused")

    def make_loss(self, model: PreTrainedModel, args: GclConfig) -> GclLoss:
        """Return the loss."""
        return GclLoss(
            temperature=args.temperature,
            learn_temperature=args.learn_temperature,
            exclude_self=args.exclude_self,
            exclude_same_modality=args.exclude_same_modality,
            exclude_other_positive=args.exclude_other_positive,
        )
