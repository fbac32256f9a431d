"""GCL: one generalized contrastive loss over the image, text and fused embeddings of each pair, or other views."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from conjoin.data import name_rows
from conjoin.data.arguments import parse_field
from conjoin.data.cells import is_missing
from conjoin.losses import GclLoss
from conjoin.storage import name_ids
from conjoin.trainers.base import RetrievalTrainer, TemperatureConfig


@dataclass
class GclConfig(TemperatureConfig):
    """Arguments of `GclTrainer`; the flags default to the paper's values.

    Args:
        views: What to embed of each row, with a weight: `{image: 1, title: 1, description: 0.5, image+title: 1}`. A
            name is that of a column, or of several joined by `+`: `image` is the picture, the others are texts, and
            several are one item. The terms of two views count by the product of their weights. None for the paper's
            image, text and both. Not in the paper.
        exclude_self: Exclude the anchor from its own denominator.
        exclude_same_modality: Exclude all embeddings of the anchor's modality from its denominator.
        exclude_other_positive: Exclude the third embedding of the anchor's pair from its denominator.

    Raises:
        ValueError: There are fewer than two views, or a weight is not positive.
    """

    views: dict[str, float] | str | None = field(default=None)
    exclude_self: bool = field(default=True)
    exclude_same_modality: bool = field(default=False)
    exclude_other_positive: bool = field(default=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.views = parse_field(self.views, "views")
        if self.views is not None and (len(self.views) < 2 or not min(self.views.values()) > 0):  # type: ignore[union-attr]
            raise ValueError(f"views={self.views}; expected two or more, each with a positive weight")
        if self.views and self.feature_copies:
            raise ValueError("views reads items, no stored features: set feature_copies to 0")


class GclTrainer(RetrievalTrainer):
    """Trains with the generalized contrastive loss over (image, text, fused), with negatives from all devices.

    With `GclConfig.views`, over these. A row that lacks a column of a view has no such view.

    Args:
        model: As for `RetrievalTrainer`.
        args: The configuration.
        train_dataset: Rows `{"image", "text", "id"?, "group"?}`, or with the columns of the views.
        eval_dataset: Rows of the same form, for R@k.
        processing_class: The model's processor.
        kwargs: As for `RetrievalTrainer`: `peft_config`, `columns` ...
    """

    config_class = GclConfig
    views: ClassVar[tuple[str, ...]] = ("image", "text", "fused")
    args: GclConfig

    def complete_args(self, model: Any, args: Any) -> Any:
        """Return the configuration; its views say which columns are needed."""
        args = super().complete_args(model, args)
        if args.views:
            columns = dict.fromkeys(name for view in args.views for name in view.split("+"))
            self.needed_columns, self.same_layers = tuple(columns), False  # type: ignore[misc]
        return args

    def make_loss(self, model: PreTrainedModel, args: Any) -> GclLoss:
        """Return the loss."""
        return GclLoss(
            temperature=args.temperature,
            learn_temperature=args.learn_temperature,
            exclude_self=args.exclude_self,
            exclude_same_modality=args.exclude_same_modality,
            exclude_other_positive=args.exclude_other_positive,
            views=args.views,
        )

    def make_collator(self, processor: Any, model: PreTrainedModel, args: Any) -> Any:
        """Return what maps rows to a batch; with `views`, it has a part for each."""
        return ViewCollator(processor, args.views) if args.views else super().make_collator(processor, model, args)

    def embed(self, model: PreTrainedModel, inputs: dict[str, Any]) -> dict[str, Tensor]:
        """Return the raw embeddings by view `(N, D)`; with `GclConfig.views`, of the rows that have it."""
        if not self.args.views:
            return super().embed(model, inputs)
        return {view: model(**inputs[view]).pooler_output for view in self.args.views if view in inputs}

    def embed_for_evaluation(self, model: PreTrainedModel, inputs: dict[str, Any]) -> dict[str, Tensor]:
        """Return the raw embeddings `{view: (N, D)}`, zero where a row lacks the view."""
        return self.spread(super().embed_for_evaluation(model, inputs), inputs)

    def loss_terms(self, embeddings: dict[str, Tensor], inputs: dict[str, Any]) -> dict[str, Tensor]:
        """Return `gcl_loss` and metrics."""
        return super().loss_terms(self.spread(embeddings, inputs), inputs)

    def spread(self, embeddings: dict[str, Tensor], inputs: dict[str, Any]) -> dict[str, Tensor]:
        """Return the embeddings of `GclConfig.views` for all rows `(N, D)`, zero where a row lacks the view."""
        if not self.args.views:
            return embeddings
        first = next(iter(embeddings.values()))
        return {
            view: first.new_zeros(len(exists), first.shape[1]).masked_scatter(
                exists[:, None], embeddings.get(view, first)
            )
            for view, exists in zip(self.args.views, inputs["present"].T, strict=True)
        }


class ViewCollator:
    """Collates rows into a part for each view, of the rows that have it, `present` `(N, V)` bool, and `ids` `(N,)`.

    Args:
        processor: Called as `processor(items, ids=ids)`.
        views: Names of columns, several joined by `+`.
    """

    def __init__(self, processor: Any, views: Sequence[str]) -> None:
        self.processor, self.views = processor, list(views)

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Collate rows.

        Raises:
            ValueError: An item cannot be used.
        """
        batch: dict[str, Any] = {"ids": name_ids(name_rows(rows))}
        present = torch.zeros(len(rows), len(self.views), dtype=torch.bool)
        for number, view in enumerate(self.views):
            items, names = [], []
            for index, row in enumerate(rows):
                cells = {name: row.get(name) for name in view.split("+")}
                if any(map(is_missing, cells.values())):
                    continue
                image, texts = cells.pop("image", None), " ".join(map(str, cells.values()))
                items.append(({"image": image} if image is not None else {}) | ({"text": texts} if cells else {}))
                names.append(f"{row.get('id', index)}, {view}")
                present[index, number] = True
            if items:
                batch[view] = dict(self.processor(items, ids=names))
        return batch | {"present": present}
