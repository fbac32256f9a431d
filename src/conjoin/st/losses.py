"""The losses of this package for `SentenceTransformerTrainer`, with the gradient cache of sentence-transformers.

A batch of any size fits in memory: `mini_batch_size` rows are embedded at once, each of them twice. With several
devices the candidates of all devices are compared.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.losses.gradcache import CachedLossMixin, has_static_embedding_input
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerState

from conjoin.losses import gather_rows, gcl, mac, mac_hard_temperature, multi_positive, self_distillation
from conjoin.losses.gather import gather_with_gradient


class CachedLoss(CachedLossMixin, nn.Module):
    """A loss over the embeddings of the columns of a dataset; a subclass implements `contrast`.

    Args:
        model: A `SentenceTransformer`.
        mini_batch_size: Rows of a column that are embedded at once.

    Raises:
        ValueError: `mini_batch_size` is below 1, or rows of the model's inputs cannot be told apart.
    """

    def __init__(self, model: SentenceTransformer, mini_batch_size: int = 32) -> None:
        super().__init__()
        if mini_batch_size < 1:
            raise ValueError(f"mini_batch_size={mini_batch_size} must be at least 1")
        if has_static_embedding_input(model):
            raise ValueError("a model of StaticEmbedding has no inputs by row; it needs no gradient cache")
        self.model = model
        self.mini_batch_size = mini_batch_size

    def contrast(self, columns: Sequence[Tensor], labels: Tensor | None) -> Tensor:
        """Return the loss of the columns' embeddings `(N, D)`."""
        raise NotImplementedError

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor | None = None) -> Tensor:
        """Return the loss; its backward pass embeds every mini-batch again."""
        return self.forward_cached(sentence_features, labels)

    def calculate_loss(
        self, reps: list[list[Tensor]], labels: Tensor | None = None, *, with_backward: bool = False
    ) -> Tensor:
        """Return the loss of the embeddings by column and mini-batch, after its backward pass if that is wanted."""
        loss = self.contrast([torch.cat(parts) for parts in reps], labels)
        if with_backward:
            loss.backward()
            return loss.detach()
        return loss


class CachedGclLoss(CachedLoss):
    """Generalized contrastive learning: one loss over the image, the text and both of each pair, see `gcl`.

    The dataset has three columns in this order: the image, the text, and `{"image": ..., "text": ...}`.

    Args:
        model: A multimodal `SentenceTransformer`.
        temperature: Of the softmax.
        mini_batch_size: As for `CachedLoss`.
        exclude_self: As for `gcl`, like the next two.
        exclude_same_modality: Leave out everything of the anchor's modality.
        exclude_other_positive: Leave out the third embedding of the pair.
    """

    def __init__(
        self,
        model: SentenceTransformer,
        temperature: float = 0.07,
        mini_batch_size: int = 32,
        exclude_self: bool = True,
        exclude_same_modality: bool = False,
        exclude_other_positive: bool = False,
    ) -> None:
        super().__init__(model, mini_batch_size)
        self.temperature = temperature
        self.excluded = (exclude_self, exclude_same_modality, exclude_other_positive)

    def contrast(self, columns: Sequence[Tensor], labels: Tensor | None) -> Tensor:
        """Return the loss; `labels` `(N,)` name what each pair shows: those of one label are not negatives.

        Raises:
            ValueError: There are not three columns.
        """
        if len(columns) != 3:
            raise ValueError(f"GCL needs the columns image, text and both, got {len(columns)} columns")
        image, text, fused = columns
        gathered = gather_rows(*columns, ids=labels)
        return gcl(image, text, fused, self.temperature, *self.excluded, gathered=gathered)


class CachedMacLoss(CachedLoss):
    """The modality-adaptive contrastive loss, see `mac`; with `decay=0` it is InfoNCE.

    The dataset has the columns query, positive and any number of negatives, and a column `label` with the modality of
    the target (integers, equal for equal modalities): one for the row, or a list with one for each candidate. With
    `decay=0` it needs no labels. Pass `MacSchedule(loss)` to the trainer as a callback: it sets the progress.

    Args:
        model: A `SentenceTransformer`.
        temperature: For candidates of other modalities than the target's, and at first for all.
        decay: Of the temperature for the target's modality, over training.
        mini_batch_size: As for `CachedLoss`.
        round_to: As for `mac_hard_temperature`.
        hold_after: As for `mac_hard_temperature`.

    Attributes:
        progress: Completed share of training, in [0, 1].
    """

    def __init__(
        self,
        model: SentenceTransformer,
        temperature: float = 0.03,
        decay: float = 0.2,
        mini_batch_size: int = 32,
        round_to: int | None = None,
        hold_after: float | None = None,
    ) -> None:
        super().__init__(model, mini_batch_size)
        if decay < 0:
            raise ValueError(f"decay={decay} must not be negative")
        self.temperature, self.decay, self.progress = temperature, decay, 0.0
        self.options = (round_to, hold_after)
        mac_hard_temperature(temperature, decay, 1.0, *self.options)

    def contrast(self, columns: Sequence[Tensor], labels: Tensor | None) -> Tensor:
        """Return the loss from the first column to the others.

        Raises:
            ValueError: There is no positive column, or the labels are missing or of another shape.
        """
        queries, *candidates = columns
        count, kinds = len(queries), len(candidates)
        if not kinds:
            raise ValueError("MAC needs the columns query, positive and perhaps negatives, got one column")
        if labels is None and self.decay:
            raise ValueError("MAC needs a column 'label' with the modality of each target, unless decay is 0")
        modality = queries.new_zeros(count, dtype=torch.long) if labels is None else labels
        modality = modality[:, None].expand(count, kinds) if modality.ndim == 1 else modality
        if modality.shape != (count, kinds):
            raise ValueError(f"labels have shape {tuple(modality.shape)}, expected ({count},) or ({count}, {kinds})")
        joined, _, _, positions = gather_rows(*candidates)
        modality = gather_with_gradient(modality).T.flatten()
        hard = mac_hard_temperature(self.temperature, self.decay, self.progress, *self.options)
        return mac(queries, torch.cat([*joined]), modality, self.temperature, hard, positive_indices=positions)


