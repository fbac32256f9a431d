"""The losses as modules: they own a temperature, gather across devices, and return named terms."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from conjoin.ops import gather_with_gradient, is_distributed, local_positions

from .contrastive import symmetric_info_nce
from .generalized import PAIRS, gcl
from .temperature import Temperature


class ContrastiveLoss(nn.Module):
    """Symmetric InfoNCE between image and text embeddings, negatives from all devices.

    Args:
        temperature: Softmax temperature, or its start.
        learn_temperature: Train it.
        false_negative_margin: See `info_nce`.
    """

    def __init__(
        self, temperature: float = 0.07, learn_temperature: bool = True, false_negative_margin: float | None = None
    ) -> None:
        super().__init__()
        self.temperature = Temperature(temperature, learn_temperature)
        self.false_negative_margin = false_negative_margin

    def forward(self, image: Tensor, text: Tensor, ids: Tensor | None = None) -> dict[str, Tensor]:
        """Return `contrastive_loss` and the metrics `temperature` and `masked_negatives`.

        Args:
            image: `(N, D)`, raw.
            text: `(N, D)`.
            ids: `(N,)` integers naming what each pair shows; pairs of one id are not each other's negatives.
        """
        temperature = self.temperature()
        gathered_ids = None if ids is None else gather_with_gradient(ids)
        loss = symmetric_info_nce(
            image,
            text,
            temperature,
            gathered_a=gather_with_gradient(image),
            gathered_b=gather_with_gradient(text),
            positives=local_positions(len(image), image.device),
            gathered_ids=gathered_ids,
            false_negative_margin=self.false_negative_margin,
        )
        return {"contrastive_loss": loss} | _metrics(temperature, gathered_ids)


class GclLoss(nn.Module):
    """Generalized contrastive loss over image, text and fused embeddings, negatives from all devices.

    Args:
        temperature: Softmax temperature, or its start.
        learn_temperature: Train it.
        exclude_self: See `gcl`, as the next three.
        exclude_same_modality: Leave the anchor's modality out of its denominator.
        exclude_other_positive: Leave the third embedding of the pair out.
        pairs: Ordered modality pairs to average over.
    """

    def __init__(
        self,
        temperature: float = 0.07,
        learn_temperature: bool = True,
        exclude_self: bool = True,
        exclude_same_modality: bool = False,
        exclude_other_positive: bool = False,
        pairs: Sequence[tuple[str, str]] = PAIRS,
    ) -> None:
        super().__init__()
        unknown = [pair for pair in pairs if tuple(pair) not in PAIRS]
        if unknown or not pairs:
            raise ValueError(f"pairs={list(pairs)}: expected some of {PAIRS}")
        self.temperature = Temperature(temperature, learn_temperature)
        self.flags = {
            "exclude_self": exclude_self,
            "exclude_same_modality": exclude_same_modality,
            "exclude_other_positive": exclude_other_positive,
        }
        self.pairs = tuple(tuple(pair) for pair in pairs)

    def forward(
        self,
        image: Tensor,
        text: Tensor,
        fused: Tensor,
        ids: Tensor | None = None,
        present: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Return `gcl_loss` and the metrics `temperature` and `masked_negatives`; arguments as in `gcl`."""
        temperature = self.temperature()
        gathered_ids = None if ids is None else gather_with_gradient(ids)
        across: dict[str, Any] = {}
        if is_distributed():
            across = {
                "gathered": tuple(gather_with_gradient(matrix) for matrix in (image, text, fused)),
                "gathered_present": None if present is None else gather_with_gradient(present),
                "gathered_ids": gathered_ids,
                "positions": local_positions(len(image), image.device),
            }
        loss = gcl(image, text, fused, temperature, **self.flags, pairs=self.pairs, present=present, ids=ids, **across)
        return {"gcl_loss": loss} | _metrics(temperature, gathered_ids)


def _metrics(temperature: Tensor, ids: Tensor | None) -> dict[str, Tensor]:
    """What is logged beside a loss: the temperature, and how many negatives per row share the row's id."""
    metrics = {"temperature": temperature.detach()}
    if ids is not None:
        counts = ids.unique(return_counts=True)[1]
        metrics["masked_negatives"] = (counts * (counts - 1)).sum() / len(ids)
    return metrics
