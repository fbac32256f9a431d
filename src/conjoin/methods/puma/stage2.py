"""Stage 2 of PUMA: instruction tuning with the modality-adaptive contrastive loss."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from conjoin.losses import mac, mac_hard_temperature
from conjoin.training.query_candidates import (
    QueryCandidateConfig,
    QueryCandidateObjective,
    QueryCandidateTrainer,
    gather_candidates,
)


@dataclass
class PumaStage2Config(QueryCandidateConfig):
    """Arguments of `PumaStage2Trainer` (PUMA Eq. 7, Eq. 8, Alg. 1).

    With `decay=0` the loss is InfoNCE from queries to candidates.

    Args:
        temperature: tau_norm and the initial tau_hard; 0.03 in the authors' code, not given in the paper.
        decay: lambda (Table 12).
        round_to: Number of decimals of tau_hard (the authors: 3).
        hold_after: Complete the decay at this share of training, then hold tau_hard (the authors: 0.5).
        reverse: Ablation of Table 5: use tau_hard for candidates of other modalities, and tau_norm for those of the
            target's modality.

    Raises:
        ValueError: `decay` is negative, or another argument is out of range.
    """

    temperature: float = field(default=0.03)
    decay: float = field(default=0.2)
    round_to: int | None = field(default=None)
    hold_after: float | None = field(default=None)
    reverse: bool = field(default=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.decay < 0:
            raise ValueError(f"decay={self.decay} must not be negative")
        self.hard_temperature(1.0)

    def hard_temperature(self, progress: float) -> float:
        """Return tau_hard at a completed share of training."""
        return mac_hard_temperature(self.temperature, self.decay, progress, self.round_to, self.hold_after)


class PumaStage2Objective(QueryCandidateObjective):
    """MAC loss from queries to the candidates of all devices.

    Args:
        encoder: Any model of this package.
        args: Temperatures and their schedule.
    """

    def __init__(self, encoder: PreTrainedModel, args: PumaStage2Config) -> None:
        super().__init__(encoder)
        self.args = args

    def contrast(self, embeddings: dict[str, Tensor], ids: Tensor | None, batch: dict[str, Any]) -> dict[str, Tensor]:
        """Return `mac_loss`, both temperatures, and the share of candidates with the modality of the query's target.

        Raises:
            ValueError: The rows do not name the modality of their candidates.
        """
        candidates = gather_candidates(embeddings, ids, batch.get("candidate_modality"))
        modality = candidates.modality
        if modality is None:
            raise ValueError(
                "the MAC loss needs rows with 'target_modality' (and 'negative_modalities' if they differ)"
            )
        decayed, constant = self.args.hard_temperature(self.progress), self.args.temperature
        intra, inter = (constant, decayed) if self.args.reverse else (decayed, constant)
        loss = mac(
            embeddings["queries"],
            candidates.embeddings,
            modality,
            inter,
            intra,
            positive_indices=candidates.positions,
            candidate_ids=candidates.ids,
        )
        same = (modality[candidates.positions, None] == modality).float().mean()
        temperatures = {"temperature": inter, "hard_temperature": intra}
        metrics = {name: torch.tensor(value, device=loss.device) for name, value in temperatures.items()}
        return {"mac_loss": loss, **metrics, "same_modality_rate": same}


class PumaStage2Trainer(QueryCandidateTrainer):
    """Trains on queries with instructions and their candidates by stage 2 of PUMA (Sec. 4.3).

    Args:
        model: The encoder.
        args: The configuration.
        kwargs: Arguments of `QueryCandidateTrainer`.
    """

    def __init__(self, model: PreTrainedModel, args: PumaStage2Config, **kwargs: Any) -> None:  # noqa: ANN401
        super().__init__(PumaStage2Objective(model, args), args, **kwargs)
