"""Score fusion: the weighted sum of the two vectors of a two-tower model (CLIP-SF of UniIR)."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModel, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.utils import ModelOutput, can_return_tuple

from .configuration_score_fusion import ScoreFusionConfig
from .modeling_towers import TowersModel, on_rows, outputs_to_record, parts_of


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


class ScoreFusionModel(TowersModel):
    """Embeds text, image, or image + text items as `w_i * e_i + w_t * e_t`, then L2-normalised (UniIR, CLIP-SF).

    `e_i` and `e_t` are the projected vectors of a two-tower model, raw by default; a missing modality adds exactly
    zero. BGE-VL-base and -large are CLIP checkpoints with this fusion: `conjoin.from_clip` builds it.
    """

    config_class = ScoreFusionConfig
    config: ScoreFusionConfig

    def __init__(self, config: ScoreFusionConfig) -> None:
        super().__init__(config)
        self.backbone = AutoModel.from_config(config.backbone_config, dtype=torch.get_default_dtype())
        self._freeze_logit_scale()
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

    @property
    def vision_model(self) -> PreTrainedModel:
        """The vision tower."""
        return self.backbone.vision_model

    @property
    def text_model(self) -> PreTrainedModel:
        """The text tower."""
        return self.backbone.text_model

    @can_return_tuple
    def forward(
        self,
        pixel_values: Tensor | None = None,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        special_tokens_mask: Tensor | None = None,
        image_mask: Tensor | None = None,
        text_mask: Tensor | None = None,
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
            views: Views to embed, of `"image"`, `"text"`, `"fused"`, in one pass of the towers. The outputs are
                stacked view by view, `(len(views) * N, d)`. By default each item is embedded once, from all its parts.
            token_type_ids: Unused, a text is one segment; accepted because tokenizers return it.
            output_attentions: Return the output of each tower, with its attention weights (not with `sdpa`).
            output_hidden_states: Return the output of each tower, with its hidden states.

        Raises:
            ValueError: Neither images nor texts are given, or a view is unknown or not in the batch.
        """
        record = outputs_to_record(
            self.config, (), output_attentions=output_attentions, output_hidden_states=output_hidden_states
        )
        outputs: dict[str, Any] = {}

        def run(name: str, get_features: Any, *inputs: Tensor, **kwargs: Any) -> Tensor:  # noqa: ANN401
            named = {"return_dict": True} if isinstance(self.backbone, PreTrainedModel) else {}
            output = get_features(*inputs, **kwargs, **record, **named)
            outputs.update({name: output} if record else {})
            return output if isinstance(output, Tensor) else output.pooler_output

        parts: dict[str, Tensor] = {}
        if pixel_values is not None:
            vision = partial(run, "vision_model_output", self.backbone.get_image_features)
            parts["image"] = on_rows(vision, image_mask, pixel_values.to(self.dtype))
        if input_ids is not None:
            attended = torch.ones_like(input_ids) if attention_mask is None else attention_mask
            text = partial(run, "text_model_output", self._text_features)
            parts["text"] = on_rows(text, text_mask, input_ids, attended)
        for name, weight in (("image", self.config.image_weight), ("text", self.config.text_weight)):
            if name in parts:
                vectors = parts[name].to(self.dtype)
                parts[name] = weight * (F.normalize(vectors, dim=-1) if self.config.normalize_inputs else vectors)
        chosen = [parts_of(parts, view) for view in views or ("fused",)]
        pooled = torch.cat([sum(vectors[1:], start=vectors[0]) for vectors in chosen])
        return ScoreFusionOutput(embeddings=F.normalize(pooled.float(), dim=-1), pooler_output=pooled, **outputs)

    def _text_features(self, input_ids: Tensor, attention_mask: Tensor, **record: Any) -> Any:  # noqa: ANN401
        mask = None if self.config.text_attends_padding else attention_mask
        return self.backbone.get_text_features(input_ids, attention_mask=mask, **record)


__all__ = ["ScoreFusionModel", "ScoreFusionOutput"]
