"""Score fusion: the weighted sum of the two vectors of a two-tower model (CLIP-SF of UniIR)."""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedModel, initialization as init
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.utils import ModelOutput, can_return_tuple

from .configuration_score_fusion import ScoreFusionConfig

VIEWS = ("image", "text", "fused")


@dataclass
class ScoreFusionOutput(ModelOutput):
    """Output of `ScoreFusionModel` for `N` items (times the requested views).

    Args:
        embeddings: `(N, d)` float32, L2-normalised, for indexing and comparison.
        pooler_output: `(N, d)` weighted sum before normalisation, the input of losses.
        vision_model_output: Output of the vision tower for the items with an image, with its `hidden_states` and
            `attentions`; only if one of them is asked for.
        text_model_output: The same of the text tower for the items with a text.
    """

    embeddings: Tensor | None = None
    pooler_output: Tensor | None = None
    vision_model_output: BaseModelOutputWithPooling | None = None
    text_model_output: BaseModelOutputWithPooling | None = None


class ScoreFusionModel(PreTrainedModel):
    """Embeds text, image, or image + text items as `w_i * e_i + w_t * e_t`, then L2-normalised (UniIR, CLIP-SF).

    `e_i` and `e_t` are the projected vectors of a two-tower model, raw by default; a missing modality adds exactly
    zero. BGE-VL-base and -large are CLIP checkpoints with this fusion: load them with `from_clip`.
    """

    config_class = ScoreFusionConfig
    config: ScoreFusionConfig
    main_input_name = "pixel_values"
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = False
    _supports_sdpa = True

    def __init__(self, config: ScoreFusionConfig) -> None:
        super().__init__(config)
        self.backbone = AutoModel.from_config(config.backbone_config, dtype=torch.get_default_dtype())
        self._freeze_logit_scale()
        if config.learnable_weights:
            self.log_weights = nn.Parameter(torch.zeros(2))
        self.post_init()

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """Load a saved model; freeze the logit scale again (transformers unfreezes all parameters)."""
        loaded = super().from_pretrained(*args, **kwargs)
        (loaded[0] if isinstance(loaded, tuple) else loaded)._freeze_logit_scale()
        return loaded

    def _freeze_logit_scale(self) -> None:
        """Freeze the backbone's logit scale and bias: losses have their own."""
        for parameter in self.backbone.parameters(recurse=False):
            parameter.requires_grad_(False)

    @classmethod
    def from_clip(
        cls,
        checkpoint: str | Path | PreTrainedModel,
        **config_kwargs: Any,  # noqa: ANN401
    ) -> "ScoreFusionModel":
        """Build score fusion on a pretrained two-tower model; fixed weights need no training.

        Args:
            checkpoint: A model id, a folder, or a loaded model: CLIP, SigLIP, or a model with the same layout.
            config_kwargs: Fields of `ScoreFusionConfig`.

        Raises:
            ValueError: The checkpoint does not have two towers.
        """
        loaded = (
            checkpoint
            if isinstance(checkpoint, PreTrainedModel)
            else AutoModel.from_pretrained(checkpoint, trust_remote_code=False)
        )
        model = cls(ScoreFusionConfig(copy.deepcopy(loaded.config), **config_kwargs))
        model.backbone.load_state_dict(loaded.state_dict())
        return model

    @property
    def vision_model(self) -> PreTrainedModel:
        """The vision tower."""
        return self.backbone.vision_model

    @property
    def text_model(self) -> PreTrainedModel:
        """The text tower."""
        return self.backbone.text_model

    def get_input_embeddings(self) -> nn.Module:
        """Return the text tower's token embeddings."""
        return self.text_model.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the text tower's token embeddings."""
        self.text_model.set_input_embeddings(value)

    @can_return_tuple
    def forward(
        self,
        pixel_values: Tensor | None = None,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        special_tokens_mask: Tensor | None = None,
        image_mask: Tensor | None = None,
        text_mask: Tensor | None = None,
        image_features: Tensor | None = None,
        text_features: Tensor | None = None,
        views: Sequence[str] | None = None,
        token_type_ids: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | Sequence[int] | None = None,
    ) -> ScoreFusionOutput:
        """Embed N items, each with an image, a text or both.

        Args:
            pixel_values: `(N, 3, H, W)`; rows without an image are ignored. Absent when no item has an image.
            input_ids: `(N, T)` token ids.
            attention_mask: `(N, T)` 1 for real tokens; all ones when absent.
            special_tokens_mask: Unused; accepted because the processor returns it.
            image_mask: `(N,)` bool, True for items with an image; all when absent.
            text_mask: `(N,)` bool, True for items with a text; all when absent.
            image_features: `(N, d)` cached outputs of `run_vision_tower` in place of `pixel_values`.
            text_features: `(N, d)` cached outputs of `run_text_tower` in place of `input_ids`.
            views: Views to embed, of `"image"`, `"text"`, `"fused"`, in one pass of the towers. The outputs are
                stacked view by view, `(len(views) * N, d)`. By default each item is embedded once, from all its parts.
            token_type_ids: Unused, a text is one segment; accepted because tokenizers return it.
            output_attentions: Return the output of each tower, with its attention weights (not with `sdpa`).
            output_hidden_states: Return the output of each tower, with its hidden states.

        Raises:
            ValueError: Neither images nor texts are given, or a view is unknown or not in the batch.
        """
        record = {
            "output_attentions": self.config.output_attentions if output_attentions is None else output_attentions,
            "output_hidden_states": (
                self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
            ),
        }
        record = {name: value for name, value in record.items() if value is not False}
        outputs: dict[str, Any] = {}

        def run(tower: Callable[..., Any], name: str, *inputs: Tensor) -> Tensor:
            output = tower(*inputs, **record)
            outputs.update({name: output} if record else {})
            return output.pooler_output

        if image_features is None and pixel_values is not None:
            vision = partial(run, self._run_vision, "vision_model_output")
            image_features = _on_rows(vision, image_mask, pixel_values)
        if text_features is None and input_ids is not None:
            attention_mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
            text = partial(run, self._run_text, "text_model_output")
            text_features = _on_rows(text, text_mask, input_ids, attention_mask)
        if image_features is None and text_features is None:
            raise ValueError("the batch has neither images (pixel_values) nor texts (input_ids)")
        parts: dict[str, Tensor] = {}
        for index, (name, features, mask) in enumerate(
            (("image", image_features, image_mask), ("text", text_features, text_mask))
        ):
            if features is not None:
                parts[name] = self._weighted(features, mask, index)
        pooled = torch.cat([_add_parts(parts, view) for view in (views or ("fused",))])
        return ScoreFusionOutput(embeddings=F.normalize(pooled.float(), dim=-1), pooler_output=pooled, **outputs)

    def run_vision_tower(self, pixel_values: Tensor) -> Tensor:
        """Return the projected image vectors `(N, d)` of `pixel_values` `(N, 3, H, W)`."""
        return self._run_vision(pixel_values).pooler_output

    def _run_vision(self, pixel_values: Tensor, **record: Any) -> Any:  # noqa: ANN401
        return self.backbone.get_image_features(pixel_values.to(self.backbone.dtype), return_dict=True, **record)

    def run_text_tower(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return the projected text vectors `(N, d)` of `input_ids` `(N, T)`."""
        return self._run_text(input_ids, attention_mask).pooler_output

    def _run_text(self, input_ids: Tensor, attention_mask: Tensor, **record: Any) -> Any:  # noqa: ANN401
        mask = None if self.config.text_attends_padding else attention_mask
        return self.backbone.get_text_features(input_ids, attention_mask=mask, return_dict=True, **record)

    def _weighted(self, features: Tensor, mask: Tensor | None, index: int) -> Tensor:
        """Return `w * e`, zero where `mask` is False; `index` is 0 for the image, 1 for the text."""
        features = features.to(self.dtype)
        if self.config.normalize_inputs:
            features = F.normalize(features, dim=-1)
        if mask is not None:
            features = features.masked_fill(~mask.bool()[:, None], 0.0)
        weight: Tensor | float = (self.config.image_weight, self.config.text_weight)[index]
        if self.config.learnable_weights:
            weight = self.log_weights[index].exp()
        return weight * features

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, ScoreFusionModel) and self.config.learnable_weights:
            weights = (self.config.image_weight, self.config.text_weight)
            init.copy_(module.log_weights, torch.tensor([math.log(weight) for weight in weights]))


def _add_parts(parts: dict[str, Tensor], view: str) -> Tensor:
    if view not in VIEWS:
        raise ValueError(f"unknown view {view!r}; expected one of {VIEWS}")
    chosen = [part for name, part in parts.items() if view in ("fused", name)]
    if not chosen:
        raise ValueError(f"view {view!r} was asked for, but no item of the batch has it")
    return sum(chosen[1:], start=chosen[0])


def _on_rows(tower: Callable[..., Tensor], mask: Tensor | None, *inputs: Tensor) -> Tensor:
    """Run `tower` only on the rows where `mask` is True; the other rows of the result are zero."""
    if mask is None:
        return tower(*inputs)
    rows = mask.bool().nonzero().squeeze(1)
    features = tower(*(tensor[rows if len(rows) else slice(1)] for tensor in inputs))
    if not len(rows):  # the modality is absent; one row has run, since towers reject an empty batch
        features = features.detach()[:0]
    return features.new_zeros(len(mask), *features.shape[1:]).index_copy(0, rows, features)


__all__ = ["ScoreFusionModel", "ScoreFusionOutput"]
