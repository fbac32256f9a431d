"""Symmetric InfoNCE between images and their texts: the baseline every method is measured against."""

from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedModel

from conjoin.losses import ContrastiveLoss

from .arguments import RetrievalConfig
from .trainer import RetrievalTrainer


@dataclass
class ContrastiveConfig(RetrievalConfig):
    """Arguments of `ContrastiveTrainer`.

    Args:
        temperature: Softmax temperature, or its start if it is learned.
        learn_temperature: Train it, as CLIP does.
    """

    temperature: float = field(default=0.07)
    learn_temperature: bool = field(default=True)


class ContrastiveTrainer(RetrievalTrainer):
    """Trains with symmetric InfoNCE over (image, text), negatives gathered from all devices (SOLAR Eq. 3)."""

    def __init__(self, model: PreTrainedModel, args: ContrastiveConfig, **kwargs: Any) -> None:  # noqa: ANN401
        loss = ContrastiveLoss(temperature=args.temperature, learn_temperature=args.learn_temperature)
        super().__init__(model, args, loss, **kwargs)
