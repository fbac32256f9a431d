"""Stage 2 of PUMA: instruction tuning with the modality-adaptive contrastive loss."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from conjoin.losses import mac, mac_hard_temperature

from .query_candidates import QueryCandidateConfig, QueryCandidateObjective, QueryCandidateTrainer, gather_candidates


@dataclass
class MacConfig(QueryCandidateConfig):
    """Arguments of `MacTrainer` (PUMA Eq. 7, Eq. 8, Alg. 1).

    With `decay=0` the loss is InfoNCE from queries to candidates.

    Args:
        temperature: tau_norm, and where tau_hard starts; 0.03 in the authors' code, not in the paper.
        decay: lambda (Table 12).
        round_to: Round tau_hard to so many decimals (the authors: 3).
        hold_after: Reach the end of the decay at this share of training and stay there (the authors: 0.5).
        reverse: The ablation: candidates of other modalities get the decaying temperature, those of the target's
            modality keep the other (Table 5).

    Raises:
        ValueError: `decay` is negative, or another argument is out of its range.
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
        """The decayed temperature at a share of training done."""
        return mac_hard_temperature(self.temperature, self.decay, progress, self.round_to, self.hold_after)


class MacObjective(QueryCandidateObjective):
    """MAC-loss from queries to the candidates of all devices.

    Args:
        encoder: Any model of this package.
        args: Temperatures and their course.
    """

    def __init__(self, encoder: PreTrainedModel, args: MacConfig) -> None:
        super().__init__(encoder)
        self.args = args

    def contrast(self, embeddings: dict[str, Tensor], ids: Tensor | None, batch: dict[str, Any]) -> dict[str, Tensor]:
        """Return `mac_loss`, both temperatures, and the share of candidates in the modality of a query's target.

        Raises:
            ValueError: The rows do not tell the modality of their candidates.
        """
        candidates = gather_candidates(embeddings, ids, batch.get("candidate_modality"))
        modality = candidates.modality
        if modality is None:
            raise ValueError(
                "MAC-loss needs rows with 'target_modality' (and 'negative_modalities' where not the same)"
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


class MacTrainer(QueryCandidateTrainer):
    """Trains on instructed queries and their candidates by stage 2 of PUMA (Sec. 4.3).

    Args:
        model: The encoder.
        args: The configuration.
        kwargs: As for `QueryCandidateTrainer`.
    """

    def __init__(self, model: PreTrainedModel, args: MacConfig, **kwargs: Any) -> None:  # noqa: ANN401
        super().__init__(MacObjective(model, args), args, **kwargs)
