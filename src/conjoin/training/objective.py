"""What a trainer trains: an encoder and a loss behind one forward, so that DDP sees a single call per step."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .replay import Replay


class Objective(nn.Module):
    """Embeds a batch in each of `views` and returns the terms of the loss.

    Args:
        encoder: A model of this package: `encoder(**batch, views=views).pooler_output` is `(len(views) * N, D)`.
        loss: Takes the raw embeddings by view name, `loss(image=..., text=..., ids=...)`, and returns named terms.
        views: The views each item is embedded as: `"image"`, `"text"`, `"fused"`.

    Attributes:
        progress: Share of training done; the trainer keeps it up to date.
    """

    accepts_loss_kwargs = False
    encoder: PreTrainedModel

    def __init__(self, encoder: PreTrainedModel, loss: nn.Module, views: Sequence[str]) -> None:
        super().__init__()
        self.encoder = encoder
        self.loss = loss
        self.views = tuple(views)
        self.progress = 0.0
        self._replay: Replay | None = None

    def forward(self, ids: Tensor | None = None, **batch: Any) -> dict[str, Tensor]:  # noqa: ANN401
        """Return the loss terms of a batch of model inputs; `ids` `(N,)` names what each row shows."""
        return self.contrast(self.embed(**batch), ids, batch)

    def contrast(self, embeddings: dict[str, Tensor], ids: Tensor | None, batch: dict[str, Any]) -> dict[str, Tensor]:
        """Return the loss terms of embeddings by view; rows that lack a modality (by the batch's masks) are told."""
        masks = {view: batch.get(f"{view}_mask") for view in ("image", "text")}
        if all(mask is None for mask in masks.values()):
            return self.loss(**embeddings, ids=ids)
        everything = torch.ones_like(next(mask for mask in masks.values() if mask is not None))
        image, text = (everything if mask is None else mask for mask in masks.values())
        return self.loss(**embeddings, ids=ids, present=torch.stack([image, text, image & text], dim=1))

    def embed(self, **batch: Any) -> dict[str, Tensor]:  # noqa: ANN401
        """Return what `contrast` needs of the rows, here `{view: (N, D)}` raw embeddings.

        Every tensor has the N rows as dimension 0, so that a batch can be embedded in chunks.
        """
        return self.encode(**batch)

    def encode(self, **batch: Any) -> dict[str, Tensor]:  # noqa: ANN401
        """Return `{view: (N, D)}` raw embeddings of the items as they are, which is what evaluation ranks."""
        stacked = self.encoder(**batch, views=self.views).pooler_output
        return dict(zip(self.views, stacked.chunk(len(self.views)), strict=True))

    def once(self, name: str, compute: Callable[[], Any]) -> Any:  # noqa: ANN401
        """Compute something in `embed` that needs no gradient: under the gradient cache in the first pass alone.

        Its size counts: it is kept for all chunks of the batch at a time.
        """
        return compute() if self._replay is None else self._replay.once(name, compute)

    @contextmanager
    def replaying(self, replay: Replay) -> Iterator[None]:
        """Make `once` keep what it computes in `replay`, or take it from there in the second pass."""
        self._replay = replay
        try:
            yield
        finally:
            self._replay = None

    def activation_checkpointing_enable(self, **kwargs: Any) -> None:  # noqa: ANN401
        """Trade compute for memory in the encoder."""
        self.encoder.activation_checkpointing_enable(**kwargs)

    def gradient_checkpointing_enable(self, **kwargs: Any) -> None:  # noqa: ANN401
        """The same, as earlier versions of transformers call it."""
        self.encoder.gradient_checkpointing_enable(**kwargs)


def total_loss(terms: dict[str, Tensor]) -> Tensor:
    """Sum the terms whose name ends in `_loss`; the others are metrics.

    Raises:
        ValueError: There is no such term.
    """
    losses = [term for name, term in terms.items() if name.endswith("_loss")]
    if not losses:
        raise ValueError(f"the loss returned no term ending in '_loss', only {sorted(terms)}")
    return sum(losses[1:], start=losses[0])
