"""The objective that a trainer minimises: encoder and loss in one forward, so DDP sees one call per step.

`Replay` repeats its computations with the same random numbers in the second pass of the gradient cache.
"""

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from conjoin.models.mllm_retriever import MllmRetrieverModel


class RandomState:
    """A snapshot of the random state of the CPU and one GPU, to repeat dropout exactly."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.cpu = torch.get_rng_state()
        self.cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def restore(self) -> None:
        """Reset the generators to the recorded state."""
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda, self.device)


class Replay:
    """Values of the first pass over some rows, for the second pass. Create it just before the first pass.

    Args:
        device: Device of both passes.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.start = device, RandomState(device)
        self._kept: dict[str, tuple[Any, RandomState]] = {}

    def once(self, name: str, compute: Callable[[], Any]) -> Any:  # noqa: ANN401
        """Return `compute()`; in the second pass return the stored value and restore the random state after it."""
        if name in self._kept:
            value, state = self._kept.pop(name)
            state.restore()
            return value
        value = compute()
        self._kept[name] = value, RandomState(self.device)
        return value


class Objective(nn.Module):
    """Embeds a batch in each of `views` and returns the loss terms.

    A batch maps part names to model inputs. A part is the processor's output for some items; dimension 0 of every
    tensor is the item. The entry `teacher` of a part holds the teacher's inputs or outputs. A batch of image-text
    pairs has the part `pairs`. Tensors outside the parts, such as `ids`, are inputs of the loss.

    Args:
        encoder: A model of this package: `encoder(**pairs, views=views).pooler_output` is `(len(views) * N, D)`.
        loss: Called with the raw embeddings by view, and with `ids` and `present` if rows have them:
            `loss(image=..., text=..., ids=...)`. It returns named terms, or one tensor, which gets the name of its
            class (`MyLoss`: `my_loss`).
        views: The views to embed of each item: `"image"`, `"text"`, `"fused"`.

    Attributes:
        progress: Completed share of training, in [0, 1], updated by the trainer.
        widths: Widths to contrast the embeddings at (Matryoshka); empty for the whole.
    """

    accepts_loss_kwargs = False
    same_layers: ClassVar[bool] = True
    """Whether all devices run the same layers in every step: not if one device may have texts and another images."""
    sorts_rows: ClassVar[bool] = True
    """Whether `embed` may get rows in any order, without the columns of tokens that are padding in all of them."""
    encoder: PreTrainedModel

    def __init__(self, encoder: PreTrainedModel, loss: nn.Module, views: Sequence[str]) -> None:
        super().__init__()
        self.encoder = encoder
        self.loss = loss
        self.views = tuple(views)
        self.progress = 0.0
        self.widths: Sequence[int] = ()
        self._replay: Replay | None = None

    @property
    def _no_split_modules(self) -> list[str]:
        """The classes of the layers that FSDP gathers one at a time; all devices run each of them equally often."""
        tower: nn.Module = self.encoder
        if isinstance(self.encoder, MllmRetrieverModel):
            tower = self.encoder.backbone.language_model
        elif not self.same_layers:
            return []
        names = {type(module).__name__ for module in tower.modules()}
        return sorted(names & set(self.encoder._no_split_modules or ()))

    def forward(self, ids: Tensor | None = None, **batch: Any) -> dict[str, Tensor]:  # noqa: ANN401
        """Return the loss terms of a batch; rows with equal `ids` `(N,)` show the same item."""
        return self.terms(self.embed(**batch), ids, batch)

    @property
    def embedding_names(self) -> Collection[str]:
        """Which outputs of `embed` are embeddings `(..., D)`."""
        return self.views

    def terms(self, embeddings: dict[str, Tensor], ids: Tensor | None, batch: dict[str, Any]) -> dict[str, Tensor]:
        """Return the loss terms of what `embed` returned for all rows.

        With `widths`, each term of `contrast` is the mean over the embeddings cut to each width, which the loss
        normalises again (Kusupati et al., "Matryoshka Representation Learning", arXiv 2205.13147, Eq. 1). A method
        whose further terms need the full width, such as those of a teacher, adds them here.

        Raises:
            ValueError: A width is larger than the embeddings.
        """
        if not self.widths:
            return self.contrast(embeddings, ids, batch)
        names = [name for name in embeddings if name in self.embedding_names]
        for name in names:
            if max(self.widths) > embeddings[name].shape[-1]:
                raise ValueError(
                    f"matryoshka_dims has {max(self.widths)}, the embeddings have {embeddings[name].shape[-1]} numbers"
                )
        means: dict[str, Tensor] = {}
        weight = 1 / len(self.widths)
        for width in self.widths:
            cut = embeddings | {name: embeddings[name][..., :width] for name in names}
            for name, term in self.contrast(cut, ids, batch).items():
                means[name] = means.get(name, 0.0) + weight * term
        return means

    def contrast(self, embeddings: dict[str, Tensor], ids: Tensor | None, batch: dict[str, Any]) -> dict[str, Tensor]:
        """Return the loss terms of embeddings by view; the loss also gets a mask of present modalities."""
        masks = {view: batch["pairs"].get(f"{view}_mask") for view in ("image", "text")}
        given = {} if ids is None else {"ids": ids}
        if any(mask is not None for mask in masks.values()):
            everything = torch.ones_like(next(mask for mask in masks.values() if mask is not None))
            image, text = (everything if mask is None else mask for mask in masks.values())
            given["present"] = torch.stack([image, text, image & text], dim=1)
        terms = self.loss(**embeddings, **given)
        if not isinstance(terms, Tensor):
            return terms
        name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(self.loss).__name__).lower()
        return {f"{name.removesuffix('_loss')}_loss": terms}

    def embed(self, **batch: Any) -> dict[str, Tensor]:  # noqa: ANN401
        """Return the inputs of `terms` for the given parts, here `{view: (N, D)}` raw embeddings.

        Dimension 0 of every tensor is the row of a part, so a batch can be embedded in chunks.
        """
        return self.encode(**batch)

    def encode(self, **batch: Any) -> dict[str, Tensor]:  # noqa: ANN401
        """Return the raw embeddings `{view: (N, D)}` of the unmodified items, for evaluation."""
        stacked = self.encoder(**batch["pairs"], views=self.views).pooler_output
        return dict(zip(self.views, stacked.chunk(len(self.views)), strict=True))

    def once(self, name: str, compute: Callable[[], Any]) -> Any:  # noqa: ANN401
        """Compute a value without gradient in `embed`; the gradient cache computes it in the first pass only.

        The gradient cache stores the values of all chunks of a batch until the second pass.
        """
        return compute() if self._replay is None else self._replay.once(name, compute)

    @contextmanager
    def replaying(self, replay: Replay) -> Iterator[None]:
        """Make `once` store its values in `replay` in the first pass and read them in the second."""
        self._replay = replay
        try:
            yield
        finally:
            self._replay = None

    def activation_checkpointing_enable(self, **kwargs: Any) -> None:  # noqa: ANN401
        """Enable activation checkpointing in the encoder: less memory, more compute."""
        self.encoder.activation_checkpointing_enable(**kwargs)

    def gradient_checkpointing_enable(self, **kwargs: Any) -> None:  # noqa: ANN401
        """Enable activation checkpointing, by its name in earlier versions of transformers."""
        self.encoder.gradient_checkpointing_enable(**kwargs)


def total_loss(terms: dict[str, Tensor]) -> Tensor:
    """Sum the terms whose names end in `_loss`; other terms are metrics.

    Raises:
        ValueError: There is no such term.
    """
    losses = [term for name, term in terms.items() if name.endswith("_loss")]
    if not losses:
        raise ValueError(f"the loss returned no term ending in '_loss', only {sorted(terms)}")
    return sum(losses[1:], start=losses[0])
