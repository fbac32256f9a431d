"""What a trainer trains: an encoder and a loss behind one forward, so that DDP sees a single call per step."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel


class Objective(nn.Module):
    """Embeds a batch in each of `views` and returns the terms of the loss.

    Args:
        encoder: A model of this package: `encoder(**batch, views=views).pooler_output` is `(len(views) * N, D)`.
        loss: Takes the raw embeddings by view name, `loss(image=..., text=..., ids=...)`, and returns named terms.
        views: The views each item is embedded as: `"image"`, `"text"`, `"fused"`.
    """

    accepts_loss_kwargs = False
    encoder: PreTrainedModel

    def __init__(self, encoder: PreTrainedModel, loss: nn.Module, views: Sequence[str]) -> None:
        super().__init__()
        self.encoder = encoder
        self.loss = loss
        self.views = tuple(views)

    def forward(self, ids: Tensor | None = None, **batch: Any) -> dict[str, Tensor]:  # noqa: ANN401
        """Return the loss terms of a batch of model inputs; `ids` `(N,)` names what each row shows."""
        return self.loss(**self.embed(**batch), ids=ids)

    def embed(self, **batch: Any) -> dict[str, Tensor]:  # noqa: ANN401
        """Return `{view: (N, D)}` raw embeddings."""
        stacked = self.encoder(**batch, views=self.views).pooler_output
        return dict(zip(self.views, stacked.chunk(len(self.views)), strict=True))

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict[str, Any] | None = None) -> None:
        """Trade compute for memory in the encoder."""
        self.encoder.gradient_checkpointing_enable(gradient_checkpointing_kwargs)


def total_loss(terms: dict[str, Tensor]) -> Tensor:
    """Sum the terms whose name ends in `_loss`; the others are metrics.

    Raises:
        ValueError: There is no such term.
    """
    losses = [term for name, term in terms.items() if name.endswith("_loss")]
    if not losses:
        raise ValueError(f"the loss returned no term ending in '_loss', only {sorted(terms)}")
    return sum(losses[1:], start=losses[0])
