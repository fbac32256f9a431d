"""The losses as modules: they own a temperature, gather across devices, and return named terms."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from conjoin.ops import gather_with_gradient, is_distributed, local_positions

from .contrastive import symmetric_terms
from .generalized import PAIRS, check_pairs, gcl
from .temperature import Temperature


class ContrastiveLoss(nn.Module):
    """Symmetric InfoNCE between image and text embeddings, negatives from all devices.

    Args:
        temperature: Softmax temperature, or its start.
        learn_temperature: Train it.
        false_negative_margin: See `info_nce`.
        ring: Pass the embeddings of other devices by in place of gathering them; see `ring_logsumexp`.
    """

    def __init__(
        self,
        temperature: float = 0.07,
        learn_temperature: bool = True,
        false_negative_margin: float | None = None,
        ring: bool = False,
    ) -> None:
        super().__init__()
        self.temperature = Temperature(temperature, learn_temperature)
        self.false_negative_margin = false_negative_margin
        self.ring = ring

    def forward(
        self, image: Tensor, text: Tensor, ids: Tensor | None = None, present: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Return `contrastive_loss` and the metrics `temperature` and, if any rule masks, `masked_negatives`.

        The latter is how many candidates a row does not count as negatives, for their id or the margin, on average.

        Args:
            image: `(N, D)`, raw.
            text: `(N, D)`.
            ids: `(N,)` integers naming what each pair shows; pairs of one id are not each other's negatives.
            present: `(N, 3)` bool, whether each row has image, text and both.

        Raises:
            ValueError: A row lacks an image or a text.
        """
        if present is not None and not present.all():
            lacking = (~present.all(dim=1)).nonzero().flatten().tolist()
            raise ValueError(f"symmetric InfoNCE needs image and text in every row; rows {lacking[:5]} lack one")
        temperature = self.temperature()
        across: dict[str, Any] = {"gathered_ids": ids, "ring": self.ring}
        if is_distributed() and not self.ring:
            across = {
                "gathered_a": gather_with_gradient(image),
                "gathered_b": gather_with_gradient(text),
                "gathered_ids": None if ids is None else gather_with_gradient(ids),
                "positive_indices": local_positions(len(image), image.device),
            }
        terms = symmetric_terms(image, text, temperature, false_negative_margin=self.false_negative_margin, **across)
        metrics = {"temperature": temperature.detach()}
        if ids is not None or self.false_negative_margin is not None:
            metrics["masked_negatives"] = terms.masked if ids is None else terms.masked + _same_id(ids)
        return {"contrastive_loss": terms.loss} | metrics


class GclLoss(nn.Module):
    """Generalized contrastive loss over image, text and fused embeddings, negatives from all devices.

    Args:
        temperature: Softmax temperature, or its start.
        learn_temperature: Train it.
        exclude_self: See `gcl`, as the next three.
        exclude_same_modality: Leave the anchor's modality out of its denominator.
        exclude_other_positive: Leave the third embedding of the pair out.
        pairs: Ordered modality pairs to average over.
        ring: Pass the embeddings of other devices by in place of gathering them; see `ring_logsumexp`.

    Raises:
        ValueError: A pair is unknown.
    """

    def __init__(
        self,
        temperature: float = 0.07,
        learn_temperature: bool = True,
        exclude_self: bool = True,
        exclude_same_modality: bool = False,
        exclude_other_positive: bool = False,
        pairs: Sequence[tuple[str, str]] = PAIRS,
        ring: bool = False,
    ) -> None:
        super().__init__()
        check_pairs(pairs)
        self.temperature = Temperature(temperature, learn_temperature)
        self.flags: dict[str, Any] = {
            "exclude_self": exclude_self,
            "exclude_same_modality": exclude_same_modality,
            "exclude_other_positive": exclude_other_positive,
            "ring": ring,
        }
        self.pairs = tuple(pairs)

    def forward(
        self,
        image: Tensor,
        text: Tensor,
        fused: Tensor,
        ids: Tensor | None = None,
        present: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Return `gcl_loss` and the metrics `temperature` and, with `ids`, `masked_negatives`; arguments as `gcl`."""
        temperature = self.temperature()
        across: dict[str, Any] = {}
        if is_distributed() and not self.flags["ring"]:
            across = {
                "gathered": tuple(gather_with_gradient(matrix) for matrix in (image, text, fused)),
                "gathered_present": None if present is None else gather_with_gradient(present),
                "gathered_ids": None if ids is None else gather_with_gradient(ids),
                "positions": local_positions(len(image), image.device),
            }
        loss = gcl(image, text, fused, temperature, **self.flags, pairs=self.pairs, present=present, ids=ids, **across)
        metrics = {"temperature": temperature.detach()}
        if ids is not None:
            metrics["masked_negatives"] = _same_id(ids)
        return {"gcl_loss": loss} | metrics


def _same_id(ids: Tensor) -> Tensor:
    """How many other rows of all devices share a row's id, the mean over all rows."""
    counts = gather_with_gradient(ids).unique(return_counts=True)[1]
    return (counts * (counts - 1)).sum() / counts.sum()