class CachedSelfDistillationLoss(CachedMacLoss):
    """InfoNCE, and the distance of a pruned model's embeddings to those of the whole model, see `self_distillation`.

    The dataset has the columns query, positive and any number of negatives.

    Args:
        model: A `SentenceTransformer`, such as `prune` makes.
        teacher: The whole model; it has the same processor.
        distill_weight: Weight of the distance; the rest is the weight of InfoNCE.
        kind: Of the distance, see `conjoin.losses.self_distillation`.
        temperature: Of InfoNCE and of `"kl"`.
        mini_batch_size: As for `CachedLoss`.

    Raises:
        ValueError: `distill_weight` is not within 0 and 1, or as `CachedLoss`.
    """

    def __init__(
        self,
        model: SentenceTransformer,
        teacher: SentenceTransformer,
        distill_weight: float = 0.9,
        kind: str = "cosine",
        temperature: float = 0.05,
        mini_batch_size: int = 32,
    ) -> None:
        super().__init__(model, temperature, 0.0, mini_batch_size)
        if not 0 <= distill_weight <= 1:
            raise ValueError(f"distill_weight={distill_weight}; expected a number within 0 and 1")
        self.distill_weight, self.kind = distill_weight, kind
        self._teacher = (CachedLoss(teacher.eval(), mini_batch_size),)  # a tuple hides it: not trained, not saved
        self._taught: list[Tensor] = []

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor | None = None) -> Tensor:
        """Return the loss; the whole model embeds every mini-batch once."""
        features, (teacher,) = list(sentence_features), self._teacher
        teacher.model.to(self.model.device)
        options: dict[str, Any] = {"with_grad": False, "copy_random_state": False}
        self._taught = [
            torch.cat([part for part, _ in teacher.embed_minibatch_iter(column, **options)]) for column in features
        ]
        return super().forward(features, labels)

    def contrast(self, columns: Sequence[Tensor], labels: Tensor | None) -> Tensor:
        """Return the weighted sum of InfoNCE and the mean distance over the columns of candidates."""
        query, *candidates = columns
        taught, *others = self._taught
        distances = [
            self_distillation(query, taught, candidate, other, self.kind, temperature=self.temperature)
            for candidate, other in zip(candidates, others, strict=True)
        ]
        contrastive = super().contrast(columns, labels)
        return (1 - self.distill_weight) * contrastive + self.distill_weight * torch.stack(distances).mean()


class MacSchedule(TrainerCallback):
    """Tells a `CachedMacLoss` the progress of training.

    Args:
        loss: The loss.
    """

    def __init__(self, loss: CachedMacLoss) -> None:
        self.loss = loss

    def on_step_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:  # noqa: ANN401
        """Set the completed share of training."""
        self.loss.progress = state.global_step / max(state.max_steps, 1)


class CachedMultiPositiveLoss(CachedLoss):
    """InfoNCE of anchors with several positives and negatives of their own, see `multi_positive`.

    The dataset has the columns anchor, `positives` positives and any number of negatives. A column `label` may hold a
    list of 0 and 1 for each row: which of its positives and negatives exist. Those that do not may hold anything.

    Args:
        model: A `SentenceTransformer`.
        temperature: Of the softmax.
        positives: Number of positive columns.
        mini_batch_size: As for `CachedLoss`.
    """

    def __init__(
        self, model: SentenceTransformer, temperature: float = 0.07, positives: int = 1, mini_batch_size: int = 32
    ) -> None:
        super().__init__(model, mini_batch_size)
        if positives < 1:
            raise ValueError(f"positives={positives} must be at least 1")
        self.temperature, self.positives = temperature, positives

    def contrast(self, columns: Sequence[Tensor], labels: Tensor | None) -> Tensor:
        """Return the loss from the first column to the others and to the other anchors.

        Raises:
            ValueError: There are too few columns, or the labels are of another shape.
        """
        anchors, *others = columns
        if len(others) < self.positives:
            raise ValueError(f"expected {self.positives} positive columns after the anchor, got {len(others)} columns")
        candidates = torch.stack(others, dim=1)
        shape, sizes = candidates.shape[:2], [self.positives, len(others) - self.positives]
        if labels is not None and labels.shape != shape:
            raise ValueError(f"labels have shape {tuple(labels.shape)}, expected {tuple(shape)}: one per candidate")
        exists = candidates.new_ones(shape, dtype=torch.bool) if labels is None else labels.bool()
        (positives, negatives), masks = candidates.split(sizes, dim=1), exists.split(sizes, dim=1)
        gathered = gather_rows(anchors, present=masks[0].any(1))
        return multi_positive(anchors, positives, negatives, self.temperature, *masks, gathered=gathered)
